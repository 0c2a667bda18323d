"""Losses of fixed-length models, where position t writes token t: cross entropy, and the length's own."""

from typing import Any

import torch
from torch import Tensor

from .inputs import (
    check_arguments,
    check_lengths,
    check_normalised,
    check_scores,
    check_targets,
    full_precision,
    full_type,
    in_use,
)

LENGTH_CLASSES = 256


def cross_entropy_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    *,
    label_smoothing: float = 0.0,
) -> Tensor:
    r"""Minus the log-probability of the target, position by position.

    .. math:: L = - \sum_t \Big[ (1 - s) \log p_t(y_t) + \frac{s}{V} \sum_v \log p_t(v) \Big]

    Args:
        log_probs: ``(B, T, V)``, normalised over ``V``.
        targets: ``(B, L)`` token ids; padding may be anything.
        input_lengths: ``(B,)`` positions in use, each in ``0..T``, equal to ``target_lengths``.
        target_lengths: ``(B,)``, each in ``0..L``.
        label_smoothing: s, the share of the target's mass spread over the whole vocabulary.

    Returns:
        ``(B,)`` losses, the sum over positions; 0 for an empty target.

    Example:
        >>> log_probs = torch.tensor([[[0.5, 0.5], [0.2, 0.8]]]).log()
        >>> cross_entropy_loss(log_probs, torch.tensor([[0, 1]]), torch.tensor([2]), torch.tensor([2])).exp()
        tensor([2.5000])
    """
    targets, lengths = check_equal_lengths(log_probs, targets, input_lengths, target_lengths)
    _check_smoothing(label_smoothing)
    positions = targets.shape[1]
    log_probs, padding_BT = log_probs[:, :positions], ~in_use(lengths, positions)
    log_p_BT = full_precision(log_probs.gather(2, targets.unsqueeze(-1)).squeeze(-1)).masked_fill(padding_BT, 0.0)
    loss_B = -(1 - label_smoothing) * log_p_BT.sum(1)
    if label_smoothing:
        mean_BT = log_probs.mean(-1, dtype=full_type(log_probs)).masked_fill(padding_BT, 0.0)
        loss_B = loss_B - label_smoothing * mean_BT.sum(1)
    return loss_B


def cross_entropy_loss_with_logits(
    logits: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    *,
    label_smoothing: float = 0.0,
) -> Tensor:
    """:func:`cross_entropy_loss` of ``log_softmax(logits)`` in less time and memory: what training uses.

    Of float32 logits with as many positions as targets, the gradient is the only tensor of their size that is made. It
    cannot be differentiated again.

    Args:
        logits: ``(B, T, V)``, any real numbers; -inf for a token that cannot occur.
        targets, input_lengths, target_lengths, label_smoothing: as in :func:`cross_entropy_loss`.

    Returns:
        ``(B,)`` losses, the sum over positions; float32 where the logits are of half precision.

    Example:
        >>> logits = torch.zeros(1, 2, 4, requires_grad=True)
        >>> loss = cross_entropy_loss_with_logits(logits, torch.tensor([[0, 1]]), torch.tensor([2]), torch.tensor([2]))
        >>> loss.exp().detach()
        tensor([16.])
        >>> loss.sum().backward()
        >>> logits.grad[0, 0]
        tensor([-0.7500,  0.2500,  0.2500,  0.2500])
    """
    input_lengths = check_scores("logits", logits, input_lengths)
    targets, target_lengths = check_targets(targets, target_lengths, logits, logits.shape[-1], blank=None)
    targets, lengths = _common_lengths(logits, targets, input_lengths, target_lengths)
    _check_smoothing(label_smoothing)
    loss_B: Tensor = _FromLogits.apply(logits, targets, in_use(lengths, targets.shape[1]), label_smoothing)
    return loss_B


