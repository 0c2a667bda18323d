"""Losses of fixed-length models, where position t writes token t: cross entropy, and the length's own."""

import torch
from torch import Tensor

from .inputs import check_arguments, check_lengths, check_normalised, full_precision, in_use

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
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing must be in [0, 1), but is {label_smoothing}")
    positions = targets.shape[1]
    log_probs, padding_BT = log_probs[:, :positions], ~in_use(lengths, positions)
    log_p_BT = full_precision(log_probs.gather(2, targets.unsqueeze(-1)).squeeze(-1)).masked_fill(padding_BT, 0.0)
    loss_B = -(1 - label_smoothing) * log_p_BT.sum(1)
    if label_smoothing:
        mean_BT = full_precision(log_probs).mean(-1)
        loss_B = loss_B - label_smoothing * mean_BT.masked_fill(padding_BT, 0.0).sum(1)
    return loss_B


def check_equal_lengths(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor
) -> tuple[Tensor, Tensor]:
    """The checks of a model that writes one token a position: the targets, at most T wide, and the common lengths."""
    targets, input_lengths, target_lengths = check_arguments(
        log_probs, targets, input_lengths, target_lengths, blank=None
    )
    if (input_lengths != target_lengths).any():
        b = int((input_lengths != target_lengths).nonzero()[0])
        raise ValueError(
            "input_lengths must equal target_lengths, one position a token, "
            f"but sentence {b} has {input_lengths[b]} positions and {target_lengths[b]} tokens"
        )
    return targets[:, : log_probs.shape[1]], input_lengths


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
