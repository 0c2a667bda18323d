"""Word by word, the most probable next token, in plain torch: what CTranslate2's decoding is held against."""

import torch
from torch import Tensor

from nmla.models.autoregressive import AutoregressiveTransformer
from nmla.models.layers import Cache
from nmla.text.tokenizer import BOS, EOS


def longest_output(source_tokens: int) -> int:
    """How many tokens a translation may have before it is stopped; alike for sources of like length."""
    return 2 * (-source_tokens // 8 * -8) + 20


@torch.inference_mode()
def greedy_decode(
    model: AutoregressiveTransformer, source_BS: Tensor, source_lengths_B: Tensor
) -> tuple[list[list[int]], list[float]]:
    """The tokens of each translation, and the logarithm of its probability, that of its end included."""
    memory = model.encode(source_BS, source_lengths_B)
    most_B = torch.tensor([longest_output(length) for length in source_lengths_B.tolist()], device=source_BS.device)
    if model.decoder_positions is not None:
        most_B = most_B.clamp(max=model.config.max_positions - 1)
    outputs: list[list[int]] = [[] for _ in source_BS]
    score_B = torch.zeros(len(source_BS), dtype=torch.float64, device=source_BS.device)
    row_A = torch.arange(len(source_BS), device=source_BS.device)  # the sentences that are not finished
    token_A = torch.full_like(row_A, BOS)
    cache: Cache = {}
    place = 0
    while len(row_A):
        best_A, token_A = model.step(token_A, place, memory, cache).float().log_softmax(-1).max(-1)
        score_B[row_A] += best_A
        place += 1
        for row, token in zip(row_A.tolist(), token_A.tolist(), strict=True):
            if token != EOS:
                outputs[row].append(token)
        going = (token_A != EOS) & (place < most_B[row_A])
        if not going.all():
            row_A, token_A = row_A[going], token_A[going]
            memory = memory._replace(states=memory.states[going], keep=memory.keep[going])
            cache = {module: states[going] for module, states in cache.items()}
    return outputs, score_B.tolist()
