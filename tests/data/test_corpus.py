import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nmla.data.corpus import Corpus, TokenStore, shortest_paths, write_store
from nmla.data.prepare import prepare
from nmla.errors import DataError, UsageError


def test_corpus_holds_what_was_prepared(digits):
    corpus = Corpus.load(digits / "corpus")
    lines = (digits / "train.txt").read_text().splitlines()
    assert len(corpus.train_source) == len(lines)
    assert [corpus.tokenizer.decode(corpus.train_source[i].tolist()) for i in range(20)] == lines[:20]
    assert corpus.valid_targets == [[line] for line in (digits / "valid.txt").read_text().splitlines()]
    assert isinstance(corpus.train_source.tokens, np.memmap)
    assert json.loads((digits / "corpus" / "manifest.json").read_text())["train_pairs"] == len(lines)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65536, np.uint16), (65537, np.uint32)])
def test_store_gives_sentences_back(tmp_path, vocab_size, dtype):
    sentences = [[5, 6], [], [vocab_size - 1]]
    write_store(tmp_path, "x", sentences, vocab_size)
    store = TokenStore.load(tmp_path, "x")
    assert [store[i].tolist() for i in range(len(store))] == sentences
    assert store.tokens.dtype == dtype
    assert store.lengths.tolist() == [2, 0, 1]


@given(st.lists(st.lists(st.integers(5, 7), max_size=6), max_size=8))
def test_shortest_path_has_a_blank_between_equal_neighbours(sentences):
    tokens = np.array([token for sentence in sentences for token in sentence], dtype=np.uint16)
    offsets = np.cumsum([0, *(len(sentence) for sentence in sentences)]).astype(np.int64)
    expected = [len(s) + sum(a == b for a, b in itertools.pairwise(s)) for s in sentences]
    assert shortest_paths(TokenStore(tokens, offsets)).tolist() == expected


@pytest.fixture
def pair(tmp_path):
    source, target = tmp_path / "a.en", tmp_path / "a.de"
    source.write_text("one two three\n" * 30)
    target.write_text("eins zwei drei\n" * 30)
    return source, target


def test_pairs_with_an_empty_side_are_dropped_and_counted(pair, tmp_path):
    pair[0].write_text("one two three\n" * 27 + " \none\n\u200b\n")
    pair[1].write_text("eins zwei drei\n" * 27 + "eins\n\neins\n")
    counts = prepare(train=pair, valid=pair, output=tmp_path / "corpus", vocab_size=24)
    assert (counts["train_pairs"], counts["train_dropped_empty"]) == (27, 3)


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        (b"", b"", "must hold at least one line, but is empty"),
        (b"a\nb\n", b"a\n", "must have as many lines as each other, but have 2 and 1"),
        (b"a\n", b"\xff\n", "must be UTF-8"),
        (b"\n\n", b"a\nb\n", "must have text on both sides, but none has"),
    ],
)
def test_unusable_text_is_refused_and_nothing_is_left(pair, tmp_path, source, target, message):
    valid = (tmp_path / "v.en", tmp_path / "v.de")
    valid[0].write_bytes(source)
    valid[1].write_bytes(target)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(DataError, match=message):
        prepare(train=pair, valid=valid, output=tmp_path / "corpus", vocab_size=24)
    assert sorted(tmp_path.iterdir()) == before


def test_training_text_without_a_letter_is_refused_as_such(pair, tmp_path):
    for path in pair:
        path.write_text(" \n" * 30)
    with pytest.raises(DataError, match="must have text on both sides, but none has"):
        prepare(train=pair, valid=pair, output=tmp_path / "corpus", vocab_size=24)


def test_existing_output_is_never_overwritten(pair, tmp_path):
    output = tmp_path / "corpus"
    output.mkdir()
    (output / "precious").write_text("x")
    with pytest.raises(UsageError, match="must not exist yet"):
        prepare(train=pair, valid=pair, output=output, vocab_size=24)
    assert (output / "precious").read_text() == "x"


def test_no_corpus_and_damaged_corpus_are_told_apart(pair, tmp_path):
    with pytest.raises(UsageError, match="make one with `nmla prepare`"):
        Corpus.load(tmp_path)
    prepare(train=pair, valid=pair, output=tmp_path / "corpus", vocab_size=24)
    tokens = tmp_path / "corpus" / "train.source.tokens.npy"
    for damaged in (b"\x93NUMPY", b""):
        tokens.write_bytes(damaged)
        with pytest.raises(DataError, match="damaged"):
            Corpus.load(tmp_path / "corpus")


def test_corpus_of_another_version_is_refused(pair, tmp_path):
    prepare(train=pair, valid=pair, output=tmp_path / "corpus", vocab_size=24)
    manifest = tmp_path / "corpus" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"version": 1', '"version": 99'))
    with pytest.raises(DataError, match="its version must be 1, but is 99"):
        Corpus.load(tmp_path / "corpus")
