"""The vanilla non-autoregressive model: it decides on the output's length, then writes one token a position."""

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
            output_lengths_B = (length_logits.argmax(-1) - LENGTH_CLASSES // 2 + source_lengths_B).clamp(min=1)
            if self.decoder_positions is not None:
                output_lengths_B = output_lengths_B.clamp(max=self.config.max_positions)
        logits, revealed = self.fill(memory, output_lengths_B, max(int(output_lengths_B.max()), 1), glance)
        return Output(logits, output_lengths_B, length_logits, revealed)

    def length_logits(self, memory: Memory) -> Tensor:
        """``(B, 256)`` from the mean of the encoder's states."""
        states = memory.states.masked_fill(~memory.keep[..., None], 0.0)
        return self.length(states.sum(1) / memory.lengths[:, None])
