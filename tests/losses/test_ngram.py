"""Counts, lengths, totals and the matching loss against the enumeration of all paths."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from cases import Case, assert_equals_oracle, leaf, random_case
from nmla.losses import (
    collapse_path,
    combined_ngram_loss,
    expected_length,
    expected_ngram_counts,
    expected_ngram_total,
    ngram_matching_loss,
    ngram_matching_loss_with_logits,
)
from nmla.losses.length import may_fall_short, shortfall_from_probs

COLLAPSES = ("ctc", "sctc")
MEANS = ("arithmetic", "geometric")
WEIGHTS = [{1: 1.0}, {1: 0.3, 2: 0.7}, {1: 0.25, 2: 0.25, 3: 0.25, 4: 0.25}, {3: 0.6, 2: 0.4}]
both_collapses = pytest.mark.parametrize("collapse", COLLAPSES)


@both_collapses
def test_collapse_path_equals_oracle_on_all_paths(collapse):
    paths = oracle.all_paths(3, 6, 1, collapse)
    for path, sentence, length in zip(paths.paths_PT, paths.sentences_PT, paths.lengths_P, strict=True):
        assert collapse_path(path, blank=1, collapse=collapse) == sentence[:length].tolist()


def check_counts(case: Case, n: int, collapse: str) -> None:
    """Of all n-grams, whose sum is the total."""
    logits = leaf(case.logits)
    words = [v for v in range(logits.shape[-1]) if v != case.blank]
    ngrams = torch.tensor(list(itertools.product(words, repeat=n)))
    counts = expected_ngram_counts(
        case.log_probs_of(logits),
        ngrams.expand(len(logits), -1, -1),
        case.input_lengths,
        blank=case.blank,
        collapse=collapse,
    )
    weights = torch.rand(len(ngrams), dtype=torch.float64)
    actual = counts.detach()

    def weighted_count(log_probs, b):
        expected = [oracle.expected_count(log_probs, tuple(g), case.blank, collapse) for g in ngrams.tolist()]
        torch.testing.assert_close(actual[b], torch.stack(expected).detach(), rtol=0, atol=1e-10)
        return torch.stack(expected) @ weights

    assert_equals_oracle(case, counts @ weights, weighted_count, logits)
    totals = expected_ngram_total(case.log_probs, case.input_lengths, n, blank=case.blank, collapse=collapse)
    torch.testing.assert_close(actual.sum(-1), totals, rtol=0, atol=1e-10)


def check_totals(case: Case, n: int, collapse: str) -> None:
    options = {"blank": case.blank, "collapse": collapse}
    logits = leaf(case.logits)
    totals = expected_ngram_total(case.log_probs_of(logits), case.input_lengths, n, **options)
    assert_equals_oracle(
        case, totals, lambda log_probs, _: oracle.expected_total(log_probs, n, case.blank, collapse), logits
    )
    logits = leaf(case.logits)
    length = expected_length(case.log_probs_of(logits), case.input_lengths, **options)
    assert_equals_oracle(
        case, length, lambda log_probs, _: oracle.expected_length(log_probs, case.blank, collapse), logits
    )
    papers = expected_ngram_total(case.log_probs, case.input_lengths, n, exact=False, **options)
    torch.testing.assert_close(papers, length.detach() - n + 1, rtol=0, atol=1e-14)


@both_collapses
@pytest.mark.parametrize(("n", "positions", "vocabulary"), [(1, 5, 4), (2, 5, 4), (3, 6, 3), (4, 7, 3)])
def test_counts_of_all_ngrams(n, positions, vocabulary, collapse):
    for seed in range(6):
        case = random_case(seed, positions=positions, vocabulary=vocabulary, zeros=seed % 2 == 1)
        check_counts(case, n, collapse)


@both_collapses
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("zeros", [False, True])
def test_totals(n, zeros, collapse):
    for seed in range(8):
        check_totals(random_case(seed, zeros=zeros), n, collapse)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from([(1, 5), (2, 2), (3, 4), (5, 3), (8, 2)]),
    st.booleans(),
    st.integers(1, 4),
    st.sampled_from(COLLAPSES),
)
def test_counts_and_totals_on_any_case(seed, shape, zeros, n, collapse):
    case = random_case(seed, batch=2, positions=shape[0], vocabulary=shape[1], zeros=zeros)
    check_counts(case, n, collapse)
    check_totals(case, n, collapse)


def test_the_bound_on_short_outputs_holds():
    """Where it says that the exact total needs no correction, there is none to see."""
    outcomes = set()
    for seed in range(30):
        case = random_case(seed, batch=4, positions=30, vocabulary=6, zeros=seed % 2 == 1)
        probs = torch.rand(4, 1, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        logits = case.logits.nan_to_num(0.0).clamp(min=-9) + 3 * (probs - 0.7) * (torch.arange(6) == case.blank)
        words = logits.float().softmax(-1)
        blanks = words[..., case.blank].clone()
        words[..., case.blank] = 0
        overlap = torch.nn.functional.pad((words[:, 1:] * words[:, :-1]).sum(-1), (1, 0))
        for n in (3, 4):
            for b, needed in enumerate(may_fall_short(blanks, overlap, n).tolist()):
                shortfall = shortfall_from_probs(words[b].double(), blanks[b].double(), n)
                assert needed or shortfall <= 8 * torch.finfo(torch.float32).eps
                outcomes.add(needed)
    assert outcomes == {True, False}


def check_matching_loss(case: Case, n: int, collapse: str, exact_total: bool, recall_weight: float = 1.0) -> None:
    options = {"n": n, "collapse": collapse, "exact_total": exact_total, "recall_weight": recall_weight}
    options["blank"] = case.blank

    def truth(log_probs, b):
        return oracle.ngram_matching_loss(log_probs, case.references(b), **options)

    logits = leaf(case.logits)
    losses = ngram_matching_loss(case.log_probs_of(logits), *case.arguments, **options)
    assert_equals_oracle(case, losses, truth, logits)
    logits = leaf(case.logits)
    losses = ngram_matching_loss_with_logits(logits, *case.arguments, **options)
    assert_equals_oracle(case, losses, truth, logits)


@both_collapses
@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("references", [None, 1, 3])
def test_matching_loss(n, references, collapse):
    for seed in range(12):
        case = random_case(seed, references=references, zeros=seed % 3 == 2)
        check_matching_loss(case, n, collapse, exact_total=seed % 4 != 3, recall_weight=(1.0, 0.5, 4.0)[seed // 4])


def any_case(data: st.DataObject) -> Case:
    positions, vocabulary = data.draw(st.sampled_from([(1, 5), (2, 2), (3, 5), (4, 4), (6, 3), (8, 2)]))
    return random_case(
        data.draw(st.integers(0, 10**6)),
        batch=data.draw(st.integers(1, 5)),
        positions=positions,
        vocabulary=vocabulary,
        longest=data.draw(st.integers(0, 7)),
        references=data.draw(st.sampled_from([None, 1, 2, 4])),
        zeros=data.draw(st.booleans()),
    )


def check_combined_loss(case: Case, weights: dict[int, float], mean: str, collapse: str) -> None:
    logits = leaf(case.logits)
    losses = combined_ngram_loss(
        case.log_probs_of(logits), *case.arguments, blank=case.blank, weights=weights, mean=mean, collapse=collapse
    )

    def truth(log_probs, b):
        return oracle.combined_ngram_loss(log_probs, case.references(b), case.blank, weights, mean, collapse)

    assert_equals_oracle(case, losses, truth, logits)


@both_collapses
@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_combined_loss(weights, mean, collapse):
    for seed in range(8):
        case = random_case(seed, references=(None, 1, 3)[seed % 3], zeros=seed % 2 == 1)
        check_combined_loss(case, weights, mean, collapse)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_combined_loss_on_any_case(data):
    weights, mean = data.draw(st.sampled_from(WEIGHTS)), data.draw(st.sampled_from(MEANS))
    check_combined_loss(any_case(data), weights, mean, data.draw(st.sampled_from(COLLAPSES)))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_matching_loss_on_any_case(data):
    case = any_case(data)
    n, collapse = data.draw(st.integers(1, 5)), data.draw(st.sampled_from(COLLAPSES))
    check_matching_loss(case, n, collapse, data.draw(st.booleans()))
