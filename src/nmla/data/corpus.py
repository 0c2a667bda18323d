"""The prepared corpus: token ids in memory-mapped shards, read by any number of processes without loading it.

manifest.json                    counts, settings, inputs, size and hash of every file; without it there is no corpus
tokenizer.model                  sentencepiece
train-00000.source.tokens.npy    all token ids of the shard's sources, one after the other
train-00000.source.offsets.npy   where each sentence starts; one more entry than sentences
train-00000.target.tokens.npy    the same of all references of all sources
train-00000.target.offsets.npy
train-00000.references.npy       how many references each source has
valid.jsonl                      the validation text itself, for scoring
dropped.tsv                      file, line, reason and finding for each pair or reference that is not here
"""

import hashlib
import json
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nmla.errors import DataError, UsageError
from nmla.files import allow_many_files
from nmla.text.tokenizer import Tokenizer

MANIFEST, TOKENIZER, VALID, DROPPED = "manifest.json", "tokenizer.model", "valid.jsonl", "dropped.tsv"
VERSION = 2  # of the layout; another is refused
TOKENS_AT_ONCE = 1 << 22  # where work on a whole corpus is done piece by piece
IntArray = npt.NDArray[np.int64]
TokenArray = npt.NDArray[np.unsignedinteger]
Tokens = Sequence[int] | TokenArray


def content_hash(corpus: Path) -> str:
    """Of what a corpus holds, wherever it lies and was made from."""
    if not (corpus / MANIFEST).is_file():
        raise UsageError(f"{corpus}: must be a corpus that nmla prepare made, but is none")
    try:
        files = dict(json.loads((corpus / MANIFEST).read_text(encoding="utf-8"))["files"])
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{corpus / MANIFEST}: must be a corpus's manifest, but: {error}") from None
    files.pop(DROPPED, None)  # what is not in it, and the paths where that was
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


class TokenStore:
    """Sentences of token ids; ``store[i]`` is the i-th. They lie in shards, each (tokens, offsets)."""

    def __init__(self, shards: Sequence[tuple[TokenArray, IntArray]]) -> None:
        self.shards = list(shards)
        self._starts = [0, *np.cumsum([len(offsets) - 1 for _, offsets in self.shards]).tolist()]

    @classmethod
    def of(cls, sentences: Iterable[Tokens], vocab_size: int) -> "TokenStore":
        """A store in memory, in the smallest type that holds the vocabulary."""
        listed = list(sentences)
        offsets = np.cumsum([0, *map(len, listed)], dtype=np.int64)
        return cls([(np.fromiter(chain.from_iterable(listed), token_type(vocab_size)), offsets)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> TokenArray:
        if not 0 <= index < len(self):
            raise IndexError(f"sentence must be in 0..{len(self) - 1}, but is {index}")
        shard = bisect_right(self._starts, index) - 1
        tokens, offsets = self.shards[shard]
        local = index - self._starts[shard]
        return tokens[offsets[local] : offsets[local + 1]]

    def take(self, indices: Sequence[int] | IntArray) -> list[TokenArray]:
        """The sentences at `indices`."""
        if len(self.shards) != 1:
            return [self[index] for index in np.asarray(indices).tolist()]
        tokens, offsets = self.shards[0]
        wanted = np.asarray(indices, dtype=np.int64)
        starts, ends = offsets[:-1][wanted].tolist(), offsets[1:][wanted].tolist()
        return [tokens[start:end] for start, end in zip(starts, ends, strict=True)]

    @cached_property
    def lengths(self) -> IntArray:
        return np.concatenate([np.empty(0, np.int64), *(np.diff(offsets) for _, offsets in self.shards)])


def token_type(vocab_size: int) -> npt.DTypeLike:
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32


@dataclass(frozen=True)
class Shard:
    """Some sources with their references, as they are stored."""

    source_tokens: TokenArray
    source_offsets: IntArray
    target_tokens: TokenArray
    target_offsets: IntArray
    references: npt.NDArray[np.int32]  # for each source, how many

    @classmethod
    def of(cls, rows: Iterable[tuple[Tokens, Sequence[Tokens]]], vocab_size: int) -> "Shard":
        listed = list(rows)
        source = TokenStore.of((source for source, _ in listed), vocab_size)
        target = TokenStore.of((target for _, targets in listed for target in targets), vocab_size)
        references = np.array([len(targets) for _, targets in listed], dtype=np.int32)
        return cls(*source.shards[0], *target.shards[0], references)

    @classmethod
    def join(cls, shards: Sequence["Shard"]) -> "Shard":
        """Several as one, one after the other."""
        columns = {name: [getattr(shard, name) for shard in shards] for name in cls.__dataclass_fields__}
        joined: dict[str, Any] = {
            name: _join_offsets(arrays) if name.endswith("offsets") else np.concatenate(arrays)
            for name, arrays in columns.items()
        }
        return cls(**joined)

    def save(self, directory: Path, name: str) -> list[Path]:
        """Write the shard, a file for each array; returns them."""
        paths = [_path(directory, name, field) for field in vars(self)]
        for path, array in zip(paths, vars(self).values(), strict=True):
            save_array(path, array)
        return paths

    @classmethod
    def load(cls, directory: Path, name: str) -> "Shard":
        """The shard, mapped; `ValueError` if its arrays cannot belong together."""
        shard = cls(*(_map(_path(directory, name, field)) for field in cls.__dataclass_fields__))
        for tokens, offsets in (
            (shard.source_tokens, shard.source_offsets),
            (shard.target_tokens, shard.target_offsets),
        ):
            if not len(offsets) or offsets[0] != 0 or offsets[-1] != len(tokens) or (np.diff(offsets) < 0).any():
                raise ValueError(f"the offsets of {name} do not fit its tokens")
        if len(shard.references) != len(shard.source_offsets) - 1:
            raise ValueError(f"{name} must have a number of references for each source")
        if (shard.references < 1).any() or shard.references.sum(dtype=np.int64) != len(shard.target_offsets) - 1:
            raise ValueError(f"{name} must have as many targets as its sources have references")
        return shard


def save_array(path: Path, array: npt.NDArray[Any]) -> None:
    """Write a .npy file down to the disk. Unlike numpy's own function, this says so when the disk is full."""
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
        file.write(np.ascontiguousarray(array).data)
        file.flush()
        os.fsync(file.fileno())


def _path(directory: Path, name: str, field: str) -> Path:
    return directory / f"{name}.{field.replace('_', '.')}.npy"


def _map(path: Path) -> Any:
    array = np.load(path, mmap_mode="r")
    kind = "u" if path.name.endswith("tokens.npy") else "i"
    if array.ndim != 1 or array.dtype.kind != kind:
        raise ValueError(f"{path.name} must be a row of whole numbers")
    return array.view(np.ndarray)  # still mapped, and quicker to slice than a memmap


def _join_offsets(arrays: Sequence[IntArray]) -> IntArray:
    lengths = np.concatenate([np.diff(offsets) for offsets in arrays])
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])


