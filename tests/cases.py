"""Random small problems for the losses: ragged lengths, repeats, any blank, garbage in the padding."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

GARBAGE = -(10**9)


@dataclass(frozen=True)
class Case:
    logits: Tensor  # (B, T, V) float64, NaN in the padding
    targets: Tensor  # (B, L) or (B, R, L), GARBAGE in the padding
    input_lengths: Tensor
    target_lengths: Tensor
    blank: int

    def log_probs_of(self, logits: Tensor) -> Tensor:
        """Log-probabilities with NaN in the padding, through which no gradient passes back to make NaN of zero."""
        padding = torch.arange(logits.shape[1]) >= self.input_lengths[:, None]
        return logits.masked_fill(padding[..., None], 0.0).log_softmax(-1).masked_fill(padding[..., None], torch.nan)

    @property
    def log_probs(self) -> Tensor:
        return self.log_probs_of(self.logits)

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.targets, self.input_lengths, self.target_lengths

    def references(self, b: int) -> list[list[int]]:
        targets, lengths = self.targets[b], self.target_lengths[b]
        if targets.dim() == 1:
            targets, lengths = targets[None], lengths[None]
        return [row[:length].tolist() for row, length in zip(targets, lengths.tolist(), strict=True)]

    def target(self, b: int) -> list[int]:
        return self.references(b)[0]


def random_case(
    seed: int,
    *,
    batch: int = 8,
    positions: int = 5,
    vocabulary: int = 4,
    longest: int = 5,
    references: int | None = None,
    zeros: bool = False,
) -> Case:
    """``zeros`` forbids some tokens at some positions: p = 0."""
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    blank = int(integers(0, vocabulary, 1))
    sharpness = torch.rand(batch, 1, 1, generator=generator, dtype=torch.float64) * 4
    logits = torch.randn(batch, positions, vocabulary, generator=generator, dtype=torch.float64) * sharpness
    if zeros:
        forbidden = torch.rand(batch, positions, vocabulary, generator=generator) < 0.3
        forbidden.scatter_(2, logits.argmax(-1, keepdim=True), False)
        logits = logits.masked_fill(forbidden, -torch.inf)
    input_lengths = integers(0, positions + 1, batch)
    logits[torch.arange(positions) >= input_lengths[:, None]] = torch.nan
    shape = (batch,) if references is None else (batch, references)
    target_lengths = integers(0, longest + 1, *shape)
    targets = integers(0, vocabulary - 1, *shape, longest)
    targets += targets >= blank
    targets[torch.arange(longest) >= target_lengths[..., None]] = GARBAGE
    return Case(logits, targets, input_lengths, target_lengths, blank)


def leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_()


def assert_equals_oracle(case: Case, loss_B: Tensor, oracle: Callable[[Tensor, int], Tensor], logits: Tensor) -> None:
    """The losses and their gradients for the logits equal ``oracle(log_probs_TV, b)`` to 1e-10, sentence by sentence.

    Where the oracle is infinite so is the loss, and its gradient is 0. Where the oracle is a constant the gradient is
    not compared. The gradient in the padding is exactly 0.
    """
    (grad,) = torch.autograd.grad(loss_B.sum(), logits)
    for b, length in enumerate(case.input_lengths.tolist()):
        sentence = leaf(case.logits[b, :length])
        expected = oracle(sentence.log_softmax(-1), b)
        torch.testing.assert_close(loss_B[b].detach(), expected.detach(), rtol=0, atol=1e-10)
        assert not grad[b, length:].any(), "padding has a gradient"
        if expected.isinf():
            assert not grad[b].any()
        elif expected.requires_grad:
            (expected_grad,) = torch.autograd.grad(expected, sentence)
            torch.testing.assert_close(grad[b, :length], expected_grad.nan_to_num(), rtol=0, atol=1e-10)
