"""Language models as ARPA text, which other programs write and read: log10 p, the words, log10 of the back-off."""

import gzip
import io
import math
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import numpy as np
import numpy.typing as npt

from nmla.decoding.ngram_lm import LOG10, MAX_ORDER, NEVER, NgramLM, check_output
from nmla.errors import DataError
from nmla.files import new_file
from nmla.progress import progress_bar, say
from nmla.text.lines import open_text
from nmla.text.tokenizer import BLANK, BOS, UNK, Tokenizer

LARGEST = 1e30  # back-off that float32 can hold, in any unit
LINES_AT_ONCE = 1 << 16
Rows = npt.NDArray[np.int32]  # (n-grams, order) token ids
Floats = npt.NDArray[np.float64]


def convert_lm(source: Path, output: Path, tokenizer: Tokenizer) -> NgramLM:
    """Write a language model in the form that the name of `output` tells."""
    check_output(output, tokenizer)
    lm = NgramLM.load(source, tokenizer)
    write_lm(lm, output, tokenizer)
    return lm


def write_lm(lm: NgramLM, output: Path, tokenizer: Tokenizer) -> None:
    """Write a model in one step, as compact or ARPA file."""
    with new_file(output) as aside:
        if output.suffix == ".lm":
            lm.save(aside, tokenizer)
        else:
            with _open(aside, output.suffix == ".gz") as file:
                _write_arpa(lm, file, tokenizer)


@contextmanager
def _open(path: Path, compressed: bool) -> Iterator[TextIO]:
    with path.open("wb") as raw:
        data = gzip.GzipFile("", "wb", 6, raw, mtime=0) if compressed else raw
        with io.TextIOWrapper(data, encoding="utf-8", newline="\n") as file:
            yield file


def _write_arpa(lm: NgramLM, file: TextIO, tokenizer: Tokenizer) -> None:
    written = np.flatnonzero(~_like_unknown(lm)) + 1
    file.write("\\data\\\n")
    for order, size in enumerate((len(written), *lm.sizes[1:]), start=1):
        file.write(f"ngram {order}={size}\n")
    words = np.array([tokenizer.piece(token) for token in range(lm.vocab_size)], dtype=object)
    with progress_bar() as bar:
        task = bar.add_task("writing", total=len(written) + sum(lm.sizes[1:]))
        for order in range(1, lm.order + 1):
            file.write(f"\n\\{order}-grams:\n")
            nodes = written if order == 1 else np.arange(lm.first(order), lm.first(order + 1))
            for start in range(0, len(nodes), LINES_AT_ONCE):
                some = nodes[start : start + LINES_AT_ONCE]
                ngrams = zip(*(words[column] for column in _columns(lm, some, order)), strict=True)
                columns = [_numbers(lm.log_probs[some]), map(" ".join, ngrams)]
                if order < lm.order:
                    columns.append(_numbers(lm.backoffs[some]))
                file.write("\n".join(map("\t".join, zip(*columns, strict=True))) + "\n")
                bar.advance(task, len(some))
    file.write("\n\\end\\\n")


def _numbers(values: npt.NDArray[np.float32]) -> Iterator[str]:
    """As log10, with so many digits that no bit is lost."""
    return map("{:.9g}".format, (values.astype(np.float64) / LOG10).tolist())


def _like_unknown(lm: NgramLM) -> npt.NDArray[np.bool_]:
    """Tokens of which a model knows nothing; they need not be written, as they will be read as <unk> again."""
    unigrams = slice(1, 1 + lm.vocab_size)
    like = (lm.log_probs[unigrams] == lm.log_probs[1 + UNK]) & (lm.backoffs[unigrams] == 0)
    if lm.order > 1:
        like &= np.diff(lm.children[1 : 2 + lm.vocab_size]) == 0
    like[[UNK, BOS, lm.end]] = False
    return np.asarray(like)


def _columns(lm: NgramLM, nodes: npt.NDArray[np.int64], order: int) -> list[npt.NDArray[np.uint32]]:
    """The tokens of n-grams of one order, position by position."""
    columns = [lm.tokens[nodes]]
    for lower in range(order - 1, 0, -1):
        first = lm.first(lower)
        starts = lm.children[first : lm.first(lower + 1) + 1]
        nodes = first + np.searchsorted(starts, nodes, side="right") - 1  # their contexts
        columns.append(lm.tokens[nodes])
    return columns[::-1]


