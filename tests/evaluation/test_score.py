import pytest
import sacrebleu

from nmla.decoding.translation import Translation
from nmla.evaluation.score import mean_entropy, score

OUTPUTS = ["the cat sat on the mat", "a dog barks at the moon tonight"]
REFERENCES = ["the cat sat on a mat", "the dog barks at the moon"]


def test_scores_are_sacrebleus_with_its_signature():
    scores = score(OUTPUTS, [REFERENCES])
    assert scores.bleu == sacrebleu.corpus_bleu(OUTPUTS, [REFERENCES]).score
    assert scores.chrf == sacrebleu.corpus_chrf(OUTPUTS, [REFERENCES]).score
    assert scores.length_ratio == pytest.approx(13 / 12)
    assert "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:" in scores.bleu_signature
    assert "nc:6|nw:0" in scores.chrf_signature


def test_several_references_may_be_fewer_for_some_sentences():
    scores = score(OUTPUTS, [REFERENCES, [None, OUTPUTS[1]]])
    assert scores.bleu > score(OUTPUTS, [REFERENCES]).bleu


def test_entropy_is_a_mean_over_positions_not_sentences():
    assert (
        mean_entropy(
            [
                Translation("a", entropy=6.0, positions=3),
                Translation("b", entropy=1.0, positions=1),
                Translation(""),
            ]
        )
        == 7 / 4
    )
    assert mean_entropy([]) == 0
