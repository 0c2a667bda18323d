"""The vanilla non-autoregressive model: it decides on the output's length, then writes one token a position."""

import torch
from torch import Tensor, nn

from nmla.config import ModelConfig
from nmla.models.transformer import Glance, Memory, Output, ParallelTransformer

LENGTH_CLASSES = 256  # of the output's length minus the source's, from -128 to 127


class FixedLengthTransformer(ParallelTransformer):
    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__(config, vocab_size)
        self.length = nn.Linear(config.d_model, LENGTH_CLASSES)
        nn.init.zeros_(self.length.bias)

    def forward(
        self,
        source_BS: Tensor,
        source_lengths_B: Tensor,
        output_lengths_B: Tensor | None = None,
        glance: Glance | None = None,
    ) -> Output:
        """Without lengths to fill, as in training, the most probable ones are taken, of at least one token."""
        memory = self.encode(source_BS, source_lengths_B)
        length_logits = self.length_logits(memory)
        if output_lengths_B is None:
            output_lengths_B = self._likeliest(length_logits, source_lengths_B, 1)[:, 0]
        logits, revealed = self.fill(memory, output_lengths_B, max(int(output_lengths_B.max()), 1), glance)
        return Output(logits, output_lengths_B, length_logits, revealed)

    def of_several_lengths(self, source_BS: Tensor, source_lengths_B: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Logits ``(B K, T, V)`` of the K likeliest lengths of each source, and these ``(B K,)``.

        The encoder runs once. K is `count`, or as many lengths as all the sources can have.
        """
        memory = self.encode(source_BS, source_lengths_B)
        lengths_BK = self._likeliest(self.length_logits(memory), source_lengths_B, count)
        each = Memory(*(of.repeat_interleave(lengths_BK.shape[1], 0) for of in memory))
        lengths = lengths_BK.flatten()
        return self.fill(each, lengths, int(lengths.max()), None)[0], lengths

    def _likeliest(self, length_logits: Tensor, source_lengths_B: Tensor, count: int) -> Tensor:
        """``(B, K)``, the likeliest first."""
        lengths = torch.arange(LENGTH_CLASSES, device=length_logits.device) - LENGTH_CLASSES // 2
        lengths = lengths + source_lengths_B[:, None]
        most = self.config.max_positions if self.decoder_positions is not None else lengths.max()
        can_be = (lengths >= 1) & (lengths <= most)
        count = min(count, int(can_be.sum(-1).min()))
        best = length_logits.masked_fill(~can_be, -torch.inf).topk(count).indices
        return lengths.gather(1, best)

    def length_logits(self, memory: Memory) -> Tensor:
        """``(B, 256)`` from the mean of the encoder's states."""
        states = memory.states.masked_fill(~memory.keep[..., None], 0.0)
        return self.length(states.sum(1) / memory.lengths[:, None])
