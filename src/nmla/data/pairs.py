"""Parallel text as people have it: two files aligned by line, or one TSV or JSONL file; each line judged on its own."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nmla.errors import DataError, UsageError
from nmla.text.lines import BYTE_ORDER_MARK, COMPRESSED, MAX_LINE_BYTES, bounded_line, not_utf8, open_text, require_file

BLOCK_LINES, BLOCK_BYTES = 1 << 14, 1 << 23  # what one process works on at a time, whichever comes first
REASONS = {
    "nul": "text must not hold NUL",
    "utf8": "text must be UTF-8",
    "malformed": "a line must hold a source and its targets",
    "empty": "both sides must hold text",
    "too_long": "a side must not be too long",
    "ratio": "the sides must not differ too much in length",
    "upsample": "the target must fit into the positions",
}


class Bad(Exception):
    """A line that cannot be used: why, by a name of REASONS, what was found, and on which side (0 source, 1 target)."""

    def __init__(self, reason: str, found: str, side: int = 0) -> None:
        super().__init__(reason, found, side)
        self.reason, self.found, self.side = reason, found, side


@dataclass(frozen=True)
class Dropped:
    """One line, or one reference of it, that did not become part of the corpus."""

    file: str
    line: int
    reason: str
    found: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {REASONS[self.reason]}, but {self.found}"


@dataclass(frozen=True)
class TextFile:
    """What is known of a file once it has been read."""

    path: str
    bytes: int
    sha256: str
    lines: int
    text_bytes: int  # decompressed


@dataclass(frozen=True)
class Block:
    """Some lines as they stand in the files, aligned; `lines` has one list for each file."""

    files: tuple[Path, ...]
    first_line: int
    lines: tuple[list[bytes], ...]


def check_files(files: Sequence[Path], option: str) -> None:
    """Refuse names that do not say what is in them, and files that cannot be read more than once."""
    kinds = [_kind(path) for path in files]
    names = " ".join(map(str, files))
    if len(files) not in (1, 2):
        raise UsageError(
            f"{option} must have one or two files, but has {len(files)} ({names}); give {option} again for more"
        )
    if len(files) == 1 and kinds[0] == "text":
        raise UsageError(
            f"{option} must have a source and a target file, or one that ends in .tsv or .jsonl, but has {names}"
        )
    if len(files) == 2 and kinds != ["text", "text"]:
        raise UsageError(f"{option} must have a .tsv or .jsonl file alone, for it holds both sides, but has {names}")
    for path in files:
        require_file(path)
        if not path.is_file():
            raise UsageError(f"{path}: must be a file, for it is read more than once, but is a pipe or a device")


def _kind(path: Path) -> str:
    name = path.with_suffix("") if path.suffix in COMPRESSED else path
    return name.suffix[1:] if name.suffix in (".tsv", ".jsonl") else "text"


def inspect(path: Path) -> TextFile:
    """Read a file once: its hash, how many lines and how much text it holds."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    lines, size, last = 0, 0, b"\n"
    with open_text(path) as text:
        while chunk := text.read(1 << 20):
            lines += chunk.count(b"\n")
            size += len(chunk)
            last = chunk[-1:]
    return TextFile(str(path), path.stat().st_size, digest, lines + (last != b"\n"), size)


def check_lines(files: Sequence[TextFile]) -> None:
    """Refuse files that cannot be aligned."""
    if len({file.lines for file in files}) > 1:
        names, counts = (
            " and ".join(str(x) for x in each) for each in zip(*((f.path, f.lines) for f in files), strict=True)
        )
        raise DataError(f"{names} must have as many lines as each other, but have {counts}")
    if not files[0].lines:
        raise DataError(f"{files[0].path}: must hold at least one line, but is empty")


def read_blocks(pairs: Sequence[tuple[Path, ...]]) -> Iterator[Block]:
    """All lines of all files in order. Where a block ends depends on the text alone."""
    for files in pairs:
        streams = [open_text(path) for path in files]
        try:
            number = 1
            while True:
                rows: list[tuple[bytes, ...]] = []
                size = 0
                while len(rows) < BLOCK_LINES and size < BLOCK_BYTES:
                    row = tuple([bounded_line(stream) for stream in streams])
                    if not all(row):
                        break
                    rows.append(row)
                    size += sum(map(len, row))
                if not rows:
                    break
                yield Block(files, number, tuple(map(list, zip(*rows, strict=True))))
                number += len(rows)
        finally:
            for stream in streams:
                stream.close()


def parse_block(block: Block) -> Iterator[tuple[int, str, list[str]] | Dropped]:
    """Line number, source and references of each line, or why there are none."""
    kind = _kind(block.files[0])
    for number, row in enumerate(zip(*block.lines, strict=True), start=block.first_line):
        try:
            texts = [_text(raw, number, side) for side, raw in enumerate(row)]
            if kind == "text":
                yield number, texts[0], [texts[1]]
            else:
                yield number, *(_tsv if kind == "tsv" else _jsonl)(texts[0])
        except Bad as bad:
            yield dropped(block, number, bad)


def dropped(block: Block, line: int, bad: Bad) -> Dropped:
    file = block.files[min(bad.side, len(block.files) - 1)]
    return Dropped(str(file), line, bad.reason, bad.found)


def _text(raw: bytes, number: int, side: int) -> str:
    if number == 1:
        raw = raw.removeprefix(BYTE_ORDER_MARK)
    raw = raw.removesuffix(b"\n")
    if len(raw) > MAX_LINE_BYTES:
        raise Bad("too_long", f"the line is longer than {MAX_LINE_BYTES} bytes", side)
    if (at := raw.find(b"\0")) >= 0:
        raise Bad("nul", f"byte {at + 1} of the line is one", side)
    try:
        return raw.removesuffix(b"\r").decode("utf-8")
    except UnicodeDecodeError as error:
        raise Bad("utf8", not_utf8(error), side) from None


def _tsv(line: str) -> tuple[str, list[str]]:
    source, *targets = line.split("\t")
    if not targets:
        raise Bad("malformed", "there is no TAB")
    while len(targets) > 1 and not targets[-1].strip():  # tables fill up short rows
        targets.pop()
    return source, targets


def _jsonl(line: str) -> tuple[str, list[str]]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise Bad("malformed", f"it is not JSON ({error})") from None
    if not isinstance(record, dict) or ("target" in record) == ("targets" in record):
        raise Bad(
            "malformed", 'it is not of the form {"source": ..., "target": ...} or {"source": ..., "targets": [...]}'
        )
    source: Any = record.get("source")
    targets: Any = record["targets"] if "targets" in record else [record["target"]]
    if not isinstance(targets, list) or not targets or not all(isinstance(text, str) for text in (source, *targets)):
        raise Bad("malformed", "source and targets are not all strings")
    for side, text in enumerate((source, *targets)):
        if "\0" in text:
            raise Bad("nul", "there is one", min(side, 1))
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise Bad("utf8", f"character {error.start + 1} is half of one", min(side, 1)) from None
    return source, targets
