"""Knowledge distillation: a corpus whose targets are what teachers make of its sources.

The work is cut into parts, some sources for one teacher each. Whoever holds a part's lock translates it and writes it
in one step; so any number of processes can share the work, a killed one leaves its part to the next, and nothing is
done twice or lost. Who finds all parts done puts the corpus together. Parts depend on nothing but their sources, so the
corpus has the same bytes however the work was shared or stopped.
"""

import fcntl
import io
import json
import math
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ctranslate2
import numpy as np
import numpy.typing as npt

from nmla import __version__
from nmla.config import WIDEST_BEAM
from nmla.data.assemble import seal, write_shards
from nmla.data.corpus import (
    MANIFEST,
    TOKENIZER,
    VALID,
    Corpus,
    Shard,
    TokenArray,
    TokenStore,
    content_hash,
    save_array,
)
from nmla.data.workers import cores
from nmla.decoding.teacher import Format, Teacher, check_teacher, identity, speaks, wants_split_text
from nmla.errors import UsageError
from nmla.files import publish, write_bytes, write_text
from nmla.progress import progress_bar, say
from nmla.text.tokenizer import BLANK, UNK, Tokenizer

PART_SOURCES = 2048  # what a kill can cost
POLL_SECONDS = 0.2  # between looks at what others still do
# Where a target comes from: a teacher, by its place in the list of teachers, or the original, and why.
KEPT = {
    "empty": "the original, for the teacher wrote nothing",
    "runaway": "the original, for the teacher did not end",
    "long": "the original, for its source or translation is longer than the teacher can take",
}

MOST_TEACHERS = 255 - len(KEPT)  # a target's origin is a byte


def distill(
    *,
    corpus: Path,
    teachers: Sequence[Path],
    output: Path,
    beam_size: int = 5,
    compute_type: str = "float32",
    form: Format | None = None,
    threads: int | None = None,
    show: bool = True,
) -> dict[str, int]:
    """Write `output`, the corpus with a target by each of `teachers` for each source, and return its counts.

    Until it is whole, `output` does not exist. A stopped run leaves its work in a hidden directory beside it, and the
    same call goes on from there, joins in while another is at work, or finds the corpus made. What a teacher cannot do
    keeps its original target. `origins` in the manifest names the values of train-*.origins.npy, which tell of every
    target where it came from. `show` shows progress.
    """
    _check(teachers, beam_size, threads)
    data = Corpus.load(corpus)
    for teacher in teachers:
        check_teacher(teacher, form)
        if data.tokenizer.pretokenised and not speaks(teacher, data.tokenizer):
            raise UsageError(
                f"{teacher}: the teacher of a corpus that came split already must have its vocabulary, but has another"
            )
        if wants_split_text(teacher) and not data.tokenizer.pretokenised:
            raise UsageError(f"{teacher}: the teacher of a corpus of plain text must take that, but wants it split")
    plan = {
        "nmla": __version__,
        "ctranslate2": ctranslate2.__version__,
        "part_sources": PART_SOURCES,
        "settings": {"beam_size": beam_size, "compute_type": compute_type, **asdict(form or Format())},
        "inputs": {"corpus": content_hash(corpus), "teachers": [identity(teacher) for teacher in teachers]},
    }
    if output.exists() and not _was_made_by(plan, output):
        raise UsageError(f"{output}: must not exist yet, but does; choose another output, or remove it")
    work = output.with_name(f".{output.name}.distilled")
    with suppress(_Done), _joined(work, json.dumps(plan), output):
        try:
            _Distillation(data, teachers, work, output, beam_size, compute_type, form, threads or cores()).run(show)
            with _locked(work / "assemble", output):
                _assemble(corpus, data, teachers, plan, work)
                publish(work / "corpus", output)
        except (KeyboardInterrupt, OSError):
            say(f"nmla distill: what is done is kept in {work}; the same command goes on from there")
            raise
    _clean_up(work)  # whoever is done: one that came at the last moment may have made it again
    if not _was_made_by(plan, output):
        raise UsageError(
            f"{output}: must be made by this command alone, but another has just made something else of it"
        )
    counts: dict[str, int] = json.loads((output / MANIFEST).read_text(encoding="utf-8"))["counts"]
    return counts


def _clean_up(work: Path) -> None:
    (work / "plan.json").unlink(missing_ok=True)  # first: what is left after a kill is then begun anew
    shutil.rmtree(work, ignore_errors=True)


