"""Fast machine translation in one forward pass: CTC models fine-tuned with non-monotonic latent alignments."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from nmla.decoding.translator import Translator

__version__ = "0.1.0"


def load(directory: "str | Path") -> "Translator":
    """The translator of a model directory: ``nmla.load(DIR).translate("...")``."""
    from nmla.decoding.translator import Translator  # here, so that `import nmla` is quick and the losses stand alone

    return Translator.load(directory)
