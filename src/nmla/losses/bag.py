"""Bag of n-grams: n-gram matching for fixed-length models, whose output is not collapsed."""

import torch
from torch import Tensor

from .inputs import check_arguments, full_precision, in_use
from .length import check_n
from .matching import matched_ngrams
from .ngram import reference_ngrams


def bag_of_ngrams_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, *, n: int = 2
) -> Tensor:
    r"""The share of the references' n-grams that the expected output of a fixed-length model lacks.

    .. math::
        L = 1 - \frac{\sum_g \min(C_g(y), C_g)}{\sum_g C_g(y)}, \qquad C_g = \sum_t \prod_{k=1}^n p_{t+k-1}(g_k)

    With one reference the denominator is \|y\| - n + 1. Where the references hold no n-gram nothing is lacking: the
    loss is 0 and so is its gradient.

    Args:
        log_probs: ``(B, T, V)``, normalised over ``V``.
        targets: ``(B, L)`` token ids or, with several references, ``(B, R, L)``; padding may be anything.
        input_lengths: ``(B,)`` positions in use, each in ``0..T``.
        target_lengths: ``(B,)`` or ``(B, R)``, each in ``0..L``; among several references 0 stands for an absent one.
        n: the length of the n-grams, at least 1.

    Returns:
        ``(B,)`` losses in [0, 1].

    Example:
        >>> log_probs = torch.nn.functional.one_hot(torch.tensor([[3, 4, 5]]), 6).float().log()
        >>> bag_of_ngrams_loss(log_probs, torch.tensor([[4, 5, 3]]), torch.tensor([3]), torch.tensor([3]))
        tensor([0.5000])
    """
    check_n(n)
    targets, input_lengths, target_lengths = check_arguments(
        log_probs, targets, input_lengths, target_lengths, blank=None, several=True
    )
    batch, positions, _ = log_probs.shape
    log_probs = full_precision(log_probs)
    ngrams_BGn, reference_BG = reference_ngrams(targets, target_lengths, n, log_probs.dtype)

    padding_BT1 = ~in_use(input_lengths, positions).unsqueeze(-1)
    windows = max(0, positions - n + 1)
    probs_BTG = log_probs.new_ones(batch, windows, reference_BG.shape[1])
    for k in range(n):
        ids_BTG = ngrams_BGn[:, None, :, k].expand(-1, positions, -1)
        token_BTG = log_probs.gather(2, ids_BTG).masked_fill(padding_BT1, -torch.inf).exp()
        probs_BTG = probs_BTG * token_BTG[:, k : k + windows]
    empty_B = reference_BG.sum(-1) == 0
    size_B = torch.where(empty_B, 1.0, reference_BG.sum(-1))
    return torch.where(empty_B, 0.0, 1 - matched_ngrams(probs_BTG.sum(1), reference_BG) / size_B)
