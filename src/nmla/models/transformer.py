"""What every model family shares: one embedding, an encoder, a decoder, and the way from decoder states to logits."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nmla.config import ModelConfig
from nmla.models.layers import Layer, initialise, length_mask, sinusoidal_positions


class Output(NamedTuple):
    logits: Tensor  # (B, T, V)
    lengths: Tensor  # (B,) positions in use
    length_logits: Tensor | None = None  # (B, 256) of the output's length, in a family that must know it
    revealed: Tensor | None = None  # (B, T) true where glancing told the decoder the token


# From the logits (B, T, V) and lengths (B,) of a first pass, the token ids (B, T) that a second is told, or NOT_TOLD.
Glance = Callable[[Tensor, Tensor], Tensor]
NOT_TOLD = -1


class Memory(NamedTuple):
    """What the encoder made of the source."""

    states: Tensor  # (B, S, D)
    keep: Tensor  # (B, S) true where a position is in use
    lengths: Tensor  # (B,)


class Transformer(nn.Module):
    """Encoder and decoder over one vocabulary; the families differ in what the decoder is given and may see."""

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.config = config
        width, pre_norm = config.d_model, config.norm == "pre"
        self.embedding = nn.Embedding(vocab_size, width)  # of both languages, and the output matrix
        self.encoder = nn.ModuleList(
            Layer(width, config.heads, config.feed_forward, cross=False, pre_norm=pre_norm)
            for _ in range(config.encoder_layers)
        )
        self.decoder = nn.ModuleList(
            Layer(width, config.heads, config.feed_forward, cross=True, pre_norm=pre_norm)
            for _ in range(config.decoder_layers)
        )
        # After each part there is a norm already; before each part, the last one's sum has none yet.
        self.encoder_norm = nn.LayerNorm(width) if pre_norm else nn.Identity()
        self.decoder_norm = nn.LayerNorm(width) if pre_norm else nn.Identity()
        learned = config.positions == "learned"
        self.encoder_positions = nn.Embedding(config.max_positions, width) if learned else None
        self.decoder_positions = nn.Embedding(config.max_positions, width) if learned else None
        self.dropout = nn.Dropout(0.0)
        initialise(self, width)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens) * self.config.d_model**0.5

    def encode(self, source_BS: Tensor, source_lengths_B: Tensor) -> Memory:
        """Every source must have at least one token."""
        keep = length_mask(source_lengths_B, source_BS.shape[1])
        x = self._with_positions(self.embed(source_BS), self.encoder_positions)
        for layer in self.encoder:
            x = layer(x, keep)
        return Memory(self.encoder_norm(x), keep, source_lengths_B)

    def decode(self, x_BTD: Tensor, keep_BT: Tensor | None, memory: Memory) -> Tensor:
        """Logits ``(B, T, V)``. Without `keep_BT` no position sees a later one."""
        x = self._with_positions(x_BTD, self.decoder_positions)
        for layer in self.decoder:
            x = layer(x, keep_BT, memory.states, memory.keep, causal=keep_BT is None)
        return F.linear(self.decoder_norm(x), self.embedding.weight)

    def _with_positions(self, x: Tensor, table: nn.Embedding | None) -> Tensor:
        size, width = x.shape[1:]
        positions = sinusoidal_positions(size, width, like=x) if table is None else table.weight[:size]
        return self.dropout(x + positions)


class ParallelTransformer(Transformer):
    """A decoder that fills all positions at once, from encoder states stretched over them."""

    def fill(
        self, memory: Memory, output_lengths_B: Tensor, width: int, glance: Glance | None
    ) -> tuple[Tensor, Tensor | None]:
        """Logits ``(B, width, V)``, and which positions ``(B, width)`` were revealed, if `glance` chose any."""
        x = uniform_copy(memory.states, memory.lengths, output_lengths_B, width)
        keep = length_mask(output_lengths_B, x.shape[1])
        if glance is None:
            return self.decode(x, keep, memory), None
        devices = [x.device] if x.device.type == "cuda" else []
        # Both passes drop the same units: leaving the fork puts the random numbers back to where the first began.
        with torch.no_grad(), torch.random.fork_rng(devices):
            told_BT = glance(self.decode(x, keep, memory), output_lengths_B)
        revealed = told_BT != NOT_TOLD
        x = torch.where(revealed[..., None], self.embed(told_BT.clamp(min=0)).to(x.dtype), x)
        return self.decode(x, keep, memory), revealed


def uniform_copy(states_BSD: Tensor, lengths_B: Tensor, output_lengths_B: Tensor, width: int) -> Tensor:
    """Stretch each sentence of n states to m of `width` positions."""
    index_BT = copied_state(torch.arange(width, device=lengths_B.device), lengths_B[:, None], output_lengths_B[:, None])
    index_BT = index_BT.clamp(max=states_BSD.shape[1] - 1)  # only positions beyond the sentence reach this
    return states_BSD.gather(1, index_BT[..., None].expand(-1, -1, states_BSD.shape[2]))


def copied_state(position: Tensor, n: Tensor, m: Tensor) -> Tensor:
    """Which of n states position j of m takes: round(j (n - 1) / (m - 1))."""
    # In whole numbers, so that the choice never depends on rounding errors: round(a / b) = (2 a + b) // (2 b).
    span = (m - 1).clamp(min=1)
    return (2 * position * (n - 1) + span) // (2 * span)
