"""The fastest decoding there is: the most probable token at every position, then collapse."""

from torch import Tensor

from nmla.losses import collapse_path


def argmax_decode(logits_BTV: Tensor, lengths_B: Tensor, *, blank: int) -> list[list[int]]:
    """The collapsed most probable path of each sentence."""
    paths = logits_BTV.argmax(-1).tolist()
    return [collapse_path(path[:length], blank=blank) for path, length in zip(paths, lengths_B.tolist(), strict=True)]
