"""What every loss asks of its arguments: checks that say what must hold, and masks that keep padding out."""

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)


def full_type(scores: Tensor) -> torch.dtype:
    """The type to compute a loss in: float32 for half precision, so that autocast changes nothing."""
    return torch.float32 if scores.dtype in HALF else scores.dtype


def full_precision(scores: Tensor) -> Tensor:
    return scores.to(full_type(scores))


def in_use(lengths: Tensor, size: int) -> Tensor:
    """Mask ``(*lengths.shape, size)``: True before each length, False in the padding."""
    return torch.arange(size, device=lengths.device) < lengths.unsqueeze(-1)


def check_scores(name: str, scores: Tensor, input_lengths: Tensor) -> Tensor:
    """Check ``(B, T, V)`` scores and their lengths; return the lengths on the scores' device."""
    if scores.dim() != 3 or not scores.is_floating_point():
        raise ValueError(f"{name} must be floating point (B, T, V), but is {scores.dtype} {tuple(scores.shape)}")
    return check_lengths("input_lengths", input_lengths, scores.shape[:1], scores.shape[1], scores.device)


def check_lengths(name: str, lengths: Tensor, shape: torch.Size, longest: int, device: torch.device) -> Tensor:
    if lengths.shape != shape or lengths.is_floating_point() or lengths.is_complex():
        raise ValueError(f"{name} must be integers {tuple(shape)}, but is {lengths.dtype} {tuple(lengths.shape)}")
    if lengths.numel() and (lengths.min() < 0 or lengths.max() > longest):
        raise ValueError(f"{name} must be in 0..{longest}, but is {lengths.min().item()}..{lengths.max().item()}")
    return lengths.to(device, torch.long)


def check_normalised(log_probs: Tensor, input_lengths: Tensor) -> None:
    """Raise unless the first position in use of every sentence sums to one: unnormalised input fails at all of them,
    and a check of all would cost as much as a loss."""
    if 0 in log_probs.shape:
        return
    log_sums_B = log_probs.detach()[:, 0].float().logsumexp(-1).masked_fill(input_lengths == 0, 0.0)
    wrong_B = ~(log_sums_B.abs() < (0.1 if log_probs.dtype in HALF else 0.01))
    if wrong_B.any():
        b = int(wrong_B.nonzero()[0])
        raise ValueError(
            "log_probs must be normalised over the vocabulary (use log_softmax), "
            f"but the probabilities of sentence {b}, position 0 sum to {log_sums_B[b].exp().item():.6g}"
        )


def check_blank(blank: int, vocabulary: int) -> None:
    if not 0 <= blank < vocabulary:
        raise ValueError(f"blank must be in 0..{vocabulary - 1}, but is {blank}")


def check_tokens(name: str, tokens: Tensor, used: Tensor, vocabulary: int, blank: int | None) -> Tensor:
    """Check the token ids in use; return them with token 0 in place of the rest, which may be garbage."""
    tokens = tokens.masked_fill(~used, 0)
    if tokens.numel() and (tokens.min() < 0 or tokens.max() >= vocabulary):
        raise ValueError(f"{name} must be in 0..{vocabulary - 1}, but is {tokens.min().item()}..{tokens.max().item()}")
    if blank is not None and ((tokens == blank) & used).any():
        raise ValueError(f"{name} must not hold the blank, but {blank} is among them")
    return tokens


def check_targets(
    targets: Tensor,
    target_lengths: Tensor,
    scores: Tensor,
    vocabulary: int,
    *,
    blank: int | None,
    several: bool = False,
) -> tuple[Tensor, Tensor]:
    """Check one reference ``(B, L)`` or, if allowed, several ``(B, R, L)``; return both tensors on the device of the
    scores, with token 0 in the padding."""
    batch = scores.shape[0]
    dims = (2, 3) if several else (2,)
    if targets.dim() not in dims or targets.shape[0] != batch or targets.is_floating_point():
        wanted = f"({batch}, L) or, with several references, ({batch}, R, L)" if several else f"({batch}, L)"
        raise ValueError(f"targets must be integers {wanted}, but is {targets.dtype} {tuple(targets.shape)}")
    lengths = check_lengths("target_lengths", target_lengths, targets.shape[:-1], targets.shape[-1], scores.device)
    targets = targets.to(scores.device, torch.long)
    return check_tokens("targets", targets, in_use(lengths, targets.shape[-1]), vocabulary, blank), lengths