def read_arpa(path: Path, tokenizer: Tokenizer) -> NgramLM:
    """The model in an ARPA file, of any order, made by any program.

    Words that are not in the vocabulary are left out with all their n-grams, and counted on stderr. Tokens that the
    file lacks have the probability of its unigram <unk>.
    """
    with open_text(path) as file:
        orders = _Reader(path, file, tokenizer).read()
    _add_contexts(orders)
    return _build(orders, tokenizer.vocab_size)


class _Order:
    """The n-grams of one order as they are read."""

    def __init__(self, order: int) -> None:
        self.order = order
        self._ids, self._log_probs, self._backoffs = array("i"), array("d"), array("d")

    def add(self, ids: list[int], log_prob: float, backoff: float) -> None:
        self._ids.extend(ids)
        self._log_probs.append(log_prob)
        self._backoffs.append(backoff)

    def freeze(self) -> tuple[Rows, Floats, Floats]:
        rows = np.frombuffer(self._ids, np.int32) if self._ids else np.empty(0, np.int32)
        floats = (np.array(values, np.float64) * LOG10 for values in (self._log_probs, self._backoffs))
        return rows.reshape(-1, self.order), *floats  # type: ignore[return-value]


class _Reader:
    """What an ARPA file says, line by line."""

    def __init__(self, path: Path, file: io.BufferedReader, tokenizer: Tokenizer) -> None:
        self.path, self.number = path, 0
        self.lines = self._numbered(file)
        self.ids = {tokenizer.piece(token).encode("utf-8"): token for token in range(tokenizer.vocab_size)}
        self.ids[b"<UNK>"] = UNK
        self.foreign: set[bytes] = set()
        self.skipped = 0

    def read(self) -> list[tuple[Rows, Floats, Floats]]:
        while self._line("\\data\\") != b"\\data\\":
            pass
        sizes = self._sizes()
        orders = [self._ngrams(order, size, len(sizes)) for order, size in enumerate(sizes, start=1)]
        if self.skipped and not (orders[0][0] > BLANK).any():
            raise DataError(
                f"{self.path}: must be over the model's tokens, but has none of them, only others such as "
                f"{min(self.foreign).decode('utf-8', errors='replace')}; nmla lm train makes one over tokens"
            )
        if self.skipped:
            say(
                f"{self.path}: left out {self.skipped} n-grams, as {len(self.foreign)} words are not in the vocabulary "
                f"(such as {min(self.foreign).decode('utf-8', errors='replace')})"
            )
        return orders

    def _numbered(self, file: io.BufferedReader) -> Iterator[bytes]:
        for self.number, line in enumerate(file, start=1):
            yield line.strip()

    def _line(self, wanted: str) -> bytes:
        line = next(self.lines, None)
        if line is None:
            raise DataError(f"{self.path}: must be a whole ARPA file, but ends where {wanted} must come")
        return line

    def _error(self, wanted: str, line: bytes) -> DataError:
        return DataError(
            f"{self.path}:{self.number}: must be {wanted}, but is {line[:80].decode('utf-8', errors='replace')!r}"
        )

    def _sizes(self) -> list[int]:
        """The numbers of n-grams; stops behind the line \\1-grams:."""
        sizes: list[int] = []
        while (line := self._line("\\1-grams:")) != b"\\1-grams:":
            name, _, size = line.partition(b"=")
            if line and (name.split() != [b"ngram", b"%d" % (len(sizes) + 1)] or not size.strip().isdigit()):
                raise self._error(f"a line 'ngram {len(sizes) + 1}=COUNT' or '\\1-grams:'", line)
            if line:
                sizes.append(int(size))
        if not 1 <= len(sizes) <= MAX_ORDER:
            raise self._error(f"after the number of n-grams of 1 to {MAX_ORDER} orders", line)
        return sizes

    def _ngrams(self, order: int, size: int, highest: int) -> tuple[Rows, Floats, Floats]:
        """The n-grams of one order; stops behind the headline of the next, or the end."""
        found, ids, read = _Order(order), self.ids, 0
        stop = b"\\%d-grams:" % (order + 1) if order < highest else b"\\end\\"
        while (line := self._line(stop.decode())) != stop:
            if not line:
                continue
            fields = line.split()
            try:
                log_prob = float(fields[0])
                backoff = float(fields[order + 1]) if len(fields) == order + 2 else 0.0
            except (ValueError, IndexError):
                log_prob = backoff = math.nan
            if not (order + 1 <= len(fields) <= order + 2 and log_prob <= 0 and abs(backoff) <= LARGEST):
                raise self._error(f"log10 p <= 0, {order} words and log10 of the back-off, or {stop.decode()}", line)
            read += 1
            try:
                found.add([ids[word] for word in fields[1 : order + 1]], log_prob, backoff)
            except KeyError as error:
                self.skipped += 1
                self.foreign.add(error.args[0])
        if read != size:
            raise self._error(f"after {size} {order}-grams as \\data\\ says", b"after %d" % read)
        rows, log_probs, backoffs = found.freeze()
        sort = np.lexsort(rows.T[::-1])
        rows = rows[sort]
        if (rows[1:] == rows[:-1]).all(axis=1).any():
            raise DataError(f"{self.path}: must have each n-gram once, but has some of order {order} twice")
        return rows, np.maximum(log_probs[sort], NEVER), backoffs[sort]


