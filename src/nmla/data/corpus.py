"""The prepared corpus: token ids in memory-mapped arrays, read by any number of processes without loading it.

manifest.json            counts and settings; a directory without it is not a corpus
tokenizer.model          sentencepiece
SPLIT.source.tokens.npy  all token ids of one side, one after the other
SPLIT.source.offsets.npy where each sentence starts; one more entry than sentences
valid.source.txt         the text itself, for scoring
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from nmla.errors import DataError, UsageError
from nmla.text.lines import read_lines
from nmla.text.tokenizer import Tokenizer

MANIFEST, TOKENIZER = "manifest.json", "tokenizer.model"
VERSION = 1  # of the layout; another is refused
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TokenStore:
    """Sentences of token ids; ``store[i]`` is the i-th."""

    tokens: npt.NDArray[np.unsignedinteger]
    offsets: IntArray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> npt.NDArray[np.unsignedinteger]:
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    @property
    def lengths(self) -> IntArray:
        return np.diff(self.offsets)

    @classmethod
    def load(cls, directory: Path, name: str) -> "TokenStore":
        tokens, offsets = (np.load(directory / f"{name}.{part}.npy", mmap_mode="r") for part in ("tokens", "offsets"))
        return cls(tokens, offsets)


def write_store(directory: Path, name: str, sentences: Iterable[list[int]], vocab_size: int) -> None:
    """Write sentences of ids as a `TokenStore`, in the smallest type that holds the vocabulary."""
    dtype = np.uint16 if vocab_size <= 1 << 16 else np.uint32
    arrays = [np.array(sentence, dtype=dtype) for sentence in sentences]
    offsets = np.concatenate([[0], np.cumsum([len(array) for array in arrays])]).astype(np.int64)
    np.save(directory / f"{name}.tokens.npy", np.concatenate([np.empty(0, dtype), *arrays]))
    np.save(directory / f"{name}.offsets.npy", offsets)


@dataclass(frozen=True)
class Corpus:
    """Training pairs as ids, validation pairs as text, and the tokenizer between them."""

    tokenizer: Tokenizer
    train_source: TokenStore
    train_target: TokenStore
    valid_source: list[str]
    valid_targets: list[list[str]]

    @property
    def references(self) -> IntArray:
        return np.arange(len(self.train_source) + 1)

    @classmethod
    def load(cls, directory: Path) -> "Corpus":
        if not (directory / MANIFEST).is_file():
            raise UsageError(f"{directory}: must be a corpus, but holds no {MANIFEST}; make one with `nmla prepare`")
        try:
            version = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))["version"]
            if version != VERSION:
                raise ValueError(f"its version must be {VERSION}, but is {version}")
            return cls(
                Tokenizer.load(directory / TOKENIZER),
                TokenStore.load(directory, "train.source"),
                TokenStore.load(directory, "train.target"),
                read_lines(directory / "valid.source.txt"),
                [[line] for line in read_lines(directory / "valid.target.txt")],
            )
        except (OSError, EOFError, KeyError, TypeError, ValueError) as error:
            raise DataError(f"{directory}: the corpus is damaged ({error}); make it anew with `nmla prepare`") from None


def shortest_paths(targets: TokenStore) -> IntArray:
    """The fewest positions a CTC path needs for each target: its length, and a blank between equal neighbours."""
    tokens, offsets = np.asarray(targets.tokens), np.asarray(targets.offsets)
    repeats = np.zeros(len(tokens) + 1, dtype=np.int64)
    if len(tokens) > 1:
        np.cumsum(tokens[1:] == tokens[:-1], out=repeats[2:])  # repeats[k]: equal neighbours among the first k tokens
    inside = repeats[offsets[1:]] - repeats[np.minimum(offsets[:-1] + 1, offsets[1:])]
    return targets.lengths + inside


def read_parallel(source: Path, target: Path) -> Iterator[tuple[str, str]]:
    """Aligned lines of two files, which must have equally many and at least one."""
    sources, targets = read_lines(source), read_lines(target)
    if len(sources) != len(targets):
        raise DataError(
            f"{source} and {target} must have as many lines as each other, but have {len(sources)} and {len(targets)}"
        )
    if not sources:
        raise DataError(f"{source}: must hold at least one line, but is empty")
    return zip(sources, targets, strict=True)
