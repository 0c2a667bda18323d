"""Monotonic alignments of a target: the losses that sum over all of them, and the best one.

Both collapses are one lattice. Its 2 L + 1 states alternate: blank, y_1, blank, y_2, ..., y_L, blank. A path stays in a
state, steps to the next, or skips a blank. CTC stays anywhere, and skips a blank only between different tokens; SCTC
stays in blanks only, as a token's repeat would be another token, and skips any blank.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .collapse import check_collapse
from .inputs import (
    check_arguments,
    check_blank,
    check_scores,
    check_targets,
    full_precision,
    full_type,
    in_use,
)


def ctc_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, *, blank: int
) -> Tensor:
    r"""Minus the log-probability of the target under CTC, the sum over all its alignments.

    .. math:: L = - \log \sum_{a: \mathrm{collapse}(a) = y} \prod_t p_t(a_t)

    The same as ``torch.nn.functional.ctc_loss(..., reduction="none")``, batch first, with gradients that are never NaN.
    Where the target is impossible (more tokens, and blanks between repeats, than positions, or zero probability) the
    loss is +inf and its gradient 0. The empty target is the path of blanks; with no position in use it is certain.

    Args:
        log_probs: ``(B, T, V)``, normalised over ``V``.
        targets: ``(B, L)`` token ids without blanks; padding may be anything.
        input_lengths: ``(B,)`` positions in use, each in ``0..T``.
        target_lengths: ``(B,)``, each in ``0..L``.
        blank: the id of the blank.

    Returns:
        ``(B,)`` losses in [0, inf].

    Example:
        >>> half = torch.full((1, 2, 2), 0.5).log()      # of the four paths three are "1": 11, 10, 01
        >>> ctc_loss(half, torch.tensor([[1]]), torch.tensor([2]), torch.tensor([1]), blank=0).exp()
        tensor([1.3333])
    """
    lattice = _lattice(log_probs, targets, input_lengths, target_lengths, blank, "ctc")
    loss_B: Tensor = _SumOverPaths.apply(lattice.scores_TBS, lattice)
    return loss_B.to(full_type(log_probs))


def sctc_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, *, blank: int
) -> Tensor:
    r"""Minus the log-probability of the target under SCTC, where a path is collapsed by dropping its blanks.

    .. math::
        L = -\log \alpha_T(|y|), \qquad \alpha_t(s) = \alpha_{t-1}(s-1) \, p_t(y_s) + \alpha_{t-1}(s) \, p_t(\epsilon)

    Args:
        log_probs, targets, input_lengths, target_lengths, blank: as in :func:`ctc_loss`.

    Returns:
        ``(B,)`` losses in [0, inf]; +inf, with gradient 0, where there are more tokens than positions or the
        probability is zero.

    Example:
        >>> half = torch.full((1, 2, 2), 0.5).log()      # of the four paths two are "1": 10, 01
        >>> sctc_loss(half, torch.tensor([[1]]), torch.tensor([2]), torch.tensor([1]), blank=0).exp()
        tensor([2.])
    """
    lattice = _lattice(log_probs, targets, input_lengths, target_lengths, blank, "sctc")
    loss_B: Tensor = _SumOverPaths.apply(lattice.scores_TBS, lattice)
    return loss_B.to(full_type(log_probs))


def ctc_loss_with_logits(
    logits: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    *,
    blank: int,
    collapse: str = "ctc",
) -> Tensor:
    """:func:`ctc_loss`, or :func:`sctc_loss`, of ``log_softmax(logits)`` in less time and memory: what training uses.

    Of float32 logits, the gradient is the only tensor of their size that is made. It cannot be differentiated again.

    Args:
        logits: ``(B, T, V)``, any real numbers; -inf for a token that cannot occur.
        targets, input_lengths, target_lengths, blank: as in :func:`ctc_loss`.
        collapse: ``"ctc"`` or ``"sctc"``.

    Returns:
        ``(B,)`` losses in [0, inf]; float32 where the logits are of half precision.

    Example:
        >>> logits = torch.zeros(1, 2, 2, requires_grad=True)  # of the four paths three are "1": 11, 10, 01
        >>> loss = ctc_loss_with_logits(logits, torch.tensor([[1]]), torch.tensor([2]), torch.tensor([1]), blank=0)
        >>> loss.exp().detach()
        tensor([1.3333])
        >>> loss.sum().backward()
        >>> logits.grad[0, 0]
        tensor([ 0.1667, -0.1667])
    """
    lattice = _lattice(logits, targets, input_lengths, target_lengths, blank, collapse, from_logits=True)
    loss_B: Tensor = _SumOverPaths.apply(lattice.scores_TBS, lattice)
    return loss_B.to(full_type(logits))


def losses_of_references(
    scores: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    collapse: str,
    from_logits: bool,
) -> Tensor:
    """``(B, R)``: the CTC or SCTC loss of each of several references ``(B, R, L)``."""
    lattice = _lattice(scores, targets, input_lengths, target_lengths, blank, collapse, True, from_logits)
    loss_N: Tensor = _SumOverPaths.apply(lattice.scores_TBS, lattice)
    return loss_N.view(target_lengths.shape)


@torch.no_grad()
def best_alignment(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    *,
    blank: int,
    collapse: str = "ctc",
) -> tuple[Tensor, Tensor]:
    """The most probable path that collapses to the target (Viterbi).

    Args:
        log_probs, targets, input_lengths, target_lengths, blank: as in :func:`ctc_loss`.
        collapse: ``"ctc"`` or ``"sctc"``.

    Returns:
        ``(B, T)`` the paths, blank in the padding, and ``(B,)`` their log-probabilities, without gradient. Where the
        target is impossible the path is all blank and its log-probability -inf.

    Example:
        >>> log_probs = torch.tensor([[[0.6, 0.4], [0.3, 0.7], [0.8, 0.2]]]).log()
        >>> path, score = best_alignment(log_probs, torch.tensor([[1]]), torch.tensor([3]), torch.tensor([1]), blank=0)
        >>> path, score.exp()
        (tensor([[0, 1, 0]]), tensor([0.3360]))
    """
    lattice = _lattice(log_probs, targets, input_lengths, target_lengths, blank, collapse)
    positions, batch, states = lattice.scores_TBS.shape
    best_BS = lattice.start_BS
    moves = lattice.scores_TBS.new_empty(positions, batch, states, dtype=torch.long)
    history = [best_BS]
    for t in range(positions):
        before_BS = torch.nn.functional.pad(best_BS, (2, 0), value=-torch.inf)
        came_from = [best_BS + lattice.stay_BS, before_BS[:, 1:-1], before_BS[:, :-2] + lattice.skip_BS]
        best_BS, moves[t] = torch.stack(came_from).max(0)
        best_BS = best_BS + lattice.scores_TBS[t]
        history.append(best_BS)
    final_BS = torch.stack(history)[lattice.input_lengths, torch.arange(batch, device=best_BS.device)]
    score_B, state_B = (final_BS + lattice.end_BS).max(-1)
    path_BT = torch.full((batch, positions), blank, device=best_BS.device)
    for t in range(positions - 1, -1, -1):
        on_path_B = (t < lattice.input_lengths) & score_B.isfinite()
        token_B = lattice.tokens_BS.gather(1, state_B.unsqueeze(1)).squeeze(1)
        path_BT[:, t] = torch.where(on_path_B, token_B, blank)
        move_B = moves[t].gather(1, state_B.unsqueeze(1)).squeeze(1)
        state_B = torch.where(on_path_B, state_B - move_B, state_B)
    return path_BT, score_B.to(full_type(log_probs))


@dataclass(frozen=True)
class _Lattice:
    """Log-weights, 0 or -inf but for the scores, of the states' tokens and of the moves between them."""

    scores_TBS: Tensor  # -inf in the padding
    tokens_BS: Tensor
    stay_BS: Tensor
    skip_BS: Tensor  # from state s - 2 to s
    start_BS: Tensor  # before the first position: as after a blank
    end_BS: Tensor  # after the last: in the last token or in the blank that follows it
    input_lengths: Tensor


