"""Assignment and alignment losses against the enumeration of paths, permutations and ways through the table."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from cases import assert_equals_oracle, leaf, random_case
from nmla.losses import axe_loss, bag_of_ngrams_loss, bipartite_loss, cross_entropy_loss, length_loss, oaxe_loss
from nmla.losses.cross_entropy import length_class

SHAPES = [(1, 5), (2, 2), (3, 5), (4, 4), (5, 3)]


def fixed_length_case(seed, **options):
    """As many positions as tokens."""
    positions = options.get("positions", 4)
    case = random_case(seed, **{"positions": positions, "longest": positions, **options})
    for b, length in enumerate(case.input_lengths.tolist()):
        words = [v for v in range(case.logits.shape[-1]) if v != case.blank]
        generator = torch.Generator().manual_seed(seed + b)
        case.targets[b, :length] = torch.tensor(words)[torch.randint(len(words), (length,), generator=generator)]
    case.target_lengths.copy_(case.input_lengths)
    return case


def check(case, loss, truth, **options):
    logits = leaf(case.logits)
    losses = loss(case.log_probs_of(logits), *case.arguments, **options)
    assert_equals_oracle(case, losses, truth, logits)


def check_bipartite(case):
    check(
        case,
        bipartite_loss,
        lambda log_probs, b: oracle.bipartite_loss(log_probs, case.target(b), case.blank),
        blank=case.blank,
    )


def check_oaxe(case, margin):
    check(case, oaxe_loss, lambda log_probs, b: oracle.oaxe_loss(log_probs, case.target(b), margin), margin=margin)


def check_axe(case, delta):
    check(
        case,
        axe_loss,
        lambda log_probs, b: oracle.axe_loss(log_probs, case.target(b), case.blank, delta),
        blank=case.blank,
        delta=delta,
    )


def check_bag(case, n):
    check(
        case,
        bag_of_ngrams_loss,
        lambda log_probs, b: oracle.bag_of_ngrams_loss(log_probs, case.references(b), n),
        n=n,
    )


@pytest.mark.parametrize(("positions", "vocabulary"), SHAPES)
def test_bipartite(positions, vocabulary):
    for seed in range(12):
        case = random_case(
            seed, batch=12, positions=positions, vocabulary=vocabulary, longest=seed % 5, zeros=seed % 3 == 2
        )
        check_bipartite(case)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(SHAPES), st.integers(0, 6), st.booleans())
def test_bipartite_on_any_case(seed, shape, longest, zeros):
    case = random_case(seed, batch=3, positions=shape[0], vocabulary=shape[1], longest=longest, zeros=zeros)
    check_bipartite(case)


@pytest.mark.parametrize("zeros", [False, True])
def test_bipartite_margin(zeros):
    case = random_case(3, batch=40, longest=3, zeros=zeros)
    check(
        case,
        bipartite_loss,
        lambda log_probs, b: oracle.bipartite_loss_with_margin(log_probs, case.target(b), case.blank, 0.3),
        blank=case.blank,
        margin=0.3,
    )


@pytest.mark.parametrize("zeros", [False, True])
def test_any_finite_log_probability_is_better_than_none(zeros):
    """However small: the worst of these are of the order of exp(-10^8)."""
    for seed in range(10):
        case = random_case(seed, zeros=zeros)
        case.logits.mul_(1e7)
        losses = bipartite_loss(case.log_probs, *case.arguments, blank=case.blank)
        for b, length in enumerate(case.input_lengths.tolist()):
            expected = oracle.bipartite_loss(case.log_probs[b, :length], case.target(b), case.blank)
            torch.testing.assert_close(losses[b], expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("margin", [None, 0.15, 0.4])
@pytest.mark.parametrize("zeros", [False, True])
def test_oaxe(margin, zeros):
    for seed in range(10):
        check_oaxe(fixed_length_case(seed, zeros=zeros), margin)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(SHAPES), st.booleans(), st.sampled_from([None, 0.15, 0.4]))
def test_oaxe_on_any_case(seed, shape, zeros, margin):
    check_oaxe(fixed_length_case(seed, batch=3, positions=shape[0], vocabulary=shape[1], zeros=zeros), margin)


def test_a_margin_leaves_the_impossible_out():
    sure = torch.eye(4, dtype=torch.float64).log()[None, [1, 1]]  # two positions, both token 1
    arguments = torch.tensor([[1, 2]]), torch.tensor([2]), torch.tensor([2])
    for loss in (oaxe_loss, partial(bipartite_loss, blank=0)):
        assert [loss(sure, *arguments, margin=margin).item() for margin in (None, 0.0, 0.1)] == [math.inf, math.inf, 0]
    too_many = torch.tensor([[1, 2, 3]]), torch.tensor([2]), torch.tensor([3])
    assert bipartite_loss(sure, *too_many, blank=0, margin=0.1).item() == math.inf


@pytest.mark.parametrize("delta", [0.3, 1.0, 3.0])
def test_axe(delta):
    for seed in range(8):
        case = random_case(seed, positions=4, longest=4, zeros=seed % 3 == 2)
        check_axe(case, delta)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from([(1, 5), (2, 2), (3, 5), (4, 3)]),
    st.integers(0, 4),
    st.booleans(),
    st.floats(0.1, 5),
)
def test_axe_on_any_case(seed, shape, longest, zeros, delta):
    case = random_case(seed, batch=3, positions=shape[0], vocabulary=shape[1], longest=longest, zeros=zeros)
    check_axe(case, delta)


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("references", [None, 3])
def test_bag_of_ngrams(n, references):
    for seed in range(8):
        case = random_case(seed, references=references, zeros=seed % 3 == 2)
        check_bag(case, n)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from(SHAPES),
    st.integers(0, 6),
    st.sampled_from([None, 1, 3]),
    st.booleans(),
    st.integers(1, 4),
)
def test_bag_of_ngrams_on_any_case(seed, shape, longest, references, zeros, n):
    size = {"batch": 3, "positions": shape[0], "vocabulary": shape[1], "longest": longest}
    check_bag(random_case(seed, references=references, zeros=zeros, **size), n)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy(smoothing):
    for seed in range(5):
        case = fixed_length_case(seed)

        def truth(log_probs, b, case=case):
            return torch.nn.functional.cross_entropy(
                log_probs,
                torch.tensor(case.target(b), dtype=torch.long),
                reduction="sum",
                label_smoothing=smoothing,
            )

        check(case, cross_entropy_loss, truth, label_smoothing=smoothing)


def test_length():
    log_probs = torch.randn(6, 256, dtype=torch.float64).log_softmax(-1)
    sources, targets = torch.tensor([10, 10, 10, 500, 1, 0]), torch.tensor([10, 13, 4, 1, 500, 0])
    assert length_class(sources, targets).tolist() == [128, 131, 122, 0, 255, 128]
    losses = length_loss(log_probs, sources, targets)
    torch.testing.assert_close(losses, -log_probs[torch.arange(6), [128, 131, 122, 0, 255, 128]])
