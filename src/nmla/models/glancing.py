"""Glancing: in training, a second pass is told some of what the first got wrong, ever fewer."""

import torch
from torch import Tensor

from nmla.models.layers import length_mask
from nmla.models.transformer import NOT_TOLD


def reveal(oracle_BT: Tensor, predicted_BT: Tensor, lengths_B: Tensor, ratio: float) -> Tensor:
    """Tell `ratio` times as many tokens of the oracle as the prediction misses, at positions drawn at random.

    Returns:
        ``(B, T)`` token ids, NOT_TOLD elsewhere.
    """
    used_BT = length_mask(lengths_B, oracle_BT.shape[1])
    wrong_B = ((oracle_BT != predicted_BT) & used_BT).sum(1)
    draw_BT = torch.rand(oracle_BT.shape, device=oracle_BT.device).masked_fill(~used_BT, 2.0)  # padding comes last
    rank_BT = draw_BT.argsort(1).argsort(1)
    return torch.where(rank_BT < (ratio * wrong_B).round()[:, None], oracle_BT, NOT_TOLD)
