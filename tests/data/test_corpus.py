import hashlib
import itertools
import json
import resource
import shutil
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nmla.data.corpus import Corpus, Shard, TokenStore, shortest_paths
from nmla.errors import DataError, UsageError


def test_corpus_holds_what_was_prepared(digits):
    corpus = Corpus.load(digits / "corpus")
    lines = (digits / "train.txt").read_text().splitlines()
    assert len(corpus.train_source) == len(lines)
    assert [corpus.tokenizer.decode(corpus.train_source[i].tolist()) for i in range(20)] == lines[:20]
    assert corpus.references.tolist() == list(range(len(lines) + 1))
    valid = (digits / "valid.txt").read_text().splitlines()
    assert corpus.valid_source == valid
    assert corpus.valid_targets == [[line] for line in valid]
    assert isinstance(corpus.train_source.shards[0][0].base, np.memmap)


def test_manifest_tells_counts_settings_inputs_and_hashes(digits):
    manifest = json.loads((digits / "corpus" / "manifest.json").read_text())
    assert manifest["counts"]["train_pairs"] == 2000
    assert manifest["settings"]["vocab_size"] == 16
    text = (digits / "train.txt").read_bytes()
    assert manifest["inputs"]["train"][0] == {
        "path": str(digits / "train.txt"),
        "bytes": len(text),
        "sha256": hashlib.sha256(text).hexdigest(),
        "lines": 2000,
        "text_bytes": len(text),
    }
    files = {path.name: path.read_bytes() for path in (digits / "corpus").iterdir() if path.name != "manifest.json"}
    assert manifest["files"] == {
        name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in sorted(files.items())
    }


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65536, np.uint16), (65537, np.uint32)])
def test_shard_gives_sentences_back(tmp_path, vocab_size, dtype):
    Shard.of([([5, 6], [[7]]), ([vocab_size - 1], [[], [8, 9]])], vocab_size).save(tmp_path, "x")
    shard = Shard.load(tmp_path, "x")
    assert shard.source_tokens.dtype == dtype
    assert shard.source_tokens.tolist() == [5, 6, vocab_size - 1]
    assert shard.target_offsets.tolist() == [0, 1, 1, 3]
    assert shard.references.tolist() == [1, 2]


SENTENCES = st.lists(st.lists(st.integers(5, 7), max_size=6), max_size=8)


@given(st.lists(SENTENCES, max_size=4))
def test_store_is_its_shards_one_after_the_other(shards):
    store = TokenStore([TokenStore.of(shard, 100).shards[0] for shard in shards])
    sentences = list(itertools.chain.from_iterable(shards))
    assert [store[i].tolist() for i in range(len(store))] == sentences
    assert store.lengths.tolist() == [len(sentence) for sentence in sentences]
    backwards = np.arange(len(sentences))[::-1]
    assert [sentence.tolist() for sentence in store.take(backwards)] == sentences[::-1]
    with pytest.raises(IndexError, match="sentence must be in"):
        store[len(sentences)]


@given(st.lists(SENTENCES, max_size=3), st.integers(1, 5))
def test_shortest_path_has_a_blank_between_equal_neighbours(shards, at_once):
    store = TokenStore([TokenStore.of(shard, 100).shards[0] for shard in shards])
    sentences = itertools.chain.from_iterable(shards)
    expected = [len(s) + sum(a == b for a, b in itertools.pairwise(s)) for s in sentences]
    with mock.patch("nmla.data.corpus.TOKENS_AT_ONCE", at_once):
        assert shortest_paths(store).tolist() == expected


def test_directory_without_manifest_is_no_corpus(tmp_path):
    with pytest.raises(UsageError, match="make one with `nmla prepare`"):
        Corpus.load(tmp_path)


@pytest.fixture
def copy(digits, tmp_path):
    return shutil.copytree(digits / "corpus", tmp_path / "copy")


@pytest.mark.parametrize("damage", [b"\x93NUMPY", b"", None])
def test_every_damaged_or_missing_file_is_told(copy, damage):
    for path in sorted(copy.iterdir()):
        data = path.read_bytes()
        if path.name == "manifest.json" and damage is None:
            continue
        if damage is None:
            path.unlink()
        else:
            path.write_bytes(damage)
        with pytest.raises(DataError, match=r"damaged .*; make it anew with `nmla prepare`"):
            Corpus.load(copy)
        path.write_bytes(data)
    Corpus.load(copy)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("source.offsets", lambda old: old[::-1], "do not fit its tokens"),
        ("target.offsets", lambda old: old + 1, "do not fit its tokens"),
        ("references", lambda old: old * 0, "as many targets as"),
        ("references", lambda old: old.astype(np.float32), "row of whole numbers"),
        ("source.tokens", lambda old: old.view(np.int16), "row of whole numbers"),
    ],
)
def test_arrays_that_cannot_be_are_told(copy, name, values, message):
    """Of the right size, but wrong inside: found without reading all tokens."""
    path = copy / f"train-00000.{name}.npy"
    np.save(path, values(np.load(path)))
    with pytest.raises(DataError, match=message):
        Corpus.load(copy)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"train_pairs": 2000', '"train_pairs": 2001'),
        ('"files": {', '"other": {'),
        ('"shards": [', '"shards": 7, "x": ['),
        ("{", "["),
    ],
)
def test_damaged_manifest_is_told(copy, old, new):
    manifest = copy / "manifest.json"
    text = manifest.read_text()
    assert old in text
    manifest.write_text(text.replace(old, new, 1))
    with pytest.raises(DataError, match="damaged"):
        Corpus.load(copy)


@pytest.mark.parametrize("version", [1, 99])
def test_corpus_of_another_version_is_refused(copy, version):
    manifest = copy / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"version": 2', f'"version": {version}'))
    with pytest.raises(DataError, match=f"its version must be 2, but is {version}.*make it anew"):
        Corpus.load(copy)


def test_corpus_of_the_first_version_is_refused(tmp_path):
    (tmp_path / "manifest.json").write_text('{"version": 1, "train_pairs": 3}')
    with pytest.raises(DataError, match=r"its version must be 2, but is 1.*make it anew"):
        Corpus.load(tmp_path)


def test_corpus_of_many_shards_may_hold_many_files(digits):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard))
    try:
        Corpus.load(digits / "corpus")
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 128
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
