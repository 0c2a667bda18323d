"""The fastest decoding there is: the most probable token at every position, then collapse."""

from dataclasses import dataclass
from itertools import groupby

from torch import Tensor


@dataclass(frozen=True)
class Hypothesis:
    """An output that was found."""

    tokens: list[int]
    positions: list[int]  # where each token begins on the most probable path
    score: float = 0.0  # of the path, or what a search maximises
    log_prob: float = 0.0  # log p(y|x), of all paths, if a search found it
    lm_log_prob: float = 0.0  # with the end; 0 without a language model


def argmax_decode(logits_BTV: Tensor, lengths_B: Tensor, *, blank: int, collapse: str = "ctc") -> list[Hypothesis]:
    """The collapsed most probable path of each sentence; its score is left to who wants it."""
    paths = zip(logits_BTV.argmax(-1).tolist(), lengths_B.tolist(), strict=True)
    return [_collapsed(path[:length], blank, collapse == "ctc") for path, length in paths]


def _collapsed(path: list[int], blank: int, merge: bool) -> Hypothesis:
    places = enumerate(path)
    runs = (next(run) for _, run in groupby(places, key=lambda place: place[1])) if merge else places
    kept = [(position, token) for position, token in runs if token != blank]
    return Hypothesis([token for _, token in kept], [position for position, _ in kept])
