"""Assignment and alignment losses against the enumeration of paths, permutations and ways through the table."""

import itertools
import math

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


def terms_loss(terms: torch.Tensor, margin: float | None) -> torch.Tensor:
    """Minus the sum of log-probabilities, without those below the margin."""
    kept = terms if margin is None else terms[terms >= math.log(margin)]
    return -kept.sum()


@pytest.mark.parametrize(("positions", "vocabulary"), SHAPES)
def test_bipartite(positions, vocabulary):
    for seed in range(12):
        case = random_case(
            seed, batch=12, positions=positions, vocabulary=vocabulary, longest=seed % 5, zeros=seed % 3 == 2
        )
        check(
            case,
            bipartite_loss,
            lambda log_probs, b, case=case: oracle.bipartite_loss(log_probs, case.target(b), case.blank),
            blank=case.blank,
        )


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(SHAPES), st.integers(0, 6), st.booleans())
def test_bipartite_on_any_case(seed, shape, longest, zeros):
    case = random_case(seed, batch=3, positions=shape[0], vocabulary=shape[1], longest=longest, zeros=zeros)
    check(
        case,
        bipartite_loss,
        lambda log_probs, b: oracle.bipartite_loss(log_probs, case.target(b), case.blank),
        blank=case.blank,
    )


def test_bipartite_margin():
    case = random_case(3, batch=40, longest=3)

    def truth(log_probs, b):
        paths, scores = oracle.paths_of(log_probs, case.blank, "sctc")
        scores = scores.masked_fill(~paths.are_orders_of(case.target(b)), -torch.inf)
        if scores.max().isinf():
            return scores.max().neg()
        path = paths.paths_PT[scores.argmax()]
        return terms_loss(log_probs[torch.arange(len(path)), path], 0.3)

    check(case, bipartite_loss, truth, blank=case.blank, margin=0.3)


@pytest.mark.parametrize("margin", [None, 0.15, 0.4])
@pytest.mark.parametrize("zeros", [False, True])
def test_oaxe(margin, zeros):
    for seed in range(10):
        case = fixed_length_case(seed, zeros=zeros and margin is None)

        def truth(log_probs, b, case=case):
            length = len(log_probs)
            orders = [torch.tensor(order) for order in itertools.permutations(case.target(b))]
            terms = [log_probs[torch.arange(length), order] for order in orders] if length else [log_probs[:0].sum(-1)]
            return terms_loss(max(terms, key=lambda term: term.sum()), margin)

        check(case, oaxe_loss, truth, margin=margin)


@pytest.mark.parametrize("delta", [0.3, 1.0, 3.0])
def test_axe(delta):
    for seed in range(8):
        case = random_case(seed, positions=4, longest=4, zeros=seed % 3 == 2)
        check(
            case,
            axe_loss,
            lambda log_probs, b, case=case: oracle.axe_loss(log_probs, case.target(b), case.blank, delta),
            blank=case.blank,
            delta=delta,
        )


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("references", [None, 3])
def test_bag_of_ngrams(n, references):
    for seed in range(8):
        case = random_case(seed, references=references, zeros=seed % 3 == 2)
        check(
            case,
            bag_of_ngrams_loss,
            lambda log_probs, b, case=case: oracle.bag_of_ngrams_loss(log_probs, case.references(b), n),
            n=n,
        )


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