def _lattice(
    scores: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    collapse: str,
    several: bool = False,
    from_logits: bool = False,
) -> _Lattice:
    """Of each target; the references of a sentence stand one after the other, as if each were a sentence."""
    check_collapse(collapse)
    if from_logits:
        input_lengths = check_scores("logits", scores, input_lengths)
        check_blank(blank, scores.shape[-1])
        targets, target_lengths = check_targets(
            targets, target_lengths, scores, scores.shape[-1], blank=blank, several=several
        )
    else:
        targets, input_lengths, target_lengths = check_arguments(
            scores, targets, input_lengths, target_lengths, blank=blank, several=several
        )
    sentences, positions, _ = scores.shape
    references = targets.shape[1] if several else 1
    targets, target_lengths = targets.flatten(0, -2), target_lengths.flatten()
    unused_BT = ~in_use(input_lengths, positions)  # of each sentence, whatever its references
    input_lengths = input_lengths.repeat_interleave(references)
    batch = len(targets)
    states = 2 * targets.shape[1] + 1
    tokens_BS = targets.new_full((batch, states), blank)
    tokens_BS[:, 1::2] = targets
    state_S = torch.arange(states, device=targets.device)
    is_token_S = state_S % 2 == 1
    may_skip_BS = is_token_S & (state_S > 1)
    if collapse == "ctc":
        may_skip_BS = may_skip_BS & (tokens_BS != torch.nn.functional.pad(tokens_BS[:, :-2], (2, 0))[:, :states])
        may_stay_BS = torch.ones_like(may_skip_BS)
    else:
        may_skip_BS = may_skip_BS.expand(batch, -1)
        may_stay_BS = (~is_token_S).expand(batch, -1)
    last_B1 = 2 * target_lengths.unsqueeze(1)
    may_end_BS = (state_S == last_B1) | (state_S == last_B1 - 1)

    padding_BT = unused_BT.repeat_interleave(references, dim=0)
    ids_BTK = tokens_BS.view(sentences, 1, references * states).expand(-1, positions, -1)
    if from_logits:
        gathered_BTK: Tensor = _GatheredLogProbs.apply(scores, ids_BTK, unused_BT)
    else:
        gathered_BTK = full_precision(scores.gather(2, ids_BTK))
    scores_BTS = gathered_BTK.view(sentences, positions, references, states)
    scores_BTS = scores_BTS.transpose(1, 2).reshape(batch, positions, states)
    # Sums of hundreds of logarithms are taken in double precision: a posterior is the exp of their small differences.
    if scores_BTS.device.type != "mps":  # which has no float64
        scores_BTS = scores_BTS.double()
    scores_TBS = scores_BTS.masked_fill(padding_BT.unsqueeze(-1), -torch.inf).transpose(0, 1).contiguous()

    def log_weight(allowed: Tensor) -> Tensor:
        return torch.zeros_like(allowed, dtype=scores_TBS.dtype).masked_fill(~allowed, -torch.inf)

    return _Lattice(
        scores_TBS,
        tokens_BS,
        log_weight(may_stay_BS),
        log_weight(may_skip_BS),
        log_weight((state_S == 0).expand(batch, -1)),
        log_weight(may_end_BS),
        input_lengths,
    )


