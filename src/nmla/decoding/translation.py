"""What a translation is, and which sentences are translated together."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from nmla.config import Decoding


@dataclass(frozen=True)
class Token:
    """A token of a translation."""

    piece: str
    confidence: float  # its probability, where the model was surest of it
    source: int  # the source token it came from, as far as the model tells


@dataclass(frozen=True)
class Translation:
    """One translated line. What the model thought of it is there if `return_scores` asked for it."""

    text: str
    # The logarithm of the path's probability, or of the output's, or what a search maximised; where a teacher chose,
    # the logarithm of the probability that it gives the output, per token.
    score: float = 0.0
    tokens: tuple[Token, ...] = ()
    alternatives: tuple["Translation", ...] = ()  # the next best, if `num_hypotheses` asked for more than one
    entropy: float = 0.0  # of the model's prediction, in nats, summed over positions
    positions: int = 0  # output positions, blanks included
    blanks: int = 0  # positions where the blank is the most probable
    parts: int = 1  # into how many pieces a long line was split


def entropy(probs_TV: Tensor) -> float:
    return float(torch.special.entr(probs_TV).sum())


def log_total(logits_TV: Tensor) -> float:
    """The logarithm of what all paths have together: of logits, unlike probabilities, that is not 0."""
    return float(logits_TV.float().logsumexp(-1).double().sum()) if len(logits_TV) else 0.0


def batches(
    lengths: list[int], settings: Decoding, cost: Callable[[int], int], widest: float = math.inf
) -> Iterator[list[int]]:
    """Rows of like length together, so that little is padding; where rows are counted, they cost `widest` at most."""
    by_rows = settings.batch_type == "examples"
    most_rows, most_tokens = (settings.max_batch_size, widest) if by_rows else (math.inf, settings.max_batch_size)
    batch: list[int] = []
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        rows = len(batch) + 1
        if batch and (rows > most_rows or cost(lengths[row]) * rows > most_tokens):
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch
