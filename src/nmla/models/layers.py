"""The parts that every model is made of: attention, feed-forward, layers, positions.

Lengths travel with every tensor and become masks, so that padding never changes what stands at a real position.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext

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

    def forward(
        self, queries_BTD: Tensor, memory_BSD: Tensor, keep_BS: Tensor | None = None, causal: bool = False
    ) -> Tensor:
        def split(x: Tensor) -> Tensor:
            return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

        query = self.query(queries_BTD)
        key, value = self.key_value(memory_BSD).chunk(2, dim=-1)
        mixing = query.device.type == "cpu" and query.dtype == torch.bfloat16 and torch.is_autocast_enabled("cpu")
        if mixing:  # the gradient of attention takes a CPU seven times as long in half precision
            query, key, value = query.float(), key.float(), value.float()
        with torch.autocast("cpu", enabled=False) if mixing else nullcontext():
            mask = None if keep_BS is None else keep_BS[:, None, None, :]
            mixed = F.scaled_dot_product_attention(
                split(query), split(key), split(value), attn_mask=mask, is_causal=causal
            )
        return self.output(mixed.transpose(1, 2).flatten(-2))


class Layer(nn.Module):
    """A Transformer layer, normalised before or after each part; with `cross`, it also attends to the encoder."""

    def __init__(self, width: int, heads: int, feed_forward: int, cross: bool, pre_norm: bool) -> None:
        super().__init__()
        self.pre_norm = pre_norm
        self.self_norm = nn.LayerNorm(width)
        self.self_attention = Attention(width, heads)
        self.cross_norm = nn.LayerNorm(width) if cross else None
        self.cross_attention = Attention(width, heads) if cross else None
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(nn.Linear(width, feed_forward), nn.ReLU(), nn.Linear(feed_forward, width))
        self.dropout = nn.Dropout(0.0)

    def forward(
        self,
        x: Tensor,
        keep: Tensor | None,
        memory: Tensor | None = None,
        memory_keep: Tensor | None = None,
        causal: bool = False,
    ) -> Tensor:
        x = self._part(x, self.self_norm, lambda h: self.self_attention(h, h, keep, causal))
        if (attend := self.cross_attention) is not None and self.cross_norm is not None:
            x = self._part(x, self.cross_norm, lambda h: attend(h, memory, memory_keep))
        return self._part(x, self.feed_forward_norm, self.feed_forward)

    def _part(self, x: Tensor, norm: nn.Module, part: Callable[[Tensor], Tensor]) -> Tensor:
        if self.pre_norm:
            return x + self.dropout(part(norm(x)))
        return norm(x + self.dropout(part(x)))


def set_dropout(model: nn.Module, rate: float) -> None:
    """Dropout is a setting of a training stage, not of a model."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = rate


def initialise(model: nn.Module, width: int) -> None:
    """Xavier for matrices, a normal scaled by the width for embeddings, zero for biases."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=width**-0.5)
