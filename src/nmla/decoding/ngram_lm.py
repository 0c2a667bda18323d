"""An n-gram language model over the tokens of a tokenizer, as plain arrays that load at once whatever their size.

The n-grams form a trie with suffix links. Node 0 is the empty context; then come the n-grams, by order and then by
token ids, so that the children of a node, which are the n-grams that continue it, stand together. Every token is a
unigram: token t is node 1 + t. A context is a node too, and that is all there is to a state of the model.

The compact form is one file: a header and the arrays as they are in memory.
"""

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nmla.errors import DataError, UsageError
from nmla.text.lines import require_file
from nmla.text.tokenizer import BOS, EOS, Tokenizer

MAGIC, VERSION = b"nmla-lm\n", 1
HEADER = struct.Struct("<8sII32s")  # magic, version, order, SHA-256 of the pieces; then the number of n-grams per order
ALIGNMENT = 64
MAX_ORDER = 100
MAX_NODES = 1 << 32  # `suffixes` are of 32 bits
LOG10 = math.log(10)
NEVER = -100 * LOG10  # the log probability of what a model says nothing about: small, but a number
SPACES = set(" \t\n\r\v\f\0")  # what readers of ARPA take for the end of a word
SUFFIXES = (".lm", ".arpa", ".arpa.gz")


@dataclass(frozen=True)
class NgramLM:
    """p(token | the tokens before), with back-off to shorter contexts. Logarithms are natural.

    `children`, one more than there are nodes of an order below the highest, has where each one's begin and the last
    one's end; they are sorted by token. What other code needs to score (`step` does it in Python):

        while token is not among the children of state:
            log_prob += backoffs[state]
            state = suffixes[state]
        log_prob += log_probs[child]
    """

    sizes: tuple[int, ...]  # n-grams of each order; all tokens are unigrams
    tokens: npt.NDArray[np.uint32]  # the last token of each node
    children: npt.NDArray[np.int64]
    log_probs: npt.NDArray[np.float32]  # of the last token after those before it
    backoffs: npt.NDArray[np.float32]  # 0 where there is none
    suffixes: npt.NDArray[np.uint32]  # the node without its first token, or if there is none, without as few as may be

    @classmethod
    def empty(cls, sizes: Sequence[int], path: Path | None = None, header: bytes = b"") -> "NgramLM":
        """A model to be filled: in memory, or in the new compact file `path`."""
        check_sizes(sizes)
        if path is None:
            return cls(tuple(sizes), *(np.zeros(size, dtype) for size, dtype in _arrays(sizes)))
        path.write_bytes(header)
        with path.open("r+b") as file:
            file.truncate(_places(sizes)[1])
        return cls(tuple(sizes), *_mapped(path, sizes, "r+"))

    @classmethod
    def load(cls, path: Path, tokenizer: Tokenizer) -> "NgramLM":
        """The model in a compact file, which must be of the tokenizer's vocabulary, or in an ARPA file."""
        require_file(path)
        with path.open("rb") as file:
            head = file.read(HEADER.size + 8 * MAX_ORDER)
        if head.startswith(MAGIC):
            sizes = _read_header(path, head, tokenizer)
            return cls(sizes, *_mapped(path, sizes, "r"))
        if path.suffix == ".lm":
            raise DataError(f"{path}: must be a compact language model, but does not begin as one")
        from nmla.decoding.arpa import read_arpa

        return read_arpa(path, tokenizer)

    def save(self, path: Path, tokenizer: Tokenizer) -> None:
        """Write the compact form."""
        copy = NgramLM.empty(self.sizes, path, header_of(self.sizes, tokenizer))
        for mine, its in zip(self.arrays, copy.arrays, strict=True):
            its[:] = mine

    @property
    def arrays(self) -> tuple[npt.NDArray[Any], ...]:
        return self.tokens, self.children, self.log_probs, self.backoffs, self.suffixes

    @property
    def order(self) -> int:
        return len(self.sizes)

    @property
    def vocab_size(self) -> int:
        return self.sizes[0]

    @property
    def start(self) -> int:
        """The state at the start of a sentence."""
        return self._state(1 + BOS)

    @property
    def end(self) -> int:
        """The token that ends a sentence."""
        return EOS

    def first(self, order: int) -> int:
        """The first node of an order, or where it would be."""
        return 1 + sum(self.sizes[: order - 1])

    def step(self, state: int, token: int) -> tuple[float, int]:
        """The log probability of `token` in `state`, and the state after it."""
        log_prob = 0.0
        while (child := self._child(state, token)) < 0:
            log_prob += float(self.backoffs[state])
            state = int(self.suffixes[state])
        return log_prob + float(self.log_probs[child]), self._state(child)

    def score(self, ids: Sequence[int]) -> float:
        """The log probability of a whole sentence, its end included."""
        total, state = 0.0, self.start
        for token in (*ids, self.end):
            log_prob, state = self.step(state, token)
            total += log_prob
        return total

    def _child(self, node: int, token: int) -> int:
        """The n-gram that continues `node` by `token`; -1 if none."""
        if node == 0:
            return 1 + token
        start, end = self.children[node : node + 2].tolist()
        child = start + int(np.searchsorted(self.tokens[start:end], token))
        return child if child < end and self.tokens[child] == token else -1

    def _state(self, node: int) -> int:
        """The longest suffix of `node` that matters for what follows: equal futures are equal states."""
        inner = len(self.children) - 1
        while node and (
            node >= inner or (self.children[node] == self.children[node + 1] and self.backoffs[node] == 0.0)
        ):
            node = int(self.suffixes[node])
        return node


