"""The truth about small cases: every path is enumerated, collapsed and weighed. Differentiable, slow, and simple."""

import itertools
import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class Paths:
    """All V^T paths and, for each, the sentence it stands for."""

    paths_PT: Tensor
    sentences_PT: Tensor  # -1 after the end
    lengths_P: Tensor

    def log_probs(self, log_probs_TV: Tensor) -> Tensor:
        """``(P,)`` log-probability of each path."""
        positions = torch.arange(log_probs_TV.shape[0])
        return log_probs_TV[positions, self.paths_PT].sum(-1)

    def counts(self, ngram: tuple[int, ...]) -> Tensor:
        """``(P,)`` how often the n-gram occurs in each path's sentence."""
        n = len(ngram)
        if n > self.sentences_PT.shape[1]:
            return torch.zeros(len(self.paths_PT))
        windows = self.sentences_PT.unfold(1, n, 1)
        return (windows == torch.tensor(ngram)).all(-1).sum(-1)

    def are(self, target: list[int]) -> Tensor:
        """``(P,)`` whether each path's sentence is the target."""
        positions = self.sentences_PT.shape[1]
        if len(target) > positions:
            return torch.zeros(len(self.paths_PT), dtype=torch.bool)
        padded = torch.tensor(target + [-1] * (positions - len(target)), dtype=torch.long)
        return (self.sentences_PT == padded).all(-1)

    def are_orders_of(self, target: list[int]) -> Tensor:
        """``(P,)`` whether each path's sentence is the target in some order."""
        result = torch.zeros(len(self.paths_PT), dtype=torch.bool)
        for order in set(itertools.permutations(target)):
            result |= self.are(list(order))
        return result


@cache
def all_paths(vocabulary: int, positions: int, blank: int, collapse: str) -> Paths:
    """``collapse`` may also be "none": the path is the sentence, as in fixed-length models."""
    paths = list(itertools.product(range(vocabulary), repeat=positions))
    sentences = []
    for path in paths:
        merged = [token for token, _ in itertools.groupby(path)] if collapse == "ctc" else list(path)
        sentences.append(merged if collapse == "none" else [token for token in merged if token != blank])
    padded = [sentence + [-1] * (positions - len(sentence)) for sentence in sentences]
    return Paths(
        torch.tensor(paths, dtype=torch.long).view(len(paths), positions),
        torch.tensor(padded, dtype=torch.long).view(len(paths), positions),
        torch.tensor([len(sentence) for sentence in sentences]),
    )


def paths_of(log_probs_TV: Tensor, blank: int, collapse: str) -> tuple[Paths, Tensor]:
    positions, vocabulary = log_probs_TV.shape
    paths = all_paths(vocabulary, positions, blank, collapse)
    return paths, paths.log_probs(log_probs_TV)


def negative_log_likelihood(log_probs_TV: Tensor, target: list[int], blank: int, collapse: str) -> Tensor:
    paths, log_probs_P = paths_of(log_probs_TV, blank, collapse)
    return -log_probs_P[paths.are(target)].logsumexp(0)


def ddrs_loss(log_probs_TV: Tensor, references: list[list[int]], progress: float, blank: int, collapse: str) -> Tensor:
    references = [reference for reference in references if reference]
    if not references:
        return log_probs_TV.new_zeros(())
    losses = [negative_log_likelihood(log_probs_TV, reference, blank, collapse) for reference in references]
    lengths = [len(reference) for reference in references]
    of_all = torch.stack(losses).sum() / sum(lengths)
    possible = [(-loss).exp() for loss in losses if loss.isfinite()]
    of_any = -torch.stack(possible or [of_all.new_zeros(())]).sum().log() / (sum(lengths) / len(lengths))
    likeliest, length = min(zip(losses, lengths, strict=True), key=lambda of: of[0].item())
    of_likeliest = likeliest / length
    if progress == 2 / 3:
        return of_any
    if progress < 2 / 3:
        return of_all if progress == 0 else (1 - 1.5 * progress) * of_all + 1.5 * progress * of_any
    return of_likeliest if progress == 1 else (3 - 3 * progress) * of_any + (3 * progress - 2) * of_likeliest


def best_score(log_probs_TV: Tensor, target: list[int], blank: int, collapse: str) -> Tensor:
    paths, log_probs_P = paths_of(log_probs_TV, blank, collapse)
    return log_probs_P.masked_fill(~paths.are(target), -torch.inf).max()


def expected_count(log_probs_TV: Tensor, ngram: tuple[int, ...], blank: int, collapse: str) -> Tensor:
    paths, log_probs_P = paths_of(log_probs_TV, blank, collapse)
    return (log_probs_P.exp() * paths.counts(ngram)).sum()


def expected_length(log_probs_TV: Tensor, blank: int, collapse: str) -> Tensor:
    return expected_total(log_probs_TV, 1, blank, collapse)


def expected_total(log_probs_TV: Tensor, n: int, blank: int, collapse: str) -> Tensor:
    paths, log_probs_P = paths_of(log_probs_TV, blank, collapse)
    return (log_probs_P.exp() * (paths.lengths_P - n + 1).clamp(min=0)).sum()


def reference_counts(references: list[list[int]], n: int) -> dict[tuple[int, ...], float]:
    """Mean count of each n-gram over the references that are not empty."""
    present = [reference for reference in references if reference]
    counts: dict[tuple[int, ...], float] = {}
    for reference in present:
        for i in range(len(reference) - n + 1):
            ngram = tuple(reference[i : i + n])
            counts[ngram] = counts.get(ngram, 0.0) + 1 / len(present)
    return counts


