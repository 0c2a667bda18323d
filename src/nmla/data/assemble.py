"""From the parts of a corpus to its shards: joined in order, or grouped by source.

Grouping must find equal sources anywhere: in real corpora they seldom stand together. Sorting the hashes of the sources
does that, bucket by bucket, so that memory does not grow with the corpus; all else stays in mapped files.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nmla.data.corpus import MANIFEST, VERSION, IntArray, Shard, TokenArray, TokenStore
from nmla.data.encode import keys_path, part_name
from nmla.files import allow_many_files, sha256, write_text

SHARD_SOURCES, SHARD_TOKENS = 1 << 18, 1 << 25  # a shard is closed by whichever comes first
BUCKET_ROWS = 1 << 21  # how many sources are sorted at once: about 100 MB


def write_shards(parts: Iterator[Shard], directory: Path) -> tuple[list[str], dict[str, int]]:
    """Join small shards to large ones; returns their names and what they hold."""
    names: list[str] = []
    counts = dict.fromkeys(("train_pairs", "train_sources", "train_source_tokens", "train_target_tokens"), 0)
    held: list[Shard] = []

    def write() -> None:
        shard = Shard.join(held)
        names.append(f"train-{len(names):05d}")
        shard.save(directory, names[-1])
        counts["train_pairs"] += len(shard.target_offsets) - 1
        counts["train_sources"] += len(shard.references)
        counts["train_source_tokens"] += len(shard.source_tokens)
        counts["train_target_tokens"] += len(shard.target_tokens)
        held.clear()

    for part in parts:
        held.append(part)
        sources = sum(len(shard.references) for shard in held)
        tokens = sum(len(shard.source_tokens) + len(shard.target_tokens) for shard in held)
        if sources >= SHARD_SOURCES or tokens >= SHARD_TOKENS:
            write()
    if held:
        write()
    return names, counts


def seal(directory: Path, plan: dict[str, Any], counts: dict[str, int], shards: list[str]) -> None:
    """Write the manifest, which makes a corpus of what is in a directory: last, when all else is there."""
    files = {path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in sorted(directory.iterdir())}
    manifest = {"version": VERSION, **plan, "counts": counts, "shards": shards, "files": files}
    write_text(directory / MANIFEST, json.dumps(manifest, indent=2) + "\n")


def plain_parts(directory: Path, count: int) -> Iterator[Shard]:
    for number in range(count):
        yield Shard.load(directory, part_name(number))


class GroupedParts:
    """Parts in which each source stands once, where it stood first, with the different references of all its lines."""

    def __init__(self, directory: Path, count: int, vocab_size: int) -> None:
        allow_many_files()
        self._shards = list(plain_parts(directory, count))
        self._vocab_size = vocab_size
        self.duplicates = 0
        keys = [np.load(keys_path(directory, number), mmap_mode="r") for number in range(count)]
        total = sum(map(len, keys))
        # Mapped files that the system may write out: they grow with the corpus.
        self._next = np.memmap(directory / "next", np.int64, "w+", shape=max(total, 1))
        self._follows = np.memmap(directory / "follows", np.bool_, "w+", shape=max(total, 1))
        self._next[:] = -1
        buckets = total // BUCKET_ROWS + 1
        for bucket in range(buckets):
            self._link(_bucket(keys, bucket, buckets))

    def _link(self, rows_and_keys: tuple[IntArray, npt.NDArray[np.uint64]]) -> None:
        """Let each row point to the next one with the same source."""
        rows, keys = rows_and_keys
        order = np.lexsort((rows, keys[:, 1], keys[:, 0]))
        rows, keys = rows[order], keys[order]
        same = (keys[1:] == keys[:-1]).all(axis=1)
        self._next[rows[:-1][same]] = rows[1:][same]
        self._follows[rows[1:][same]] = True

    def __iter__(self) -> Iterator[Shard]:
        sources = TokenStore([(shard.source_tokens, shard.source_offsets) for shard in self._shards])
        targets = TokenStore([(shard.target_tokens, shard.target_offsets) for shard in self._shards])
        references = reference_starts(self._shards)
        start = 0
        for shard in self._shards:
            rows = []
            for row in range(start, start + len(shard.references)):
                if not self._follows[row]:
                    rows.append((sources[row], self._references(row, targets, references)))
            start += len(shard.references)
            yield Shard.of(rows, self._vocab_size)

    def _references(self, row: int, targets: TokenStore, references: IntArray) -> list[TokenArray]:
        different: dict[bytes, TokenArray] = {}
        while row >= 0:
            for index in range(references[row], references[row + 1]):
                target = targets[index]
                self.duplicates += target.tobytes() in different
                different.setdefault(target.tobytes(), target)
            row = int(self._next[row])
        return list(different.values())


def reference_starts(shards: list[Shard]) -> IntArray:
    counts = [shard.references for shard in shards]
    return np.cumsum(np.concatenate([np.zeros(1, np.int64), *counts]), dtype=np.int64)


def _bucket(keys: list[npt.NDArray[np.uint64]], bucket: int, buckets: int) -> tuple[IntArray, npt.NDArray[np.uint64]]:
    rows, found = [np.empty(0, np.int64)], [np.empty((0, 2), np.uint64)]
    start = 0
    for of_part in keys:
        wanted = np.flatnonzero(of_part[:, 0] % np.uint64(buckets) == bucket)
        rows.append(wanted + start)
        found.append(np.asarray(of_part[wanted]))
        start += len(of_part)
    return np.concatenate(rows), np.concatenate(found)
