"""The non-autoregressive model: an encoder, and a decoder that fills all output positions at once."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nmla.config import ModelConfig
from nmla.models.layers import Layer, initialise, length_mask, sinusoidal_positions


class CTCTransformer(nn.Module):
    """Source tokens to logits over the vocabulary, blank among it, for all output positions in one pass."""

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.config = config
        width = config.d_model
        self.embedding = nn.Embedding(vocab_size, width)  # of the source, and the output matrix: one vocabulary
        self.encoder = nn.ModuleList(
            Layer(width, config.heads, config.feed_forward, cross=False) for _ in range(config.encoder_layers)
        )
        self.decoder = nn.ModuleList(
            Layer(width, config.heads, config.feed_forward, cross=True) for _ in range(config.decoder_layers)
        )
        self.encoder_norm = nn.LayerNorm(width)
        self.decoder_norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(0.0)
        initialise(self, width)

    def forward(self, source_BS: Tensor, source_lengths_B: Tensor) -> tuple[Tensor, Tensor]:
        """Logits ``(B, T, V)`` and the positions in use ``(B,)``; every source must have at least one token."""
        memory, memory_keep = self.encode(source_BS, source_lengths_B)
        x, lengths = uniform_copy(memory, source_lengths_B, self.config.upsample)
        x = self._with_positions(x)
        keep = length_mask(lengths, x.shape[1])
        for layer in self.decoder:
            x = layer(x, keep, memory, memory_keep)
        return F.linear(self.decoder_norm(x), self.embedding.weight), lengths

    def encode(self, source_BS: Tensor, source_lengths_B: Tensor) -> tuple[Tensor, Tensor]:
        keep = length_mask(source_lengths_B, source_BS.shape[1])
        x = self._with_positions(self.embedding(source_BS) * self.config.d_model**0.5)
        for layer in self.encoder:
            x = layer(x, keep)
        return self.encoder_norm(x), keep

    def _with_positions(self, x: Tensor) -> Tensor:
        return self.dropout(x + sinusoidal_positions(x.shape[1], x.shape[2], like=x))


def uniform_copy(states_BSD: Tensor, lengths_B: Tensor, upsample: int) -> tuple[Tensor, Tensor]:
    """Stretch each sentence of n states to m = upsample x n: position j takes state round(j (n - 1) / (m - 1))."""
    output_lengths_B = lengths_B * upsample
    position_T = torch.arange(states_BSD.shape[1] * upsample, device=lengths_B.device)
    # In whole numbers, so that the choice never depends on rounding errors: round(a / b) = (2 a + b) // (2 b).
    span_B1 = (output_lengths_B - 1).clamp(min=1)[:, None]
    index_BT = (2 * position_T * (lengths_B[:, None] - 1) + span_B1) // (2 * span_B1)
    index_BT = index_BT.clamp(max=states_BSD.shape[1] - 1)  # only positions beyond the sentence reach this
    return states_BSD.gather(1, index_BT[..., None].expand(-1, -1, states_BSD.shape[2])), output_lengths_B
