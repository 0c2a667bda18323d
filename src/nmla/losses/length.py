"""Expected length of the collapsed output, and expected number of its n-grams."""

from typing import Any

import torch
from torch import Tensor

from .collapse import check_collapse
from .inputs import check_log_probs, full_precision, in_use


def expected_length(log_probs: Tensor, input_lengths: Tensor, *, blank: int, collapse: str = "ctc") -> Tensor:
    r"""Expected length of the collapsed output.

    .. math::
        \mathrm{CTC:}\quad E|y| = \sum_t \sum_{v \ne \epsilon} p_t(v) \, (1 - p_{t-1}(v)), \qquad
        \mathrm{SCTC:}\quad E|y| = \sum_t \sum_{v \ne \epsilon} p_t(v), \qquad p_0 = 0

    Args:
        log_probs: ``(B, T, V)``, normalised over ``V``.
        input_lengths: ``(B,)`` positions in use, each in ``0..T``.
        blank: the id of the blank.
        collapse: ``"ctc"`` or ``"sctc"``.

    Returns:
        ``(B,)`` expected lengths, 0 where no position is in use.

    Example:
        >>> half = torch.full((1, 2, 2), 0.5).log()      # two positions, token 1 or blank 0
        >>> expected_length(half, torch.tensor([2]), blank=0), expected_length(
        ...     half, torch.tensor([2]), blank=0, collapse="sctc")
        (tensor([0.7500]), tensor([1.]))
    """
    check_collapse(collapse)
    input_lengths = check_log_probs(log_probs, input_lengths, blank)
    return length_from_probs(word_probs(log_probs, input_lengths, blank), collapse)


def expected_ngram_total(
    log_probs: Tensor, input_lengths: Tensor, n: int, *, blank: int, collapse: str = "ctc", exact: bool = True
) -> Tensor:
    r"""Expected number of n-grams in the collapsed output, the sum of the expected counts of all n-grams.

    .. math:: \sum_g C_g = E \max(0, |y| - n + 1) = E|y| - n + 1 + E \max(0, n - 1 - |y|)

    The paper leaves out the last term, which is wrong when an output of fewer than n - 1 tokens has some probability;
    ``exact=False`` leaves it out too (and can be negative).

    Args:
        log_probs: ``(B, T, V)``, normalised over ``V``.
        input_lengths: ``(B,)`` positions in use, each in ``0..T``.
        n: the length of the n-grams, at least 1.
        blank: the id of the blank.
        collapse: ``"ctc"`` or ``"sctc"``.
        exact: whether to add the last term.

    Returns:
        ``(B,)`` expected totals.

    Example:
        >>> half = torch.full((1, 2, 2), 0.5).log()      # "" with probability 1/4, else "1": never a 2-gram
        >>> expected_ngram_total(half, torch.tensor([2]), 2, blank=0)
        tensor([0.])
        >>> expected_ngram_total(half, torch.tensor([2]), 2, blank=0, exact=False)
        tensor([-0.2500])
    """
    check_n(n)
    check_collapse(collapse)
    input_lengths = check_log_probs(log_probs, input_lengths, blank)
    return total_from_log_probs(log_probs, input_lengths, n, blank, collapse, exact)


def total_from_log_probs(
    log_probs: Tensor, input_lengths: Tensor, n: int, blank: int, collapse: str, exact: bool
) -> Tensor:
    """:func:`expected_ngram_total` of arguments that have been checked."""
    probs_BTV = word_probs(log_probs, input_lengths, blank)
    total_B = length_from_probs(probs_BTV, collapse) - (n - 1)
    if not exact or n == 1:
        return total_B
    padding_BT = ~in_use(input_lengths, log_probs.shape[1])
    blank_BT = full_precision(log_probs[:, :, blank]).masked_fill(padding_BT, 0.0).exp()
    if collapse == "sctc" or n == 2:
        return total_B + shortfall_from_blanks(blank_BT, n)
    shortfall_B: Tensor = _Shortfall.apply(probs_BTV, blank_BT, input_lengths, n)
    return total_B + shortfall_B


def check_n(n: int) -> None:
    if not n >= 1:
        raise ValueError(f"n must be at least 1, but is {n}")


