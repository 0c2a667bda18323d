"""Systems to analyse: what they wrote, read from files or had from models."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nmla.decoding.translation import Translation
from nmla.decoding.translator import Translator
from nmla.errors import DataError
from nmla.evaluation.measure import Lines
from nmla.progress import progress_bar
from nmla.text.lines import read_lines

TOLD = {"text": str, "entropy": float, "positions": int, "blanks": int}  # of a translation as JSON, what is read


@dataclass(frozen=True)
class System:
    """A system's outputs, one per sentence, and of a model also what it thought of them."""

    name: str
    outputs: Lines
    translations: Sequence[Translation] | None = None  # with scores

    @classmethod
    def of_file(cls, name: str, path: Path) -> "System":
        """What is in a file: lines of text or, if its name ends in .jsonl, what `nmla translate` writes as JSON."""
        lines = read_lines(path)
        if path.suffix != ".jsonl":
            return cls(name, lines)
        translations = []
        for number, line in enumerate(lines, start=1):
            try:
                found = json.loads(line)
                told = {name: kind(found[name]) for name, kind in TOLD.items()}
            except (ValueError, KeyError, TypeError):
                raise DataError(
                    f"{path}:{number}: must be a translation as nmla translate --format jsonl writes it, but is not"
                ) from None
            translations.append(Translation(**told))
        return cls(name, [one.text for one in translations], translations)

    @classmethod
    def of_model(cls, name: str, translator: Translator, sources: Lines) -> "System":
        """What a model makes of `sources`, decoded as it decodes by itself."""
        translations = []
        with progress_bar() as bar:
            task = bar.add_task(name, total=len(sources))
            for translation in translator.translate_iterable(sources, return_scores=True):
                translations.append(translation)
                bar.advance(task)
        return cls(name, [one.text for one in translations], translations)
