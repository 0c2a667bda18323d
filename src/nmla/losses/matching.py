"""The n-gram matching loss on log-probabilities, and combinations of it."""

import math
from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from .collapse import check_collapse
from .inputs import check_arguments, full_precision
from .length import check_n, total_from_log_probs
from .ngram import counts_from_log_probs, reference_ngrams


def ngram_matching_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    *,
    blank: int,
    n: int = 2,
    collapse: str = "ctc",
    exact_total: bool = True,
    recall_weight: float = 1.0,
) -> Tensor:
    r"""Minus the F1 score of n-gram matching between the expected output and the references.

    .. math::
        L_n = - \frac{2 \sum_g \min(C_g(y), C_g)}{\sum_g C_g(y) + \sum_g C_g}

    :math:`C_g` is the expected count of the n-gram in the collapsed output (:func:`expected_ngram_counts`), the sum of
    all of them :func:`expected_ngram_total`; :math:`C_g(y)` is the count in the reference or, with several, the mean
    over those present. An n-gram that reaches its reference count has nothing more to gain: the gradient of the minimum
    is 1 below it and 0 from there on.

    Where the references hold no n-gram (shorter than n, empty, absent) there is nothing to match: the loss is 0 and so
    is its gradient. Where no position is in use nothing is matched and the loss is 0 as well.

    Args:
        log_probs: ``(B, T, V)``, normalised over ``V``.
        targets: ``(B, L)`` token ids, none blank, or, with several references, ``(B, R, L)``; padding may be anything.
        input_lengths: ``(B,)`` positions in use, each in ``0..T``.
        target_lengths: ``(B,)`` or ``(B, R)``, each in ``0..L``; among several references 0 stands for an absent one.
        blank: the id of the blank.
        n: the length of the n-grams, at least 1.
        collapse: ``"ctc"`` or ``"sctc"``.
        exact_total: the exact expected number of n-grams; False takes the paper's E\|y\| - n + 1, or 0 where that is
            negative. With False the result may fall below -1.
        recall_weight: how much recall counts beside precision: with :math:`w` the score is
            :math:`(1 + w) \sum_g \min(C_g(y), C_g) / (\sum_g C_g + w \sum_g C_g(y))`. 1 is F1, as above. Above 1 even a
            token that is seldom right pays, so outputs get longer.

    Returns:
        ``(B,)`` losses in [-1, 0].

    Example:
        >>> path = torch.tensor([[3, 3, 0, 4, 5]])       # a model that is sure of "3 4 5"
        >>> log_probs = torch.nn.functional.one_hot(path, 6).float().log()
        >>> ngram_matching_loss(log_probs, torch.tensor([[3, 4, 2]]), torch.tensor([5]), torch.tensor([3]), blank=0)
        tensor([-0.5000])
    """
    check_collapse(collapse)
    check_n(n)
    check_recall_weight(recall_weight)
    targets, input_lengths, target_lengths = check_arguments(
        log_probs, targets, input_lengths, target_lengths, blank=blank, several=True
    )
    log_probs = full_precision(log_probs)
    ngrams_BGn, reference_BG = reference_ngrams(targets, target_lengths, n, log_probs.dtype)
    counts_BG = counts_from_log_probs(log_probs, ngrams_BGn, input_lengths, blank, collapse)
    total_B = total_from_log_probs(log_probs, input_lengths, n, blank, collapse, exact_total)
    return negative_score(counts_BG, reference_BG, total_B, recall_weight)


