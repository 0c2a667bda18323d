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

    def read(self, b: int, start: int, bordered_RV: Tensor) -> None:
        """Take note of the probabilities of some positions of a sentence, from ``start`` on; changes them.

        ``bordered_RV`` holds one row before them: the position before, or zeros before the first.
        """
        probs_RV, here = bordered_RV[1:], slice(start, start + len(bordered_RV) - 1)
        self.blank_BT[b, here] = probs_RV[:, self.problem.blank]
        bordered_RV[:, self.problem.blank] = 0
        tokens_RnG = self.tokens_TnBG[here, :, b]
        tokens_RnG.copy_(probs_RV.index_select(1, self.ids_BK[b]).view(tokens_RnG.shape))
        self.words_BT[b, here] = probs_RV.sum(-1)
        if self.problem.collapse == "ctc":
            self.overlap_BT[b, here] = (bordered_RV[:-1] * probs_RV).sum(-1)

    def finish_reading(self, again: Callable[[int], Tensor]) -> None:
        """Compute what the exact total needs beyond the expected length. ``again(b)`` gives all probabilities of a
        sentence once more: of few, once a model writes whole sentences."""
        if self.problem.exact_total and self.problem.collapse == "ctc" and self.n > 2:
            self.falls_short = may_fall_short(self.blank_BT, self.overlap_BT, self.n).tolist()
            for b in range(len(self.falls_short)):
                if self.falls_short[b]:
                    self.shortfall_B[b] = shortfall_from_probs(*self._words_and_blank(b, again), self.n)

    def _words_and_blank(self, b: int, again: Callable[[int], Tensor]) -> tuple[Tensor, Tensor]:
        probs_TV = again(b)
        probs_TV[:, self.problem.blank] = 0
        return probs_TV, self.blank_BT[b, : len(probs_TV)]

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

    def weigh(self, weight_B: Tensor) -> None:
        """Prepare :meth:`write`: derivatives of the losses, times their weights, for log-probabilities."""
        self.g_total_B = self.d_total_B * weight_B
        self.g_tokens_TnBG = self.d_tokens_TnBG * self.tokens_TnBG * weight_B.unsqueeze(-1)
        self.g_blank_BT = self.d_blank_BT * self.blank_BT * weight_B.unsqueeze(-1)
        # A token counts for the total by p_t(v) (1 - p_{t-1}(v) - p_{t+1}(v)); under SCTC there is no overlap.
        next_overlap_BT = torch.nn.functional.pad(self.overlap_BT[:, 1:], (0, 1))
        length_BT = self.words_BT - self.overlap_BT - next_overlap_BT
        self.g_sum_BT = self.g_tokens_TnBG.sum((1, 3)).t() + self.g_blank_BT + self.g_total_B.unsqueeze(-1) * length_BT

    def shortfall_gradient(self, b: int, again: Callable[[int], Tensor]) -> tuple[Tensor, Tensor] | None:
        """For :meth:`write`: the part of a sentence's gradient that needs all its probabilities, if there is one."""
        return shortfall_gradient(*self._words_and_blank(b, again), self.n) if self.falls_short[b] else None

    def write(
        self, b: int, start: int, bordered_RV: Tensor, grad_RV: Tensor, shortfall: tuple[Tensor, Tensor] | None
    ) -> None:
        """Write the gradient for the logits of some positions of a sentence, from ``start`` on, into ``grad_RV``.

        ``bordered_RV`` holds their probabilities and one row before and one after: the positions there, or zeros before
        the first and after the last; changes them.
        """
        here = slice(start, start + len(grad_RV))
        g_total, g_sum_R, g_blank_R = self.g_total_B[b], self.g_sum_BT[b, here], self.g_blank_BT[b, here]
        blank_R, probs_RV = self.blank_BT[b, here], bordered_RV[1:-1]
        bordered_RV[:, self.problem.blank] = 0
        # Of each derivative the softmax takes the share p_t(v) of the sum of all.
        if self.problem.collapse == "sctc":
            torch.mul(probs_RV, (g_total - g_sum_R).unsqueeze(-1), out=grad_RV)
        else:
            torch.add(bordered_RV[:-2], bordered_RV[2:], out=grad_RV)
            if shortfall is not None:
                d_probs_RV, d_blank_R = shortfall[0][here], shortfall[1][here]
                g_blank_R = g_blank_R + g_total * d_blank_R * blank_R
                g_sum_R = g_sum_R + g_total * ((d_probs_RV * probs_RV).sum(-1) + d_blank_R * blank_R)
                grad_RV -= d_probs_RV
            torch.addcmul((g_total - g_sum_R).unsqueeze(-1), grad_RV, -g_total, out=grad_RV)
            grad_RV *= probs_RV
        grad_RV.index_add_(1, self.ids_BK[b], self.g_tokens_TnBG[here, :, b].flatten(1))
        grad_RV[:, self.problem.blank] = g_blank_R - blank_R * g_sum_R
