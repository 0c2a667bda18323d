"""Our autoregressive models under CTranslate2, against the same models in torch."""

import json

import pytest
import torch

from greedy import greedy_decode
from nmla.config import ModelConfig
from nmla.data.batching import pad
from nmla.data.corpus import Corpus
from nmla.decoding.ctranslate import CTranslator, export, longest_output
from nmla.decoding.translator import Translator
from nmla.errors import UsageError
from nmla.models.pretrained import build_model
from nmla.text.tokenizer import BLANK, EOS

SHAPES = [("pre", "sinusoidal"), ("post", "sinusoidal"), ("pre", "learned")]


@pytest.fixture(scope="module")
def tokenizer(digits):
    return Corpus.load(digits / "corpus").tokenizer


def build(tokenizer, norm="pre", positions="sinusoidal", family="autoregressive"):
    """A model as it is drawn, but for an end that it writes now and then."""
    torch.manual_seed(3)
    sizes = {"d_model": 32, "heads": 4, "feed_forward": 64, "encoder_layers": 2, "decoder_layers": 2}
    config = ModelConfig(family=family, norm=norm, positions=positions, max_positions=64, **sizes)
    model = build_model(config, tokenizer.vocab_size).eval()
    model.embedding.weight.data[EOS] *= 3
    return model


def random_sources(tokenizer, count=120, longest=17):
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    ids = [torch.randint(BLANK + 1, tokenizer.vocab_size, (n,), generator=generator).tolist() for n in lengths]
    return [[*of_one, EOS] for of_one in ids]


def best(written):
    return [first for first, *_ in written]


def pieces(tokenizer, sentences):
    return [[tokenizer.piece(token) for token in sentence] for sentence in sentences]


@pytest.mark.parametrize(("norm", "positions"), SHAPES)
def test_greedy_equals_torch(tokenizer, norm, positions):
    model, sources = build(tokenizer, norm, positions), random_sources(tokenizer)
    outputs, scores = greedy_decode(model, *pad(sources))
    written = best(CTranslator.of(model, tokenizer).write(pieces(tokenizer, sources), 1, max_positions=64))
    assert [of.tokens for of in written] == pieces(tokenizer, outputs)
    assert [of.score for of in written] == pytest.approx(scores, abs=1e-3)
    ended = [of.ended for of in written]
    assert True in ended
    limits = [min(longest_output(len(source)), 63) for source in sources]
    assert ended == [len(output) < most for output, most in zip(outputs, limits, strict=True)]


@pytest.mark.parametrize(("norm", "positions"), SHAPES)
def test_scores_equal_torch(tokenizer, norm, positions):
    model, sources, targets = build(tokenizer, norm, positions), random_sources(tokenizer), random_sources(tokenizer)
    targets = [target[:-1] for target in reversed(targets)]
    scores = CTranslator.of(model, tokenizer).score(pieces(tokenizer, sources), pieces(tokenizer, targets))
    with torch.no_grad():
        for source, target, score in zip(sources, targets, scores, strict=True):
            log_probs = model(*pad([source]), *pad([target])).logits[0].log_softmax(-1)
            expected = log_probs.gather(1, torch.tensor([*target, EOS])[:, None]).sum().item()
            assert score == pytest.approx(expected, abs=1e-3)


def test_a_beam_tells_the_score_of_what_it_found(tokenizer):
    model, sources = build(tokenizer), pieces(tokenizer, random_sources(tokenizer))
    translator = CTranslator.of(model, tokenizer)
    greedy, beam = (best(translator.write(sources, size)) for size in (1, 5))
    assert [of.tokens for of in greedy] != [of.tokens for of in beam]
    again = translator.score(sources, [of.tokens for of in beam])
    for of, score in zip(beam, again, strict=True):
        if of.ended:
            assert of.score == pytest.approx(score, abs=1e-3)


def test_neighbours_and_workers_change_nothing(tokenizer):
    model, sources = build(tokenizer), pieces(tokenizer, random_sources(tokenizer, count=40))
    translator = CTranslator.of(model, tokenizer, workers=2)
    together = translator.write(sources, 3, alone=True)
    assert translator.write(sources[::-1], 3, alone=True)[::-1] == together
    assert [translator.write([source], 3, alone=True)[0] for source in sources] == together
    assert [of.tokens for of in best(translator.write(sources, 3))] == [of.tokens for of in best(together)]


def test_int8_says_much_the_same(tokenizer):
    model, sources = build(tokenizer), pieces(tokenizer, random_sources(tokenizer))
    full, small = (
        CTranslator.of(model, tokenizer, compute_type=kind).score(sources, sources) for kind in ("float32", "int8")
    )
    assert sum(small) == pytest.approx(sum(full), rel=0.1)
    assert small != full


def test_an_export_is_a_model_directory_of_ctranslate2(tokenizer, tmp_path):
    export(build(tokenizer), tokenizer, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"model.bin", "config.json", "shared_vocabulary.json"}
    vocabulary = json.loads((tmp_path / "shared_vocabulary.json").read_text())
    assert vocabulary == [tokenizer.piece(token) for token in range(tokenizer.vocab_size)]


def test_translator_writes_by_ctranslate2(tokenizer):
    model, sources = build(tokenizer), random_sources(tokenizer, count=20)
    translator = Translator(model, tokenizer)
    texts = [tokenizer.decode(source) for source in sources]
    outputs, _ = greedy_decode(model, *pad([[*tokenizer.encode(text), EOS] for text in texts]))
    translations = translator.translate_batch(["", *texts])
    assert [of.text for of in translations] == ["", *map(tokenizer.decode, outputs)]
    assert [of.positions for of in translations] == [0, *(len(output) + 1 for output in outputs)]
    wider = translator.translate_batch(texts, beam_size=4)
    assert [of.text for of in wider] != [of.text for of in translations[1:]]


def test_entropy_of_an_autoregressive_model_is_that_of_its_predictions(tokenizer):
    model = build(tokenizer)
    [translation] = Translator(model, tokenizer).translate_batch(["1 2 3"], return_scores=True)
    source = [[*tokenizer.encode("1 2 3"), EOS]]
    outputs, _ = greedy_decode(model, *pad(source))
    with torch.no_grad():
        probabilities = model(*pad(source), *pad(outputs)).logits[0, : len(outputs[0]) + 1].softmax(-1)
    assert translation.entropy == pytest.approx(torch.special.entr(probabilities).sum().item(), rel=1e-4)


def test_opinions_do_not_depend_on_neighbours(tokenizer):
    translator = Translator(build(tokenizer), tokenizer)
    texts = [tokenizer.decode(source) for source in random_sources(tokenizer, count=20)]
    together = translator.translate_batch(texts, return_scores=True)
    assert [translator.translate_batch([text], return_scores=True)[0] for text in texts] == together


def test_learned_positions_leave_room_for_the_translation(tokenizer):
    translator = Translator(build(tokenizer, positions="learned"), tokenizer)  # 64 positions
    assert translator.max_source_tokens == 12
    assert longest_output(12 + 1) <= 64


def test_beam_size_must_be_possible(tokenizer):
    with pytest.raises(UsageError, match="beam_size must be a whole number of at least 1, but is 0"):
        Translator(build(tokenizer), tokenizer).translate_batch(["1"], beam_size=0)
