"""Systems to analyse: what they wrote, read from files or had from models."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nmla.decoding.translation import Translation
from nmla.decoding.translator import Translator
from nmla.errors import DataError
from nmla.evaluation.measure import Lines
from nmla.progress import progress_bar
from nmla.text.lines import COMPRESSED, read_lines

# Of a translation as JSON, what is read.
TOLD: dict[str, type | tuple[type, ...]] = {"text": str, "entropy": (float, int), "positions": int, "blanks": int}


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
        if (path.with_suffix("") if path.suffix in COMPRESSED else path).suffix != ".jsonl":
            return cls(name, lines)
        translations = []
        for number, line in enumerate(lines, start=1):
            if not is_translation(line):
                raise DataError(
                    f"{path}:{number}: must be a translation as nmla translate --format jsonl writes it, but is not"
                )
            found = json.loads(line)
            translations.append(Translation(**{name: found[name] for name in TOLD}))
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


def is_translation(line: str) -> bool:
    """Whether it is JSON as `nmla translate` writes it."""
    try:
        found = json.loads(line)
        if not isinstance(found, dict) or not all(isinstance(found.get(name), kind) for name, kind in TOLD.items()):
            return False
        found["text"].encode("utf-8")  # which half a surrogate pair has no place in
        return math.isfinite(found["entropy"]) and 0 <= found["blanks"] <= found["positions"]
    except (ValueError, RecursionError, OverflowError):
        return False
