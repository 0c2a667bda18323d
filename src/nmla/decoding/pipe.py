"""Lines in, lines out, as they come: what `nmla translate` does between its input and its output."""

import json
import math
import os
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

from nmla.decoding.translation import Translation
from nmla.decoding.translator import Translator
from nmla.errors import DataError, UsageError
from nmla.progress import progress_bar, say
from nmla.text.lines import COMPRESSED, arriving, decode_lines, open_text, require_file, standard_input


def translate_files(
    translator: Translator, files: Sequence[Path], output: Path | None, form: str, **options: Any
) -> None:
    """Translate `files`, or standard input without any, to `output`, or standard output; long lines are told of."""
    options["return_scores"] = form == "jsonl"
    translator.settings(**options)  # before anything is written over
    for file in files:
        require_file(file)
    if output is None and sys.stdout is None:
        raise UsageError("standard output must be open, but is closed")
    inputs: Sequence[Path | None] = files or [None]
    if any(_same_file(one, output) for one in inputs):
        raise UsageError(f"{output or 'standard output'}: must not be what is translated, but is")
    with ExitStack() as held:
        written = held.enter_context(output.open("wb")) if output else sys.stdout.buffer
        bar = held.enter_context(progress_bar(enabled=bool(files) and not written.isatty()))
        for path in inputs:
            stream = standard_input() if path is None else held.enter_context(open_text(path))
            name = str(path or "stdin")
            # How much text a compressed file holds is not known before its end.
            task = bar.add_task(name, total=None if path is None or path.suffix in COMPRESSED else path.stat().st_size)
            chunks = _chunks(stream, name, partial(bar.advance, task))
            for number, translation in translate_lines(translator, chunks, written, form, **options):
                if translation.parts > 1:
                    say(f"{name}:{number}: long line, translated in {translation.parts} parts")


def _same_file(source: Path | None, output: Path | None) -> bool:
    """Whether what is read, or standard input, is the file that is written, or standard output."""
    try:
        read = os.fstat(standard_input().fileno()) if source is None else source.stat()
        written = os.fstat(sys.stdout.fileno()) if output is None else output.stat()
    except OSError:  # such as of what is not there yet, or is no file
        return False
    return stat.S_ISREG(read.st_mode) and os.path.samestat(read, written)


def _chunks(stream: BinaryIO, name: str, done: Callable[[int], None]) -> Iterator[Iterator[str]]:
    """What arrives, and `done` is told the bytes of it once the next is asked for."""
    first = 1
    for lines in arriving(stream, name):
        yield decode_lines(lines, name, first)
        first += len(lines)
        done(sum(map(len, lines)))


def translate_lines(
    translator: Translator, chunks: Iterable[Iterable[str]], output: BinaryIO, form: str, **options: Any
) -> Iterator[tuple[int, Translation]]:
    """Translate every line of every chunk and write it, whole lines and chunk by chunk; tells of each, with its number.

    A line that cannot be read ends the work, but not before those before it are written.
    """
    number = 0
    for chunk in chunks:
        lines: list[str] = []
        bad: DataError | None = None
        try:
            lines.extend(chunk)
        except DataError as error:
            bad = error
        translations = translator.translate_batch(lines, **options)
        with unbroken():
            output.write(b"".join(map(_line, lines, translations, [form] * len(lines))))
            output.flush()
        for translation in translations:
            number += 1
            yield number, translation
        if bad is not None:
            raise bad


@contextmanager
def unbroken() -> Iterator[None]:
    """Let Ctrl-C wait until the block is done, so that it leaves no half line; a second one does not wait."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # such as of a job in background
        yield
        return
    asked: list[int] = []

    def wait(number: int, frame: FrameType | None) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    before = signal.signal(signal.SIGINT, wait)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if asked:
        raise KeyboardInterrupt


def _line(source: str, translation: Translation, form: str) -> bytes:
    if form == "jsonl":
        line = json.dumps({"source": source, **_finite(asdict(translation))}, ensure_ascii=False)
    elif form == "tsv":
        line = "\t".join(column.replace("\t", " ") for column in (source, translation.text))
    else:
        line = translation.text
    return line.replace("\n", " ").encode("utf-8") + b"\n"  # one line, whatever a model may have learned to write


def _finite(translation: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity: the score of what was too long for a teacher is null."""
    score = translation["score"] if math.isfinite(translation["score"]) else None
    return {**translation, "score": score, "alternatives": [_finite(of) for of in translation["alternatives"]]}