class _GatheredLogProbs(torch.autograd.Function):
    """``log_softmax(logits).gather(2, ids)``: the probabilities made forward become the gradient backward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids_BTK: Tensor, padding_BT: Tensor) -> Tensor:
        probs_BTV = logits.softmax(-1, dtype=full_type(logits))
        # From the likeliest token, whose probability never is too small for a logarithm. Its logit is taken away first:
        # where all are large, small differences of their sums would be lost.
        below_BTK = full_precision(logits.gather(2, ids_BTK)) - full_precision(logits.amax(-1, keepdim=True))
        ctx.save_for_backward(logits, ids_BTK, padding_BT)
        ctx.probs_BTV = probs_BTV if ctx.needs_input_grad[0] else None
        return below_BTK + probs_BTV.amax(-1, keepdim=True).log()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_BTK: Tensor) -> tuple[Tensor, None, None]:
        logits, ids_BTK, padding_BT = ctx.saved_tensors
        grad_BTV, ctx.probs_BTV = ctx.probs_BTV, None  # written over: they can be used once
        if grad_BTV is None:
            grad_BTV = logits.softmax(-1, dtype=grad_BTK.dtype)
        grad_BTV.mul_(-grad_BTK.sum(-1, keepdim=True)).scatter_add_(2, ids_BTK, grad_BTK)
        grad_BTV.flatten(0, 1).index_fill_(0, padding_BT.flatten().nonzero().squeeze(1), 0)  # whatever garbage gave
        return grad_BTV.to(logits.dtype), None, None


class _SumOverPaths(torch.autograd.Function):
    """-log of the sum over all paths through the lattice, by the forward recurrence in log space; its gradient for the
    scores is minus the posterior probability of each state, by the backward one."""

    @staticmethod
    def forward(ctx: Any, scores_TBS: Tensor, lattice: _Lattice) -> Tensor:
        positions, batch, states = scores_TBS.shape
        # Two states in front that are never reached, so that steps and skips are slices.
        alpha = scores_TBS.new_full((positions + 1, batch, states + 2), -torch.inf)
        alpha[0, :, 2:] = lattice.start_BS
        arrive = torch.empty_like(lattice.stay_BS)
        skipped = torch.empty_like(arrive)
        same_T, step_T, skip_T = alpha[..., 2:].unbind(), alpha[..., 1:-1].unbind(), alpha[..., :-2].unbind()
        for t, score in enumerate(scores_TBS.unbind()):
            torch.add(same_T[t], lattice.stay_BS, out=arrive)
            torch.logaddexp(arrive, step_T[t], out=arrive)
            torch.add(skip_T[t], lattice.skip_BS, out=skipped)
            torch.logaddexp(arrive, skipped, out=arrive)
            torch.add(arrive, score, out=same_T[t + 1])
        alpha = alpha[..., 2:]
        sentences = torch.arange(batch, device=alpha.device)
        log_prob_B = (alpha[lattice.input_lengths, sentences] + lattice.end_BS).logsumexp(-1)
        ctx.save_for_backward(scores_TBS, alpha, log_prob_B)
        ctx.lattice = lattice
        return -log_prob_B

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_B: Tensor) -> tuple[Tensor, None]:
        scores_TBS, alpha, log_prob_B = ctx.saved_tensors
        lattice: _Lattice = ctx.lattice
        positions, batch, states = scores_TBS.shape
        # beta[t]: the log-sum over what may follow each state after t positions; two states behind, never reached.
        beta = scores_TBS.new_full((positions + 1, batch, states), -torch.inf)
        onward = scores_TBS.new_full((batch, states + 2), -torch.inf)
        skip_from_BS = torch.nn.functional.pad(lattice.skip_BS[:, 2:], (0, min(2, states)), value=-torch.inf)
        same, step, skip = onward[:, :-2], onward[:, 1:-1], onward[:, 2:]
        depart = torch.empty_like(lattice.stay_BS)
        is_end = lattice.input_lengths.unsqueeze(-1) == torch.arange(positions + 1, device=grad_B.device)
        for t in range(positions, -1, -1):
            if t < positions:
                torch.add(beta[t + 1], scores_TBS[t], out=same)
                torch.add(same, lattice.stay_BS, out=depart)
                torch.logaddexp(depart, step, out=depart)
                torch.logaddexp(depart, skip + skip_from_BS, out=beta[t])
            torch.where(is_end[:, t : t + 1], lattice.end_BS, beta[t], out=beta[t])
        posterior_TBS = (alpha[1:] + beta[1:] - log_prob_B.unsqueeze(-1)).exp()
        # Where the target is impossible nothing can make it likelier: no gradient, whatever inf - inf gave.
        impossible_B1 = log_prob_B.isinf().unsqueeze(-1)
        return -grad_B.unsqueeze(-1) * posterior_TBS.masked_fill(impossible_B1, 0.0), None
