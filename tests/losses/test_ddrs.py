"""DDRS against the enumeration of all paths, and against CTC where there is one reference."""

import pytest
import torch

import oracle
from cases import assert_equals_oracle, leaf, random_case
from nmla.losses import ctc_loss, ddrs_loss


@pytest.mark.parametrize("collapse", ["ctc", "sctc"])
@pytest.mark.parametrize("progress", [0, 0.25, 2 / 3, 0.9, 1])
@pytest.mark.parametrize("references", [1, 3])
@pytest.mark.parametrize("seed", range(6))
def test_equals_enumeration(collapse, progress, references, seed):
    case = random_case(seed, references=references, longest=seed % 4 + 1, zeros=seed % 3 == 2)
    logits = leaf(case.logits)
    options = {"blank": case.blank, "progress": progress, "collapse": collapse}
    losses = ddrs_loss(case.log_probs_of(logits), *case.arguments, **options)
    assert_equals_oracle(
        case, losses, lambda log_probs, b: oracle.ddrs_loss(log_probs, case.references(b), **options), logits
    )


def test_one_reference_is_ctc_per_token():
    case = random_case(3, positions=9, longest=4)
    expected = ctc_loss(case.log_probs, *case.arguments, blank=case.blank) / case.target_lengths
    some = case.target_lengths > 0
    for progress in (0, 0.5, 2 / 3, 0.7, 1):
        losses = ddrs_loss(case.log_probs, *case.arguments, blank=case.blank, progress=progress)
        torch.testing.assert_close(losses[some], expected[some], rtol=0, atol=1e-12)


def test_progress_must_be_a_share():
    case = random_case(3)
    with pytest.raises(ValueError, match=r"progress must be in \[0, 1\], but is 1.5"):
        ddrs_loss(case.log_probs, *case.arguments, blank=case.blank, progress=1.5)