def at_most(limit: float, value: Tensor) -> Tensor:
    """The minimum; as a constant where the two are equal but for rounding, which then decides the gradient."""
    return torch.minimum(value, value.new_tensor(limit)) if abs(value - limit) > 1e-12 else value.detach()


def ngram_matching_loss(
    log_probs_TV: Tensor,
    references: list[list[int]],
    blank: int,
    n: int,
    collapse: str,
    exact_total: bool = True,
    recall_weight: float = 1.0,
) -> Tensor:
    """A constant where the gradient is undefined: an expected count equal to the references'."""
    reference = reference_counts(references, n)
    if not reference:
        return log_probs_TV[:0].sum()
    matched = [
        at_most(count, expected_count(log_probs_TV, ngram, blank, collapse)) for ngram, count in reference.items()
    ]
    if exact_total:
        total = expected_total(log_probs_TV, n, blank, collapse)
    else:
        total = (expected_length(log_probs_TV, blank, collapse) - n + 1).clamp(min=0)
    size = recall_weight * sum(reference.values()) + total
    loss = -(1 + recall_weight) * torch.stack(matched).sum() / size
    return loss if all(term.requires_grad for term in matched) else loss.detach()


def combined_ngram_loss(
    log_probs_TV: Tensor,
    references: list[list[int]],
    blank: int,
    weights: dict[int, float],
    mean: str,
    collapse: str,
) -> Tensor:
    """The geometric mean is over the n of which there are n-grams to match, and 0 if one of them is."""
    losses = {n: ngram_matching_loss(log_probs_TV, references, blank, n, collapse) for n in weights}
    if mean == "arithmetic":
        combined = torch.stack([weights[n] * loss for n, loss in losses.items()]).sum()
    else:
        losses = {n: loss for n, loss in losses.items() if reference_counts(references, n)}
        if not losses or any(loss == 0 for loss in losses.values()):
            return log_probs_TV[:0].sum()
        share = sum(weights[n] for n in losses)
        combined = -torch.stack([(-loss) ** (weights[n] / share) for n, loss in losses.items()]).prod()
    return combined if all(loss.requires_grad for loss in losses.values()) else combined.detach()


def best_choice(choices: list[Tensor], margin: float | None) -> Tensor:
    """Minus the sum of log-probabilities, without those below the margin, of the choice that is likeliest: with the
    fewest impossible ones and then the largest sum of the others."""

    def likelihood(choice: Tensor) -> tuple[float, float]:
        return -choice.isneginf().sum().item(), choice[choice.isfinite()].sum().item()

    best = max(choices, key=likelihood)
    return -(best if margin is None else best[best >= math.log(margin)]).sum()


def oaxe_loss(log_probs_TV: Tensor, target: list[int], margin: float | None) -> Tensor:
    orders = [torch.tensor(order, dtype=torch.long) for order in itertools.permutations(target)]
    return best_choice([log_probs_TV[torch.arange(len(order)), order] for order in orders], margin)


def bipartite_loss_with_margin(log_probs_TV: Tensor, target: list[int], blank: int, margin: float) -> Tensor:
    paths, _ = paths_of(log_probs_TV, blank, "sctc")
    orders = paths.paths_PT[paths.are_orders_of(target)]
    if not len(orders):
        return log_probs_TV.new_tensor(torch.inf)
    return best_choice([log_probs_TV[torch.arange(len(order)), order] for order in orders], margin)


def bipartite_loss(log_probs_TV: Tensor, target: list[int], blank: int) -> Tensor:
    paths, log_probs_P = paths_of(log_probs_TV, blank, "sctc")
    return -log_probs_P.masked_fill(~paths.are_orders_of(target), -torch.inf).max()


def bag_of_ngrams_loss(log_probs_TV: Tensor, references: list[list[int]], n: int) -> Tensor:
    reference = reference_counts(references, n)
    if not reference:
        return log_probs_TV[:0].sum()
    matched = [at_most(count, expected_count(log_probs_TV, ngram, -1, "none")) for ngram, count in reference.items()]
    loss = 1 - torch.stack(matched).sum() / sum(reference.values())
    return loss if all(term.requires_grad for term in matched) else loss.detach()


def axe_loss(log_probs_TV: Tensor, target: list[int], blank: int, delta: float) -> Tensor:
    """The least cost over all ways through the table, each followed to its end."""
    positions = log_probs_TV.shape[0]
    if target and not positions:
        return log_probs_TV.new_tensor(torch.inf)

    def ways(i: int, j: int) -> list[Tensor]:
        """Costs of all ways from i target tokens and j positions done to all done."""
        if i == len(target) and j == positions:
            return [log_probs_TV[:0].sum()]
        costs = []
        if i < len(target):
            # The position of an omitted token is the one just done; before the first, the first.
            omit = -delta * log_probs_TV[max(j - 1, 0), target[i]]
            costs += [omit + rest for rest in ways(i + 1, j)]
        if j < positions:
            costs += [-log_probs_TV[j, blank] + rest for rest in ways(i, j + 1)]
        if i < len(target) and j < positions:
            costs += [-log_probs_TV[j, target[i]] + rest for rest in ways(i + 1, j + 1)]
        return costs

    return torch.stack(ways(0, 0)).min()
