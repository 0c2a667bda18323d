"""Word by word, the most probable next token, in plain torch: what CTranslate2's decoding is held against."""

import torch
from torch import Tensor

from nmla.decoding.ctranslate import longest_output
from nmla.models.autoregressive import AutoregressiveTransformer
from nmla.text.tokenizer import EOS


@torch.no_grad()
def greedy_decode(
    model: AutoregressiveTransformer, source_BS: Tensor, source_lengths_B: Tensor
) -> tuple[list[list[int]], list[float]]:
    """The tokens of each translation, and the logarithm of its probability, that of its end included."""
    outputs: list[list[int]] = []
    scores: list[float] = []
    for source_S, length in zip(source_BS, source_lengths_B.tolist(), strict=True):
        most = longest_output(length)
        if model.decoder_positions is not None:
            most = min(most, model.config.max_positions - 1)
        output: list[int] = []
        score = 0.0
        while len(output) < most:
            target, words = torch.tensor([output], dtype=torch.long), torch.tensor([len(output)])
            logits = model(source_S[None, :length], torch.tensor([length]), target, words).logits[0, -1]
            best, token = logits.float().log_softmax(-1).max(-1)
            score += float(best)
            if token == EOS:
                break
            output.append(int(token))
        outputs.append(output)
        scores.append(score)
    return outputs, scores
