r"""Text files as lines, the same way everywhere: plain, or compressed as the ending of the name says.

A line ends at "\n" and nowhere else: real corpora hold U+0085 and U+2028 inside sentences, and splitting there would
shift every later line against the other side. A "\r" before the "\n" belongs to the line end.
"""

import gzip
import io
import lzma
import os
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

import zstandard

from nmla.errors import DataError, UsageError

COMPRESSED = (".gz", ".xz", ".zst")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
MAX_LINE_BYTES = 1 << 20  # longer is no sentence; the limit keeps memory flat
DAMAGE = (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error, zstandard.ZstdError)


def decode_lines(raw_lines: Iterable[bytes], name: str, first: int = 1) -> Iterator[str]:
    """Decode lines as read from a binary file called `name`; `DataError` names the line that is not UTF-8."""
    for number, raw in enumerate(raw_lines, start=first):
        if len(raw.removesuffix(b"\n")) > MAX_LINE_BYTES:
            raise too_long(name, number)
        if number == 1:
            raw = raw.removeprefix(BYTE_ORDER_MARK)  # it is not text
        try:
            yield raw.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{name}:{number}: text must be UTF-8, but {not_utf8(error)}; convert the file, for example with iconv"
            ) from None


def arriving(file: BinaryIO, name: str) -> Iterator[list[bytes]]:
    """The lines of a stream, as many at a time as have arrived, so that nobody waits for a line that is there."""
    rest, done = b"", 0
    read: Callable[[int], bytes] = getattr(file, "read1", file.read)
    while data := read(1 << 14):
        *lines, rest = (rest + data).split(b"\n")
        if len(rest) > MAX_LINE_BYTES:
            yield [line + b"\n" for line in lines]
            raise too_long(name, done + len(lines) + 1)
        if lines:
            yield [line + b"\n" for line in lines]
            done += len(lines)
    if rest:
        yield [rest]


def too_long(name: str, line: int) -> DataError:
    return DataError(f"{name}:{line}: must have at most {MAX_LINE_BYTES} bytes, but has more; split the line")


def standard_input() -> BinaryIO:
    if sys.stdin is None:
        raise UsageError("standard input must be open, but is closed")
    with suppress(OSError, ValueError):  # what stands in for it may be no file
        os.set_blocking(sys.stdin.fileno(), True)  # else nothing yet would be taken for the end
    return sys.stdin.buffer


def not_utf8(error: UnicodeDecodeError) -> str:
    return f"byte {error.start + 1} of the line is 0x{error.object[error.start]:02x}"


def read_lines(path: Path) -> list[str]:
    """All lines of a text file."""
    with open_text(path) as file:
        return list(lines_of(file, path))


def lines_of(file: io.BufferedReader, path: Path) -> Iterator[str]:
    """The lines of an open text file, one at a time."""
    return decode_lines(iter(partial(bounded_line, file), b""), str(path))


def bounded_line(file: io.BufferedReader) -> bytes:
    """The next line with its end, b"" after the last; one that is too long comes cut to MAX_LINE_BYTES + 1."""
    line = file.readline(MAX_LINE_BYTES + 1)
    if len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
        while (rest := file.readline(MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
            pass
    return line


def require_file(path: Path) -> None:
    """Refuse a path that is not there or is a directory, before any work is done; a pipe is as good as a file."""
    if not path.exists():
        raise UsageError(f"{path}: must be a file, but does not exist")
    if path.is_dir():
        raise UsageError(f"{path}: must be a file, but is a directory")


def open_text(path: Path) -> io.BufferedReader:
    """The bytes of a text file, decompressed if its name ends in .gz, .xz or .zst."""
    require_file(path)
    return io.BufferedReader(_Decompressed(path), buffer_size=1 << 20)


def position(file: io.BufferedReader) -> int:
    """How many bytes of a file that `open_text` opened have been used, as they are on the disk; 0 of a pipe."""
    raw = file.raw
    return raw.position() if isinstance(raw, _Decompressed) else 0


class _Decompressed(io.RawIOBase):
    """What a file holds; damage becomes a `DataError` that names the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("rb")
        self._text = _decompress(self._file, path.suffix)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        try:
            piece = self._text.read(len(buffer))
        except DAMAGE as error:
            raise DataError(
                f"{self._path}: must be whole {self._path.suffix} data, but is damaged ({error}); fetch it anew"
            ) from None
        buffer[: len(piece)] = piece
        return len(piece)

    def position(self) -> int:
        return self._file.tell() if self._file.seekable() else 0

    def close(self) -> None:
        self._file.close()
        super().close()


def _decompress(file: BinaryIO, suffix: str) -> "BinaryIO | _Zstd | gzip.GzipFile | lzma.LZMAFile":
    match suffix:
        case ".gz":
            return gzip.GzipFile(fileobj=file)
        case ".xz":
            return lzma.LZMAFile(file)
        case ".zst":
            return _Zstd(file)
    return file


class _Zstd:
    """A file of zstd frames. The package's own stream reader takes a cut file for a whole one."""

    def __init__(self, file: BinaryIO) -> None:
        self._pieces = self._decompress(file)
        self._rest = memoryview(b"")

    def read(self, size: int) -> memoryview:
        while not self._rest:
            try:
                self._rest = memoryview(next(self._pieces))
            except StopIteration:
                break
        head, self._rest = self._rest[:size], self._rest[size:]
        return head

    def _decompress(self, file: BinaryIO) -> Iterator[bytes]:
        frame = None
        while piece := file.read(1 << 8):  # so few bytes can become 8 megabytes
            while piece:
                frame = frame or zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
                yield frame.decompress(piece)
                piece = b""
                if frame.eof:
                    piece, frame = frame.unused_data, None
        if frame is not None:
            raise EOFError("it ends in the middle")
