r"""Estimate an n-gram language model from text: interpolated modified Kneser-Ney, as KenLM's lmplz does.

With a the adjusted count (the number of occurrences for the highest order and for n-grams that begin a sentence, else
the number of different tokens that come before), D the discount of that order for a count of 1, 2, or 3 and more, and
h' the context h without its first token:

    p(w | h) = (a(hw) - D(a(hw))) / \sum_v a(hv) + \gamma(h) p(w | h'),    \gamma(h) = \sum_v D(a(hv)) / \sum_v a(hv)

and below the unigrams p is uniform over the tokens that occur, <unk> and </s>.

The text is encoded once, in chunks on the disk that hold whole sentences. Beside each token stands the node of the
n-gram that ends there. An n-gram one longer is that node at the token before, and the token: one number, whatever the
order. So each order takes one pass, which sorts the numbers of each chunk, merges the sorted runs bucket by bucket, and
finds the suffix links on the way. Memory stays flat: all that grows is in mapped files.
"""

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.progress import Progress

from nmla.decoding.arpa import write_lm
from nmla.decoding.ngram_lm import MAX_ORDER, NEVER, NgramLM, check_output, header_of
from nmla.errors import DataError, UsageError
from nmla.files import clear_directory, kept_directory, new_file
from nmla.progress import progress_bar, say
from nmla.text.lines import decode_lines, open_text, position, require_file
from nmla.text.tokenizer import BOS, EOS, UNK, Tokenizer

CHUNK_TOKENS = 1 << 22  # sorted at once
BUCKET_ROWS = 1 << 22  # n-grams merged or estimated at once; with the chunks this takes some hundred megabytes
SAMPLES = 1 << 10  # numbers of each run by which buckets are made about equal
LINES_AT_ONCE = 1024
FALLBACK = (0.0, 0.5, 1.0, 1.5)  # discounts for counts of 0, 1, 2, and 3 and more, where the text cannot tell
LEAST = 1e-100  # instead of 0, of which there is no logarithm
Array = npt.NDArray[Any]


def train_lm(texts: Sequence[Path], tokenizer: Tokenizer, output: Path, order: int = 4) -> NgramLM:
    """Estimate a model from text files, a sentence a line, and write it to `output`, compact or ARPA as its name ends.

    Empty lines are no sentences. <unk>, where the text has letters that the vocabulary lacks, is a token like others.
    """
    check_output(output, tokenizer)
    if not 1 <= order <= MAX_ORDER:
        raise UsageError(f"order must be from 1 to {MAX_ORDER}, but is {order}")
    with kept_directory(output) as work, progress_bar() as bar:
        clear_directory(work)  # of what a killed run left
        try:
            counts = _Counts(work, tokenizer.vocab_size)
            counts.add_text(texts, tokenizer, bar)
            for k in range(2, order + 1):
                counts.add_order(k, last=k == order, bar=bar)
            with new_file(output if output.suffix == ".lm" else work / "model.lm") as compact:
                lm = NgramLM.empty(counts.sizes, compact, header_of(counts.sizes, tokenizer))
                _estimate(lm, counts, work, bar)
            if output.suffix != ".lm":
                write_lm(lm, output, tokenizer)
        finally:
            clear_directory(work)
    return NgramLM.load(output, tokenizer) if output.suffix == ".lm" else lm


