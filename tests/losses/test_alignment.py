"""CTC, SCTC and the best alignment against the enumeration of all paths, and against torch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from cases import assert_equals_oracle, leaf, random_case
from nmla.losses import best_alignment, collapse_path, ctc_loss, ctc_loss_with_logits, sctc_loss

LOSSES = {"ctc": ctc_loss, "sctc": sctc_loss}
both_collapses = pytest.mark.parametrize("collapse", LOSSES)
SHAPES = [(1, 5), (2, 2), (3, 5), (4, 4), (5, 3), (7, 2)]


def check_loss(case, collapse):
    logits = leaf(case.logits)
    losses = LOSSES[collapse](case.log_probs_of(logits), *case.arguments, blank=case.blank)
    assert_equals_oracle(
        case,
        losses,
        lambda log_probs, b: oracle.negative_log_likelihood(log_probs, case.target(b), case.blank, collapse),
        logits,
    )


def check_loss_with_logits(case, collapse):
    """The same as from log-probabilities, and a graph that is kept can be gone through again."""
    ours, theirs = leaf(case.logits), leaf(case.logits)
    losses = ctc_loss_with_logits(ours, *case.arguments, blank=case.blank, collapse=collapse)
    expected = LOSSES[collapse](case.log_probs_of(theirs), *case.arguments, blank=case.blank)
    torch.testing.assert_close(losses, expected, rtol=0, atol=1e-10)
    weights = torch.rand_like(losses)
    for _ in range(2):
        torch.testing.assert_close(
            torch.autograd.grad(losses, ours, weights, retain_graph=True),
            torch.autograd.grad(expected, theirs, weights, retain_graph=True),
            rtol=0,
            atol=1e-10,
        )


def check_best_alignment(case, collapse):
    paths, scores = best_alignment(case.log_probs, *case.arguments, blank=case.blank, collapse=collapse)
    for b, length in enumerate(case.input_lengths.tolist()):
        log_probs = case.log_probs[b, :length]
        best = oracle.best_score(log_probs, case.target(b), case.blank, collapse)
        torch.testing.assert_close(scores[b], best, rtol=0, atol=1e-10)
        assert (paths[b, length:] == case.blank).all()
        if best.isinf():
            assert (paths[b] == case.blank).all()
        else:
            path = paths[b, :length]
            assert collapse_path(path, blank=case.blank, collapse=collapse) == case.target(b)
            own_score = log_probs[torch.arange(length), path].sum()
            torch.testing.assert_close(own_score, best, rtol=0, atol=1e-10)


@both_collapses
@pytest.mark.parametrize(("positions", "vocabulary"), SHAPES)
def test_random_cases(positions, vocabulary, collapse):
    for seed in range(12):
        case = random_case(
            seed, batch=16, positions=positions, vocabulary=vocabulary, longest=seed % 5, zeros=seed % 3 == 2
        )
        check_loss(case, collapse)
        check_loss_with_logits(case, collapse)
        check_best_alignment(case, collapse)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(SHAPES), st.integers(0, 6), st.booleans(), st.sampled_from(list(LOSSES)))
def test_any_case(seed, shape, longest, zeros, collapse):
    case = random_case(seed, batch=3, positions=shape[0], vocabulary=shape[1], longest=longest, zeros=zeros)
    check_loss(case, collapse)
    check_loss_with_logits(case, collapse)
    check_best_alignment(case, collapse)


def test_ctc_equals_torch():
    for seed in range(10):
        case = random_case(seed, batch=20, positions=40, vocabulary=12, longest=18)
        mine, torchs = leaf(case.logits.nan_to_num(0.0)), leaf(case.logits.nan_to_num(0.0))
        losses = ctc_loss(mine.log_softmax(-1), *case.arguments, blank=case.blank)
        expected = torch.nn.functional.ctc_loss(
            torchs.log_softmax(-1).transpose(0, 1),
            case.targets.clamp(min=0),
            case.input_lengths,
            case.target_lengths,
            blank=case.blank,
            reduction="none",
        )
        torch.testing.assert_close(losses, expected, rtol=0, atol=1e-10)
        assert losses.isinf().any()
        finite = losses.isfinite()
        losses.sum().backward()
        expected[finite].sum().backward()
        torch.testing.assert_close(mine.grad[finite], torchs.grad[finite], rtol=0, atol=1e-10)
        assert not mine.grad[~finite].any()


@both_collapses
@pytest.mark.parametrize("offset", [1e3, 1e8])
def test_what_all_logits_share_changes_nothing(collapse, offset):
    logits = 2.0 ** torch.arange(3, 9).repeat(1, 6, 1)  # steps that float32 has beside any of the offsets
    arguments = (torch.tensor([[1, 2, 2]]), torch.tensor([6]), torch.tensor([3]))
    plain, shifted = (
        ctc_loss_with_logits(of, *arguments, blank=5, collapse=collapse) for of in (logits, logits + offset)
    )
    torch.testing.assert_close(shifted, plain, rtol=0, atol=0)


@both_collapses
def test_logits_need_not_be_contiguous_nor_want_a_gradient(collapse):
    case = random_case(3, batch=5, positions=7, vocabulary=6, longest=3)
    case.logits[torch.arange(7) >= case.input_lengths[:, None]] = torch.nan
    options = {"blank": case.blank, "collapse": collapse}
    expected = leaf(case.logits)
    losses = ctc_loss_with_logits(expected, *case.arguments, **options)
    losses[losses.isfinite()].sum().backward()
    for order in ((1, 0, 2), (2, 1, 0), (0, 2, 1)):
        logits = leaf(case.logits.permute(order).contiguous()).permute(order)
        logits.retain_grad()
        found = ctc_loss_with_logits(logits, *case.arguments, **options)
        torch.testing.assert_close(found, losses)
        found[found.isfinite()].sum().backward()
        torch.testing.assert_close(logits.grad, expected.grad)
    with torch.no_grad():
        torch.testing.assert_close(ctc_loss_with_logits(expected, *case.arguments, **options), losses.detach())
