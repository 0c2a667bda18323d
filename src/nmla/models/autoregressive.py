"""The autoregressive model, the teacher: each word sees those before it."""

from torch import Tensor

from nmla.models.transformer import Output, Transformer
from nmla.text.tokenizer import BOS


class AutoregressiveTransformer(Transformer):
    def forward(self, source_BS: Tensor, source_lengths_B: Tensor, target_BL: Tensor, lengths_B: Tensor) -> Output:
        """Logits ``(B, L + 1, V)`` of each target token given those before it, and of the end after the last."""
        memory = self.encode(source_BS, source_lengths_B)
        before_BT = target_BL.new_full((len(target_BL), target_BL.shape[1] + 1), BOS)
        before_BT[:, 1:] = target_BL
        return Output(self.decode(self.embed(before_BT), None, memory), lengths_B + 1)
