import asyncio
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import nmla
from decoding import trials
from nmla.config import Decoding, ModelConfig
from nmla.decoding.argmax import argmax_decode
from nmla.decoding.translation import batches
from nmla.decoding.translator import MAX_SOURCE_TOKENS, Translator
from nmla.errors import DataError, UsageError
from nmla.models.pretrained import build_model
from nmla.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def translator(copy_run):
    return nmla.load(copy_run / "train" / "model")


def test_argmax_collapses_within_the_length():
    paths = torch.tensor([[1, 1, 0, 1, 2, 2], [2, 0, 0, 2, 1, 1]])
    logits = torch.nn.functional.one_hot(paths, 3).float()
    found = argmax_decode(logits, torch.tensor([6, 3]), blank=0)
    assert [(of.tokens, of.positions) for of in found] == [([1, 1, 2], [0, 3, 4]), ([2], [0])]
    found = argmax_decode(logits, torch.tensor([6, 3]), blank=0, collapse="sctc")
    assert [(of.tokens, of.positions) for of in found] == [([1, 1, 1, 2, 2], [0, 1, 3, 4, 5]), ([2], [0])]


def test_order_and_number_of_lines_are_kept_whatever_the_batching(translator, digits):
    lines = (digits / "valid.txt").read_text().splitlines()
    lines = [*lines[:10], "", *lines[10:40], "   "]
    whole = [translation.text for translation in translator.translate_batch(lines)]
    assert len(whole) == len(lines)
    for size in (1, 100, 1000):
        assert [t.text for t in translator.translate_batch(lines, max_batch_size=size, fast=True)] == whole
    examples = translator.translate_batch(lines, max_batch_size=3, batch_type="examples", fast=True)
    assert [t.text for t in examples] == whole
    assert [translator.translate(line) for line in lines] == whole


def test_batches():
    """Of like length, and as large as is asked for; where lines are counted, not too wide for a processor."""
    lengths = [9, 1, 5, 2, 8]
    double = (2).__mul__

    def of(kind, most, **limit):
        settings = Decoding(fast=True, batch_type=kind, max_batch_size=most)
        return [[lengths[row] for row in rows] for rows in batches(lengths, settings, double, **limit)]

    assert of("tokens", 20) == [[1, 2], [5], [8], [9]]
    assert of("tokens", 20, widest=2) == of("tokens", 20)
    assert of("examples", 3) == [[1, 2, 5], [8, 9]]
    assert of("examples", 3, widest=20) == [[1, 2], [5], [8], [9]]
    assert of("examples", 2, widest=36) == [[1, 2], [5, 8], [9]]


def test_blank_lines_come_back_as_they_are(translator):
    assert [t.text for t in translator.translate_batch(["", "  ", "\t"])] == ["", "  ", "\t"]
    assert translator.translate_batch([]) == []


def test_long_line_is_split_never_cut(translator):
    words = ["1 2 3 4 5 6 7"] * 200
    parts = translator._parts(" ".join(words))
    tokens = translator.tokenizer.encode(" ".join(words))
    assert [token for part in parts for token in part[:-1]] == tokens
    assert all(len(part) <= MAX_SOURCE_TOKENS + 1 for part in parts)
    assert all(translator.tokenizer.starts_word(part[0]) for part in parts)
    translation = translator.translate_batch([" ".join(words), "1 2 3"])
    assert [t.parts for t in translation] == [len(parts), 1]


def test_long_word_is_split_where_it_must_be(translator):
    parts = translator._parts("7" * 3 * MAX_SOURCE_TOKENS)
    assert [token for part in parts for token in part[:-1]] == translator.tokenizer.encode("7" * 3 * MAX_SOURCE_TOKENS)


def test_unknown_characters_do_no_harm(translator):
    assert isinstance(translator.translate("\U0001f600 \x00 \u202e ẞ 1 2"), str)


def test_entropy_is_that_of_the_probabilities(translator):
    probabilities = translator.probabilities("1 2 3").double()
    translation = translator.translate_batch(["1 2 3"], return_scores=True)[0]
    assert translation.positions == len(probabilities)
    assert translation.entropy == pytest.approx(torch.special.entr(probabilities).sum().item(), abs=1e-4)


def test_wrong_directory_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="must be a model directory"):
        Translator.load(tmp_path / "nowhere")


