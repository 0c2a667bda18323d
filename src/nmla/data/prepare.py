"""From a text file a side to a corpus directory: read, check, learn the vocabulary, encode, write."""

import json
from collections.abc import Sequence
from pathlib import Path

from nmla.data.corpus import MANIFEST, TOKENIZER, VERSION, read_parallel, write_store
from nmla.errors import DataError, UsageError
from nmla.files import new_directory
from nmla.progress import progress_bar
from nmla.text.tokenizer import Tokenizer


def prepare(*, train: tuple[Path, Path], valid: tuple[Path, Path], output: Path, vocab_size: int) -> dict[str, int]:
    """Write a corpus to `output` and return its counts. Nothing is left behind if anything goes wrong.

    A pair with a side that has no text is dropped and counted, judged by tokens: a zero-width space has none.
    """
    if output.exists():
        raise UsageError(f"{output}: must not exist yet, but does; choose another output, or remove it")
    pairs = list(read_parallel(*train))
    valid_pairs = list(read_parallel(*valid))
    _require_text(train, [pair for pair in pairs if all(map(str.strip, pair))])
    tokenizer = Tokenizer.learn((side for pair in pairs for side in pair if side), vocab_size)
    with new_directory(output) as directory, progress_bar() as bar:
        encoded = (tuple(map(tokenizer.encode, pair)) for pair in bar.track(pairs, description="encoding"))
        kept = [sides for sides in encoded if all(sides)]
        valid_kept = [pair for pair in valid_pairs if all(map(tokenizer.encode, pair))]
        _require_text(train, kept)
        _require_text(valid, valid_kept)
        tokenizer.save(directory / TOKENIZER)
        for side, name in enumerate(("source", "target")):
            write_store(directory, f"train.{name}", (sides[side] for sides in kept), tokenizer.vocab_size)
            text = "".join(f"{pair[side]}\n" for pair in valid_kept)
            (directory / f"valid.{name}.txt").write_text(text, encoding="utf-8", newline="\n")
        counts = {
            "train_pairs": len(kept),
            "train_dropped_empty": len(pairs) - len(kept),
            "valid_pairs": len(valid_kept),
            "valid_dropped_empty": len(valid_pairs) - len(valid_kept),
            "vocab_size": tokenizer.vocab_size,
        }
        manifest = json.dumps({"version": VERSION, **counts}, indent=2) + "\n"
        (directory / MANIFEST).write_text(manifest, encoding="utf-8")
    return counts


def _require_text(paths: tuple[Path, Path], pairs: Sequence[object]) -> None:
    if not pairs:
        raise DataError(f"{paths[0]} and {paths[1]}: at least one pair must have text on both sides, but none has")
