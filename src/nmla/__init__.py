"""Fast machine translation in one forward pass: CTC models fine-tuned with non-monotonic latent alignments."""

__version__ = "0.1.0"
