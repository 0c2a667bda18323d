"""Diverse distillation with reference selection (DDRS): several references, of which the model may choose one."""

import torch
from torch import Tensor

from .alignment import losses_of_references
from .inputs import full_type

SWITCH = 2 / 3  # the progress at which any reference may be chosen


def ddrs_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    *,
    blank: int,
    progress: float,
    collapse: str = "ctc",
) -> Tensor:
    r"""Minus the log-probability of several references per token: of all, then of any, in the end of the likeliest.

    With :math:`l_k = -\log p(y_k)`, the CTC or SCTC loss of reference k of K,

    .. math::
        L_{sum} = \frac{\sum_k l_k}{\sum_k |y_k|}, \quad
        L_{mid} = \frac{-\log \sum_k e^{-l_k}}{\frac{1}{K} \sum_k |y_k|}, \quad
        L_{max} = \frac{l_{k^*}}{|y_{k^*}|}, \; k^* = \arg\min_k l_k

    and the loss goes linearly with the progress of training: from :math:`L_{sum}` at 0 to :math:`L_{mid}` at 2/3, and
    on to :math:`L_{max}` at 1. With one reference all are CTC's loss per token.

    Args:
        log_probs: ``(B, T, V)``, normalised over ``V``.
        targets: ``(B, R, L)`` token ids without blanks, or ``(B, L)``; padding may be anything.
        input_lengths: ``(B,)`` positions in use, each in ``0..T``.
        target_lengths: ``(B, R)``, each in ``0..L``; 0 where a sentence has fewer references.
        blank: the id of the blank.
        progress: how far training has come, in [0, 1].
        collapse: ``"ctc"`` or ``"sctc"``.

    Returns:
        ``(B,)`` losses per token; 0 for a sentence without any reference, and +inf, with gradient 0, where any of
        them is impossible, or from progress 2/3 on only where all are.

    Example:
        >>> log_probs = torch.tensor([[[0.5, 0.4, 0.1]]]).log()  # one position: blank 0, or the word 1, or the word 2
        >>> words = torch.tensor([[[1], [2]]]), torch.tensor([1]), torch.tensor([[1, 1]])
        >>> [ddrs_loss(log_probs, *words, blank=0, progress=p).neg().exp() for p in (0, 2 / 3, 1)]
        [tensor([0.2000]), tensor([0.5000]), tensor([0.4000])]
    """
    return _ddrs(log_probs, targets, input_lengths, target_lengths, blank, progress, collapse, from_logits=False)


def ddrs_loss_with_logits(
    logits: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    *,
    blank: int,
    progress: float,
    collapse: str = "ctc",
) -> Tensor:
    """:func:`ddrs_loss` of ``log_softmax(logits)`` in less time and memory: what training uses.

    Of float32 logits, the gradient is the only tensor of their size that is made. It cannot be differentiated again.

    Args:
        logits: ``(B, T, V)``, any real numbers; -inf for a token that cannot occur.
        targets, input_lengths, target_lengths, blank, progress, collapse: as in :func:`ddrs_loss`.

    Returns:
        ``(B,)`` losses per token; float32 where the logits are of half precision.

    Example:
        >>> words = torch.tensor([[[1], [2]]]), torch.tensor([1]), torch.tensor([[1, 1]])
        >>> ddrs_loss_with_logits(torch.zeros(1, 1, 4), *words, blank=0, progress=2 / 3).neg().exp()
        tensor([0.5000])
    """
    return _ddrs(logits, targets, input_lengths, target_lengths, blank, progress, collapse, from_logits=True)


def _ddrs(
    scores: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    progress: float,
    collapse: str,
    from_logits: bool,
) -> Tensor:
    if not 0 <= progress <= 1:
        raise ValueError(f"progress must be in [0, 1], but is {progress}")
    if targets.dim() == 2:
        targets, target_lengths = targets.unsqueeze(1), target_lengths.unsqueeze(1)
    if targets.shape[1] == 0:  # as if there were one that is absent
        targets, target_lengths = targets.new_zeros(len(targets), 1, 0), target_lengths.new_zeros(len(targets), 1)
    losses_BR = losses_of_references(scores, targets, input_lengths, target_lengths, blank, collapse, from_logits)
    lengths_BR = target_lengths.to(losses_BR)
    present_BR = lengths_BR > 0
    possible_BR = present_BR & losses_BR.isfinite()
    length_B, absent_B = lengths_BR.sum(1).clamp(min=1), ~present_BR.any(1)
    losses_BR = losses_BR.masked_fill(~possible_BR, 0.0)
    none_BR = ~possible_BR & possible_BR.any(1, keepdim=True)  # not to be chosen; where no other is, see below

    def of_all() -> Tensor:
        return losses_BR.sum(1) / length_B

    def of_any() -> Tensor:
        return -losses_BR.neg().masked_fill(none_BR, -torch.inf).logsumexp(1) * present_BR.sum(1) / length_B

    def of_likeliest() -> Tensor:
        least_B, which_B = losses_BR.masked_fill(none_BR, torch.inf).min(1)
        return least_B / lengths_BR.gather(1, which_B.unsqueeze(1)).squeeze(1).clamp(min=1)

    if progress < SWITCH:
        loss_B = torch.lerp(of_all(), of_any(), progress / SWITCH)
        impossible_B = (present_BR & ~possible_BR).any(1)
    else:
        loss_B = torch.lerp(of_any(), of_likeliest(), (progress - SWITCH) / (1 - SWITCH))
        impossible_B = ~possible_BR.any(1)
    # Nothing makes the impossible likelier: no gradient.
    loss_B = loss_B.masked_fill(impossible_B, torch.inf).masked_fill(absent_B, 0.0)
    return loss_B.to(full_type(scores))
