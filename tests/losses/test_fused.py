"""The losses from logits and from decoder states are the loss on log-probabilities, with its gradients."""

import pytest
import torch

from cases import leaf, random_case
from nmla.losses import fused_ngram_matching_loss, ngram_matching_loss, ngram_matching_loss_with_logits
from nmla.losses.sweep import Sweep

cases = pytest.mark.parametrize(
    ("collapse", "n", "references", "exact_total"),
    [
        (collapse, n, r, exact)
        for collapse in ("ctc", "sctc")
        for n, r, exact in [(1, 2, True), (2, None, True), (3, 2, False), (4, None, True)]
    ],
)


def larger_case(seed, references):
    case = random_case(seed, batch=7, positions=24, vocabulary=40, longest=9, references=references)
    # Outputs of few tokens are likely in some sentences and out of the question in others.
    case.logits[1:3, :, case.blank] += 4
    case.logits[3:5, :, case.blank] -= 20
    return case


@cases
def test_from_hidden(collapse, n, references, exact_total, monkeypatch):
    """The same whether sentences are weighted alike or not, and however many are taken at a time."""
    case = larger_case(n, references)
    options = {"blank": case.blank, "n": n, "collapse": collapse, "exact_total": exact_total, "recall_weight": n / 2}
    padding = case.logits.isnan().any(-1, keepdim=True)
    hidden = torch.randn(7, 24, 6, dtype=torch.float64)
    garbage = leaf(hidden.masked_fill(padding, torch.nan))
    hidden, weight = leaf(hidden), leaf(torch.randn(40, 6, dtype=torch.float64))
    bias = leaf(case.logits[0, 0].nan_to_num(0.0))
    parameters = [weight, bias]
    expected = ngram_matching_loss((hidden @ weight.t() + bias).log_softmax(-1), *case.arguments, **options)
    for elements in (1, 2000, 10**9):
        monkeypatch.setattr("nmla.losses.fused._ELEMENTS", elements)
        losses = fused_ngram_matching_loss(garbage, *parameters, *case.arguments, **options)
        torch.testing.assert_close(losses, expected, rtol=0, atol=1e-12)
        for weights in (torch.full_like(expected, 0.3), torch.rand_like(expected)):
            theirs = torch.autograd.grad(expected, [hidden, *parameters], weights, retain_graph=True)
            ours = torch.autograd.grad(losses, [garbage, *parameters], weights, retain_graph=True)
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
            assert not ours[0][padding.expand_as(ours[0])].any()


def test_from_hidden_without_bias():
    case = larger_case(0, None)
    hidden, weight = torch.randn(7, 24, 6), leaf(torch.randn(40, 6))
    losses = fused_ngram_matching_loss(hidden, weight, None, *case.arguments, blank=case.blank)
    losses.sum().backward()
    expected = ngram_matching_loss((hidden @ weight.t()).log_softmax(-1), *case.arguments, blank=case.blank)
    torch.testing.assert_close(losses, expected)
    (grad,) = torch.autograd.grad(expected.sum(), weight)
    torch.testing.assert_close(weight.grad, grad)


def unfused(hidden, weight, bias, *arguments, **options):
    return ngram_matching_loss_with_logits(torch.nn.functional.linear(hidden, weight, bias), *arguments, **options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_loses_no_more_than_the_unfused_head(dtype):
    """With the loss scaled, as in float16 it must be: unscaled, most of the logits' gradient is too small for it."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, 60, 16), (2000, 16), (2000,)]
    tensors = [(torch.randn(shape, generator=generator) / 4).to(dtype) for shape in shapes]
    arguments = torch.randint(1, 2000, (4, 20), generator=generator), torch.full((4,), 60), torch.full((4,), 20)

    def gradients(loss, dtype, scale):
        inputs = [leaf(tensor.to(dtype)) for tensor in tensors]
        scaled = scale * loss(*inputs, *arguments, blank=0).mean()
        return [grad.double() / scale for grad in torch.autograd.grad(scaled, inputs)]

    truth = gradients(unfused, torch.float64, 1)
    ours, theirs = (gradients(loss, dtype, 65536) for loss in (fused_ngram_matching_loss, unfused))
    for true, our, their in zip(truth, ours, theirs, strict=True):
        assert (our - true).norm() <= 1.3 * (their - true).norm()
        assert (our - true).norm() <= 0.02 * true.norm()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_no_gradient_is_made_where_none_is_recorded(mode, monkeypatch):
    case = larger_case(0, None)
    hidden, weight, bias = torch.randn(7, 24, 6), leaf(torch.randn(40, 6)), leaf(torch.randn(40))
    logits = leaf(hidden @ weight.t() + bias)
    expected = ngram_matching_loss_with_logits(logits, *case.arguments, blank=case.blank).detach()

    def loss(self, *, derivatives, original=Sweep.loss):
        assert not derivatives
        return original(self, derivatives=derivatives)

    monkeypatch.setattr(Sweep, "loss", loss)
    with mode():
        from_logits = ngram_matching_loss_with_logits(logits, *case.arguments, blank=case.blank)
        from_hidden = fused_ngram_matching_loss(hidden * 1, weight, bias, *case.arguments, blank=case.blank)
        for losses in (from_logits, from_hidden):
            assert not losses.requires_grad
            torch.testing.assert_close(losses, expected)


@cases
@pytest.mark.parametrize("rows", [1, 5, 100])
def test_from_logits(collapse, n, references, exact_total, rows, monkeypatch):
    """The same however many positions are taken at a time."""
    monkeypatch.setattr("nmla.losses.sweep._BLOCK", 40 * rows)
    case = larger_case(n, references)
    options = {"blank": case.blank, "n": n, "collapse": collapse, "exact_total": exact_total}
    ours, theirs = leaf(case.logits), leaf(case.logits)
    losses = ngram_matching_loss_with_logits(ours, *case.arguments, **options)
    expected = ngram_matching_loss(case.log_probs_of(theirs), *case.arguments, **options)
    torch.testing.assert_close(losses, expected, rtol=0, atol=1e-12)
    weights = torch.rand_like(losses)
    for _ in range(2):  # a graph that is kept can be gone through again
        torch.testing.assert_close(
            torch.autograd.grad(losses, ours, weights, retain_graph=True),
            torch.autograd.grad(expected, theirs, weights, retain_graph=True),
            rtol=0,
            atol=1e-12,
        )


def test_logits_need_not_be_contiguous_nor_want_a_gradient():
    case = larger_case(0, None)
    logits = case.logits.transpose(0, 1).contiguous().transpose(0, 1)
    losses = ngram_matching_loss_with_logits(logits, *case.arguments, blank=case.blank, n=3)
    assert not losses.requires_grad
    expected = ngram_matching_loss(case.log_probs, *case.arguments, blank=case.blank, n=3)
    torch.testing.assert_close(losses, expected, rtol=0, atol=1e-12)
