r"""Estimate an n-gram language model from text: interpolated modified Kneser-Ney, as KenLM's lmplz does.

With a the adjusted count (the number of occurrences for the highest order and for n-grams that begin a sentence, else
the number of different tokens that come before), D the discount of that order for a count of 1, 2, or 3 and more, and
h' the context h without its first token:

    p(w | h) = (a(hw) - D(a(hw))) / \sum_v a(hv) + \gamma(h) p(w | h'),    \gamma(h) = \sum_v D(a(hv)) / \sum_v a(hv)

and below the unigrams p is uniform over the tokens that occur, <unk> and </s>.

lm_counts.py counts; here are the discounts and the probabilities. Memory stays flat: all that grows is in mapped files.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from rich.progress import Progress

from nmla.decoding import lm_counts
from nmla.decoding.arpa import write_lm
from nmla.decoding.lm_counts import Array, Counts, blocks, new_map
from nmla.decoding.ngram_lm import MAX_ORDER, NEVER, NgramLM, check_output, header_of
from nmla.errors import UsageError
from nmla.files import clear_directory, kept_directory, new_file
from nmla.progress import progress_bar, say
from nmla.text.tokenizer import BOS, EOS, UNK, Tokenizer

FALLBACK = (0.0, 0.5, 1.0, 1.5)  # discounts for counts of 0, 1, 2, and 3 and more, where the text cannot tell
LEAST = 1e-100  # instead of 0, of which there is no logarithm


def train_lm(texts: Sequence[Path], tokenizer: Tokenizer, output: Path, order: int = 4) -> NgramLM:
    """Estimate a model from text files, a sentence a line, and write it to `output`, compact or ARPA as its name ends.

    Empty lines are no sentences. <unk>, where the text has letters that the vocabulary lacks, is a token like others.
    """
    check_output(output, tokenizer)
    if not 1 <= order <= MAX_ORDER:
        raise UsageError(f"order must be from 1 to {MAX_ORDER}, but is {order}")
    with kept_directory(output) as work:
        clear_directory(work)  # of what a killed run left
        try:
            with new_file(output if output.suffix == ".lm" else work / "model.lm") as compact, progress_bar() as bar:
                counts = Counts(work, tokenizer.vocab_size)
                counts.add_text(texts, tokenizer, bar)
                for k in range(2, order + 1):
                    counts.add_order(k, last=k == order, bar=bar)
                lm = NgramLM.empty(counts.sizes, compact, header_of(counts.sizes, tokenizer))
                _estimate(lm, counts, work, bar)
            if output.suffix != ".lm":
                write_lm(lm, output, tokenizer)
        finally:
            clear_directory(work)
    return NgramLM.load(output, tokenizer) if output.suffix == ".lm" else lm


def _estimate(lm: NgramLM, counts: Counts, work: Path, bar: Progress) -> None:
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
        probs = new_map(work / f"probs-of-{order}", np.float64, lm.sizes[order - 1])
        if order == 1:
            probs[:], lm.backoffs[0] = _unigrams(adjusted, discounts), 0
        for first, end in _parent_blocks(lm, order) if order > 1 else ():
            _interpolate(lm, order, slice(first, end), adjusted, discounts, probs, lower)
        for block in blocks(here.start, here.stop):
            some = probs[block.start - here.start : block.stop - here.start]
            lm.log_probs[block] = np.log(np.maximum(some, LEAST))
            bar.advance(task, block.stop - block.start)
        lower = probs
    lm.log_probs[1 + BOS] = NEVER


def _link(lm: NgramLM, counts: Counts, order: int) -> None:
    """Write tokens and suffixes of an order, and where the children of the order below begin."""
    keys, suffixes, start = counts.keys(order), counts.suffixes(order), lm.first(order)
    for block in blocks(0, len(keys)):
        there = slice(start + block.start, start + block.stop)
        lm.tokens[there] = keys[block] % lm.vocab_size
        lm.suffixes[there] = suffixes[block]
    for block in blocks(lm.first(order - 1), start):
        contexts = np.arange(block.start, block.stop, dtype=np.int64)
        lm.children[block] = start + np.searchsorted(keys, contexts * lm.vocab_size)
    lm.children[start] = start + len(keys)  # the next order writes the same


def _preceding(counts: Counts, order: int, lm: NgramLM, work: Path) -> Array:
    """How many different tokens come before each n-gram: so many n-grams one longer end in it."""
    found = new_map(work / f"adjusted-of-{order}", np.int64, lm.sizes[order - 1])
    suffixes, start = counts.suffixes(order + 1), lm.first(order)
    for block in blocks(0, len(suffixes)):
        ends, often = np.unique(suffixes[block], return_counts=True)
        found[ends - np.uint32(start)] += often
    return found


def _discounts(adjusted: Array, order: int) -> Array:
    """What to take from counts of 0, 1, 2, and 3 and more (Chen and Goodman 1998, equation 26)."""
    n = np.zeros(5)
    for block in blocks(0, len(adjusted)):
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
    """Ranges of contexts that have about lm_counts.BUCKET_ROWS n-grams each, and are no more than that themselves."""
    for block in blocks(lm.first(order - 1), lm.first(order)):
        bounds = lm.children[block.start : block.stop + 1]
        wanted = np.arange(bounds[0] + lm_counts.BUCKET_ROWS, bounds[-1], lm_counts.BUCKET_ROWS)
        ends = np.unique([*np.searchsorted(bounds, wanted), len(bounds) - 1])
        first = 0
        for end in ends.tolist():
            if end > first:
                yield block.start + first, block.start + end
                first = end
