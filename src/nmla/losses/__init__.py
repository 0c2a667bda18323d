"""Losses for CTC models: pure functions of tensors, one value per sentence. Needs torch and scipy, nothing else."""

from .alignment import best_alignment, ctc_loss, sctc_loss
from .collapse import collapse_path
from .fused import ngram_matching_loss_with_logits
from .length import expected_length, expected_ngram_total
from .matching import ngram_matching_loss
from .ngram import expected_ngram_counts

__all__ = [
    "best_alignment",
    "collapse_path",
    "ctc_loss",
    "expected_length",
    "expected_ngram_counts",
    "expected_ngram_total",
    "ngram_matching_loss",
    "ngram_matching_loss_with_logits",
    "sctc_loss",
]
