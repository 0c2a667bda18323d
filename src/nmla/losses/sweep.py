"""What the n-gram matching loss needs of a sentence's probabilities, and its gradient in closed form.

The loss reads few of the (T, V) probabilities, those of the reference's tokens. All it asks of the others is the
expected length, whose gradient is known in closed form. So a sentence's probabilities can be made, read and dropped
while they are in the cache; the recurrences run on what was read; and a second sweep writes the gradient.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .collapse import check_collapse
from .inputs import check_blank, check_targets, full_type
from .length import check_n, may_fall_short, shortfall_from_blanks, shortfall_from_probs, shortfall_gradient
from .matching import negative_f1
from .ngram import counts_from_probs, reference_ngrams

_ROWS = 32


@dataclass(frozen=True)
class Problem:
    """What is to be matched: all but the model's scores."""

    ngrams_BGn: Tensor
    reference_BG: Tensor
    lengths: list[int]
    blank: int
    collapse: str
    exact_total: bool

    def part(self, sentences: slice) -> "Problem":
        return replace(
            self,
            ngrams_BGn=self.ngrams_BGn[sentences],
            reference_BG=self.reference_BG[sentences],
            lengths=self.lengths[sentences],
        )


def checked_problem(
    scores: Tensor,
    vocabulary: int,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    n: int,
    collapse: str,
    exact_total: bool,
) -> Problem:
    check_collapse(collapse)
    check_n(n)
    check_blank(blank, vocabulary)
    targets, target_lengths = check_targets(targets, target_lengths, scores, vocabulary, blank=blank, several=True)
    ngrams_BGn, reference_BG = reference_ngrams(targets, target_lengths, n, full_type(scores))
    return Problem(ngrams_BGn, reference_BG, input_lengths.tolist(), blank, collapse, exact_total)


