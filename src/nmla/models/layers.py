"""The parts that every model is made of: attention, feed-forward, pre-norm layers, positions.

Lengths travel with every tensor and become masks, so that padding never changes what stands at a real position.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def length_mask(lengths_B: Tensor, size: int) -> Tensor:
    """``(B, size)``, true where a position is in use."""
    return torch.arange(size, device=lengths_B.device) < lengths_B[:, None]


def sinusoidal_positions(size: int, width: int, like: Tensor) -> Tensor:
    """``(size, width)`` sines and cosines of each position; no table, so no longest sentence."""
    frequencies = torch.exp(torch.arange(0, width, 2, device=like.device) * (-math.log(10000.0) / width))
    angles = torch.arange(size, device=like.device)[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=-1).to(like.dtype)


class Attention(nn.Module):
    """Multi-head attention from queries to a memory, of which only what `keep_BS` marks is seen."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.output = nn.Linear(width, width)
        self.dropout = 0.0

    def forward(self, queries_BTD: Tensor, memory_BSD: Tensor, keep_BS: Tensor) -> Tensor:
        def split(x: Tensor) -> Tensor:
            return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

        key, value = self.key_value(memory_BSD).chunk(2, dim=-1)
        mixed = F.scaled_dot_product_attention(
            split(self.query(queries_BTD)),
            split(key),
            split(value),
            attn_mask=keep_BS[:, None, None, :],
            dropout_p=self.dropout if self.training else 0.0,
        )
        return self.output(mixed.transpose(1, 2).flatten(-2))


class Layer(nn.Module):
    """A pre-norm Transformer layer; with `cross`, it also attends to the encoder. No causal mask: all words at once."""

    def __init__(self, width: int, heads: int, feed_forward: int, cross: bool) -> None:
        super().__init__()
        self.self_norm = nn.LayerNorm(width)
        self.self_attention = Attention(width, heads)
        self.cross_norm = nn.LayerNorm(width) if cross else None
        self.cross_attention = Attention(width, heads) if cross else None
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(nn.Linear(width, feed_forward), nn.ReLU(), nn.Linear(feed_forward, width))
        self.dropout = nn.Dropout(0.0)

    def forward(
        self, x: Tensor, keep: Tensor, memory: Tensor | None = None, memory_keep: Tensor | None = None
    ) -> Tensor:
        normed = self.self_norm(x)
        x = x + self.dropout(self.self_attention(normed, normed, keep))
        if self.cross_attention is not None and self.cross_norm is not None:
            x = x + self.dropout(self.cross_attention(self.cross_norm(x), memory, memory_keep))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


def set_dropout(model: nn.Module, rate: float) -> None:
    """Dropout is a setting of a training stage, not of a model."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = rate
        elif isinstance(module, Attention):
            module.dropout = rate


def initialise(model: nn.Module, width: int) -> None:
    """Xavier for matrices, a normal scaled by the width for embeddings, zero for biases."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=width**-0.5)
