"""From two text files a side to a corpus directory: read, check, learn the vocabulary, encode, write."""

import json
from pathlib import Path

from nmla.data.corpus import MANIFEST, TOKENIZER, read_parallel, write_store
from nmla.errors import DataError, UsageError
from nmla.files import new_directory
from nmla.progress import progress_bar
from nmla.text.tokenizer import Tokenizer

Pair = tuple[str, str]


def prepare(*, train: tuple[Path, Path], valid: tuple[Path, Path], output: Path, vocab_size: int) -> dict[str, int]:
    """Write a corpus to `output` and return its counts. Nothing is left behind if anything goes wrong."""
    if output.exists():
        raise UsageError(f"{output}: must not exist yet, but does; choose another output, or remove it")
    train_pairs, train_dropped = _without_empty_sides(train)
    valid_pairs, valid_dropped = _without_empty_sides(valid)
    tokenizer = Tokenizer.learn((side for pair in train_pairs for side in pair), vocab_size)
    counts = {
        "train_pairs": len(train_pairs),
        "train_dropped_empty": train_dropped,
        "valid_pairs": len(valid_pairs),
        "valid_dropped_empty": valid_dropped,
        "vocab_size": tokenizer.vocab_size,
    }
    with new_directory(output) as directory, progress_bar() as bar:
        tokenizer.save(directory / TOKENIZER)
        for side, name in enumerate(("source", "target")):
            encoding = bar.track(train_pairs, description=f"encoding {name}")
            sentences = (tokenizer.encode(pair[side]) for pair in encoding)
            write_store(directory, f"train.{name}", sentences, tokenizer.vocab_size)
            text = "".join(f"{pair[side]}\n" for pair in valid_pairs)
            (directory / f"valid.{name}.txt").write_text(text, encoding="utf-8", newline="\n")
        (directory / MANIFEST).write_text(json.dumps({"version": 1, **counts}, indent=2) + "\n", encoding="utf-8")
    return counts


def _without_empty_sides(paths: tuple[Path, Path]) -> tuple[list[Pair], int]:
    pairs = list(read_parallel(*paths))
    kept = [(source, target) for source, target in pairs if source.strip() and target.strip()]
    if not kept:
        raise DataError(
            f"{paths[0]} and {paths[1]}: must hold at least one pair of text, but every pair has an empty side"
        )
    return kept, len(pairs) - len(kept)