@dataclass(frozen=True)
class Corpus:
    """Training pairs as ids, validation pairs as text, and the tokenizer between them.

    The references of source ``i`` are ``train_target[j]`` for ``j`` in ``references[i] .. references[i + 1] - 1``.
    """

    tokenizer: Tokenizer
    train_source: TokenStore
    train_target: TokenStore
    references: IntArray
    valid_source: list[str]
    valid_targets: list[list[str]]

    @classmethod
    def load(cls, directory: Path) -> "Corpus":
        """Open a corpus. Sizes and structure are checked, not the hashes in the manifest: that would read it all."""
        if not (directory / MANIFEST).is_file():
            raise UsageError(f"{directory}: must be a corpus, but holds no {MANIFEST}; make one with `nmla prepare`")
        allow_many_files()
        try:
            manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
            if manifest["version"] != VERSION:
                raise ValueError(f"its version must be {VERSION}, but is {manifest['version']}")
            for name, file in manifest["files"].items():
                if (size := (directory / name).stat().st_size) != file["bytes"]:
                    raise ValueError(f"{name} must have {file['bytes']} bytes, but has {size}")
            shards = [Shard.load(directory, name) for name in manifest["shards"]]
            references = np.cumsum(
                np.concatenate([np.zeros(1, np.int64), *(shard.references for shard in shards)]), dtype=np.int64
            )
            if (len(references) - 1, references[-1]) != (
                manifest["counts"]["train_sources"],
                manifest["counts"]["train_pairs"],
            ):
                raise ValueError("the shards must hold as many pairs as the manifest says")
            valid = [(record["source"], record["targets"]) for record in _records(directory / VALID)]
            return cls(
                Tokenizer.load(directory / TOKENIZER),
                TokenStore([(shard.source_tokens, shard.source_offsets) for shard in shards]),
                TokenStore([(shard.target_tokens, shard.target_offsets) for shard in shards]),
                references,
                [source for source, _ in valid],
                [targets for _, targets in valid],
            )
        except (OSError, EOFError, AttributeError, KeyError, TypeError, ValueError, DataError, UsageError) as error:
            raise DataError(f"{directory}: the corpus is damaged ({error}); make it anew with `nmla prepare`") from None


def _records(path: Path) -> Iterator[Any]:
    with path.open(encoding="utf-8", newline="\n") as file:
        yield from map(json.loads, file)


def shortest_paths(targets: TokenStore) -> IntArray:
    """The fewest positions a CTC path needs for each target: its length, and a blank between equal neighbours."""
    paths = [np.empty(0, np.int64)]
    for tokens, offsets in targets.shards:
        steps = np.searchsorted(offsets, np.arange(0, len(tokens), TOKENS_AT_ONCE)).tolist()
        for start, end in pairwise(sorted({0, *steps, len(offsets) - 1})):
            piece = offsets[start : end + 1] - offsets[start]
            paths.append(_shortest_paths(tokens[offsets[start] : offsets[end]], piece))
    return np.concatenate(paths)


def _shortest_paths(tokens: TokenArray, offsets: IntArray) -> IntArray:
    repeats = np.zeros(len(tokens) + 1, dtype=np.int64)
    if len(tokens) > 1:
        np.cumsum(tokens[1:] == tokens[:-1], out=repeats[2:])  # repeats[k]: equal neighbours among the first k tokens
    inside = repeats[offsets[1:]] - repeats[np.minimum(offsets[:-1] + 1, offsets[1:])]
    return np.asarray(np.diff(offsets) + inside)
