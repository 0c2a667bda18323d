"""Count the n-grams of text of any size, for lm_train.py.

The text is encoded once, in chunks on the disk that hold whole sentences. Beside each token stands the node of the
n-gram that ends there. An n-gram one longer is that node at the token before, and the token: one number, whatever the
order. So each order takes one pass, which sorts the numbers of each chunk, merges the sorted runs bucket by bucket, and
finds the suffix links on the way. Memory stays flat: all that grows is in mapped files.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.progress import Progress

from nmla.decoding.ngram_lm import check_sizes
from nmla.errors import DataError
from nmla.text.lines import lines_of, open_text, position, require_file
from nmla.text.tokenizer import BOS, EOS, Tokenizer

CHUNK_TOKENS = 1 << 22  # sorted at once
BUCKET_ROWS = 1 << 22  # n-grams merged or estimated at once; with the chunks this takes some hundred megabytes
SAMPLES = 1 << 10  # numbers of each run by which buckets are made about equal
LINES_AT_ONCE = 1024
COLUMNS = ("keys", "counts", "suffixes")  # of a run, and of all n-grams of an order
Array = npt.NDArray[Any]


class Counts:
    """The different n-grams of each order: how often each occurs, and which one it ends in."""

    def __init__(self, work: Path, vocab_size: int) -> None:
        self._work, self._vocab_size = work, vocab_size
        self.sizes = [vocab_size]
        self.unigrams = np.zeros(vocab_size, np.int64)
        self._chunks = 0

    def add_text(self, texts: Sequence[Path], tokenizer: Tokenizer, bar: Progress) -> None:
        """Write the sentences as chunks of tokens, with the nodes of unigrams beside them."""
        held: list[Array] = []
        size = 0
        for ids in _encode(texts, tokenizer, bar):
            held.append(ids)
            size += len(ids)
            if size >= CHUNK_TOKENS:
                self._write_chunk(held)
                held, size = [], 0
        if size:
            self._write_chunk(held)
        if not self._chunks:
            names = ", ".join(map(str, texts))
            raise DataError(f"{names}: there must be at least one sentence to learn from, but there is none")

    def _write_chunk(self, parts: list[Array]) -> None:
        tokens = np.concatenate(parts)
        self.unigrams += np.bincount(tokens, minlength=self._vocab_size)
        self._save(tokens, "tokens", self._chunks)
        self._save(tokens + np.uint32(1), "nodes", self._chunks)
        self._chunks += 1

    def add_order(self, order: int, last: bool, bar: Progress) -> None:
        """Count the n-grams of the next order; unless it is the last, let their nodes stand beside the tokens."""
        task = bar.add_task(f"counting {order}-grams", total=(2 if last else 3) * self._chunks)
        for chunk in range(self._chunks):
            self._count_chunk(chunk, last)
            bar.advance(task)
        first = 1 + sum(self.sizes)
        self.sizes.append(self._merge(order))
        check_sizes(self.sizes)
        bar.advance(task, self._chunks)
        keys = self.keys(order)
        for chunk in range(self._chunks if not last else 0):
            ranks = self._load("ranks", chunk)
            nodes = first + np.searchsorted(keys, self._load("keys", chunk))
            self._save(np.append(nodes, 0)[ranks].astype(np.uint32), "nodes", chunk)  # rank -1 becomes node 0
            bar.advance(task)

    def _count_chunk(self, chunk: int, last: bool) -> None:
        """Write a sorted run of the different n-grams of a chunk, and which of them ends at each token."""
        tokens, nodes = self._load("tokens", chunk), self._load("nodes", chunk)
        ends = 1 + np.flatnonzero((nodes[:-1] > 0) & (tokens[1:] != BOS))
        keys = nodes[ends - 1].astype(np.int64) * self._vocab_size + tokens[ends]
        sort = np.argsort(keys)
        keys = keys[sort]
        starts = _starts(keys)
        self._save(keys[starts], "keys", chunk)
        self._save(np.diff(starts, append=len(keys)), "counts", chunk)
        self._save(nodes[ends[sort[starts]]], "suffixes", chunk)
        if not last:
            ranks = np.full(len(tokens), -1, np.int32)
            ranks[ends[sort]] = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(keys)))
            self._save(ranks, "ranks", chunk)

    def _merge(self, order: int) -> int:
        """Join the runs of all chunks, a range of keys at a time; returns the number of different n-grams."""
        rows, samples = 0, []
        for chunk in range(self._chunks):
            keys = self._load("keys", chunk)
            rows += len(keys)
            samples.append(np.array(keys[:: len(keys) // SAMPLES + 1]))
        sample = np.sort(np.concatenate(samples))
        buckets = rows // BUCKET_ROWS + 1
        splits = sample[np.arange(1, buckets) * len(sample) // buckets]
        bounds = [np.searchsorted(self._load("keys", chunk), splits) for chunk in range(self._chunks)]
        size = 0
        with ExitStack() as stack:
            files = [stack.enter_context(self._path(name, order).open("wb")) for name in COLUMNS]
            for bucket in range(buckets):
                keys, counts, suffixes = (
                    np.concatenate([self._part(name, chunk, bound, bucket) for chunk, bound in enumerate(bounds)])
                    for name in COLUMNS
                )
                sort = np.argsort(keys)
                keys = keys[sort]
                starts = _starts(keys)
                if len(starts):
                    found = keys[starts], np.add.reduceat(counts[sort], starts), suffixes[sort[starts]]
                    for file, column in zip(files, found, strict=True):
                        column.tofile(file)
                size += len(starts)
        return size

    def _part(self, name: str, chunk: int, bound: Array, bucket: int) -> Array:
        """What of a run belongs to a bucket. The file is closed again: there may be more runs than open files."""
        start = bound[bucket - 1] if bucket else 0
        return np.array(self._load(name, chunk)[start : bound[bucket] if bucket < len(bound) else None])

    def keys(self, order: int) -> Array:
        """context * vocab_size + token of the n-grams of an order, ascending: they are sorted by tokens."""
        return _mapped(self._path("keys", order), np.int64)

    def raw(self, order: int) -> Array:
        """How often each occurs."""
        return self.unigrams if order == 1 else _mapped(self._path("counts", order), np.int64)

    def suffixes(self, order: int) -> Array:
        return _mapped(self._path("suffixes", order), np.uint32)

    def _path(self, name: str, order: int) -> Path:
        return self._work / f"{name}-of-{order}"

    def _save(self, values: Array, name: str, chunk: int) -> None:
        np.save(self._work / f"{name}-{chunk:06d}.npy", values)

    def _load(self, name: str, chunk: int) -> Array:
        return np.load(self._work / f"{name}-{chunk:06d}.npy", mmap_mode="r")


def _encode(texts: Sequence[Path], tokenizer: Tokenizer, bar: Progress) -> Iterator[Array]:
    """The tokens of all sentences, some at a time, each with its <s> and </s>."""
    for path in texts:
        require_file(path)
    total = sum(path.stat().st_size for path in texts)
    task = bar.add_task("encoding", total=total or None)
    before = 0
    for path in texts:
        with open_text(path) as file:
            lines = lines_of(file, path)
            while batch := list(islice(lines, LINES_AT_ONCE)):
                sentences = [ids for ids in tokenizer.encode_batch(batch) if ids]
                flat = chain.from_iterable((BOS, *ids, EOS) for ids in sentences)
                yield np.fromiter(flat, np.uint32)
                bar.update(task, completed=before + position(file))
            before += position(file)


def blocks(start: int, stop: int) -> Iterator[slice]:
    for first in range(start, stop, BUCKET_ROWS):
        yield slice(first, min(first + BUCKET_ROWS, stop))


def _starts(keys: Array) -> Array:
    """Where in a sorted array each value stands first."""
    return np.flatnonzero(np.concatenate([[True] * bool(len(keys)), keys[1:] != keys[:-1]]))


def _mapped(path: Path, dtype: type[np.generic]) -> Array:
    if not path.stat().st_size:
        return np.empty(0, dtype)
    return np.memmap(path, dtype, "r")


def new_map(path: Path, dtype: type[np.generic], size: int) -> Array:
    """Zeros in a new file."""
    return np.memmap(path, dtype, "w+", shape=(size,)) if size else np.empty(0, dtype)