def word_probs(log_probs: Tensor, input_lengths: Tensor, blank: int) -> Tensor:
    """``(B, T, V)`` probabilities, 0 for the blank and in the padding."""
    is_blank_V = torch.arange(log_probs.shape[-1], device=log_probs.device) == blank
    padding_BT1 = ~in_use(input_lengths, log_probs.shape[1]).unsqueeze(-1)
    return full_precision(log_probs).masked_fill(padding_BT1 | is_blank_V, -torch.inf).exp()


def length_from_probs(probs_BTV: Tensor, collapse: str) -> Tensor:
    length_B = probs_BTV.sum((1, 2))
    return length_B if collapse == "sctc" else length_B - (probs_BTV[:, 1:] * probs_BTV[:, :-1]).sum((1, 2))


def shortfall_from_blanks(blank_BT: Tensor, n: int) -> Tensor:
    r"""E max(0, n - 1 - \|y\|) where the blanks decide it: under SCTC, where all positions but the blanks are tokens,
    and for n = 2, where only the empty output falls short. ``blank_BT`` is 1 in the padding."""
    if n == 2:
        return blank_BT.prod(1)
    # have_BJ[:, j]: the probability of j tokens so far, for the lengths j = 0..n - 2 that fall short.
    short_by_J = torch.arange(n - 1, 0, -1, device=blank_BT.device, dtype=blank_BT.dtype)
    have_BJ = (short_by_J == n - 1).to(blank_BT.dtype).expand(blank_BT.shape[0], -1)
    for p_B1 in blank_BT.unsqueeze(-1).unbind(1):
        have_BJ = p_B1 * have_BJ + (1 - p_B1) * torch.nn.functional.pad(have_BJ[:, :-1], (1, 0))
    return (have_BJ * short_by_J).sum(-1)


def may_fall_short(blank_BT: Tensor, overlap_BT: Tensor, n: int) -> Tensor:
    r"""Whether E max(0, n - 1 - \|y\|) under CTC could be seen beside E\|y\|: ``(B,)``, True where it must be computed.

    The mass H_j(t) of outputs of j tokens after t positions is bounded without a look at the vocabulary. A position is
    blank, starts a token, or repeats its predecessor, which took its own token v with p_{t-1}(v) at most:

        H_j(t) <= p_t(e) H_j(t-1) + (1 - p_t(e)) H_{j-1}(t-1) + sum_v p_t(v) p_{t-1}(v) [H_j(t-2) + H_{j-1}(t-2)]

    Args:
        blank_BT: the blank's probabilities, 1 in the padding.
        overlap_BT: sum over v != blank of p_t(v) p_{t-1}(v); 0 at the first position and in the padding.
        n: the length of the n-grams.
    """
    pad = torch.nn.functional.pad
    bound_BJ = blank_BT.new_zeros(blank_BT.shape[0], n - 1)
    bound_BJ[:, 0] = 1
    before_BJ = torch.zeros_like(bound_BJ)
    for p_B1, overlap_B1 in zip(blank_BT.unsqueeze(-1).unbind(1), overlap_BT.unsqueeze(-1).unbind(1), strict=True):
        starts_BJ = pad(bound_BJ[:, :-1], (1, 0))
        repeats_BJ = before_BJ + pad(before_BJ[:, :-1], (1, 0))
        before_BJ = bound_BJ
        bound_BJ = starts_BJ + p_B1 * (bound_BJ - starts_BJ) + overlap_B1 * repeats_BJ
    return bound_BJ.sum(-1) * (n - 1) > 8 * torch.finfo(blank_BT.dtype).eps


def shortfall_from_probs(probs_TV: Tensor, blank_T: Tensor, n: int) -> Tensor:
    r"""E max(0, n - 1 - \|y\|) of one sentence under CTC for n > 2, from all its probabilities, 0 for the blank.

    Under CTC a repeat of the last token adds nothing, so the state is the number j of tokens so far together with the
    last one. With A_j(t, v) the mass in the run of v and H_j(t) all mass with j tokens, from H_0(0) = 1:

        A_j(t, v) = p_t(v) [A_j(t-1, v) - A_{j-1}(t-1, v) + H_{j-1}(t-1)]
        H_j(t) = p_t(e) H_j(t-1) + sum_v A_j(t, v)
    """
    run_JV, have_J = _no_tokens(probs_TV, n)
    for p_V, blank in zip(probs_TV, blank_T, strict=True):
        _, run_JV, have_J = _extend(run_JV, have_J, p_V, blank)
    return (have_J * _short_by(have_J)).sum()