def check_output(path: Path, tokenizer: Tokenizer) -> None:
    """Refuse, before any work is done, a name that does not tell the form, or is taken, and words that break ARPA."""
    if not path.name.endswith(SUFFIXES):
        raise UsageError(f"{path}: a language model's name must end in {', '.join(SUFFIXES)}, but does not")
    if path.exists():
        raise UsageError(f"{path}: must not exist yet, but does; choose another output, or remove it")
    for piece in map(tokenizer.piece, range(tokenizer.vocab_size if path.suffix != ".lm" else 0)):
        if SPACES & set(piece):
            raise DataError(f"words in {path} must not hold white space, but {piece!r} does; write a .lm file")


def check_sizes(sizes: Sequence[int]) -> None:
    if sum(sizes) >= MAX_NODES:
        raise DataError(f"a language model must have fewer than {MAX_NODES} n-grams, but has {sum(sizes)}")


def header_of(sizes: Sequence[int], tokenizer: Tokenizer) -> bytes:
    return HEADER.pack(MAGIC, VERSION, len(sizes), _vocabulary(tokenizer)) + struct.pack(f"<{len(sizes)}Q", *sizes)


def _vocabulary(tokenizer: Tokenizer) -> bytes:
    pieces = "\n".join(tokenizer.piece(token) for token in range(tokenizer.vocab_size))
    return hashlib.sha256(pieces.encode("utf-8")).digest()


def _arrays(sizes: Sequence[int]) -> list[tuple[int, type[np.generic]]]:
    """Lengths and types of the arrays, in the order of the fields."""
    nodes = 1 + sum(sizes)
    inner = nodes - sizes[-1]
    return [(nodes, np.uint32), (inner + 1, np.int64), (nodes, np.float32), (nodes, np.float32), (nodes, np.uint32)]


def _places(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where in the file each array begins, and the size of the file."""
    places, end = [], HEADER.size + 8 * len(sizes)
    for size, dtype in _arrays(sizes):
        places.append(-(-end // ALIGNMENT) * ALIGNMENT)
        end = places[-1] + size * np.dtype(dtype).itemsize
    return places, end


def _mapped(path: Path, sizes: Sequence[int], mode: str) -> list[npt.NDArray[Any]]:
    # A view as a plain array: numba takes it, and slices of it are cheap.
    whole = np.asarray(np.memmap(path, np.uint8, mode))  # type: ignore[call-overload]
    return [
        whole[place : place + size * np.dtype(dtype).itemsize].view(np.dtype(dtype).newbyteorder("<"))
        for place, (size, dtype) in zip(_places(sizes)[0], _arrays(sizes), strict=True)
    ]


def _read_header(path: Path, head: bytes, tokenizer: Tokenizer) -> tuple[int, ...]:
    damaged = f"{path}: must be a whole compact language model, but is damaged"
    if len(head) < HEADER.size:
        raise DataError(f"{damaged}: it ends in its header; make it anew")
    _, version, order, vocabulary = HEADER.unpack_from(head)
    if version != VERSION:
        raise DataError(f"{path}: must be of version {VERSION}, but is of {version}; make it anew")
    if not 1 <= order <= MAX_ORDER or len(head) < HEADER.size + 8 * order:
        raise DataError(f"{damaged}: it ends in its header, or has order {order}; make it anew")
    if vocabulary != _vocabulary(tokenizer):
        raise DataError(f"{path}: must be of the same vocabulary as the tokenizer, but is of another; make it anew")
    sizes: tuple[int, ...] = struct.unpack_from(f"<{order}Q", head, HEADER.size)
    if sizes[0] != tokenizer.vocab_size or sum(sizes) >= MAX_NODES:
        raise DataError(f"{damaged}: it cannot have {sizes} n-grams; make it anew")
    if (found := path.stat().st_size) != (size := _places(sizes)[1]):
        raise DataError(f"{damaged}: it must have {size} bytes, but has {found}; make it anew")
    return sizes