class Sweep:
    """Reads what the loss depends on from each sentence's probabilities; later turns them into their gradient."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        batch, grams, n = problem.ngrams_BGn.shape
        positions = max(problem.lengths, default=0)
        like = problem.reference_BG
        self.n = n
        self.ids_BK = problem.ngrams_BGn.transpose(1, 2).reshape(batch, n * grams)
        self.tokens_TnBG = like.new_zeros(positions, n, batch, grams)
        self.blank_BT = like.new_ones(batch, positions)  # padding is blank, and so adds nothing
        self.words_BT = like.new_zeros(batch, positions)  # the probability of anything but blank
        self.overlap_BT = like.new_zeros(batch, positions)  # of the token before once more, and not blank
        self.shortfall_B = like.new_zeros(batch)
        self.falls_short = [False] * batch

    def read(self, b: int, probs_TV: Tensor) -> None:
        """Take note of a sentence's probabilities, ``(T, V)`` without padding; changes them."""
        problem, used, grams = self.problem, probs_TV.shape[0], self.tokens_TnBG.shape[-1]
        self.blank_BT[b, :used] = probs_TV[:, problem.blank]
        probs_TV[:, problem.blank] = 0
        self.tokens_TnBG[:used, :, b] = probs_TV.index_select(1, self.ids_BK[b]).view(used, self.n, grams)
        self.words_BT[b, :used] = probs_TV.sum(-1)
        if problem.collapse == "ctc" and used:
            # In blocks of rows, whose products stay in the cache.
            pairs = zip(probs_TV[1:].split(_ROWS), probs_TV[:-1].split(_ROWS), strict=True)
            self.overlap_BT[b, 1:used] = torch.cat([(after * before).sum(-1) for after, before in pairs])

    def finish_reading(self, again: Callable[[int], Tensor]) -> None:
        """Compute what the exact total needs beyond the expected length. ``again(b)`` gives a sentence's probabilities
        once more: for few, once a model writes whole sentences."""
        if self.problem.exact_total and self.problem.collapse == "ctc" and self.n > 2:
            self.falls_short = may_fall_short(self.blank_BT, self.overlap_BT, self.n).tolist()
            for b in range(len(self.falls_short)):
                if self.falls_short[b]:
                    probs_TV = again(b)
                    probs_TV[:, self.problem.blank] = 0
                    self.shortfall_B[b] = shortfall_from_probs(probs_TV, self.blank_BT[b, : len(probs_TV)], self.n)

    def loss(self, *, derivatives: bool) -> Tensor:
        """The losses ``(B,)`` and, for :meth:`write`, their derivatives for all that was read."""
        problem = self.problem
        length_B = (self.words_BT - self.overlap_BT).sum(-1)
        reads = [read.requires_grad_(derivatives) for read in (self.tokens_TnBG, self.blank_BT, length_B)]
        with torch.enable_grad():
            counts_BG = counts_from_probs(self.tokens_TnBG, self.blank_BT.t(), problem.ngrams_BGn, problem.collapse)
            total_B = length_B - (self.n - 1) + self.shortfall_B
            if problem.exact_total and (self.n == 2 or (self.n > 2 and problem.collapse == "sctc")):
                total_B = total_B + shortfall_from_blanks(self.blank_BT, self.n)
            loss_B = negative_f1(counts_BG, problem.reference_BG, total_B)
            if derivatives:
                self.d_tokens_TnBG, self.d_blank_BT, self.d_total_B = torch.autograd.grad(loss_B.sum(), reads)
        for read in reads:
            read.requires_grad_(False)
        return loss_B.detach()

    def write(self, b: int, bordered_TV: Tensor, grad_TV: Tensor, weight: Tensor) -> None:
        """Write the gradient of ``weight`` times a sentence's loss for its logits into ``grad_TV``.

        ``bordered_TV`` holds the sentence's probabilities between two rows of zeros: (T + 2, V); changes them.
        """
        used = grad_TV.shape[0]
        bordered_TV[:, self.problem.blank] = 0
        probs_TV, blank_T, overlap_T = bordered_TV[1:-1], self.blank_BT[b, :used], self.overlap_BT[b, :used]
        # Derivatives for log-probabilities: of the few tokens that the n-grams are made of, and of the blank ...
        d_total = self.d_total_B[b] * weight
        d_tokens_TnG = self.d_tokens_TnBG[:used, :, b] * self.tokens_TnBG[:used, :, b] * weight
        d_blank_T = self.d_blank_BT[b, :used] * blank_T * weight
        d_sum_T = d_tokens_TnG.sum((1, 2)) + d_blank_T + d_total * self.words_BT[b, :used]
        # ... and of any token through the total: p_t(v) times d_total (1 - p_{t-1}(v) - p_{t+1}(v)), less under SCTC.
        # The softmax then takes from each its share p_t(v) of the sum of all.
        if self.problem.collapse == "sctc":
            torch.mul(probs_TV, (d_total - d_sum_T).unsqueeze(-1), out=grad_TV)
        else:
            d_sum_T -= d_total * (overlap_T + torch.nn.functional.pad(overlap_T[1:], (0, 1)))
            torch.add(bordered_TV[:-2], bordered_TV[2:], out=grad_TV)
            if self.falls_short[b]:
                d_probs_TV, d_blanks_T = shortfall_gradient(probs_TV, blank_T, self.n)
                d_blank_T += d_total * d_blanks_T * blank_T
                d_sum_T += d_total * ((d_probs_TV * probs_TV).sum(-1) + d_blanks_T * blank_T)
                grad_TV -= d_probs_TV
            torch.addcmul((d_total - d_sum_T).unsqueeze(-1), grad_TV, -d_total, out=grad_TV)
            grad_TV *= probs_TV
        grad_TV.index_add_(1, self.ids_BK[b], d_tokens_TnG.flatten(1))
        grad_TV[:, self.problem.blank] = d_blank_T - blank_T * d_sum_T
