"""Batches of sentences of like length, by a budget of output positions, the same for the same seed."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nmla.data.corpus import IntArray
from nmla.text.tokenizer import EOS, PAD

Tokens = Sequence[int] | npt.NDArray[np.unsignedinteger]


@dataclass(frozen=True)
class Batch:
    source: Tensor  # (B, S) token ids, each sentence closed by EOS, then PAD
    source_lengths: Tensor  # (B,)
    target: Tensor  # (B, L) token ids, then PAD; with several references (B, R, L)
    target_lengths: Tensor  # (B,), or (B, R) with 0 where a sentence has fewer references

    def to(self, device: torch.device) -> "Batch":
        return Batch(*(tensor.to(device) for tensor in vars(self).values()))


def epoch_batches(costs: IntArray, widths: IntArray, max_cost: int, seed: int, epoch: int) -> list[IntArray]:
    """All sentences once, as index arrays whose padded cost, longest times rows, is at most `max_cost`.

    Sentences of one cost stand together, and among them those of one width, the target's length, so that little is
    padding; which of them meet, and the order of the batches, is drawn anew each epoch. None may cost more alone.
    """
    rng = np.random.default_rng((seed, epoch))
    order = np.lexsort((rng.random(len(costs)), widths, costs))
    rising = costs[order]
    ends = []
    start = 0
    while start < len(order):
        # Costs rise, so the last is the longest: at most as many rows as fit by the first, fewer as they grow.
        most = rising[start : start + max(int(max_cost // rising[start]), 1)]
        fits = int(np.searchsorted(most * np.arange(1, len(most) + 1), max_cost, side="right"))
        start += max(fits, 1)
        ends.append(start)
    batches = np.split(order, ends[:-1])
    return [batches[i] for i in rng.permutation(len(batches))]


def collate(sources: Sequence[Tokens], references: Sequence[Sequence[Tokens]], several: bool = False) -> Batch:
    """Sentences, each with its references, as padded tensors; unless `several`, each has one."""
    source, source_lengths = pad(sources, end=EOS)
    target, target_lengths = pad([tokens for of_source in references for tokens in of_source])
    if several:
        counts = [len(of_source) for of_source in references]
        row = np.repeat(np.arange(len(counts)), counts)
        column = np.concatenate([np.arange(count) for count in counts])
        spread = target.new_full((len(counts), max(counts), target.shape[1]), PAD)
        spread[row, column] = target
        spread_lengths = target_lengths.new_zeros(len(counts), max(counts))
        spread_lengths[row, column] = target_lengths
        target, target_lengths = spread, spread_lengths
    return Batch(source, source_lengths, target, target_lengths)


def pad(sentences: Sequence[Tokens], end: int | None = None) -> tuple[Tensor, Tensor]:
    """``(B, longest)`` ids, each sentence closed by `end` if there is one, and ``(B,)`` lengths."""
    extra = 0 if end is None else 1
    lengths = np.array([len(sentence) + extra for sentence in sentences], dtype=np.int64)
    padded = np.full((len(sentences), max(int(lengths.max(initial=1)), 1)), PAD, dtype=np.int64)
    for row, sentence, length in zip(padded, sentences, lengths.tolist(), strict=True):
        row[: length - extra] = sentence
        if end is not None:
            row[length - 1] = end
    return torch.from_numpy(padded), torch.from_numpy(lengths)
