"""Losses of the best order of the target's tokens: which position writes which token is an assignment problem."""

import torch
from torch import Tensor

from .cross_entropy import check_equal_lengths
from .inputs import check_arguments, full_precision, in_use


def bipartite_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    *,
    blank: int,
    margin: float | None = None,
) -> Tensor:
    r"""Minus the log-probability of the best path under SCTC to the target's tokens in any order.

    .. math:: L = - \max_a \sum_t \log p_t(a_t), \qquad a \text{ a permutation of } y_1 \ldots y_L \text{ and } T - L
        \text{ blanks}

    The blanks are all alike: with log p_t(blank) taken as the baseline of each position only the tokens are assigned,
    an L x T problem, solved exactly (Hungarian algorithm).

    Args:
        log_probs: ``(B, T, V)``, normalised over ``V``.
        targets: ``(B, L)`` token ids without blanks; padding may be anything.
        input_lengths: ``(B,)`` positions in use, each in ``0..T``.
        target_lengths: ``(B,)``, each in ``0..L``.
        blank: the id of the blank.
        margin: leave out of the sum the terms whose probability is below it (the official code's is 0.036).

    Returns:
        ``(B,)`` losses in [0, inf]; +inf, with gradient 0, where there are more tokens than positions or, without a
        margin, the probability is zero: a margin leaves out impossible terms like others below it, and the path is then
        one with as few of them as can be. The empty target is the path of blanks.

    Example:
        >>> log_probs = torch.tensor([[[0.1, 0.2, 0.7], [0.1, 0.8, 0.1], [0.6, 0.2, 0.2]]]).log()
        >>> lengths = torch.tensor([3]), torch.tensor([2])
        >>> bipartite_loss(log_probs, torch.tensor([[1, 2]]), *lengths, blank=0).neg().exp()   # .7 * .8 * .6
        tensor([0.3360])
    """
    _check_margin(margin)
    targets, input_lengths, target_lengths = check_arguments(
        log_probs, targets, input_lengths, target_lengths, blank=blank
    )
    enough_B = target_lengths <= input_lengths
    path_BT = torch.full(log_probs.shape[:2], blank, device=log_probs.device)
    with_blank_BL = torch.nn.functional.pad(targets, (1, 0), value=blank)
    log_p_BTL = _log_probs_of(log_probs, with_blank_BL, input_lengths)
    _assign(path_BT, log_p_BTL[..., 1:] - log_p_BTL[..., :1], targets, input_lengths, target_lengths * enough_B)
    return _path_loss(log_probs, path_BT, input_lengths, margin).masked_fill(~enough_B, torch.inf)


def oaxe_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    *,
    margin: float | None = 0.15,
) -> Tensor:
    r"""Order-agnostic cross entropy of a fixed-length model: cross entropy under the best order of the target's tokens.

    .. math:: L = - \max_\pi \sum_t \log p_t(y_{\pi(t)})

    Args:
        log_probs: ``(B, T, V)``, normalised over ``V``.
        targets: ``(B, L)`` token ids; padding may be anything.
        input_lengths: ``(B,)`` positions in use, each in ``0..T``, equal to ``target_lengths``.
        target_lengths: ``(B,)``, each in ``0..L``.
        margin: leave out of the sum the terms whose probability is below it; None keeps all.

    Returns:
        ``(B,)`` losses in [0, inf]; 0 for an empty target. Where every order is impossible, +inf, with gradient 0,
        without a margin; a margin leaves out impossible terms like others below it, and the order is then one with as
        few of them as can be.

    Example:
        >>> log_probs = torch.tensor([[[0.1, 0.9], [0.7, 0.3]]]).log()
        >>> oaxe_loss(log_probs, torch.tensor([[0, 1]]), torch.tensor([2]), torch.tensor([2])).neg().exp()   # .9 * .7
        tensor([0.6300])
    """
    _check_margin(margin)
    targets, lengths = check_equal_lengths(log_probs, targets, input_lengths, target_lengths)
    path_BT = torch.zeros(log_probs.shape[:2], dtype=torch.long, device=log_probs.device)
    _assign(path_BT, _log_probs_of(log_probs, targets, lengths), targets, lengths, lengths)
    return _path_loss(log_probs, path_BT, lengths, margin)


def _check_margin(margin: float | None) -> None:
    if margin is not None and not 0 <= margin <= 1:
        raise ValueError(f"margin must be a probability in 0..1 or None, but is {margin}")


def _log_probs_of(log_probs: Tensor, tokens_BL: Tensor, input_lengths: Tensor) -> Tensor:
    """``(B, T, L)`` log-probability of each token at each position, without gradient; finite, so that it can be
    subtracted: what is impossible gets less than any path without it."""
    positions = log_probs.shape[1]
    ids_BTL = tokens_BL.unsqueeze(1).expand(-1, positions, -1)
    log_p_BTL = log_probs.detach().gather(2, ids_BTL).double()
    padding_BT1 = ~in_use(input_lengths, positions).unsqueeze(-1)
    log_p_BTL = log_p_BTL.masked_fill(padding_BT1, 0.0)
    impossible_BTL = log_p_BTL.isneginf()
    possible_BK = log_p_BTL.masked_fill(impossible_BTL, 0.0).flatten(1)
    lowest_B = torch.nn.functional.pad(possible_BK, (0, 1)).amin(1)
    too_low_B = 2 * input_lengths * (lowest_B - 1)
    return torch.where(impossible_BTL, too_low_B[:, None, None], log_p_BTL)


def _assign(path_BT: Tensor, gain_BTL: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor) -> None:
    """Write each target token into ``path_BT`` at the position of its own where the sum of gains is largest."""
    from scipy.optimize import linear_sum_assignment  # slow to import, and no other loss needs it

    gain_BTL = gain_BTL.cpu()
    for b, (used, tokens) in enumerate(zip(input_lengths.tolist(), target_lengths.tolist(), strict=True)):
        at, token = linear_sum_assignment(gain_BTL[b, :used, :tokens].numpy(), maximize=True)
        path_BT[b, torch.as_tensor(at)] = targets[b, torch.as_tensor(token)]


def _path_loss(log_probs: Tensor, path_BT: Tensor, input_lengths: Tensor, margin: float | None) -> Tensor:
    """``(B,)`` minus the log-probability of each path; +inf, with gradient 0, where it is impossible."""
    log_p_BT = full_precision(log_probs.gather(2, path_BT.unsqueeze(-1)).squeeze(-1))
    kept_BT = in_use(input_lengths, path_BT.shape[1])
    if margin is not None:
        kept_BT = kept_BT & (log_p_BT >= torch.tensor(margin).log())
    impossible_B = (log_p_BT.isneginf() & kept_BT).any(1)
    loss_B = -log_p_BT.masked_fill(~kept_BT | impossible_B.unsqueeze(1), 0.0).sum(1)
    return loss_B.masked_fill(impossible_B, torch.inf)
