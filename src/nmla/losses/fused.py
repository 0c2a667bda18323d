"""The n-gram matching loss straight from logits, or from decoder states: softmax, loss and gradient in one sweep."""

from typing import Any

import torch
from torch import Tensor

from .inputs import check_scores, in_use
from .sweep import Problem, Sweep, checked_problem

# Elements of the (sentences, T, V) logits that the fused loss holds at once: few sentences, but no small products.
_ELEMENTS = 2**22


def ngram_matching_loss_with_logits(
    logits: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    *,
    blank: int,
    n: int = 2,
    collapse: str = "ctc",
    exact_total: bool = True,
    recall_weight: float = 1.0,
) -> Tensor:
    r""":func:`ngram_matching_loss` of ``log_softmax(logits)`` in less time and memory: what training uses.

    The gradient is the only tensor of the logits' size that is made. It cannot be differentiated again.

    Args:
        logits: ``(B, T, V)``, any real numbers; -inf for a token that cannot occur.
        targets, input_lengths, target_lengths, blank, n, collapse, exact_total, recall_weight: as in
            :func:`ngram_matching_loss`.

    Returns:
        ``(B,)`` losses in [-1, 0]; float32 where the logits are of half precision.

    Example:
        >>> logits = torch.zeros(1, 2, 2, requires_grad=True)  # two positions, token 1 or blank 0
        >>> loss = ngram_matching_loss_with_logits(
        ...     logits, torch.tensor([[1]]), torch.tensor([2]), torch.tensor([1]), blank=0, n=1)
        >>> loss.detach()                                # 1 is expected 3/4 times: F1 = 2 * .75 / (1 + .75)
        tensor([-0.8571])
        >>> loss.sum().backward()
        >>> logits.grad[0, 0]
        tensor([ 0.0816, -0.0816])
    """
    input_lengths = check_scores("logits", logits, input_lengths)
    problem = checked_problem(
        logits, logits.shape[-1], targets, input_lengths, target_lengths, blank, n, collapse, exact_total, recall_weight
    )
    loss_B: Tensor = _FromLogits.apply(*_to_differentiate(logits), problem)
    return loss_B


def fused_ngram_matching_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    *,
    blank: int,
    n: int = 2,
    collapse: str = "ctc",
    exact_total: bool = True,
    recall_weight: float = 1.0,
) -> Tensor:
    r""":func:`ngram_matching_loss_with_logits` of ``hidden @ weight.T + bias``, a few sentences at a time.

    The ``(B, T, V)`` logits never exist, so memory does not grow with the batch but by the states' own gradient.
    Gradients are made along with the loss, as if all sentences were to weigh the same (a sum or a mean); when they turn
    out not to, they are made again, which doubles the time. In float16 they are made backwards only, where the scale of
    the loss that keeps them from becoming 0 is known, at the price of making the logits twice.

    Args:
        hidden: ``(B, T, D)`` decoder states.
        weight: ``(V, D)`` output matrix.
        bias: ``(V,)`` or None.
        targets, input_lengths, target_lengths, blank, n, collapse, exact_total, recall_weight: as in
            :func:`ngram_matching_loss`.

    Returns:
        ``(B,)`` losses in [-1, 0], differentiable in ``hidden``, ``weight`` and ``bias``; float32 where ``hidden`` is
        of half precision.

    Example:
        >>> states, matrix = torch.eye(3)[None], 9 * torch.eye(3)    # three positions: blank 0, then 1, then 2
        >>> fused_ngram_matching_loss(
        ...     states, matrix, None, torch.tensor([[1, 2]]), torch.tensor([3]), torch.tensor([2]), blank=0)
        tensor([-0.9997])
    """
    input_lengths = check_scores("hidden", hidden, input_lengths)
    vocabulary = weight.shape[0]
    if weight.shape != (vocabulary, hidden.shape[2]):
        raise ValueError(f"weight must be (V, {hidden.shape[2]}), but is {tuple(weight.shape)}")
    if bias is not None and bias.shape != (vocabulary,):
        raise ValueError(f"bias must be ({vocabulary},) or None, but is {tuple(bias.shape)}")
    problem = checked_problem(
        hidden, vocabulary, targets, input_lengths, target_lengths, blank, n, collapse, exact_total, recall_weight
    )
    loss_B: Tensor = _FromHidden.apply(*_to_differentiate(hidden, weight, bias), problem)
    return loss_B