class _FromLogits(torch.autograd.Function):
    """The probabilities made forward become the gradient backward: ``p - (1 - s) [v = y] - s / V``."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets_BT: Tensor, used_BT: Tensor, smoothing: float) -> Tensor:
        positions = targets_BT.shape[1]
        ctx.smoothing, ctx.positions = smoothing, logits.shape[1]
        logits = logits[:, :positions]
        probs_BTV = logits.softmax(-1, dtype=full_type(logits))
        # From the likeliest token, whose probability never is too small for a logarithm. Its logit is taken away first:
        # where all are large, small differences of their sums would be lost.
        top_BT, log_top_BT = full_precision(logits.amax(-1)), probs_BTV.amax(-1).log()
        log_p_BT = full_precision(logits.gather(2, targets_BT.unsqueeze(-1)).squeeze(-1)) - top_BT + log_top_BT
        if smoothing:
            mean_BT = logits.mean(-1, dtype=full_type(logits)) - top_BT + log_top_BT
            log_p_BT = (1 - smoothing) * log_p_BT + smoothing * mean_BT
        ctx.save_for_backward(logits, targets_BT, used_BT)
        ctx.probs_BTV = probs_BTV if ctx.needs_input_grad[0] else None
        return -log_p_BT.masked_fill(~used_BT, 0.0).sum(1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_B: Tensor) -> tuple[Tensor, None, None, None]:
        logits, targets_BT, used_BT = ctx.saved_tensors
        grad_BTV, ctx.probs_BTV = ctx.probs_BTV, None  # written over: they can be used once
        if grad_BTV is None:
            grad_BTV = logits.softmax(-1, dtype=grad_B.dtype)
        if ctx.smoothing:
            grad_BTV -= ctx.smoothing / grad_BTV.shape[-1]
        target_BT1 = grad_BTV.new_full((), ctx.smoothing - 1).expand(*targets_BT.shape, 1)
        grad_BTV.scatter_add_(2, targets_BT.unsqueeze(-1), target_BT1)
        grad_BTV *= grad_B[:, None, None]
        grad_BTV.flatten(0, 1).index_fill_(0, (~used_BT).flatten().nonzero().squeeze(1), 0)  # whatever garbage gave
        behind = ctx.positions - grad_BTV.shape[1]
        grad_BTV = torch.nn.functional.pad(grad_BTV, (0, 0, 0, behind)) if behind else grad_BTV
        return grad_BTV.to(logits.dtype), None, None, None


def _check_smoothing(label_smoothing: float) -> None:
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing must be in [0, 1), but is {label_smoothing}")


def check_equal_lengths(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor
) -> tuple[Tensor, Tensor]:
    """The checks of a model that writes one token a position: the targets, at most T wide, and the common lengths."""
    targets, input_lengths, target_lengths = check_arguments(
        log_probs, targets, input_lengths, target_lengths, blank=None
    )
    return _common_lengths(log_probs, targets, input_lengths, target_lengths)


def _common_lengths(
    scores: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor
) -> tuple[Tensor, Tensor]:
    if (input_lengths != target_lengths).any():
        b = int((input_lengths != target_lengths).nonzero()[0])
        raise ValueError(
            "input_lengths must equal target_lengths, one position a token, "
            f"but sentence {b} has {input_lengths[b]} positions and {target_lengths[b]} tokens"
        )
    return targets[:, : scores.shape[1]], input_lengths


def length_loss(log_probs: Tensor, source_lengths: Tensor, target_lengths: Tensor) -> Tensor:
    r"""Minus the log-probability of the target's length, as a class: \|y\| - \|x\| + 128, one of 256.

    A difference outside -128..127 is taken as the nearest of them.

    Args:
        log_probs: ``(B, 256)``, normalised.
        source_lengths: ``(B,)`` \|x\|.
        target_lengths: ``(B,)`` \|y\|.

    Returns:
        ``(B,)`` losses.

    Example:
        >>> uniform = torch.zeros(1, 256).log_softmax(-1)
        >>> length_loss(uniform, torch.tensor([7]), torch.tensor([9])).exp().round()
        tensor([256.])
    """
    if log_probs.dim() != 2 or log_probs.shape[1] != LENGTH_CLASSES:
        raise ValueError(f"log_probs must be (B, {LENGTH_CLASSES}), but is {tuple(log_probs.shape)}")
    longest = torch.iinfo(torch.long).max
    source_lengths, target_lengths = (
        check_lengths(name, lengths, log_probs.shape[:1], longest, log_probs.device)
        for name, lengths in (("source_lengths", source_lengths), ("target_lengths", target_lengths))
    )
    check_normalised(log_probs.unsqueeze(1), torch.ones_like(source_lengths))
    class_B = length_class(source_lengths, target_lengths)
    return -full_precision(log_probs).gather(1, class_B.unsqueeze(1)).squeeze(1)


def length_class(source_lengths: Tensor, target_lengths: Tensor) -> Tensor:
    """``(B,)`` the class of each target's length given its source's."""
    return (target_lengths - source_lengths + LENGTH_CLASSES // 2).clamp(0, LENGTH_CLASSES - 1)