def combined_ngram_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    *,
    blank: int,
    weights: Mapping[int, float] = MappingProxyType({1: 0.5, 2: 0.5}),
    mean: str = "arithmetic",
    collapse: str = "ctc",
    exact_total: bool = True,
) -> Tensor:
    r"""Several n at once: a weighted mean of :func:`ngram_matching_loss` over n.

    .. math::
        \mathrm{arithmetic:}\quad \sum_n w_n L_n, \qquad \mathrm{geometric:}\quad -\prod_n (-L_n)^{w_n}

    Where the references hold no n-gram of some n, the arithmetic mean takes its 0; the geometric mean leaves that n
    out and shares its weight among the others, for the product would be 0 whatever the model does. Where a matched
    count is exactly 0 the geometric mean is 0, and so is its gradient, which has no finite value there.

    Args:
        log_probs, targets, input_lengths, target_lengths, blank, collapse, exact_total: as in
            :func:`ngram_matching_loss`.
        weights: the weight of each n, positive, summing to 1.
        mean: ``"arithmetic"`` or ``"geometric"``.

    Returns:
        ``(B,)`` losses in [-1, 0].

    Example:
        >>> path = torch.tensor([[3, 3, 0, 4, 5]])       # "3 4 5": two of three tokens and one of two 2-grams match
        >>> log_probs = torch.nn.functional.one_hot(path, 6).float().log()
        >>> target, lengths = torch.tensor([[3, 4, 2]]), (torch.tensor([5]), torch.tensor([3]))
        >>> combined_ngram_loss(log_probs, target, *lengths, blank=0)
        tensor([-0.5833])
        >>> combined_ngram_loss(log_probs, target, *lengths, blank=0, mean="geometric")
        tensor([-0.5774])
    """
    if mean not in ("arithmetic", "geometric"):
        raise ValueError(f'mean must be "arithmetic" or "geometric", but is {mean!r}')
    if not (all(weight > 0 for weight in weights.values()) and abs(sum(weights.values()) - 1) <= 1e-6):
        raise ValueError(f"weights must be positive and sum to 1, but are {dict(weights)}")
    arguments = (log_probs, targets, input_lengths, target_lengths)
    losses_B = [
        ngram_matching_loss(*arguments, blank=blank, n=n, collapse=collapse, exact_total=exact_total) for n in weights
    ]
    scores_NB = -torch.stack(losses_B)
    weights_N1 = scores_NB.new_tensor(list(weights.values())).unsqueeze(-1)
    if mean == "arithmetic":
        return -(weights_N1 * scores_NB).sum(0)
    lengths_BR = (target_lengths if target_lengths.dim() == 2 else target_lengths.unsqueeze(1)).to(scores_NB.device)
    counted_NB = (lengths_BR >= torch.tensor(list(weights), device=scores_NB.device)[:, None, None]).any(-1)
    positive_NB = counted_NB & (scores_NB >= torch.finfo(scores_NB.dtype).tiny)
    zero_B = (counted_NB & ~positive_NB).any(0) | ~counted_NB.any(0)
    weight_B = torch.where(zero_B, 1.0, (weights_N1 * counted_NB).sum(0))
    log_mean_B = (weights_N1 * torch.where(positive_NB, scores_NB, 1.0).log()).sum(0) / weight_B
    return torch.where(zero_B, 0.0, -log_mean_B.exp())


def matched_ngrams(counts_BG: Tensor, reference_BG: Tensor) -> Tensor:
    """``(B,)`` the sum of the minima of expected and reference counts."""
    # A repeated n-gram has reference count 0 at its repeats and so adds nothing: hence "<", no gradient at equality.
    return torch.where(counts_BG < reference_BG, counts_BG, reference_BG).sum(-1)


def check_recall_weight(recall_weight: float) -> None:
    if not 0 < recall_weight < math.inf:
        raise ValueError(f"recall_weight must be above 0, but is {recall_weight}")


def negative_score(counts_BG: Tensor, reference_BG: Tensor, total_B: Tensor, recall_weight: float) -> Tensor:
    """``(B,)`` minus F1, or its weighted form, from expected counts, the references', and the expected total."""
    reference_B = reference_BG.sum(-1)
    # Rounding, or the paper's total, may make the total negative. An empty reference has nothing to match, and 0 / 1.
    size_B = torch.where(reference_B == 0, 1.0, recall_weight * reference_B + total_B.clamp(min=0))
    return -(1 + recall_weight) * matched_ngrams(counts_BG, reference_BG) / size_B
