"""Batches of sentences of like length, by a budget of output positions, the same for the same seed."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nmla.data.corpus import IntArray, TokenStore
from nmla.text.tokenizer import EOS, PAD


@dataclass(frozen=True)
class Batch:
    source: Tensor  # (B, S) token ids, each sentence closed by EOS, then PAD
    source_lengths: Tensor  # (B,)
    target: Tensor  # (B, L) token ids, then PAD
    target_lengths: Tensor  # (B,)

    def to(self, device: torch.device) -> "Batch":
        return Batch(*(tensor.to(device) for tensor in vars(self).values()))


def epoch_batches(costs: IntArray, max_cost: int, seed: int, epoch: int) -> list[IntArray]:
    """All sentences once, as index arrays whose padded cost, longest times rows, is at most `max_cost`.

    Sentences of one cost stand together, so little is padding; which of them meet, and the order of the batches, is
    drawn anew each epoch. No sentence may cost more alone.
    """
    rng = np.random.default_rng((seed, epoch))
    order = rng.permutation(len(costs))
    order = order[np.argsort(costs[order], kind="stable")]
    batches = []
    start = 0
    for end, index in enumerate(order):  # costs rise, so the newest is the longest
        if end > start and costs[index] * (end - start + 1) > max_cost:
            batches.append(order[start:end])
            start = end
    batches.append(order[start:])
    return [batches[i] for i in rng.permutation(len(batches))]


def collate(sources: TokenStore, targets: TokenStore, indices: IntArray) -> Batch:
    """The sentences at `indices` as padded tensors."""
    source, source_lengths = pad([[*sources[i], EOS] for i in indices])
    target, target_lengths = pad([list(targets[i]) for i in indices])
    return Batch(source, source_lengths, target, target_lengths)


def pad(sentences: list[list[int]]) -> tuple[Tensor, Tensor]:
    """``(B, longest)`` ids and ``(B,)`` lengths."""
    lengths = torch.tensor([len(sentence) for sentence in sentences])
    padded = np.full((len(sentences), max(int(lengths.max()), 1)), PAD, dtype=np.int64)
    for row, sentence in zip(padded, sentences, strict=True):
        row[: len(sentence)] = sentence
    return torch.from_numpy(padded), lengths
