"""Aligned cross entropy: the best monotonic alignment of a fixed-length model's positions with the target."""

import torch
from torch import Tensor

from .inputs import check_arguments, full_precision, in_use


def axe_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    *,
    blank: int,
    delta: float = 1.0,
) -> Tensor:
    r"""Aligned cross entropy: the least cost of aligning all tokens with all positions, in order.

    .. math::
        A_{i,j} = \min \begin{cases}
            A_{i-1,j-1} - \log p_j(y_i)        & \text{position j writes token i} \\
            A_{i,j-1} - \log p_j(\epsilon)     & \text{position j writes nothing} \\
            A_{i-1,j} - \delta \log p_j(y_i)   & \text{token i is written by no position of its own}
        \end{cases} \qquad A_{0,0} = 0, \quad L = A_{|y|,T}

    A token that comes before the first position is measured there: :math:`A_{i,0} = A_{i-1,0} - \delta \log p_1(y_i)`.

    Args:
        log_probs: ``(B, T, V)``, normalised over ``V``.
        targets: ``(B, L)`` token ids without blanks; padding may be anything.
        input_lengths: ``(B,)`` positions in use, each in ``0..T``.
        target_lengths: ``(B,)``, each in ``0..L``.
        blank: the id of the blank, the paper's special token for "nothing".
        delta: the cost of a token without a position, relative to one with; positive and finite.

    Returns:
        ``(B,)`` losses in [0, inf]; +inf, with gradient 0, where each alignment has probability zero or no position is
        in use for a target that is not empty.

    Example:
        >>> log_probs = torch.tensor([[[0.1, 0.1, 0.8], [0.7, 0.2, 0.1]]]).log()
        >>> lengths = torch.tensor([2]), torch.tensor([1])
        >>> axe_loss(log_probs, torch.tensor([[2]]), *lengths, blank=0).neg().exp()   # .8 * .7
        tensor([0.5600])
    """
    if not 0 < delta < float("inf"):
        raise ValueError(f"delta must be positive and finite, but is {delta}")
    targets, input_lengths, target_lengths = check_arguments(
        log_probs, targets, input_lengths, target_lengths, blank=blank
    )
    batch, positions, _ = log_probs.shape

    # Costs by (token i, position j), counted from 1; infinite at 0, in the padding, and one position past the end.
    padding_B1T = ~in_use(input_lengths, positions).unsqueeze(1)
    ids_BTL = targets.unsqueeze(1).expand(-1, positions, -1)
    match_BLT = -full_precision(log_probs.gather(2, ids_BTL)).transpose(1, 2)
    nothing_B1T = -full_precision(log_probs[:, :, blank]).unsqueeze(1)
    match_BLT, nothing_B1T = (
        torch.nn.functional.pad(cost.masked_fill(padding_B1T, torch.inf), (1, 1, rows, 0), value=torch.inf)
        for cost, rows in ((match_BLT, 1), (nothing_B1T, 0))
    )
    first_position_T = torch.arange(positions + 2, device=targets.device).clamp(min=1)
    omit_BLT = delta * match_BLT[:, :, first_position_T]

    # The table by diagonals d = i + j, each of which depends on the two before it alone.
    i_L = torch.arange(targets.shape[1] + 1, device=targets.device)
    diagonals = [torch.where(i_L == 0, 0.0, torch.inf).to(match_BLT.dtype).expand(batch, -1)]
    before_BL = torch.full_like(diagonals[0], torch.inf)
    for d in range(1, len(i_L) + positions):
        j_L = (d - i_L).clamp(max=positions + 1)
        j_L = torch.where(j_L < 0, positions + 1, j_L)
        shift = torch.nn.functional.pad(torch.stack([before_BL, diagonals[-1]])[..., :-1], (1, 0), value=torch.inf)
        written_BL = shift[0] + match_BLT[:, i_L, j_L]
        omitted_BL = shift[1] + omit_BLT[:, i_L, j_L]
        empty_BL = diagonals[-1] + nothing_B1T[:, 0, j_L]
        before_BL = diagonals[-1]
        diagonals.append(torch.minimum(torch.minimum(written_BL, empty_BL), omitted_BL))
    cells_BD = torch.stack(diagonals, 1)[torch.arange(batch, device=targets.device), target_lengths + input_lengths]
    loss_B = cells_BD.gather(1, target_lengths.unsqueeze(1)).squeeze(1)
    # Infinity comes from log-probabilities, but should not go back to them as a gradient.
    return torch.where(loss_B.isinf(), torch.inf, loss_B)
