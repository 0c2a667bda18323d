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


def is_integer(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def check_arguments(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    *,
    blank: int | None,
    several: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Check what a loss on log-probabilities is given; return all but these as :func:`check_targets` does."""
    input_lengths = check_log_probs(log_probs, input_lengths, blank)
    vocabulary = log_probs.shape[-1]
    targets, target_lengths = check_targets(
        targets, target_lengths, log_probs, vocabulary, blank=blank, several=several
    )
    return targets, input_lengths, target_lengths


def check_log_probs(log_probs: Tensor, input_lengths: Tensor, blank: int | None) -> Tensor:
    """Check log-probabilities, their lengths and, if there is one, the blank; return the lengths on their device."""
    input_lengths = check_scores("log_probs", log_probs, input_lengths)
    if blank is not None:
        check_blank(blank, log_probs.shape[-1])
    check_normalised(log_probs, input_lengths)
    return input_lengths


def check_scores(name: str, scores: Tensor, input_lengths: Tensor) -> Tensor:
    """Check ``(B, T, V)`` scores and their lengths; return the lengths on the scores' device."""
    if scores.dim() != 3 or not scores.is_floating_point():
        raise ValueError(f"{name} must be floating point (B, T, V), but is {scores.dtype} {tuple(scores.shape)}")
    return check_lengths("input_lengths", input_lengths, scores.shape[:1], scores.shape[1], scores.device)


def check_lengths(name: str, lengths: Tensor, shape: torch.Size, longest: int, device: torch.device) -> Tensor:
    if lengths.shape != shape or not is_integer(lengths):
        raise ValueError(f"{name} must be integers {tuple(shape)}, but is {lengths.dtype} {tuple(lengths.shape)}")
    if lengths.numel() and (lengths.min() < 0 or lengths.max() > longest):
        raise ValueError(f"{name} must be in 0..{longest}, but is {lengths.min().item()}..{lengths.max().item()}")
    return lengths.to(device, torch.long)


def check_normalised(log_probs: Tensor, input_lengths: Tensor) -> None:
    """Raise unless the first, the middle and the last position in use of every sentence sum to one: a check of all
    would cost as much as a loss.

    Log-probabilities that have been through bfloat16 are off by up to 0.03 each, and so, if all alike, is their sum.
    """
    if 0 in log_probs.shape:
        return
    last_B = (input_lengths - 1).clamp(min=0)
    position_B3 = torch.stack([torch.zeros_like(last_B), last_B // 2, last_B], 1)
    sentence_B1 = torch.arange(len(last_B), device=last_B.device).unsqueeze(1)
    log_sums_B3 = log_probs.detach()[sentence_B1, position_B3].float().logsumexp(-1)
    right_B3 = log_sums_B3.abs() < (0.1 if log_probs.dtype in HALF else 0.05)
    wrong_B3 = ~right_B3 & (input_lengths > 0).unsqueeze(1)
    if wrong_B3.any():
        b, k = wrong_B3.nonzero()[0].tolist()
        raise ValueError(
            "log_probs must be normalised over the vocabulary (use log_softmax), but the probabilities of "
            f"sentence {b}, position {position_B3[b, k]} sum to {log_sums_B3[b, k].exp().item():.6g}"
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
    if targets.dim() not in dims or targets.shape[0] != batch or not is_integer(targets):
        wanted = f"({batch}, L) or, with several references, ({batch}, R, L)" if several else f"({batch}, L)"
        raise ValueError(f"targets must be integers {wanted}, but is {targets.dtype} {tuple(targets.shape)}")
    lengths = check_lengths("target_lengths", target_lengths, targets.shape[:-1], targets.shape[-1], scores.device)
    targets = targets.to(scores.device, torch.long)
    return check_tokens("targets", targets, in_use(lengths, targets.shape[-1]), vocabulary, blank), lengths
