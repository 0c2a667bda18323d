"""The fastest decoding there is: the most probable token at every position, then collapse."""

from torch import Tensor

from nmla.losses import collapse_path


def argmax_decode(logits_BTV: Tensor, lengths_B: Tensor, *, blank: int, collapse: str = "ctc") -> list[list[int]]:
    """The collapsed most probable path of each sentence."""
    paths = zip(logits_BTV.argmax(-1).tolist(), lengths_B.tolist(), strict=True)
    return [collapse_path(path[:length], blank=blank, collapse=collapse) for path, length in paths]
