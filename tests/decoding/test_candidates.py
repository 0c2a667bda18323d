"""Several lengths of a fixed-length model, and a teacher that chooses among what was found."""

from collections import Counter

import pytest
import torch

from nmla.config import ModelConfig
from nmla.data.batching import pad
from nmla.data.corpus import Corpus
from nmla.decoding.teacher import Teacher
from nmla.decoding.translator import Translator
from nmla.errors import UsageError
from nmla.models.pretrained import build_model, save_model
from nmla.text.tokenizer import BLANK, EOS, Tokenizer

LINES = ["1 2 3", "", "4", "5 6 7 8 9 1 2 3 4 5 6 7 8 9", "7 7", "3 1 2"]


@pytest.fixture(scope="module")
def tokenizer(digits):
    return Corpus.load(digits / "corpus").tokenizer


def build(tokenizer, family, positions="sinusoidal", max_positions=1024):
    torch.manual_seed(5)
    sizes = {"d_model": 32, "heads": 4, "feed_forward": 64, "encoder_layers": 2, "decoder_layers": 2}
    config = ModelConfig(family=family, positions=positions, max_positions=max_positions, **sizes)
    model = build_model(config, tokenizer.vocab_size).eval()
    if family == "fixed_length":
        model.length.weight.data *= 30  # lengths of different sources differ
    return model


@pytest.fixture(scope="module")
def teacher(tokenizer, tmp_path_factory):
    directory = tmp_path_factory.mktemp("teacher") / "model"
    directory.mkdir()
    save_model(build(tokenizer, "autoregressive"), tokenizer, directory)
    return Teacher(directory)


@torch.no_grad()
def one_by_one(model, tokenizer, line, count):
    """(mean log-probability, text) of the likeliest lengths, each in a pass of its own, best first."""
    source, lengths = pad([[*tokenizer.encode(line), EOS]])
    of_length = model(source, lengths).length_logits[0]
    possible = [(float(of_length[n]), n - 128 + int(lengths[0])) for n in range(256) if n - 128 + int(lengths[0]) > 0]
    found = []
    for _, length in sorted(possible, reverse=True)[:count]:
        probs = model(source, lengths, torch.tensor([length])).logits[0].log_softmax(-1)
        tokens = [token for token in probs.argmax(-1).tolist() if token != BLANK]
        found.append((float(probs.amax(-1).mean()), tokenizer.decode(tokens)))
    return sorted(found, key=lambda one: -one[0])


@pytest.mark.parametrize("fast", [False, True])
def test_best_of_several_lengths_is_that_of_each_alone(tokenizer, fast):
    model = build(tokenizer, "fixed_length")
    told = Translator(model, tokenizer).translate_batch(
        LINES, beam_size=4, num_hypotheses=4, fast=fast, return_scores=True
    )
    assert told[1].text == ""
    for line, best in zip(LINES, told, strict=True):
        if line:
            expected = one_by_one(model, tokenizer, line, 4)
            found = [best, *best.alternatives]
            assert [one.text for one in found] == [text for _, text in expected]
            assert [one.score / one.positions for one in found] == pytest.approx([mean for mean, _ in expected], 1e-4)
    assert len({best.positions for best in told}) > 2


def test_one_length_is_the_likeliest(tokenizer):
    model = build(tokenizer, "fixed_length")
    told = Translator(model, tokenizer).translate_batch(LINES)
    texts = [one_by_one(model, tokenizer, line, 1)[0][1] if line else "" for line in LINES]
    assert [one.text for one in told] == texts


def test_lengths_that_cannot_be_are_not_tried(tokenizer):
    model = build(tokenizer, "fixed_length", "learned", 9)
    source, lengths = pad([[*tokenizer.encode("1 2"), EOS], [*tokenizer.encode("1"), EOS]])
    logits, tried = model.of_several_lengths(source, lengths, 50)
    assert logits.shape[:2] == (18, 9)
    assert [sorted(of) for of in tried.reshape(2, -1).tolist()] == [[*range(1, 10)]] * 2


