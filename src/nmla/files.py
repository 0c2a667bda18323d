"""Writing so that nobody ever sees half of a file or of a directory."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

MANIFEST = "manifest.json"


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` in one step: aside, synced, renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, aside = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(aside, 0o644)  # mkstemp makes it private
        os.replace(aside, path)
    except BaseException:
        os.unlink(aside)
        raise
    _sync(path.parent)


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Yield an empty directory beside `path` that replaces `path` when the block ends well, else disappears."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        yield aside
        for file in aside.rglob("*"):
            _sync(file)
        _sync(aside)
        os.chmod(aside, 0o755)  # mkdtemp makes it private
        old = aside.with_name(f"{aside.name}.old")
        if path.exists():
            os.rename(path, old)
        os.rename(aside, path)
        _sync(path.parent)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


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


def verify_manifest(directory: Path) -> None:
    """Raise ValueError unless every file is as it was when the manifest was written."""
    for name, expected in json.loads((directory / MANIFEST).read_text(encoding="utf-8"))["sha256"].items():
        if sha256(directory / name) != expected:
            raise ValueError(f"the SHA-256 of {name} must be as in {MANIFEST}, but is not")


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
