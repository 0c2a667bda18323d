"""Word by word, the most probable next token: how an autoregressive model writes."""

import torch
from torch import Tensor

from nmla.models.autoregressive import AutoregressiveTransformer
from nmla.models.layers import Cache
from nmla.text.tokenizer import BOS, EOS

LONGEST = 2  # times the source length, and SPARE more: where a translation that would never end is ended
SPARE = 20


def greedy_decode(
    model: AutoregressiveTransformer, source_BS: Tensor, source_lengths_B: Tensor
) -> tuple[list[list[int]], list[float], list[int]]:
    """The tokens of each translation, the entropy of its predictions in nats, and how many there were."""
    memory = model.encode(source_BS, source_lengths_B)
    most_B = LONGEST * source_lengths_B + SPARE
    if model.decoder_positions is not None:
        most_B = most_B.clamp(max=model.config.max_positions - 1)
    outputs: list[list[int]] = [[] for _ in source_BS]
    entropy_B = torch.zeros(len(source_BS), dtype=torch.float64)
    predictions = [0] * len(source_BS)
    row_A = torch.arange(len(source_BS), device=source_BS.device)  # the sentences that are not finished
    token_A = torch.full_like(row_A, BOS)
    cache: Cache = {}
    place = 0
    while len(row_A):
        logits_AV = model.step(token_A, place, memory, cache).float()
        token_A = logits_AV.argmax(-1)
        entropy_B[row_A.cpu()] += torch.special.entr(logits_AV.softmax(-1)).sum(-1).double().cpu()
        place += 1
        for row, token in zip(row_A.tolist(), token_A.tolist(), strict=True):
            predictions[row] = place
            if token != EOS:
                outputs[row].append(token)
        going = (token_A != EOS) & (place < most_B[row_A])
        if not going.all():
            row_A, token_A = row_A[going], token_A[going]
            memory = memory._replace(states=memory.states[going], keep=memory.keep[going])
            cache = {module: states[going] for module, states in cache.items()}
    return outputs, entropy_B.tolist(), predictions