def test_result_tells_what_the_model_thought(translator):
    [translation] = translator.translate_batch(["1 2 3"], return_scores=True)
    assert "".join(token.piece for token in translation.tokens) == "▁1▁2▁3"
    assert all(0.5 < token.confidence <= 1 for token in translation.tokens)
    sources = [token.source for token in translation.tokens]
    assert sources == sorted(sources)
    assert 0 <= sources[0] <= sources[-1] <= len(translator.tokenizer.encode("1 2 3"))
    probabilities = translator.probabilities("1 2 3")
    assert translation.score == pytest.approx(float(probabilities.amax(-1).log().sum()), abs=1e-4)
    assert translation.alternatives == ()
    [plain] = translator.translate_batch(["1 2 3"])
    assert (plain.text, plain.tokens, plain.score) == (translation.text, (), 0.0)


def test_search_tells_alternatives(translator):
    [translation] = translator.translate_batch(["4 5 6"], beam_size=8, num_hypotheses=3, return_scores=True)
    found = [translation, *translation.alternatives]
    assert len({"/".join(token.piece for token in of.tokens) for of in found}) == 3
    assert translation.text == "4 5 6"
    scores = [translation.score, *(other.score for other in translation.alternatives)]
    assert scores == sorted(scores, reverse=True)
    assert translator.translate("4 5 6", beam_size=8) == "4 5 6"


def test_blank_penalty_makes_outputs_longer(translator):
    lines = ["1 2 3 4", "5 6 7", "8 9"]
    lengths = [
        sum(len(t.tokens) for t in translator.translate_batch(lines, blank_penalty=penalty, return_scores=True))
        for penalty in (-30.0, 0.0, 30.0)
    ]
    assert lengths[0] < lengths[1] < lengths[2]


def test_tuned_decoding_is_kept_with_the_model(translator, tmp_path):
    tuned = Translator(translator.model, translator.tokenizer, Decoding(blank_penalty=30.0))
    tuned.save_pretrained(tmp_path / "tuned")
    again = Translator.load(tmp_path / "tuned")
    assert again.decoding == tuned.decoding
    assert again.translate("1 2 3") == tuned.translate("1 2 3") != translator.translate("1 2 3")
    (tmp_path / "tuned" / "decoding.json").write_text('{"blank": 1}')
    with pytest.raises(DataError, match=r"decoding\.json: must hold settings of decoding"):
        Translator.load(tmp_path / "tuned")


def test_neighbours_change_not_one_bit(translator, digits):
    """Any order and any company: scores are the same to the last bit, not only the text."""
    lines = (digits / "valid.txt").read_text().splitlines()
    whole = translator.translate_batch(lines, return_scores=True)
    rng = random.Random(1)
    for size in (1, 3, 17, 60):
        order = rng.sample(range(len(lines)), len(lines))
        parts = [order[start : start + size] for start in range(0, len(lines), size)]
        for part in parts:
            found = translator.translate_batch([lines[row] for row in part], return_scores=True)
            assert found == [whole[row] for row in part]


def test_a_word_that_was_split_is_joined_without_a_space(translator):
    one = "7" * (MAX_SOURCE_TOKENS + 50)
    [translation] = translator.translate_batch([one])
    assert translation.parts == 2
    assert " " not in translation.text.strip()


def test_threads_share_a_tokenizer(translator, monkeypatch):
    """Words are remembered up to a limit; to forget them must not harm who is at work."""
    monkeypatch.setattr("nmla.text.tokenizer._WORDS_LENGTH", 50)
    rng = random.Random(1)
    texts = [" ".join(str(rng.randrange(10**6)) for _ in range(20)) for _ in range(200)]
    expected = [translator.tokenizer.encode(text) for text in texts]
    with ThreadPoolExecutor(6) as threads:
        assert list(threads.map(translator.tokenizer.encode, texts * 5)) == expected * 5


def test_stream_and_awaitable_give_the_same(translator, digits):
    lines = (digits / "valid.txt").read_text().splitlines()
    whole = translator.translate_batch(lines)
    assert list(translator.translate_iterable(iter(lines))) == whole
    assert asyncio.run(translator.translate_async(lines)) == whole
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(translator.translate, lines[:20])) == [t.text for t in whole[:20]]


