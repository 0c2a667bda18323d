"""Lines in, lines out, as they come: what `nmla translate` does between its input and its output."""

import json
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from types import FrameType
from typing import Any, BinaryIO

from nmla.decoding.translator import Translation, Translator
from nmla.errors import DataError

FORMATS = ("text", "tsv", "jsonl")


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
    if threading.current_thread() is not threading.main_thread():
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
        line = json.dumps({"source": source, **asdict(translation)}, ensure_ascii=False)
    elif form == "tsv":
        line = "\t".join(column.replace("\t", " ") for column in (source, translation.text))
    else:
        line = translation.text
    return line.replace("\n", " ").encode("utf-8") + b"\n"  # one line, whatever a model may have learned to write