def _to_differentiate(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """The tensors, cut off where no gradient is recorded: ``needs_input_grad`` knows nothing of ``torch.no_grad``."""
    if torch.is_grad_enabled():
        return tensors
    return tuple(None if tensor is None else tensor.detach() for tensor in tensors)


class _FromLogits(torch.autograd.Function):
    """The probabilities made forward become the gradient backward: no other tensor of the logits' size is needed."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, problem: Problem) -> Tensor:
        batch, positions, vocabulary = logits.shape
        sweep = Sweep(problem, vocabulary)
        wanted = ctx.needs_input_grad[0]
        probs_BTV = problem.reference_BG.new_empty(batch if wanted else 1, positions, vocabulary)

        def make(b: int) -> Tensor:
            return _softmax(logits, problem, b, probs_BTV[b if wanted else 0])

        for b in range(batch):
            sweep.read(b, make(b))
        sweep.finish_reading(make)
        ctx.save_for_backward(logits)
        ctx.sweep, ctx.probs_BTV = sweep, probs_BTV if wanted else None
        return sweep.loss(derivatives=wanted)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_B: Tensor) -> tuple[Tensor, None]:
        (logits,) = ctx.saved_tensors
        sweep: Sweep = ctx.sweep
        grad_BTV, ctx.probs_BTV = ctx.probs_BTV, None  # written over: they can be used once
        if grad_BTV is None:
            grad_BTV = torch.empty_like(logits, dtype=grad_B.dtype, memory_format=torch.contiguous_format)
            for b in range(len(logits)):
                _softmax(logits, sweep.problem, b, grad_BTV[b])
        sweep.weigh(grad_B)
        for b, used in enumerate(sweep.problem.lengths):
            sweep.write(b, grad_BTV[b, :used])
            grad_BTV[b, used:] = 0
        return grad_BTV.to(logits.dtype), None


def _softmax(logits: Tensor, problem: Problem, b: int, out_TV: Tensor) -> Tensor:
    """A sentence's probabilities at the positions in use."""
    used = problem.lengths[b]
    return torch.softmax(logits[b, :used], -1, dtype=out_TV.dtype, out=out_TV[:used])


class _FromHidden(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, problem: Problem) -> Tensor:
        loss_B = problem.reference_BG.new_empty(hidden.shape[0])
        alike_B = torch.ones_like(loss_B)
        in_float16 = any(tensor is not None and tensor.dtype == torch.float16 for tensor in (hidden, weight, bias))
        wanted = (False, False, False) if in_float16 else ctx.needs_input_grad
        gradients = _sweep_head(hidden, weight, bias, problem, loss_B, alike_B, wanted)
        ctx.gradients = None if in_float16 else gradients
        ctx.save_for_backward(hidden, weight, bias)
        ctx.problem = problem
        return loss_B

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_B: Tensor) -> tuple[Tensor | None, ...]:
        # Scaled in place: they can be used once.
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is not None and (grad_B == grad_B[:1]).all():
            for grad in gradients:
                if grad is not None:
                    grad *= grad_B[:1].sum()  # of none: 0
        else:
            loss_B = torch.empty_like(grad_B)
            hidden, weight, bias = ctx.saved_tensors
            gradients = _sweep_head(hidden, weight, bias, ctx.problem, loss_B, grad_B, ctx.needs_input_grad)
        return *gradients, None


def _sweep_head(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    problem: Problem,
    loss_B: Tensor,
    weight_B: Tensor,
    wanted: tuple[bool, ...],
) -> list[Tensor | None]:
    """Fill ``loss_B``; return the gradients that are wanted of the losses' sum, weighted by ``weight_B``."""
    batch, positions, _ = hidden.shape
    vocabulary = weight.shape[0]
    d_hidden = torch.zeros_like(hidden) if wanted[0] else None
    d_weight = torch.zeros_like(weight, dtype=loss_B.dtype) if wanted[1] else None
    d_bias = torch.zeros_like(bias, dtype=loss_B.dtype) if bias is not None and wanted[2] else None
    # The products are made in the type of the states, all else in full precision, whatever autocast would choose.
    matrix_VD, bias_V = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
    sentences = max(1, min(batch, _ELEMENTS // max(1, positions * vocabulary)))
    logits = hidden.new_empty(sentences * positions, vocabulary)
    probs = loss_B.new_empty(sentences * positions, vocabulary)
    for start in range(0, batch, sentences):
        part = slice(start, start + sentences)
        sweep = Sweep(problem.part(part), vocabulary)
        lengths = problem.lengths[part]
        used_ST = in_use(torch.tensor(lengths, device=hidden.device), positions)
        rows_ND = hidden[part][used_ST]
        with torch.autocast(hidden.device.type, enabled=False):
            logits_NV = torch.mm(rows_ND, matrix_VD.t(), out=logits[: len(rows_ND)])
        if bias_V is not None:
            logits_NV += bias_V
        grad_NV = torch.softmax(logits_NV, -1, dtype=probs.dtype, out=probs[: len(rows_ND)])  # probabilities so far
        probs_TVs = grad_NV.split(lengths)
        for s, probs_TV in enumerate(probs_TVs):
            sweep.read(s, probs_TV)
        sweep.finish_reading(probs_TVs.__getitem__)
        loss_B[part] = sweep.loss(derivatives=any(wanted))
        if not any(wanted):
            continue
        sweep.weigh(weight_B[part])
        for s, probs_TV in enumerate(probs_TVs):
            sweep.write(s, probs_TV)
        if d_bias is not None:
            d_bias += grad_NV.sum(0)
        grad_NV = grad_NV.to(hidden.dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            if d_hidden is not None:
                d_hidden[part][used_ST] = grad_NV @ matrix_VD
            if d_weight is not None:
                if d_weight.dtype == hidden.dtype:
                    d_weight.addmm_(grad_NV.t(), rows_ND)
                else:
                    d_weight += grad_NV.t() @ rows_ND
    return [
        d_hidden,
        None if d_weight is None else d_weight.to(weight.dtype),
        None if d_bias is None or bias is None else d_bias.to(bias.dtype),
    ]
