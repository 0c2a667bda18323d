"""What the processes of `prepare` do: learn a vocabulary from text, and turn blocks of lines into parts of the corpus.

A part is a shard with a report of what was dropped. The report is written last: a part without it is not finished.
"""

import hashlib
import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache
from itertools import chain, islice, pairwise
from pathlib import Path

import numpy as np

from nmla.data.corpus import Shard, save_array
from nmla.data.pairs import Bad, Block, Dropped, dropped, parse_block, read_blocks
from nmla.errors import DataError
from nmla.files import write_text
from nmla.text.tokenizer import UNK, Tokenizer

LINES_AT_ONCE = 1024  # sentencepiece's lists of Python numbers are large: few lines at a time
MAX_UNITS = 2_000_000  # different units in pretokenised text; each takes about 100 bytes
Row = tuple[list[int], list[list[int]]]  # a source and its references


@dataclass(frozen=True)
class Rules:
    """Which pairs are usable; None: any."""

    max_tokens: int | None = None
    max_ratio: float | None = None
    upsample: int | None = None


def learn_tokenizer(train: Sequence[tuple[Path, ...]], share: float, vocab_size: int, pretokenised: bool) -> bytes:
    """A vocabulary of both sides, from about `share` of the pairs; the same ones each time."""
    lost: list[Dropped] = []
    texts = _sample(train, share, lost)
    first = next(texts, None)
    if first is None:
        raise none_usable(train, lost)
    if not pretokenised:
        return Tokenizer.learn(chain([first], texts), vocab_size).model
    counts: Counter[str] = Counter()
    for text in chain([first], texts):
        counts.update(unit for unit in text.split(" ") if "\t" not in unit)  # which sentencepiece cannot learn
        if len(counts) > MAX_UNITS:
            raise DataError(
                f"pretokenised text must have at most {MAX_UNITS} different units, but has more; is it split by BPE?"
            )
    del counts[""]
    return Tokenizer.of_units(counts, vocab_size).model


def none_usable(pairs: Sequence[tuple[Path, ...]], lost: Sequence[Dropped] = ()) -> DataError:
    names = ", ".join(" and ".join(map(str, files)) for files in pairs)
    why = f" ({lost[0]})" if lost else ""
    return DataError(f"{names}: at least one pair must have usable text on both sides, but none has{why}")


def _sample(train: Sequence[tuple[Path, ...]], share: float, lost: list[Dropped]) -> Iterator[str]:
    """Both sides of some pairs; the first that cannot be used goes to `lost`."""
    rng = random.Random(1)
    for block in read_blocks(train):
        for item in parse_block(block):
            if isinstance(item, Dropped):
                lost[:] = lost or [item]
            elif rng.random() < share:
                _, source, targets = item
                with_text = [text for text in targets if text.strip()]
                if source.strip() and with_text:
                    yield from (source, *with_text)


@dataclass(frozen=True, slots=True)
class Encoded:
    """A usable line: its source, and its references, each with its ids."""

    source: str
    ids: list[int]
    references: list[tuple[str, list[int]]]


def encode_lines(block: Block, tokenizer: Tokenizer, rules: Rules) -> Iterator[Encoded | Dropped]:
    """Each line in turn: what is usable of it, and what is not. One bad reference does not harm the others."""
    items = parse_block(block)
    while batch := list(islice(items, LINES_AT_ONCE)):
        parsed = [item for item in batch if not isinstance(item, Dropped)]
        sources = iter(tokenizer.encode_batch([source for _, source, _ in parsed]))
        targets = iter(tokenizer.encode_batch([text for _, _, texts in parsed for text in texts]))
        for item in batch:
            if isinstance(item, Dropped):
                yield item
                continue
            line, source, texts = item
            ids = next(sources)
            references = []
            for text, reference in zip(texts, [next(targets) for _ in texts], strict=True):
                try:
                    _check(ids, reference, rules)
                    references.append((text, reference))
                except Bad as bad:
                    yield dropped(block, line, bad)
                    if bad.side == 0:  # no reference can mend the source
                        break
            if references:
                yield Encoded(source, ids, references)


def _check(source: list[int], target: list[int], rules: Rules) -> None:
    for side, ids in enumerate((source, target)):
        if not ids:
            raise Bad("empty", f"the {('source', 'target')[side]} holds none", side)
        if rules.max_tokens is not None and len(ids) > rules.max_tokens:
            raise Bad("too_long", f"this one has {len(ids)} tokens, more than {rules.max_tokens}", side)
    shorter, longer = sorted((len(source), len(target)))
    if rules.max_ratio is not None and longer > rules.max_ratio * shorter:
        raise Bad("ratio", f"they have {len(source)} and {len(target)} tokens, more than {rules.max_ratio:g} to 1", 1)
    if rules.upsample is not None:
        positions = rules.upsample * (len(source) + 1)
        needed = len(target) + sum(one == next_one for one, next_one in pairwise(target))
        if needed > positions:
            raise Bad("upsample", f"it needs {needed} and there are {positions}", 1)


def encode_block(
    number: int, block: Block, model: bytes, rules: Rules, directory: Path, with_keys: bool
) -> Dropped | None:
    """Write the part of a block; returns the first that was dropped."""
    tokenizer = _tokenizer(model)
    shards: list[Shard] = []
    rows: list[Row] = []
    keys: list[bytes] = []
    lost: list[Dropped] = []
    duplicates = 0
    for item in encode_lines(block, tokenizer, rules):
        if isinstance(item, Dropped):
            lost.append(item)
            continue
        different = list({tuple(ids): ids for _, ids in item.references}.values())
        duplicates += len(item.references) - len(different)
        rows.append((item.ids, different))
        if with_keys:
            keys.append(source_key(item.source))
        if len(rows) == LINES_AT_ONCE:
            shards.append(Shard.of(rows, tokenizer.vocab_size))
            rows = []
    shard = Shard.join([*shards, Shard.of(rows, tokenizer.vocab_size)])
    shard.save(directory, part_name(number))
    if with_keys:
        save_array(keys_path(directory, number), np.frombuffer(b"".join(keys), np.uint64).reshape(-1, 2))
    report = {
        "dropped": [astuple(item) for item in lost],
        "duplicates": duplicates,
        "unknown": int((shard.source_tokens == UNK).sum() + (shard.target_tokens == UNK).sum()),
    }
    write_text(report_path(directory, number), json.dumps(report))
    return lost[0] if lost else None


def part_name(number: int) -> str:
    return f"{number:06d}"


def report_path(directory: Path, number: int) -> Path:
    return directory / f"{part_name(number)}.json"


def keys_path(directory: Path, number: int) -> Path:
    return directory / f"{part_name(number)}.keys.npy"


def source_key(source: str) -> bytes:
    """128 bits: enough that two different sources never meet."""
    return hashlib.blake2b(source.strip().encode("utf-8"), digest_size=16).digest()


@lru_cache(maxsize=1)
def _tokenizer(model: bytes) -> Tokenizer:
    return Tokenizer(model)