@pytest.mark.parametrize("family", ["fixed_length", "ctc", "autoregressive"])
def test_teacher_chooses(tokenizer, teacher, family):
    model = build(tokenizer, family)
    own = Translator(model, tokenizer).translate_batch(LINES, beam_size=4, num_hypotheses=4)
    chosen = Translator(model, tokenizer, teacher=teacher).translate_batch(LINES, beam_size=4, num_hypotheses=2)
    for line, of_own, of_chosen in zip(LINES, own, chosen, strict=True):
        if line:
            texts = [one.text for one in (of_own, *of_own.alternatives)]
            scores = dict(zip(texts, teacher.score([line], [texts])[0], strict=True))
            best = sorted(scores, key=lambda text: -scores[text])
            assert of_chosen.text == best[0]
            assert of_chosen.score == pytest.approx(scores[best[0]], abs=1e-4)
            assert len(of_chosen.alternatives) == 1
    assert [one.text for one in own] != [one.text for one in chosen]


@pytest.mark.parametrize("fast", [False, True])
def test_what_the_teacher_chose_has_the_models_own_opinion(tokenizer, teacher, fast):
    model = build(tokenizer, "autoregressive")
    told = Translator(model, tokenizer, teacher=teacher).translate_batch(
        LINES, beam_size=4, num_hypotheses=4, return_scores=True, fast=fast
    )
    for line, best in zip(LINES, told, strict=True):
        for one in (best, *best.alternatives) if line else ():
            written = [tokenizer.id(token.piece) for token in one.tokens]
            assert len(written) + 1 == one.positions
            assert tokenizer.decode(written, join=False) == one.text
            with torch.no_grad():
                logits = model(*pad([[*tokenizer.encode(line), EOS]]), *pad([written])).logits[0]
            probs = logits[: one.positions].softmax(-1)
            assert one.entropy == pytest.approx(float(-(probs * probs.log()).sum()), rel=1e-4)


def test_teacher_gives_the_same_bytes_in_any_company(tokenizer, teacher):
    translator = Translator(build(tokenizer, "fixed_length"), tokenizer, teacher=teacher)
    together = translator.translate_batch(LINES, beam_size=3, return_scores=True)
    assert together == [translator.translate_batch([line], beam_size=3, return_scores=True)[0] for line in LINES]


def test_teacher_needs_something_to_choose_from(tokenizer, teacher):
    with pytest.raises(UsageError, match="beam_size must be above 1, so that a teacher has something to choose from"):
        Translator(build(tokenizer, "fixed_length"), tokenizer, teacher=teacher).translate("1")


def test_what_is_too_long_for_a_teacher_is_not_chosen(tokenizer, teacher, monkeypatch):
    monkeypatch.setattr(teacher, "max_positions", 6)
    (scores,) = teacher.score(["1 2"], [["1 2 3 4 5 6 7 8 9", "1"]])
    assert scores[0] == -float("inf")
    assert scores[1] > scores[0]
    assert teacher.score(["1 2 3 4 5 6 7 8 9"], [["1"]]) == [[-float("inf")]]


def test_teacher_reads_what_came_split_as_it_came(tmp_path):
    lines = ["ab@@ c gh", "gh ab@@ c", "k"]
    units = Tokenizer.of_units(Counter(unit for line in lines for unit in line.split()), 20)
    (tmp_path / "model").mkdir()
    save_model(build(units, "autoregressive"), units, tmp_path / "model")
    teacher = Teacher(tmp_path / "model")
    model = build(units, "ctc")
    split = [[units.decode(units.encode(text), join=False) for text in lines]] * len(lines)
    assert split[0] == lines
    scores = teacher.score(lines, split)
    assert len({score for of in scores for score in of}) == 9  # joined, the words would all be unknown
    found = Translator(model, units).translate_batch(lines, beam_size=4, num_hypotheses=4)
    chosen = Translator(model, units, teacher=teacher).translate_batch(lines, beam_size=4, num_hypotheses=4)
    for one, other in zip(found, chosen, strict=True):
        assert sorted(of.text for of in (one, *one.alternatives)) == sorted(
            of.text for of in (other, *other.alternatives)
        )
        assert not any("@@ " in of.text for of in (other, *other.alternatives))
