"""What the n-gram matching loss needs of a sentence's probabilities, and its gradient in closed form.

The loss reads few of the (T, V) probabilities, those of the reference's tokens. All it asks of the others is the
expected length, whose gradient is known in closed form. So one sweep over a sentence's probabilities reads what is
needed, the recurrences run on that alone, and a second sweep turns the probabilities into the gradient, in place.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .collapse import check_collapse
from .inputs import check_blank, check_targets, full_type
from .length import check_n, may_fall_short, shortfall_from_blanks, shortfall_from_probs, shortfall_gradient
from .matching import check_recall_weight, negative_score
from .ngram import counts_from_probs, reference_ngrams

# Elements of the (positions, V) probabilities that are read or written at once: few enough to stay in the cache.
_BLOCK = 2**20


@dataclass(frozen=True)
class Problem:
    """What is to be matched: all but the model's scores."""

    ngrams_BGn: Tensor
    reference_BG: Tensor
    lengths: list[int]
    blank: int
    collapse: str
    exact_total: bool
    recall_weight: float

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
    recall_weight: float,
) -> Problem:
    check_collapse(collapse)
    check_n(n)
    check_recall_weight(recall_weight)
    check_blank(blank, vocabulary)
    targets, target_lengths = check_targets(targets, target_lengths, scores, vocabulary, blank=blank, several=True)
    ngrams_BGn, reference_BG = reference_ngrams(targets, target_lengths, n, full_type(scores))
    return Problem(ngrams_BGn, reference_BG, input_lengths.tolist(), blank, collapse, exact_total, recall_weight)


class Sweep:
    """Reads what the loss depends on from each sentence's probabilities; later turns them into their gradient."""

    def __init__(self, problem: Problem, vocabulary: int) -> None:
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
        self.scratch_RV = like.new_empty(max(1, min(positions, _BLOCK // vocabulary)), vocabulary)
        self.nothing_V = like.new_zeros(vocabulary)

    def read(self, b: int, probs_TV: Tensor) -> None:
        """Take note of a sentence's probabilities; changes them."""
        used = len(probs_TV)
        self.blank_BT[b, :used] = probs_TV[:, self.problem.blank]
        probs_TV[:, self.problem.blank] = 0
        tokens_TnG = self.tokens_TnBG[:used, :, b]
        tokens_TnG.copy_(probs_TV.index_select(1, self.ids_BK[b]).view(tokens_TnG.shape))
        for start, stop in self._blocks(used):
            self.words_BT[b, start:stop] = probs_TV[start:stop].sum(-1)
            if self.problem.collapse == "ctc":
                start = max(start, 1)
                both_RV = self.scratch_RV[: stop - start]
                torch.mul(probs_TV[start - 1 : stop - 1], probs_TV[start:stop], out=both_RV)
                self.overlap_BT[b, start:stop] = both_RV.sum(-1)

    def _blocks(self, used: int) -> Iterator[tuple[int, int]]:
        rows = len(self.scratch_RV)
        return ((start, min(start + rows, used)) for start in range(0, used, rows))

    def finish_reading(self, again: Callable[[int], Tensor]) -> None:
        """Compute what the exact total needs beyond the expected length. ``again(b)`` gives all probabilities of a
        sentence once more: of few, once a model writes whole sentences."""
        if self.problem.exact_total and self.problem.collapse == "ctc" and self.n > 2:
            self.falls_short = may_fall_short(self.blank_BT, self.overlap_BT, self.n).tolist()
            for b, used in enumerate(self.problem.lengths):
                if self.falls_short[b]:
                    probs_TV = again(b)
                    probs_TV[:, self.problem.blank] = 0
                    self.shortfall_B[b] = shortfall_from_probs(probs_TV, self.blank_BT[b, :used], self.n)

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
            loss_B = negative_score(counts_BG, problem.reference_BG, total_B, problem.recall_weight)
            if derivatives:
                self.d_tokens_TnBG, self.d_blank_BT, self.d_total_B = torch.autograd.grad(loss_B.sum(), reads)
        for read in reads:
            read.requires_grad_(False)
        return loss_B.detach()

    def weigh(self, weight_B: Tensor) -> None:
        """Prepare :meth:`write`: derivatives of the losses, times their weights, for log-probabilities."""
        self.g_total_B = self.d_total_B * weight_B
        self.g_tokens_TnBG = self.d_tokens_TnBG * self.tokens_TnBG * weight_B.unsqueeze(-1)
        self.g_blank_BT = self.d_blank_BT * self.blank_BT * weight_B.unsqueeze(-1)
        # A token counts for the total by p_t(v) (1 - p_{t-1}(v) - p_{t+1}(v)); under SCTC there is no overlap.
        next_overlap_BT = torch.nn.functional.pad(self.overlap_BT[:, 1:], (0, 1))
        length_BT = self.words_BT - self.overlap_BT - next_overlap_BT
        self.g_sum_BT = self.g_tokens_TnBG.sum((1, 3)).t() + self.g_blank_BT + self.g_total_B.unsqueeze(-1) * length_BT

    def write(self, b: int, probs_TV: Tensor) -> None:
        """Turn a sentence's probabilities into the gradient for its logits, in place."""
        used = len(probs_TV)
        probs_TV[:, self.problem.blank] = 0
        g_total, g_sum_T, g_blank_T = self.g_total_B[b], self.g_sum_BT[b, :used], self.g_blank_BT[b, :used]
        blank_T = self.blank_BT[b, :used]
        d_short_TV = None
        if self.falls_short[b]:
            d_short_TV, d_blank_T = shortfall_gradient(probs_TV, blank_T, self.n)
            g_blank_T = g_blank_T + g_total * d_blank_T * blank_T
            g_sum_T = g_sum_T + g_total * ((d_short_TV * probs_TV).sum(-1) + d_blank_T * blank_T)
        # Of each derivative the softmax takes the share p_t(v) of the sum of all.
        factor_T1 = (g_total - g_sum_T).unsqueeze(-1)
        if self.problem.collapse == "sctc":
            probs_TV *= factor_T1
        else:
            before_V = self.nothing_V
            for start, stop in self._blocks(used):
                around_RV = self._neighbours(probs_TV, start, stop, before_V)
                if d_short_TV is not None:
                    around_RV -= d_short_TV[start:stop]
                before_V = probs_TV[stop - 1].clone()
                around_RV *= -g_total
                around_RV += factor_T1[start:stop]
                probs_TV[start:stop] *= around_RV
        probs_TV.index_add_(1, self.ids_BK[b], self.g_tokens_TnBG[:used, :, b].flatten(1))
        probs_TV[:, self.problem.blank] = g_blank_T - blank_T * g_sum_T

    def _neighbours(self, probs_TV: Tensor, start: int, stop: int, before_V: Tensor) -> Tensor:
        """p_{t-1} + p_{t+1} for some positions; ``before_V`` is the one before them, which has been written over."""
        around_RV = self.scratch_RV[: stop - start]
        after_V = probs_TV[stop] if stop < len(probs_TV) else self.nothing_V
        torch.add(before_V, probs_TV[start + 1] if stop - start > 1 else after_V, out=around_RV[0])
        if stop - start > 1:
            torch.add(probs_TV[start : stop - 2], probs_TV[start + 2 : stop], out=around_RV[1:-1])
            torch.add(probs_TV[stop - 2], after_V, out=around_RV[-1])
        return around_RV