def _no_tokens(probs_TV: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """A for j = 1..n - 2 and H for j = 0..n - 2, before the first position."""
    have_J = probs_TV.new_zeros(n - 1)
    have_J[0] = 1
    return probs_TV.new_zeros(n - 2, probs_TV.shape[1]), have_J


def _short_by(have_J: Tensor) -> Tensor:
    """n - 1 - j for j = 0..n - 2."""
    return torch.arange(len(have_J), 0, -1, dtype=have_J.dtype, device=have_J.device)


def _extend(run_JV: Tensor, have_J: Tensor, p_V: Tensor, blank: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One position more: what each A is now p times, A and H."""
    before_JV = run_JV + have_J[:-1, None]
    before_JV[1:] -= run_JV[:-1]
    run_JV = before_JV * p_V
    have_J = blank * have_J
    have_J[1:] += run_JV.sum(-1)
    return before_JV, run_JV, have_J


def shortfall_gradient(probs_TV: Tensor, blank_T: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The gradients of :func:`shortfall_from_probs` for the probabilities of the words and of the blank.

    The same backwards, for the shortfall to be expected: D_j(t) after a blank, D_j(t) + R_j(t, v) in the run of v,

        R_j(t-1, v) = p_t(v) [D_j(t) + R_j(t, v) - D_{j+1}(t) - R_{j+1}(t, v)]
        D_j(t-1) = p_t(e) D_j(t) + sum_v p_t(v) [D_{j+1}(t) + R_{j+1}(t, v)]
    """
    run_JV, have_J = _no_tokens(probs_TV, n)
    befores, haves = [], []
    for p_V, blank in zip(probs_TV, blank_T, strict=True):
        haves.append(have_J)
        before_JV, run_JV, have_J = _extend(run_JV, have_J, p_V, blank)
        befores.append(before_JV)
    d_probs_TV, d_blank_T = torch.empty_like(probs_TV), torch.empty_like(blank_T)
    after_J = _short_by(have_J)  # D for j = 0..n - 2
    in_run_J1 = torch.nn.functional.pad(after_J[1:], (0, 1)).unsqueeze(-1)
    in_run_JV = in_run_J1.repeat(1, probs_TV.shape[1])  # D + R for j = 1..n - 1
    for t in range(len(probs_TV) - 1, -1, -1):
        d_probs_TV[t] = (in_run_JV[:-1] * befores[t]).sum(0)
        d_blank_T[t] = (after_J * haves[t]).sum()
        word_JV = in_run_JV * probs_TV[t]
        after_J = blank_T[t] * after_J + word_JV.sum(-1)
        torch.sub(word_JV[:-1], word_JV[1:], out=in_run_JV[:-1])
        in_run_JV[:-1] += after_J[1:, None]
    return d_probs_TV, d_blank_T


class _Shortfall(torch.autograd.Function):
    """:func:`shortfall_from_probs`, sentence by sentence, where it can be seen at all."""

    @staticmethod
    def forward(ctx: Any, probs_BTV: Tensor, blank_BT: Tensor, input_lengths: Tensor, n: int) -> Tensor:
        overlap_BT = torch.zeros_like(blank_BT)
        overlap_BT[:, 1:] = (probs_BTV[:, 1:] * probs_BTV[:, :-1]).sum(-1)
        short_B = may_fall_short(blank_BT, overlap_BT, n)
        shortfall_B = blank_BT.new_zeros(blank_BT.shape[0])
        ctx.sentences = [(b, int(input_lengths[b])) for b in short_B.nonzero().flatten().tolist()]
        for b, used in ctx.sentences:
            shortfall_B[b] = shortfall_from_probs(probs_BTV[b, :used], blank_BT[b, :used], n)
        ctx.save_for_backward(probs_BTV, blank_BT)
        ctx.n = n
        return shortfall_B

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_B: Tensor) -> tuple[Tensor, Tensor, None, None]:
        probs_BTV, blank_BT = ctx.saved_tensors
        d_probs, d_blank = torch.zeros_like(probs_BTV), torch.zeros_like(blank_BT)
        for b, used in ctx.sentences:
            gradients = shortfall_gradient(probs_BTV[b, :used], blank_BT[b, :used], ctx.n)
            d_probs[b, :used], d_blank[b, :used] = (grad_B[b] * gradient for gradient in gradients)
        return d_probs, d_blank, None, None