class _Counts:
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
        task = bar.add_task(f"counting {order}-grams", total=3 * self._chunks)
        for chunk in range(self._chunks):
            self._count_chunk(chunk, last)
            bar.advance(task)
        first = 1 + sum(self.sizes)
        self.sizes.append(self._merge(order))
        bar.advance(task, self._chunks)
        keys = self.keys(order)
        for chunk in range(self._chunks):
            if not last:
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
        runs = [[self._load(name, chunk) for name in ("keys", "counts", "suffixes")] for chunk in range(self._chunks)]
        samples = np.sort(np.concatenate([keys[:: len(keys) // SAMPLES + 1] for keys, _, _ in runs]))
        buckets = sum(len(keys) for keys, _, _ in runs) // BUCKET_ROWS + 1
        splits: Array = samples[[len(samples) * bucket // buckets for bucket in range(1, buckets)]]
        bounds = [[0, *np.searchsorted(keys, splits).tolist(), len(keys)] for keys, _, _ in runs]
        size = 0
        with (
            self._path("keys", order).open("wb") as all_keys,
            self._path("counts", order).open("wb") as all_counts,
            self._path("suffixes", order).open("wb") as all_suffixes,
        ):
            for bucket in range(buckets):
                parts = [
                    [column[bound[bucket] : bound[bucket + 1]] for column in run]
                    for run, bound in zip(runs, bounds, strict=True)
                ]
                keys, counts, suffixes = (np.concatenate(column) for column in zip(*parts, strict=True))
                sort = np.argsort(keys)
                keys = keys[sort]
                starts = _starts(keys)
                keys[starts].tofile(all_keys)
                np.add.reduceat(counts[sort], starts).tofile(all_counts) if len(starts) else None
                suffixes[sort[starts]].tofile(all_suffixes)
                size += len(starts)
        return size

    def keys(self, order: int) -> Array:
        """context * vocab_size + token of the n-grams of an order, ascending: they are sorted by tokens."""
        return _map(self._path("keys", order), np.int64)

    def raw(self, order: int) -> Array:
        """How often each occurs."""
        return self.unigrams if order == 1 else _map(self._path("counts", order), np.int64)

    def suffixes(self, order: int) -> Array:
        return _map(self._path("suffixes", order), np.uint32)

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
            lines = decode_lines(file, str(path))
            while batch := list(islice(lines, LINES_AT_ONCE)):
                sentences = [ids for ids in tokenizer.encode_batch(batch) if ids]
                flat = chain.from_iterable((BOS, *ids, EOS) for ids in sentences)
                yield np.fromiter(flat, np.uint32)
                bar.update(task, completed=before + position(file))
            before += position(file)


def _estimate(lm: NgramLM, counts: _Counts, work: Path, bar: Progress) -> None:
    """Fill an empty model, order by order."""
    task = bar.add_task("estimating", total=sum(lm.sizes))
    lm.tokens[1 : lm.first(2)] = np.arange(lm.vocab_size)
    lm.children[0], lm.children[-1] = 1, len(lm.tokens)
    begins = slice(1 + BOS, 2 + BOS)  # the n-grams of an order that begin a sentence
    lower = np.empty(0)
    for order in range(1, lm.order + 1):
        here = slice(lm.first(order), lm.first(order + 1))
        if order > 1:
            _link(lm, counts, order)
            begins = slice(*lm.children[[begins.start, begins.stop]].tolist())
        of_begins = slice(begins.start - here.start, begins.stop - here.start)
        adjusted = counts.raw(order)
        if order < lm.order:
            adjusted = _preceding(counts, order, lm, work)
            adjusted[of_begins] = counts.raw(order)[of_begins]
        if order == 1:
            adjusted = np.where(np.arange(lm.vocab_size) == BOS, 0, adjusted)
        discounts = _discounts(adjusted, order)
        probs = _new_map(work / f"probs-of-{order}", np.float64, lm.sizes[order - 1])
        if order == 1:
            probs[:], lm.backoffs[0] = _unigrams(adjusted, discounts), 0
        for first, end in _parent_blocks(lm, order) if order > 1 else ():
            _interpolate(lm, order, slice(first, end), adjusted, discounts, probs, lower)
        for block in _blocks(here.start, here.stop):
            some = probs[block.start - here.start : block.stop - here.start]
            lm.log_probs[block] = np.log(np.maximum(some, LEAST))
            bar.advance(task, block.stop - block.start)
        lower = probs
    lm.log_probs[1 + BOS] = NEVER


def _link(lm: NgramLM, counts: _Counts, order: int) -> None:
    """Write tokens and suffixes of an order, and where the children of the order below begin."""
    keys, suffixes, start = counts.keys(order), counts.suffixes(order), lm.first(order)
    for block in _blocks(0, len(keys)):
        there = slice(start + block.start, start + block.stop)
        lm.tokens[there] = keys[block] % lm.vocab_size
        lm.suffixes[there] = suffixes[block]
    for block in _blocks(lm.first(order - 1), start):
        contexts = np.arange(block.start, block.stop, dtype=np.int64)
        lm.children[block] = start + np.searchsorted(keys, contexts * lm.vocab_size)
    lm.children[start] = start + len(keys)  # the next order writes the same


def _preceding(counts: _Counts, order: int, lm: NgramLM, work: Path) -> Array:
    """How many different tokens come before each n-gram: so many n-grams one longer end in it."""
    found = _new_map(work / f"adjusted-of-{order}", np.int64, lm.sizes[order - 1])
    suffixes, start = counts.suffixes(order + 1), lm.first(order)
    for block in _blocks(0, len(suffixes)):
        ends, often = np.unique(suffixes[block], return_counts=True)
        found[ends - np.uint32(start)] += often
    return found


def _discounts(adjusted: Array, order: int) -> Array:
    """What to take from counts of 0, 1, 2, and 3 and more (Chen and Goodman 1998, equation 26)."""
    n = np.zeros(5)
    for block in _blocks(0, len(adjusted)):
        n += np.bincount(np.minimum(adjusted[block], 5), minlength=6)[:5]
    if n[1:4].all():
        y = n[1] / (n[1] + 2 * n[2])
        discounts = np.array([0.0, *(k - (k + 1) * y * n[k + 1] / n[k] for k in (1, 2, 3))])
        if (discounts >= 0).all() and (discounts <= np.arange(4)).all():
            return discounts
    say(f"too little text, or too regular, to estimate the discounts of {order}-grams: taking {FALLBACK[1:]}")
    return np.array(FALLBACK)


def _unigrams(adjusted: Array, discounts: Array) -> Array:
    total = adjusted.sum()
    taken = discounts[np.minimum(adjusted, 3)]
    seen = adjusted > 0
    seen[[UNK, EOS]] = True
    probs = (adjusted - taken) / total + taken.sum() / total / seen.sum()
    probs[~seen] = probs[UNK]
    return np.asarray(probs)


def _interpolate(
    lm: NgramLM, order: int, contexts: slice, adjusted: Array, discounts: Array, probs: Array, lower: Array
) -> None:
    """The probabilities of all n-grams that continue these contexts, and the contexts' back-offs."""
    bounds = lm.children[contexts.start : contexts.stop + 1]
    start = lm.first(order)
    here = slice(int(bounds[0]) - start, int(bounds[-1]) - start)
    used = np.flatnonzero(np.diff(bounds))
    if not len(used):
        return
    counts = adjusted[here]
    taken = discounts[np.minimum(counts, 3)]
    first = bounds[used] - bounds[0]
    total = np.add.reduceat(counts, first)
    left = np.add.reduceat(taken, first) / total
    lm.backoffs[contexts.start + used] = np.log(np.maximum(left, LEAST))
    context = np.repeat(np.arange(len(used)), np.diff(first, append=len(counts)))
    suffixes = lm.suffixes[start + here.start : start + here.stop]
    probs[here] = (counts - taken) / total[context] + left[context] * lower[suffixes - np.uint32(lm.first(order - 1))]


def _parent_blocks(lm: NgramLM, order: int) -> Iterator[tuple[int, int]]:
    """Ranges of contexts that have about BUCKET_ROWS n-grams each, and are no more than that themselves."""
    for block in _blocks(lm.first(order - 1), lm.first(order)):
        bounds = lm.children[block.start : block.stop + 1]
        wanted = np.arange(bounds[0] + BUCKET_ROWS, bounds[-1], BUCKET_ROWS)
        ends = np.unique([*np.searchsorted(bounds, wanted), len(bounds) - 1])
        first = 0
        for end in ends.tolist():
            if end > first:
                yield block.start + first, block.start + end
                first = end


def _blocks(start: int, stop: int) -> Iterator[slice]:
    for first in range(start, stop, BUCKET_ROWS):
        yield slice(first, min(first + BUCKET_ROWS, stop))


def _starts(keys: Array) -> Array:
    """Where in a sorted array each value stands first."""
    return np.flatnonzero(np.concatenate([[True] * bool(len(keys)), keys[1:] != keys[:-1]]))


def _map(path: Path, dtype: type[np.generic]) -> Array:
    if not path.stat().st_size:
        return np.empty(0, dtype)
    return np.memmap(path, dtype, "r")


def _new_map(path: Path, dtype: type[np.generic], size: int) -> Array:
    """Zeros in a new file."""
    return np.memmap(path, dtype, "w+", shape=(size,)) if size else np.empty(0, dtype)