def _was_made_by(plan: dict[str, Any], output: Path) -> bool:
    try:
        manifest = json.loads((output / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    # Not with which versions: a corpus that is whole stays what it is.
    return all(json.loads(json.dumps(plan[name])) == manifest.get(name) for name in ("settings", "inputs"))


def _check(teachers: Sequence[Path], beam_size: int, threads: int | None) -> None:
    if not teachers:
        raise UsageError("there must be at least one teacher, but there is none")
    if len(teachers) > MOST_TEACHERS:
        raise UsageError(f"there must be at most {MOST_TEACHERS} teachers, but there are {len(teachers)}")
    for name, value in (("beam_size", beam_size), ("threads", threads)):
        if value is not None and not 1 <= value <= WIDEST_BEAM:
            raise UsageError(f"{name} must be from 1 to {WIDEST_BEAM}, but is {value}")


class _Done(Exception):
    """Another process has put the corpus together."""


@contextmanager
def _joined(work: Path, plan: str, output: Path) -> Iterator[None]:
    """Be one of those who work on `plan`."""
    if output.exists():
        raise _Done
    try:
        work.mkdir(parents=True, exist_ok=True)
        with (work / "lock").open("a") as gate:
            fcntl.flock(gate, fcntl.LOCK_EX)
            if output.exists():
                raise _Done
            _begin_or_go_on(work, plan, output)
    except FileNotFoundError:
        if not output.exists():
            raise
        raise _Done from None  # another has just finished, and removed the work
    yield


def _begin_or_go_on(work: Path, plan: str, output: Path) -> None:
    """Nobody else is here meanwhile."""
    path = work / "plan.json"
    if path.exists():
        begun, now = json.loads(path.read_text(encoding="utf-8")), json.loads(plan)
        if others := [name for name in now if now[name] != begun.get(name)]:
            raise UsageError(
                f"{work}: must have been begun like this, but was with other {' and '.join(others)}; go on with the "
                "same command as then, or remove it"
            )
        say(f"nmla distill: going on with what was done of {output}")
        (work / "parts").mkdir(exist_ok=True)
    else:
        # What is left of a work that was being removed; nobody is at it, for there is no plan.
        for entry in work.iterdir():
            if entry.name != "lock":
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        (work / "parts").mkdir()
        write_text(path, plan)


@contextmanager
def _locked(lock: Path, output: Path, wait: bool = True) -> Iterator[bool]:
    """Hold `lock` and yield True; False if another holds it and this does not wait. Raise if all is done meanwhile."""
    try:
        file = lock.open("a")
    except FileNotFoundError:
        raise _Done from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        if output.exists():
            raise _Done
        yield True


class _Distillation:
    """The work of one process."""

    def __init__(
        self,
        corpus: Corpus,
        teachers: Sequence[Path],
        work: Path,
        output: Path,
        beam_size: int,
        compute_type: str,
        form: Format | None,
        threads: int,
    ) -> None:
        self.corpus, self.teachers, self.work, self.output = corpus, teachers, work, output
        self.beam_size, self.compute_type, self.form, self.threads = beam_size, compute_type, form, threads
        self.loaded: tuple[int, Teacher] | None = None

    def run(self, show: bool) -> None:
        """Translate parts, in whatever order they are free, until there is none that is not done."""
        for k in reversed(range(len(self.teachers))):  # so that one that is damaged is found at once
            self._teacher(k)
        jobs = [(k, block) for k in range(len(self.teachers)) for block in _blocks(self.corpus)]
        with progress_bar(show) as bar:
            task = bar.add_task("translating", total=sum(len(block) for _, block in jobs))
            while left := [job for job in jobs if not self._path(*job).exists()]:
                took_any = False
                for k, block in left:
                    with _locked(self._path(k, block).with_suffix(".lock"), self.output, wait=False) as mine:
                        if mine and not self._path(k, block).exists():
                            self._translate(k, block)
                            took_any = True
                            done = (len(block) for k, block in jobs if self._path(k, block).exists())  # others' too
                            bar.update(task, completed=sum(done))
                if not took_any:  # others are at what is left
                    time.sleep(POLL_SECONDS)

    def _path(self, k: int, block: range) -> Path:
        return _part_path(self.work, k, block)

    def _teacher(self, k: int) -> Teacher:
        if self.loaded is None or self.loaded[0] != k:
            self.loaded = None  # one at a time: they may be large
            teacher = self.teachers[k]
            self.loaded = k, Teacher(teacher, compute_type=self.compute_type, workers=self.threads, form=self.form)
        return self.loaded[1]

    def _translate(self, k: int, block: range) -> None:
        """One part: a target and its origin for each source."""
        teacher, tokenizer = self._teacher(k), self.corpus.tokenizer
        same = teacher.tokenizer is not None and teacher.tokenizer.model == tokenizer.model
        sources = [_source(ids.tolist(), tokenizer, teacher, same) for ids in self.corpus.train_source.take(block)]
        fits = [i for i, source in enumerate(sources) if len(source) <= teacher.max_source_tokens]
        written = dict(zip(fits, teacher.write([sources[i] for i in fits], self.beam_size), strict=True))
        targets: list[Sequence[int] | TokenArray] = []
        origins = []
        for i, source in enumerate(block):
            ids = _target(written[i].tokens, tokenizer, teacher, same) if i in written else []
            why = "" if ids else "empty"
            if i not in written or written[i].score == -math.inf:
                why = "long"
            elif not written[i].ended:
                why = "runaway"
            targets.append(self._original(source, k) if why else ids)
            origins.append(len(self.teachers) + list(KEPT).index(why) if why else k)
        [(tokens, offsets)] = TokenStore.of(targets, tokenizer.vocab_size).shards
        data = io.BytesIO()
        np.savez(data, tokens=tokens, offsets=offsets, origins=np.array(origins, dtype=np.uint8))
        write_bytes(self._path(k, block), data.getvalue())

    def _original(self, source: int, k: int) -> TokenArray:
        """Of several references, another for each teacher."""
        first, end = self.corpus.references[source : source + 2].tolist()
        return self.corpus.train_target[first + k % (end - first)]


def _source(ids: list[int], tokenizer: Tokenizer, teacher: Teacher, same: bool) -> list[str]:
    return [tokenizer.piece(token) for token in ids] if same else teacher.source_tokens(tokenizer.decode(ids))


def _target(tokens: list[str], tokenizer: Tokenizer, teacher: Teacher, same: bool) -> list[int]:
    """A teacher's words as a student is to learn them: without blanks and other special tokens."""
    ids = [tokenizer.id(token) for token in tokens] if same else tokenizer.encode(teacher.text(tokens))
    return [token for token in ids if token > BLANK or token == UNK]


def _blocks(corpus: Corpus) -> list[range]:
    sources = len(corpus.train_source)
    return [range(start, min(start + PART_SOURCES, sources)) for start in range(0, sources, PART_SOURCES)]


def _part_path(work: Path, k: int, block: range) -> Path:
    return work / "parts" / f"{k:03d}-{block.start // PART_SOURCES:06d}.npz"


def _assemble(path: Path, corpus: Corpus, teachers: Sequence[Path], plan: dict[str, Any], work: Path) -> None:
    """Write the corpus from all its parts."""
    target = work / "corpus"
    if target.exists():  # by a run that was stopped right here
        shutil.rmtree(target)
    target.mkdir()
    for name in (TOKENIZER, VALID):
        shutil.copyfile(path / name, target / name)
    origins: list[npt.NDArray[np.uint8]] = []

    def shards() -> Iterator[Shard]:
        for block in _blocks(corpus):
            parts = [_load_part(_part_path(work, k, block)) for k in range(len(teachers))]
            origins.append(np.stack([of_part for _, of_part in parts], axis=1).flatten())
            stores = [store for store, _ in parts]
            assert all(len(store) == len(of_part) == len(block) for store, of_part in parts)
            sources = corpus.train_source.take(block)
            rows = ((source, [store[i] for store in stores]) for i, source in enumerate(sources))
            yield Shard.of(rows, corpus.tokenizer.vocab_size)

    names, counts = write_shards(shards(), target)
    of_all = np.concatenate([np.empty(0, np.uint8), *origins])
    start = 0
    for name in names:
        end = start + int(np.load(target / f"{name}.references.npy", mmap_mode="r").sum())
        save_array(target / f"{name}.origins.npy", of_all[start:end])
        start = end
    found = np.bincount(of_all, minlength=len(teachers) + len(KEPT)).tolist()
    counts["train_taught"] = sum(found[: len(teachers)])
    counts |= {f"train_kept_{why}": count for why, count in zip(KEPT, found[len(teachers) :], strict=True)}
    before = json.loads((path / MANIFEST).read_text(encoding="utf-8"))["counts"]
    counts |= {name: before[name] for name in ("valid_pairs", "valid_sources", "vocab_size")}
    names_of_origins = [*(f"teacher {k}: {teacher}" for k, teacher in enumerate(teachers, start=1)), *KEPT.values()]
    seal(target, {**plan, "origins": names_of_origins}, counts, names)


def _load_part(path: Path) -> tuple[TokenStore, npt.NDArray[np.uint8]]:
    with np.load(path) as arrays:
        return TokenStore([(arrays["tokens"], arrays["offsets"])]), arrays["origins"]
