"""From a path, one token per output position, to the sentence it stands for."""

from collections.abc import Sequence

from torch import Tensor

COLLAPSES = ("ctc", "sctc")


def check_collapse(collapse: str) -> None:
    if collapse not in COLLAPSES:
        raise ValueError(f'collapse must be "ctc" or "sctc", but is {collapse!r}')


def collapse_path(path: Sequence[int] | Tensor, *, blank: int, collapse: str = "ctc") -> list[int]:
    """The sentence that a path stands for.

    ``"ctc"`` merges neighbouring repeats and then drops the blanks; ``"sctc"`` (simplified CTC) only drops the blanks.

    Args:
        path: ``(T,)`` token ids, one per output position: a list or a tensor, without padding.
        blank: the id of the blank.
        collapse: ``"ctc"`` or ``"sctc"``.

    Returns:
        The tokens of the sentence; an empty list where the path is empty or all blank.

    Example:
        >>> collapse_path([5, 5, 0, 5, 7], blank=0)
        [5, 5, 7]
        >>> collapse_path([5, 5, 0, 5, 7], blank=0, collapse="sctc")
        [5, 5, 5, 7]
    """
    check_collapse(collapse)
    if isinstance(path, Tensor) and path.dim() != 1:
        raise ValueError(f"path must be (T,), one path at a time, but is {tuple(path.shape)}")
    tokens = path.tolist() if isinstance(path, Tensor) else list(path)
    if collapse == "ctc":
        tokens = [token for before, token in zip([None, *tokens], tokens, strict=False) if token != before]
    return [token for token in tokens if token != blank]
