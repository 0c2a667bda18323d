"""The latent-alignment model: several output positions per source token, among whose tokens is a blank."""

from torch import Tensor

from nmla.models.transformer import Glance, Output, ParallelTransformer


class CTCTransformer(ParallelTransformer):
    """Source tokens to logits over the vocabulary for all output positions in one pass.

    The families "ctc" and "sctc" are the same network; how a path becomes a sentence is another matter.
    """

    def forward(self, source_BS: Tensor, source_lengths_B: Tensor, glance: Glance | None = None) -> Output:
        memory = self.encode(source_BS, source_lengths_B)
        lengths_B = source_lengths_B * self.config.upsample
        logits, revealed = self.fill(memory, lengths_B, source_BS.shape[1] * self.config.upsample, glance)
        return Output(logits, lengths_B, revealed=revealed)
