"""Writing so that nobody ever sees half of a file or of a directory."""

import fcntl
import hashlib
import json
import os
import re
import resource
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from nmla.errors import DataError, UsageError

MANIFEST = "manifest.json"
MOST_FILES = 1 << 16  # open at once
UMASK = os.umask(0o077)  # it can only be read by setting it, which is no thing to do while other threads make files
os.umask(UMASK)


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` in one step: aside, synced, renamed."""
    write_bytes(path, text.encode("utf-8", errors="surrogateescape"))  # as the names of files come


def write_bytes(path: Path, data: bytes) -> None:
    """Write `data` to `path` in one step: aside, synced, renamed."""
    with new_file(path) as aside:
        aside.write_bytes(data)


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yield an empty file beside `path` that replaces `path` when the block ends well, else disappears."""
    _check_replaceable(path)
    path = Path(os.path.realpath(path))  # of a link, what it leads to
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(descriptor)
    aside = Path(name)
    try:
        yield aside
        _sync(aside)
        _set_mode(aside)
        os.replace(aside, path)
    except BaseException:
        aside.unlink()
        raise
    _sync(path.parent)


def check_output(path: Path) -> None:
    """Refuse, before any long work, a file that could not be written after it."""
    _check_replaceable(path)
    nearest = next(parent for parent in path.absolute().parents if parent.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise UsageError(f"{path}: must be in a directory that can be written to, but {nearest} cannot")


def _check_replaceable(path: Path) -> None:
    """A device such as /dev/null would become a file for everybody."""
    if path.exists() and not path.is_file():
        what = "a directory" if path.is_dir() else "a device or a pipe"
        raise UsageError(f"{path}: must be a file to write, but is {what}")


@contextmanager
def locked(lock: Path, what: Path) -> Iterator[None]:
    """Hold `lock`, a file, so that no other process works on `what` meanwhile; a kill lets it go."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"{what}: must be made by one process at a time, but another is at it") from None
        yield


@contextmanager
def kept_directory(path: Path) -> Iterator[Path]:
    """Yield a hidden directory beside `path` for work that may be stopped and go on; it is there again the next time.

    It goes when the block ends well, or by an error that would come again. Only one process may have it.
    """
    aside = path.with_name(f".{path.name}.partial")
    aside.mkdir(parents=True, exist_ok=True)
    with locked(aside / "lock", path):
        try:
            yield aside
        except (UsageError, DataError):
            shutil.rmtree(aside, ignore_errors=True)
            raise
        shutil.rmtree(aside, ignore_errors=True)


def allow_many_files() -> None:
    """Let this process hold as many files open as the system lets it: each mapped array holds one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(ValueError, OSError):  # a system may have a limit that it does not tell
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def clear_directory(path: Path) -> None:
    """Remove what `kept_directory` holds."""
    for entry in path.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        elif entry.name != "lock":
            entry.unlink()


def publish(directory: Path, path: Path) -> None:
    """Give a finished directory its name, in one step, once it is safely on the disk."""
    for file in directory.rglob("*"):
        _sync(file)
    _sync(directory)
    os.rename(directory, path)
    _sync(path.parent)


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Yield an empty directory beside `path` that replaces `path` when the block ends well, else disappears."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        yield aside
        for file in (aside, *aside.rglob("*")):
            _set_mode(file)
            _sync(file)
        old = aside.with_name(f"{aside.name}.old")
        if path.exists():
            os.rename(path, old)
        try:
            os.rename(aside, path)
        except OSError:
            if old.exists():
                os.rename(old, path)
            raise
        _sync(path.parent)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def remove_directory(path: Path) -> None:
    """Remove a directory so that it is never seen half removed."""
    hidden = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    os.rename(path, hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def remove_leftovers(directory: Path) -> None:
    """Remove what writes that a kill stopped left, and nothing else that is hidden."""
    for path in directory.glob(".*"):
        if re.fullmatch(r"\..+\.[a-z0-9_]{8}(\.old)?", path.name):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _set_mode(path: Path) -> None:
    """As if it had been made by `open` or `mkdir`: tempfile and safetensors make theirs private."""
    path.chmod((0o777 if path.is_dir() else 0o666) & ~UMASK)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_manifest(directory: Path, names: Iterable[str]) -> None:
    """Write down the SHA-256 of these files in `directory`."""
    hashes = {name: sha256(directory / name) for name in names}
    write_text(directory / MANIFEST, json.dumps({"sha256": hashes}, indent=2) + "\n")


def verify_manifest(directory: Path, but: str = "") -> None:
    """Raise ValueError unless every file, `but` one, is as it was when the manifest was written."""
    manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
    if not isinstance(manifest, dict) or not isinstance(manifest.get("sha256"), dict):
        raise ValueError(f"{MANIFEST} must hold the SHA-256 of its files, but holds none")
    for name, expected in manifest["sha256"].items():
        if name != but and sha256(directory / name) != expected:
            raise ValueError(f"the SHA-256 of {name} must be as in {MANIFEST}, but is not")


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
