r"""Text files as lists of lines, the same way everywhere.

A line ends at "\n" and nowhere else: real corpora hold U+0085 and U+2028 inside sentences, and splitting there would
shift every later line against the other side. A "\r" before the "\n" belongs to the line end.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

from nmla.errors import DataError, UsageError


def decode_lines(raw_lines: Iterable[bytes], name: str) -> Iterator[str]:
    """Decode lines as read from a binary file called `name`; `DataError` names the line that is not UTF-8."""
    for number, raw in enumerate(raw_lines, start=1):
        if number == 1:
            raw = raw.removeprefix(b"\xef\xbb\xbf")  # a byte order mark is not text
        try:
            yield raw.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{name}:{number}: text must be UTF-8, but byte {error.start + 1} of the line is "
                f"0x{raw[error.start]:02x}; convert the file, for example with iconv"
            ) from None


def read_lines(path: Path) -> list[str]:
    """All lines of a text file."""
    require_file(path)
    with path.open("rb") as file:
        return list(decode_lines(file, str(path)))


def require_file(path: Path) -> None:
    """Refuse a path that is not there or is a directory, before any work is done; a pipe is as good as a file."""
    if not path.exists():
        raise UsageError(f"{path}: must be a file, but does not exist")
    if path.is_dir():
        raise UsageError(f"{path}: must be a file, but is a directory")
