"""Expected n-gram counts of the collapsed output, for any n, under both collapses."""

from typing import Any

import torch
from torch import Tensor

from .collapse import check_collapse
from .inputs import check_log_probs, check_tokens, full_precision, in_use, is_integer


def expected_ngram_counts(
    log_probs: Tensor, ngrams: Tensor, input_lengths: Tensor, *, blank: int, collapse: str = "ctc"
) -> Tensor:
    r"""Expected number of times each n-gram occurs in the collapsed output.

    .. math:: C_g = \sum_a p(a) \, C_g(\mathrm{collapse}(a)), \qquad p(a) = \prod_t p_t(a_t)

    Positions are independent, so the sum over all paths is a recurrence over positions, O(n T) for each n-gram
    (docs/losses.md derives it). No output is shorter than an n-gram it holds: with ``input_lengths < n`` counts are 0.

    Args:
        log_probs: ``(B, T, V)``, normalised over ``V``.
        ngrams: ``(B, G, n)`` token ids, n >= 1; none may be ``blank``.
        input_lengths: ``(B,)`` positions in use, each in ``0..T``.
        blank: the id of the blank.
        collapse: ``"ctc"`` or ``"sctc"``.

    Returns:
        ``(B, G)`` expected counts, differentiable in ``log_probs``.

    Example:
        >>> half = torch.full((1, 2, 2), 0.5).log()      # two positions, token 1 or blank 0
        >>> expected_ngram_counts(half, torch.tensor([[[1]]]), torch.tensor([2]), blank=0)
        tensor([[0.7500]])
    """
    check_collapse(collapse)
    input_lengths = check_log_probs(log_probs, input_lengths, blank)
    batch, _, vocabulary = log_probs.shape
    if ngrams.dim() != 3 or ngrams.shape[0] != batch or ngrams.shape[2] < 1 or not is_integer(ngrams):
        raise ValueError(f"ngrams must be integers ({batch}, G, n), but is {ngrams.dtype} {tuple(ngrams.shape)}")
    ngrams = ngrams.to(log_probs.device, torch.long)
    ngrams = check_tokens("ngrams", ngrams, torch.ones_like(ngrams, dtype=torch.bool), vocabulary, blank)
    return counts_from_log_probs(log_probs, ngrams, input_lengths, blank, collapse)


def counts_from_log_probs(
    log_probs: Tensor, ngrams_BGn: Tensor, input_lengths: Tensor, blank: int, collapse: str
) -> Tensor:
    """:func:`expected_ngram_counts` of arguments that have been checked."""
    batch, positions, _ = log_probs.shape
    _, grams, n = ngrams_BGn.shape
    # Only the n-grams' own tokens and the blank are ever read; -inf in the padding makes all that follows exactly 0.
    padding_BT1 = ~in_use(input_lengths, positions).unsqueeze(-1)
    ids_BTK = ngrams_BGn.transpose(1, 2).reshape(batch, 1, n * grams).expand(-1, positions, -1)
    tokens_BTK = full_precision(log_probs.gather(2, ids_BTK)).masked_fill(padding_BT1, -torch.inf).exp()
    blank_BT1 = full_precision(log_probs[:, :, blank : blank + 1]).masked_fill(padding_BT1, -torch.inf).exp()
    tokens_TnBG = tokens_BTK.view(batch, positions, n, grams).permute(1, 2, 0, 3).contiguous()
    return counts_from_probs(tokens_TnBG, blank_BT1.squeeze(-1).t(), ngrams_BGn, collapse)


def counts_from_probs(tokens_TnBG: Tensor, blank_TB: Tensor, ngrams_BGn: Tensor, collapse: str) -> Tensor:
    """Expected counts ``(B, G)`` from the probability of each token of each n-gram, and of the blank, at each position;
    both 0 in the padding."""
    follows_BGm = ngrams_BGn[..., 1:] != ngrams_BGn[..., :-1] if collapse == "ctc" else ngrams_BGn[..., 1:] >= 0
    direct_mBG = follows_BGm.permute(2, 0, 1).to(tokens_TnBG.dtype)
    counts_BG: Tensor = _ExpectedCounts.apply(tokens_TnBG, blank_TB, direct_mBG, collapse == "ctc")
    return counts_BG