def _add_contexts(orders: list[tuple[Rows, Floats, Floats]]) -> None:
    """Let each n-gram's context be there too, as the trie needs it; new ones have no probability yet."""
    for k in range(len(orders) - 1, 1, -1):
        rows, log_probs, backoffs = orders[k - 1]
        contexts = orders[k][0][:, :-1]
        new = np.ones(len(contexts), np.bool_)
        new[1:] = (contexts[1:] != contexts[:-1]).any(axis=1)
        contexts = contexts[new]
        both = np.concatenate([rows, contexts])
        sort = np.lexsort((np.arange(len(both)), *both.T[::-1]))  # its own first
        both = both[sort]
        first = np.ones(len(both), np.bool_)
        first[1:] = (both[1:] != both[:-1]).any(axis=1)
        if first.sum() > len(rows):
            keep = sort[first]
            log_probs = np.concatenate([log_probs, np.full(len(contexts), np.nan)])[keep]
            backoffs = np.concatenate([backoffs, np.zeros(len(contexts))])[keep]
            orders[k - 1] = both[first], log_probs, backoffs


def _build(orders: list[tuple[Rows, Floats, Floats]], vocab_size: int) -> NgramLM:
    """The trie of sorted n-grams whose contexts are all there."""
    lm = NgramLM.empty([vocab_size, *(len(rows) for rows, _, _ in orders[1:])])
    rows, log_probs, backoffs = orders[0]
    known = rows[:, 0]
    unknown = log_probs[known == UNK]
    lm.tokens[1 : 1 + vocab_size] = np.arange(vocab_size)
    lm.log_probs[1 : 1 + vocab_size] = unknown[0] if len(unknown) else NEVER
    lm.log_probs[1 + known], lm.backoffs[1 + known] = log_probs, backoffs
    lm.log_probs[1 + BOS] = NEVER  # it only ever begins; some write log p = 0
    lm.children[0] = 1
    keys = np.arange(vocab_size, dtype=np.int64)  # context * vocab_size + token of every node but the root, ascending

    def nodes(contexts: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The nodes of n-grams; -1 where there is none."""
        wanted = contexts * vocab_size + tokens
        found = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        return np.where(keys[found] == wanted, found + 1, -1)

    for order, (rows, log_probs, backoffs) in enumerate(orders[1:], start=2):
        tokens = rows[:, -1].astype(np.int64)
        contexts = np.zeros(len(rows), np.int64)
        for column in range(order - 1):
            contexts = nodes(contexts, rows[:, column].astype(np.int64))
        # The longest shorter n-gram that is there, and the probability by back-off for those that have none.
        suffix, backed_off = contexts.copy(), np.zeros(len(rows))
        found = np.full(len(rows), -1, np.int64)
        while (left := np.flatnonzero(found < 0)).size:
            backed_off[left] += lm.backoffs[suffix[left]]
            suffix[left] = lm.suffixes[suffix[left]]
            found[left] = nodes(suffix[left], tokens[left])
        backed_off += lm.log_probs[found]
        here = slice(lm.first(order), lm.first(order + 1))
        lm.tokens[here], lm.suffixes[here], lm.backoffs[here] = tokens, found, backoffs
        lm.log_probs[here] = np.where(np.isnan(log_probs), backed_off, log_probs)
        keys = np.concatenate([keys, contexts * vocab_size + tokens])
        above = np.arange(lm.first(order - 1), lm.first(order), dtype=np.int64)
        lm.children[above] = 1 + np.searchsorted(keys, above * vocab_size)
    lm.children[-1] = len(lm.tokens)
    return lm
