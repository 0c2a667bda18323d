"""From text files to a corpus directory: read, learn the vocabulary, encode in all processes, assemble.

Each step depends on the text and the settings alone, so the corpus has the same bytes whatever the number of processes,
and wherever a run was stopped and went on. Memory does not grow with the corpus.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import sentencepiece
from rich.progress import Progress

from nmla import __version__
from nmla.data.assemble import GroupedParts, plain_parts, seal, write_shards
from nmla.data.corpus import DROPPED, TOKENIZER, VALID
from nmla.data.encode import Rules, encode_block, encode_lines, learn_tokenizer, none_usable, report_path
from nmla.data.pairs import REASONS, Block, Dropped, TextFile, check_files, check_lines, inspect, read_blocks
from nmla.data.workers import Workers, cores
from nmla.errors import DataError, UsageError
from nmla.files import clear_directory, kept_directory, publish, write_bytes, write_text
from nmla.progress import progress_bar, say
from nmla.text.tokenizer import Tokenizer

SMALL = 1 << 21  # bytes of input that one process encodes before others have even started
SAMPLE_BYTES = 1 << 26  # of text to learn a vocabulary from: sentencepiece takes four times as much memory
TOLD = 5  # dropped pairs that are named on stderr; all are in the corpus
Pairs = Sequence[tuple[Path, ...]]


def prepare(
    *,
    train: Pairs,
    valid: Pairs,
    output: Path,
    vocab_size: int = 32000,
    tokenizer: Path | None = None,
    pretokenised: bool = False,
    group: bool = False,
    max_tokens: int = 1024,
    max_ratio: float | None = None,
    upsample: int | None = None,
    bad: str = "drop",
    processes: int | None = None,
) -> dict[str, int]:
    """Write a corpus to `output` and return its counts.

    `train` and `valid` are files as (source, target), or (both,) for TSV and JSONL. Until the corpus is whole, `output`
    does not exist. A stopped run leaves its work in a hidden directory beside it, and the same call goes on from there.
    Bad pairs are dropped and listed, or with ``bad="refuse"`` the first of them ends the work.
    """
    train, valid = list(map(tuple, train)), list(map(tuple, valid))
    _check_settings(train, valid, output, max_tokens, max_ratio, upsample, bad, processes)
    known = None if tokenizer is None else _load_tokenizer(tokenizer, pretokenised)
    settings = {
        "vocab_size": vocab_size if known is None else known.vocab_size,
        "tokenizer_sha256": None if known is None else hashlib.sha256(known.model).hexdigest(),
        "pretokenised": pretokenised if known is None else known.pretokenised,
        "group": group,
        "max_tokens": max_tokens,
        "max_ratio": max_ratio,
        "upsample": upsample,
        "bad": bad,
    }
    rules = Rules(max_tokens, max_ratio, upsample)
    size = sum(path.stat().st_size for files in train for path in files)
    with (
        kept_directory(output) as work,
        Workers(0 if size < SMALL else processes or cores()) as workers,
        progress_bar() as bar,
    ):
        inputs = _inspect(train, valid, workers, bar)
        plan = {
            "nmla": __version__,
            "sentencepiece": sentencepiece.__version__,
            "settings": settings,
            "inputs": {split: [asdict(f) for files in inputs[split] for f in files] for split in inputs},
        }
        _begin(work, plan, output)
        try:
            model = _tokenizer(work, known, train, inputs["train"], settings, workers, bar)
            held_out = _Valid.read(valid, Tokenizer(model), settings)  # before the long work: what is wrong is told now
            lines = sum(files[0].lines for files in inputs["train"])
            count = _encode(work, train, lines, model, rules, settings, workers, bar)
            counts = _assemble(work, count, train, held_out, plan)
        except (KeyboardInterrupt, OSError):
            say(f"nmla prepare: what is done is kept in {work}; the same command goes on from there")
            raise
        publish(work / "corpus", output)
    return counts


def _check_settings(
    train: Pairs,
    valid: Pairs,
    output: Path,
    max_tokens: int,
    max_ratio: float | None,
    upsample: int | None,
    bad: str,
    processes: int | None,
) -> None:
    if output.exists():
        raise UsageError(f"{output}: must not exist yet, but does; choose another output, or remove it")
    for name, pairs in (("train", train), ("valid", valid)):
        if not pairs:
            raise UsageError(f"{name} must have at least one pair of files, but has none")
        for files in pairs:
            check_files(files, f"--{name}")
    for name, value, least in (("max_tokens", max_tokens, 1), ("upsample", upsample, 1), ("processes", processes, 1)):
        if value is not None and value < least:
            raise UsageError(f"{name} must be at least {least}, but is {value}")
    if max_ratio is not None and not (max_ratio >= 1 and math.isfinite(max_ratio)):
        raise UsageError(f"max_ratio must be at least 1, but is {max_ratio}")
    if bad not in ("drop", "refuse"):
        raise UsageError(f"bad must be drop or refuse, but is {bad}")


def _load_tokenizer(path: Path, pretokenised: bool) -> Tokenizer:
    known = Tokenizer.load(path / TOKENIZER if path.is_dir() else path)
    if pretokenised and not known.pretokenised:
        raise UsageError(f"{path}: must be a tokenizer of pretokenised text, but splits raw text")
    return known


def _inspect(train: Pairs, valid: Pairs, workers: Workers, bar: Progress) -> dict[str, list[list[TextFile]]]:
    """Hash and count every file, and refuse those that cannot be aligned, before the long work."""
    paths = [path for files in (*train, *valid) for path in files]
    found = iter(bar.track(workers.map(inspect, ((path,) for path in paths)), len(paths), description="reading"))
    inputs = {
        name: [[next(found) for _ in files] for files in pairs] for name, pairs in (("train", train), ("valid", valid))
    }
    for _ in found:  # the bar ends when all are fetched
        pass
    for files in (*inputs["train"], *inputs["valid"]):
        check_lines(files)
    return inputs


def _begin(work: Path, plan: dict[str, Any], output: Path) -> None:
    """Go on with earlier work if it was for the same plan; else start anew."""
    path = work / "plan.json"
    text = json.dumps(plan)
    if path.exists() and path.read_text(encoding="utf-8") == text:
        say(f"nmla prepare: going on with what an earlier run did of {output}")
        return
    if path.exists():
        say(f"nmla prepare: an earlier run for {output} had other settings or other text; starting anew")
    clear_directory(work)
    for name in ("parts", "corpus"):
        (work / name).mkdir()
    write_text(path, text)


def _tokenizer(
    work: Path,
    known: Tokenizer | None,
    train: Pairs,
    inputs: list[list[TextFile]],
    settings: dict[str, Any],
    workers: Workers,
    bar: Progress,
) -> bytes:
    path = work / "corpus" / TOKENIZER
    if not path.exists():
        if known is not None:
            model = known.model
        else:
            share = (
                1.0
                if settings["pretokenised"]
                else SAMPLE_BYTES / sum(f.text_bytes + 1 for files in inputs for f in files)
            )
            job = (train, share, settings["vocab_size"], settings["pretokenised"])
            task = bar.add_task("learning the vocabulary", total=None)
            [model] = workers.map(learn_tokenizer, [job])
            bar.update(task, total=1, completed=1)
        write_bytes(path, model)
    return path.read_bytes()


def _encode(
    work: Path,
    train: Pairs,
    lines: int,
    model: bytes,
    rules: Rules,
    settings: dict[str, Any],
    workers: Workers,
    bar: Progress,
) -> int:
    """Write all parts that are not there yet; returns how many there are."""
    parts = work / "parts"
    task = bar.add_task("encoding", total=lines)
    count, read = 0, 0
    sizes: list[int] = []

    def jobs() -> Iterator[tuple[int, Block, bytes, Rules, Path, bool]]:
        nonlocal count, read
        for block in read_blocks(train):
            read += len(block.lines[0])
            if report_path(parts, count).exists():
                if settings["bad"] == "refuse" and (dropped := _report(parts, count)["dropped"]):
                    raise _refused(Dropped(*dropped[0]))
                bar.advance(task, len(block.lines[0]))
            else:
                sizes.append(len(block.lines[0]))
                yield count, block, model, rules, parts, settings["group"]
            count += 1

    for done, lost in enumerate(workers.map(encode_block, jobs())):
        if lost is not None and settings["bad"] == "refuse":
            raise _refused(lost)
        bar.advance(task, sizes[done])
    if read != lines:
        raise DataError(f"the training text must not change while it is read, but had {lines} lines and then {read}")
    return count


def _report(parts: Path, number: int) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(report_path(parts, number).read_text(encoding="utf-8"))
    return report


def _refused(lost: object) -> DataError:
    return DataError(f"{lost}; mend it, or let such pairs be dropped")


def _assemble(work: Path, count: int, train: Pairs, valid: "_Valid", plan: dict[str, Any]) -> dict[str, int]:
    parts, corpus, settings = work / "parts", work / "corpus", plan["settings"]
    tokenizer = Tokenizer((corpus / TOKENIZER).read_bytes())
    for left in corpus.iterdir():  # by a run that was stopped right here
        if left.name != TOKENIZER:
            left.unlink()
    grouped = GroupedParts(parts, count, tokenizer.vocab_size) if settings["group"] else None
    shards, counts = write_shards(iter(grouped or plain_parts(parts, count)), corpus)
    losses = _Losses(corpus / DROPPED)
    counts |= {"train_duplicates": grouped.duplicates if grouped else 0, "train_unknown_tokens": 0}
    with losses:
        for number in range(count):
            report = _report(parts, number)
            counts["train_duplicates"] += report["duplicates"]
            counts["train_unknown_tokens"] += report["unknown"]
            for item in report["dropped"]:
                losses.add("train", Dropped(*item))
        if not counts["train_pairs"]:
            raise none_usable(train)
        for dropped in valid.dropped:
            losses.add("valid", dropped)
    counts |= valid.write(corpus / VALID)
    counts |= losses.counts()
    counts["vocab_size"] = tokenizer.vocab_size
    seal(corpus, plan, counts, shards)
    return counts


@dataclass(frozen=True)
class _Valid:
    """The usable validation pairs as text. Long ones stay: they are only scored."""

    records: list[tuple[str, list[str]]]  # a source and its references
    dropped: list[Dropped]

    @classmethod
    def read(cls, valid: Pairs, tokenizer: Tokenizer, settings: dict[str, Any]) -> "_Valid":
        records: list[tuple[str, list[str]]] = []
        places: dict[str, int] = {}
        lost: list[Dropped] = []
        for block in read_blocks(valid):
            for item in encode_lines(block, tokenizer, Rules()):
                if isinstance(item, Dropped):
                    if settings["bad"] == "refuse":
                        raise _refused(item)
                    lost.append(item)
                    continue
                place = places.setdefault(item.source.strip(), len(records)) if settings["group"] else len(records)
                if place == len(records):
                    records.append((item.source, []))
                records[place][1].extend(tokenizer.joined(text) for text, _ in item.references)
        if not records:
            raise none_usable(valid)
        return cls([(source, list(dict.fromkeys(targets))) for source, targets in records], lost)

    def write(self, path: Path) -> dict[str, int]:
        pairs = ({"source": source, "targets": targets} for source, targets in self.records)
        write_text(path, "".join(f"{json.dumps(pair, ensure_ascii=False)}\n" for pair in pairs))
        targets = sum(len(targets) for _, targets in self.records)
        return {"valid_pairs": targets, "valid_sources": len(self.records)}


class _Losses:
    """The list of what was dropped: all in a file, the first few on stderr, counted by split and reason."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8", errors="surrogateescape", newline="\n")
        self._file.write("file\tline\treason\tfound\n")
        self._counts: Counter[str] = Counter()

    def add(self, split: str, item: Dropped) -> None:
        if self._counts.total() < TOLD:
            say(f"dropped: {item}")
        self._counts[f"{split}_dropped_{item.reason}"] += 1
        self._file.write("\t".join(map(str, (item.file, item.line, item.reason, item.found))) + "\n")

    def counts(self) -> dict[str, int]:
        return {name: self._counts[name] for split in ("train", "valid") for name in _drop_names(split)}

    def __enter__(self) -> "_Losses":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        if (more := self._counts.total() - TOLD) > 0:
            say(f"dropped: {more} more; {DROPPED} in the corpus lists all")


def _drop_names(split: str) -> list[str]:
    return [f"{split}_dropped_{reason}" for reason in REASONS]