class _ExpectedCounts(torch.autograd.Function):
    """The recurrence over positions and its adjoint.

    m = n - 1 prefixes of each n-gram are followed. After t positions, ``run[t]`` is the probability that a prefix has
    just been completed and position t lies in the run of its last token, ``gap[t]`` that blanks came after that run.
    ``free[t, k]`` is the probability that token k would extend a match if it came next. ``direct`` is 1 where a token
    may follow its predecessor without a blank between.

    Written by hand because the loop over positions would otherwise build a graph of some ten small nodes a position.
    """

    @staticmethod
    def forward(ctx: Any, tokens_TnBG: Tensor, blank_TB: Tensor, direct_mBG: Tensor, merge: bool) -> Tensor:
        positions, n, batch, grams = tokens_TnBG.shape
        run = tokens_TnBG.new_zeros(positions, n - 1, batch, grams)
        gap = torch.zeros_like(run)
        free = torch.zeros_like(tokens_TnBG)
        # The first token starts a match wherever it starts a run; without merging, every occurrence is a start.
        free[:, 0] = 1
        if merge:
            free[1:, 0] -= tokens_TnBG[:-1, 0]
        if n > 1:
            step = torch.empty_like(direct_mBG)
            blank_T = blank_TB[:, None, :, None].unbind()
            run_T, gap_T = run.unbind(), gap.unbind()
            tokens_T, before_T, after_T = tokens_TnBG[:, :-1].unbind(), free[:, :-1].unbind(), free[:, 1:].unbind()
            for t in range(positions - 1):
                torch.add(before_T[t], run_T[t], out=step) if merge else step.copy_(before_T[t])
                torch.mul(tokens_T[t], step, out=run_T[t + 1])
                torch.add(run_T[t], gap_T[t], out=step)
                torch.mul(blank_T[t], step, out=gap_T[t + 1])
                torch.addcmul(gap_T[t + 1], direct_mBG, run_T[t + 1], out=after_T[t + 1])
        ctx.save_for_backward(tokens_TnBG, blank_TB, direct_mBG, run, gap, free)
        ctx.merge = merge
        return (tokens_TnBG[:, -1] * free[:, -1]).sum(0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_BG: Tensor) -> tuple[Tensor, Tensor, None, None]:
        tokens_TnBG, blank_TB, direct_mBG, run, gap, free = ctx.saved_tensors
        positions, n, _, _ = tokens_TnBG.shape
        # d_run[t] and d_gap[t] are adjoints of the states after t + 1 positions, d_free[t] of those before position t.
        d_run, d_gap, d_free = torch.zeros_like(run), torch.zeros_like(gap), torch.empty_like(free)
        torch.mul(tokens_TnBG[:, -1], grad_BG, out=d_free[:, -1])
        if n > 1:
            step = torch.empty_like(direct_mBG)
            blank_T = blank_TB[:, None, :, None].unbind()
            d_run_T, d_gap_T, tokens_T = d_run.unbind(), d_gap.unbind(), tokens_TnBG[:, :-1].unbind()
            own_T, next_T = d_free[:, :-1].unbind(), d_free[:, 1:].unbind()
            for t in range(positions - 1, -1, -1):
                torch.mul(d_run_T[t], tokens_T[t], out=own_T[t])
                if t == 0:  # nothing is matched before the first position
                    break
                torch.mul(d_gap_T[t], blank_T[t], out=step)
                torch.add(next_T[t], step, out=d_gap_T[t - 1])
                torch.addcmul(step, direct_mBG, next_T[t], out=d_run_T[t - 1])
                if ctx.merge:
                    d_run_T[t - 1].add_(own_T[t])
        d_tokens = torch.empty_like(tokens_TnBG)
        torch.mul(free[:, -1], grad_BG, out=d_tokens[:, -1])
        torch.mul(free[:, :-1] + run if ctx.merge else free[:, :-1], d_run, out=d_tokens[:, :-1])
        if ctx.merge:
            d_tokens[:-1, 0] -= d_free[1:, 0]
        d_blank = (d_gap * (run + gap)).sum((1, 3))
        return d_tokens, d_blank, None, None


def reference_ngrams(targets: Tensor, target_lengths: Tensor, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The n-grams of the references and their counts, the mean over the references present (length > 0).

    Args:
        targets: ``(B, L)`` or ``(B, R, L)``, padding of any valid id.
        target_lengths: ``(B,)`` or ``(B, R)``.
        n: the length of the n-grams.
        dtype: the type of the counts.

    Returns:
        ``(B, G, n)`` n-grams and ``(B, G)`` counts. Each distinct n-gram has its count at its first occurrence; repeats
        of it and n-grams that reach into the padding have 0.
    """
    if targets.dim() == 2:
        targets, target_lengths = targets.unsqueeze(1), target_lengths.unsqueeze(1)
    batch, references, longest = targets.shape
    if longest < n:
        return targets.new_zeros(batch, 0, n), targets.new_zeros(batch, 0, dtype=dtype)
    windows = longest - n + 1
    ngrams_BGn = targets.unfold(2, n, 1).reshape(batch, references * windows, n)
    used_BG = in_use(target_lengths - n + 1, windows).reshape(batch, references * windows)
    same_BGG = (ngrams_BGn.unsqueeze(1) == ngrams_BGn.unsqueeze(2)).all(-1) & used_BG.unsqueeze(1)
    seen_before_BG = same_BGG.tril(-1).any(-1)
    present_B1 = (target_lengths > 0).sum(1, keepdim=True).clamp(min=1)
    counts_BG = same_BGG.sum(-1).to(dtype) / present_B1
    return ngrams_BGn, counts_BG.masked_fill(seen_before_BG | ~used_BG, 0.0)
