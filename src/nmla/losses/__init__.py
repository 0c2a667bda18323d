"""Losses for CTC models: pure functions of tensors, one value per sentence. Needs torch and scipy, nothing else."""

from .alignment import best_alignment, ctc_loss, ctc_loss_with_logits, sctc_loss
from .assignment import bipartite_loss, oaxe_loss
from .axe import axe_loss
from .bag import bag_of_ngrams_loss
from .collapse import collapse_path
from .cross_entropy import cross_entropy_loss, cross_entropy_loss_with_logits, length_class, length_loss
from .ddrs import ddrs_loss, ddrs_loss_with_logits
from .fused import fused_ngram_matching_loss, ngram_matching_loss_with_logits
from .length import expected_length, expected_ngram_total
from .matching import combined_ngram_loss, ngram_matching_loss
from .ngram import expected_ngram_counts

__all__ = [
    "axe_loss",
    "bag_of_ngrams_loss",
    "best_alignment",
    "bipartite_loss",
    "collapse_path",
    "combined_ngram_loss",
    "cross_entropy_loss",
    "cross_entropy_loss_with_logits",
    "ctc_loss",
    "ctc_loss_with_logits",
    "ddrs_loss",
    "ddrs_loss_with_logits",
    "expected_length",
    "expected_ngram_counts",
    "expected_ngram_total",
    "fused_ngram_matching_loss",
    "length_class",
    "length_loss",
    "ngram_matching_loss",
    "ngram_matching_loss_with_logits",
    "oaxe_loss",
    "sctc_loss",
]