def test_long_line_is_split_at_sentences_before_clauses_before_words(translator, monkeypatch):
    pieces = [translator.tokenizer.piece(token) for token in range(translator.tokenizer.vocab_size)]
    monkeypatch.setattr("nmla.decoding.translator.SENTENCE_ENDS", (pieces[-1],))
    monkeypatch.setattr("nmla.decoding.translator.CLAUSE_ENDS", (pieces[-2],))
    stop, pause, word = len(pieces) - 1, len(pieces) - 2, len(pieces) - 3
    monkeypatch.setattr(translator.tokenizer.__class__, "starts_word", lambda self, token: token != 0)
    assert translator._cut([word] * 6 + [stop, word, pause, word, word], 10) == 7
    assert translator._cut([word] * 6 + [word, word, pause, word, word], 10) == 9
    assert translator._cut([stop] + [word] * 10, 10) == 10  # too early a sentence is not worth it
    assert translator._cut([word] * 8 + [0, 0, 0], 10) == 7


def made_of(texts):
    """A translator that is only asked where it would split, with a vocabulary learned from these texts."""
    letters = len(set("".join(texts)))
    tokenizer = Tokenizer.of_units(count(texts), 60) if "@@" in texts[0] else Tokenizer.learn(texts, letters + 7)
    sizes = {"d_model": 8, "heads": 1, "feed_forward": 8, "encoder_layers": 1, "decoder_layers": 1}
    return Translator(build_model(ModelConfig(**sizes), tokenizer.vocab_size).eval(), tokenizer)


def count(texts):
    return Counter(unit for text in texts for unit in text.split())


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ('He said "stop it now." Then, he went on and on and on', '."'),
        ("(it is so.) Then, he went on and on and on and on", ".)"),
        ("他们来了。我们走了，然后回来了然后又走了", "。"),
        ("「他们来了。」我们走了，然后回来了然后又走了", "」"),
        ("un@@ believ@@ able th@@ ing@@ s un@@ believ@@ able", None),
    ],
)
def test_real_text_is_split_where_sentences_end(text, end):
    translator = made_of([text])
    tokens = translator.tokenizer.encode(text)
    pieces = [translator.tokenizer.piece(token) for token in tokens]
    for most in range(len(tokens) // 2, len(tokens)):
        cut = translator._cut(tokens, most)
        ends = [i for i in range(most // 2 + 1, most + 1) if end and "".join(pieces[:i]).endswith(end)]
        assert 0 < cut <= most
        assert not pieces[cut - 1].endswith("@@")
        if ends:
            assert cut == ends[-1], (most, "".join(pieces[:cut]))


def test_texts_may_come_from_anywhere_but_one_string(translator):
    lines = ["1 2", "3"]
    assert translator.translate_batch(line for line in lines) == translator.translate_batch(lines)
    with pytest.raises(UsageError, match="must be a list of strings, but are one string"):
        list(translator.translate_iterable("1 2"))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"beam_size": 2.5}, "beam_size must be a whole number of at least 1, but is 2.5"),
        ({"beam_size": 10**9}, "beam_size must be at most 10000, but is 1000000000"),
        ({"alpha": 1.0}, "alpha must be 0 without a language model, but is 1.0"),
        ({"beta": 1.0}, "beta is a weight of a search, so beam_size must be above 1, but is 1"),
        ({"num_hypotheses": 2}, "num_hypotheses must be at most beam_size 1, but is 2"),
        ({"batch_type": "lines"}, "batch_type must be one of tokens, examples, but is 'lines'"),
        ({"beta": float("nan")}, "beta must be a finite number, but is nan"),
    ],
)
def test_options_that_cannot_be(translator, options, match):
    with pytest.raises(UsageError, match=match):
        translator.translate("1", **options)


@pytest.mark.parametrize("texts", ["one string", ["1", "\ud800"], ["1", None], [b"1"]])
def test_texts_that_cannot_be(translator, texts):
    with pytest.raises(UsageError, match=r"must be a (list of strings|string of Unicode characters), but"):
        translator.translate_batch(texts)


def test_many_batchings_and_text_of_all_kinds(copy_run, digits):
    """Small forms of the trials; `python tests/decoding/trials.py` runs them in full."""
    translator = nmla.load(copy_run / "train" / "model")
    lines = (digits / "valid.txt").read_text().splitlines()
    assert trials.batchings(translator, lines, 5) == 0
    assert trials.batchings(translator, lines[:40], 3, beam_size=4) == 0
    assert trials.kept_lines(copy_run / "train" / "model", 300) == (300, 300)
