import pytest
import torch

import nmla
from nmla.decoding.argmax import argmax_decode
from nmla.decoding.translator import MAX_SOURCE_TOKENS, Translator
from nmla.errors import UsageError


@pytest.fixture(scope="module")
def translator(copy_run):
    return nmla.load(copy_run / "train" / "model")


def test_argmax_collapses_within_the_length():
    paths = torch.tensor([[1, 1, 0, 1, 2, 2], [2, 0, 0, 2, 1, 1]])
    logits = torch.nn.functional.one_hot(paths, 3).float()
    assert argmax_decode(logits, torch.tensor([6, 3]), blank=0) == [[1, 1, 2], [2]]


def test_order_and_number_of_lines_are_kept_whatever_the_batching(translator, digits):
    lines = (digits / "valid.txt").read_text().splitlines()
    lines = [*lines[:10], "", *lines[10:40], "   "]
    whole = [translation.text for translation in translator.translate_batch(lines)]
    assert len(whole) == len(lines)
    for max_tokens in (1, 100, 1000):
        assert [t.text for t in translator.translate_batch(lines, max_tokens=max_tokens)] == whole
    assert [translator.translate(line) for line in lines] == whole


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
    translation = translator.translate_batch(["1 2 3"], entropy=True)[0]
    assert translation.positions == len(probabilities)
    assert translation.entropy == pytest.approx(torch.special.entr(probabilities).sum().item(), abs=1e-4)


def test_wrong_directory_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="must be a model directory"):
        Translator.load(tmp_path / "nowhere")
