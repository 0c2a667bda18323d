"""From files as people have them to a corpus: what goes in comes out, and what does not is told."""

import gzip
import json
import lzma
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import zstandard

from nmla.data import assemble, pairs
from nmla.data import prepare as module
from nmla.data.corpus import Corpus, content_hash
from nmla.data.prepare import prepare
from nmla.data.synthetic import HEADLINE, generate
from nmla.data.workers import Workers
from nmla.errors import DataError, NmlaError, UsageError
from nmla.text.tokenizer import UNK, Tokenizer

PLAIN = [("one two three", "eins zwei drei"), ("two", "zwei"), ("three one", "drei eins")] * 10
COMPRESS = {
    "": bytes,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": lambda data: zstandard.compress(data[:30]) + zstandard.compress(data[30:]),  # two frames, as pzstd makes
}


def write(path: Path, text: str | bytes) -> Path:
    data = text if isinstance(text, bytes) else text.encode()
    path.write_bytes(COMPRESS[path.suffix if path.suffix in COMPRESS else ""](data))
    return path


def write_pair(directory: Path, rows, name="a", ending="") -> tuple[Path, Path]:
    return tuple(
        write(directory / f"{name}.{language}{ending}", "".join(f"{row[side]}\n" for row in rows))
        for side, language in enumerate(("en", "de"))
    )


@pytest.fixture
def pair(tmp_path):
    return write_pair(tmp_path, PLAIN)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    Tokenizer.learn([side for pair in PLAIN for side in pair], vocab_size=26).save(path)
    return path


def text_of(corpus: Path):
    """Sources with their references, as text again."""
    loaded = Corpus.load(corpus)
    decode = loaded.tokenizer.decode
    ends = loaded.references.tolist()
    return [
        (
            decode(loaded.train_source[i].tolist()),
            [decode(target.tolist()) for target in loaded.train_target.take(range(ends[i], ends[i + 1]))],
        )
        for i in range(len(loaded.train_source))
    ]


def drops(corpus: Path):
    """What dropped.tsv says, with the names of files alone: (file, line, reason)."""
    lines = (corpus / "dropped.tsv").read_text().split("\n")[1:-1]
    return [(Path(file).name, int(line), reason) for file, line, reason, _ in (line.split("\t") for line in lines)]


def content(directory: Path):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("ending", COMPRESS)
@pytest.mark.parametrize("kind", ["text", "tsv", "jsonl"])
def test_every_format_gives_the_same_pairs(tmp_path, tokenizer, kind, ending):
    if kind == "text":
        files = write_pair(tmp_path, PLAIN, ending=ending)
    elif kind == "tsv":
        files = (write(tmp_path / f"a.tsv{ending}", "".join(f"{a}\t{b}\n" for a, b in PLAIN)),)
    else:
        lines = (json.dumps({"source": a, "target": b, "other": 1}) + "\n" for a, b in PLAIN)
        files = (write(tmp_path / f"a.jsonl{ending}", "".join(lines)),)
    counts = prepare(train=[files], valid=[files], output=tmp_path / "corpus", tokenizer=tokenizer)
    assert text_of(tmp_path / "corpus") == [(a, [b]) for a, b in PLAIN]
    corpus = Corpus.load(tmp_path / "corpus")
    assert list(zip(corpus.valid_source, corpus.valid_targets, strict=True)) == [(a, [b]) for a, b in PLAIN]
    assert (counts["train_pairs"], counts["valid_pairs"], counts["vocab_size"]) == (30, 30, 26)


def test_several_files_a_side_come_one_after_the_other(tmp_path, tokenizer):
    first, second = write_pair(tmp_path, PLAIN[:2], "a"), write_pair(tmp_path, PLAIN[2:4], "b", ".xz")
    third = (write(tmp_path / "c.tsv", "three\tdrei"),)
    prepare(train=[first, second, third], valid=[first], output=tmp_path / "corpus", tokenizer=tokenizer)
    assert text_of(tmp_path / "corpus") == [(a, [b]) for a, b in (*PLAIN[:4], ("three", "drei"))]


def test_lines_stay_aligned_whatever_they_hold(tmp_path, tokenizer):
    """Other line ends inside a line, a byte order mark in each file, Windows line ends, no newline at the end."""
    odd = "one\u2028two\u0085three\x0bone\x0cone\x1etwo"
    for number in (1, 2):
        write(tmp_path / f"{number}.en", b"\xef\xbb\xbf" + f"{odd}\ntwo\r\n\r\nthree".encode())
        write(tmp_path / f"{number}.de", "eins\nzwei\ndrei\ndrei\n")
    files = [(tmp_path / f"{number}.en", tmp_path / f"{number}.de") for number in (1, 2)]
    prepare(train=files, valid=files[:1], output=tmp_path / "corpus", tokenizer=tokenizer)
    corpus = Corpus.load(tmp_path / "corpus")
    assert corpus.valid_source == [odd, "two", "three"]
    assert corpus.valid_targets == [["eins"], ["zwei"], ["drei"]]
    pairs_of_text = text_of(tmp_path / "corpus")
    assert pairs_of_text[1:3] == pairs_of_text[4:] == [("two", ["zwei"]), ("three", ["drei"])]
    assert pairs_of_text[0] == pairs_of_text[3]
    assert "\ufeff" not in pairs_of_text[0][0]
    assert drops(tmp_path / "corpus") == [("1.en", 3, "empty"), ("2.en", 3, "empty"), ("1.en", 3, "empty")]


BAD = [
    (b"one\0two", b"eins", "nul", 0),
    (b"one", b"ei\xffns", "utf8", 1),
    (b" ", b"eins", "empty", 0),
    (b"one", b"", "empty", 1),
    ("\u200b".encode(), b"eins", "empty", 0),
    (b"one " * 40, b"eins", "too_long", 0),
    (b"one", b"eins " * 40, "too_long", 1),
    (b"one", b"x" * (pairs.MAX_LINE_BYTES + 1), "too_long", 1),
    (b"one", b"eins zwei drei eins zwei drei eins zwei drei", "ratio", 1),
    (b"t t", b"t t t t", "upsample", 1),  # four tokens and three blanks, and six positions
]
STRICT = {"max_tokens": 30, "max_ratio": 5.0, "upsample": 2}


@pytest.mark.parametrize(("source", "target", "reason", "side"), BAD, ids=range(len(BAD)))
def test_every_bad_pair_is_counted_listed_and_told(tmp_path, tokenizer, pair, capsys, source, target, reason, side):
    bad = (
        write(tmp_path / "bad.en", b"one\n" + source + b"\ntwo\n"),
        write(tmp_path / "bad.de", b"eins\n" + target + b"\nzwei\n"),
    )
    options = {"valid": [pair], "tokenizer": tokenizer, **STRICT}
    counts = prepare(train=[bad], output=tmp_path / "corpus", **options)
    assert {name: count for name, count in counts.items() if "dropped" in name and count} == {
        f"train_dropped_{reason}": 1
    }
    assert counts["train_pairs"] == 2
    name = ("bad.en", "bad.de")[side]
    assert drops(tmp_path / "corpus") == [(name, 2, reason)]
    assert f"dropped: {tmp_path / name}:2: " in capsys.readouterr().err
    assert json.loads((tmp_path / "corpus" / "manifest.json").read_text())["counts"] == counts
    before = content_names(tmp_path)
    with pytest.raises(DataError, match=re.escape(f"{tmp_path / name}:2: ")):
        prepare(train=[bad], output=tmp_path / "refused", bad="refuse", **options)
    assert content_names(tmp_path) == before


def content_names(directory: Path):
    return sorted(path.name for path in directory.iterdir())


def test_content_hash_is_the_same_wherever_the_text_lay(tmp_path, tokenizer):
    """Though what was dropped is listed with its file."""
    hashes = []
    for name, last in (("here", "c"), ("there", "c"), ("other", "d")):
        (tmp_path / name).mkdir()
        files = write_pair(tmp_path / name, [("a b", "a b"), ("", "b"), ("c", last)])
        prepare(train=[files], valid=[files], output=tmp_path / name / "corpus", tokenizer=tokenizer)
        hashes.append(content_hash(tmp_path / name / "corpus"))
    assert hashes[0] == hashes[1] != hashes[2]
    with pytest.raises(UsageError, match="must be a corpus that nmla prepare made, but is none"):
        content_hash(tmp_path)


def test_only_the_first_dropped_are_told_but_all_are_listed(tmp_path, tokenizer, pair, capsys):
    bad = write_pair(tmp_path, [("", "eins")] * 8 + [("one", "eins")], "bad")
    prepare(train=[bad], valid=[pair], output=tmp_path / "corpus", tokenizer=tokenizer)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 6
    assert lines[-1] == "dropped: 3 more; dropped.tsv in the corpus lists all"
    assert len(drops(tmp_path / "corpus")) == 8


def test_bad_validation_pairs_are_dropped_or_refused_but_long_ones_stay(tmp_path, tokenizer, pair):
    valid = write_pair(tmp_path, [("one " * 50, "eins"), ("one", "")], "v")
    counts = prepare(train=[pair], valid=[valid], output=tmp_path / "corpus", tokenizer=tokenizer, **STRICT)
    assert (counts["valid_pairs"], counts["valid_dropped_empty"]) == (1, 1)
    with pytest.raises(DataError, match=r"v\.de:2: both sides must hold text"):
        prepare(train=[pair], valid=[valid], output=tmp_path / "refused", tokenizer=tokenizer, bad="refuse")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "malformed"),
        (b"7", "malformed"),
        (b"[" * 100_000, "malformed"),
        (b'{"source": "one"}', "malformed"),
        (b'{"target": "one"}', "malformed"),
        (b'{"source": "one", "target": "eins", "targets": ["eins"]}', "malformed"),
        (b'{"source": "one", "target": 1}', "malformed"),
        (b'{"source": "one", "targets": "eins"}', "malformed"),
        (b'{"source": "one", "targets": []}', "malformed"),
        (b'{"source": "one", "targets": ["eins", null]}', "malformed"),
        (b'{"source": "one\\u0000", "target": "eins"}', "nul"),
        (b'{"source": "one", "target": "\\ud800"}', "utf8"),
        (b'{"source": "\xff", "target": "eins"}', "utf8"),
        (b"", "malformed"),
    ],
)
def test_bad_records_are_dropped(tmp_path, tokenizer, pair, line, reason):
    file = write(tmp_path / "a.jsonl", line + b'\n{"source": "one", "target": "eins"}\n')
    prepare(train=[(file,)], valid=[pair], output=tmp_path / "corpus", tokenizer=tokenizer)
    assert drops(tmp_path / "corpus") == [("a.jsonl", 1, reason)]
    assert text_of(tmp_path / "corpus") == [("one", ["eins"])]


def test_row_without_a_tab_is_dropped(tmp_path, tokenizer, pair):
    file = write(tmp_path / "a.tsv", "one eins\none\teins\n")
    prepare(train=[(file,)], valid=[pair], output=tmp_path / "corpus", tokenizer=tokenizer)
    assert drops(tmp_path / "corpus") == [("a.tsv", 1, "malformed")]


def test_references_of_one_source_stay_together_each_once(tmp_path, tokenizer):
    records = [
        {"source": "one", "targets": ["eins", "zwei", "eins"]},
        {"source": "two", "targets": ["", "zwei"]},
        {"source": "three", "target": "drei"},
    ]
    file = write(tmp_path / "a.jsonl", "".join(json.dumps(record) + "\n" for record in records))
    counts = prepare(train=[(file,)], valid=[(file,)], output=tmp_path / "corpus", tokenizer=tokenizer)
    assert text_of(tmp_path / "corpus") == [("one", ["eins", "zwei"]), ("two", ["zwei"]), ("three", ["drei"])]
    assert Corpus.load(tmp_path / "corpus").valid_targets == [["eins", "zwei"], ["zwei"], ["drei"]]
    assert (counts["train_sources"], counts["train_pairs"], counts["train_duplicates"]) == (3, 4, 1)
    assert drops(tmp_path / "corpus") == [("a.jsonl", 2, "empty")] * 2  # in training and in validation


def test_more_columns_are_more_references(tmp_path, tokenizer):
    file = write(tmp_path / "a.tsv", "one\teins\tzwei\r\ntwo\tzwei\t\t\n")
    prepare(train=[(file,)], valid=[(file,)], output=tmp_path / "corpus", tokenizer=tokenizer)
    assert text_of(tmp_path / "corpus") == [("one", ["eins", "zwei"]), ("two", ["zwei"])]
    assert drops(tmp_path / "corpus") == []


@pytest.mark.parametrize("bucket_rows", [1, 7, 1 << 20])
def test_grouping_finds_equal_sources_anywhere(tmp_path, tokenizer, monkeypatch, bucket_rows):
    """Against a dict; with blocks and buckets so small that groups cross all of them."""
    monkeypatch.setattr(pairs, "BLOCK_LINES", 5)
    monkeypatch.setattr(assemble, "BUCKET_ROWS", bucket_rows)
    monkeypatch.setattr(assemble, "SHARD_SOURCES", 4)
    rng = random.Random(1)
    words = {"one": "eins", "two": "zwei", "three": "drei"}
    sources = [" ".join(rng.choices(sorted(words), k=rng.randint(1, 2))) for _ in range(60)]
    rows = [(source, rng.choice(sorted(words.values()))) for source in sources]
    expected: dict[str, list[str]] = {}
    for source, target in rows:
        expected.setdefault(source, [])
        if target not in expected[source]:
            expected[source].append(target)
    files = write_pair(tmp_path, rows)
    counts = prepare(train=[files], valid=[files], output=tmp_path / "corpus", tokenizer=tokenizer, group=True)
    assert text_of(tmp_path / "corpus") == list(expected.items())
    corpus = Corpus.load(tmp_path / "corpus")
    assert dict(zip(corpus.valid_source, corpus.valid_targets, strict=True)) == expected
    assert counts["train_sources"] == len(expected)
    assert counts["train_pairs"] + counts["train_duplicates"] == 60


def test_pretokenised_text_may_hold_a_tab(tmp_path):
    rows = [("a\tb c", "d e")] * 3
    files = tmp_path / "a.en", tmp_path / "a.de"
    for file, side in zip(files, zip(*rows, strict=True), strict=True):
        file.write_text("".join(f"{line}\n" for line in side))
    prepare(train=[files], valid=[files], output=tmp_path / "corpus", vocab_size=20, pretokenised=True)
    tokenizer = Corpus.load(tmp_path / "corpus").tokenizer
    assert tokenizer.encode("a\tb c") == [UNK, tokenizer.id("▁c")]


def test_pretokenised_text_keeps_its_units_and_comes_back_joined(tmp_path):
    rows = [("the cap@@ ital &apos;s", "die Haupt@@ stadt"), ("Stadt@@ rat", "der R@@ at")] * 3
    files = write_pair(tmp_path, rows)
    prepare(train=[files], valid=[files], output=tmp_path / "corpus", pretokenised=True)
    corpus = Corpus.load(tmp_path / "corpus")
    assert corpus.tokenizer.pretokenised
    assert corpus.train_source.lengths.tolist() == [4, 2] * 3
    assert text_of(tmp_path / "corpus")[:2] == [("the capital &apos;s", ["die Hauptstadt"]), ("Stadtrat", ["der Rat"])]
    assert corpus.valid_source[0] == rows[0][0]
    assert corpus.valid_targets[:2] == [["die Hauptstadt"], ["der Rat"]]  # as a model's outputs come, to be scored
    counts = prepare(train=[files], valid=[files], output=tmp_path / "small", pretokenised=True, vocab_size=10)
    assert counts["vocab_size"] == 10
    assert counts["train_unknown_tokens"] > 0
    again = prepare(train=[files], valid=[files], output=tmp_path / "again", tokenizer=tmp_path / "small")
    assert again["train_unknown_tokens"] == counts["train_unknown_tokens"]
    assert Corpus.load(tmp_path / "again").tokenizer.pretokenised


def test_tokenizer_comes_from_a_file_or_a_directory(tmp_path, tokenizer, pair):
    prepare(train=[pair], valid=[pair], output=tmp_path / "one", tokenizer=tokenizer)
    prepare(train=[pair], valid=[pair], output=tmp_path / "two", tokenizer=tmp_path / "one")
    assert content(tmp_path / "one") == content(tmp_path / "two")
    with pytest.raises(UsageError, match="must be a tokenizer of pretokenised text, but splits raw text"):
        prepare(train=[pair], valid=[pair], output=tmp_path / "x", tokenizer=tmp_path / "one", pretokenised=True)
    with pytest.raises(UsageError, match=r"tokenizer\.model: must be a file, but does not exist"):
        prepare(train=[pair], valid=[pair], output=tmp_path / "x", tokenizer=tmp_path)


def test_vocabulary_is_learnt_from_a_bounded_sample(tmp_path, monkeypatch):
    rows = [(s.source, s.target) for s in generate(HEADLINE, 400, seed=1)]
    files = write_pair(tmp_path, rows)
    lines: list[str] = []
    learn = Tokenizer.learn
    monkeypatch.setattr(module, "SAMPLE_BYTES", 4000)
    monkeypatch.setattr(
        Tokenizer, "learn", lambda texts, size: learn([lines.append(text) or text for text in texts], size)
    )
    prepare(train=[files], valid=[files], output=tmp_path / "corpus", vocab_size=120)
    assert 2000 < sum(map(len, lines)) < 8000
    assert set(lines) <= {side for row in rows for side in row}


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        (b"", b"", "must hold at least one line, but is empty"),
        (b"a\nb\n", b"a\n", "must have as many lines as each other, but have 2 and 1"),
        (b"a\n", b"\xff\n", "at least one pair must have usable text on both sides, but none has"),
        (b"\n\n", b"a\nb\n", "must have usable text on both sides, but none has"),
    ],
)
@pytest.mark.parametrize("split", ["train", "valid"])
def test_unusable_text_is_refused_and_nothing_is_left(pair, tmp_path, split, source, target, message):
    bad = (write(tmp_path / "v.en", source), write(tmp_path / "v.de", target))
    before = content_names(tmp_path)
    with pytest.raises(DataError, match=message):
        prepare(**{"train": [pair], "valid": [pair], split: [bad]}, output=tmp_path / "corpus", vocab_size=24)
    assert content_names(tmp_path) == before


@pytest.mark.parametrize("ending", [".gz", ".xz", ".zst"])
@pytest.mark.parametrize("damage", [lambda data: data[:-9], lambda data: b"plain text\n", lambda data: data + b"more"])
def test_damaged_compression_is_refused(tmp_path, tokenizer, ending, damage):
    files = write_pair(tmp_path, PLAIN, ending=ending)
    files[1].write_bytes(damage(files[1].read_bytes()))
    with pytest.raises(DataError, match=rf"a\.de{ending}: must be whole {ending} data, but is damaged"):
        prepare(train=[files], valid=[files], output=tmp_path / "corpus", tokenizer=tokenizer)
    assert content_names(tmp_path) == sorted(path.name for path in files)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a.en"], "must have a source and a target file, or one that ends in .tsv or .jsonl"),
        (["a.en", "a.de", "a.de"], "must have one or two files, but has 3"),
        (["a.tsv", "a.en"], "must have a .tsv or .jsonl file alone"),
        (["a.en", "nowhere"], "nowhere: must be a file, but does not exist"),
        (["a.en", "."], "must be a file, but is a directory"),
        (["a.en", "pipe"], "must be a file, for it is read more than once"),
    ],
)
def test_wrong_files_are_refused(tmp_path, tokenizer, pair, names, message):
    write(tmp_path / "a.tsv", "one\teins\n")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match=re.escape(message)):
        prepare(
            train=[tuple(tmp_path / name for name in names)],
            valid=[pair],
            output=tmp_path / "corpus",
            tokenizer=tokenizer,
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1, but is 0"),
        ({"max_ratio": 0.5}, "max_ratio must be at least 1, but is 0.5"),
        ({"max_ratio": float("nan")}, "max_ratio must be at least 1, but is nan"),
        ({"upsample": 0}, "upsample must be at least 1"),
        ({"processes": 0}, "processes must be at least 1"),
        ({"bad": "keep"}, "bad must be drop or refuse, but is keep"),
        ({"train": []}, "train must have at least one pair of files"),
        ({"vocab_size": 5, "pretokenised": True}, "vocab_size must be from 6 to"),
        ({"vocab_size": 99999999999}, "vocab_size must be from 6 to"),
    ],
)
def test_wrong_settings_are_refused(tmp_path, pair, options, message):
    before = content_names(tmp_path)
    with pytest.raises(UsageError, match=message):
        prepare(**{"train": [pair], "valid": [pair], **options}, output=tmp_path / "corpus")
    assert content_names(tmp_path) == before


def test_existing_output_is_never_overwritten(pair, tmp_path):
    output = tmp_path / "corpus"
    output.mkdir()
    (output / "precious").write_text("x")
    with pytest.raises(UsageError, match="must not exist yet"):
        prepare(train=[pair], valid=[pair], output=output, vocab_size=24)
    assert (output / "precious").read_text() == "x"


@pytest.fixture(scope="module")
def language(tmp_path_factory):
    """Some thousand pairs with bad ones between, and the corpus that one process makes of them at one go."""
    directory = tmp_path_factory.mktemp("language")
    rows = [(s.source, s.target) for s in generate(HEADLINE, 3000, seed=1)] * 2
    rows[1000:1000] = [("", "x")] * 3
    rows[4500:4500] = [("x y " * 900, "y")]
    files = write_pair(directory, rows)
    arguments = {"train": [files], "valid": [files], "vocab_size": 200, "group": True}
    with small_blocks():
        counts = prepare(**arguments, output=directory / "corpus")
    assert counts["train_sources"] == 3000
    assert counts["train_dropped_empty"] == 3
    return arguments, content(directory / "corpus")


class small_blocks(pytest.MonkeyPatch):
    """Many parts and shards of little text, and other processes for any size."""

    def __enter__(self):
        self.setattr(pairs, "BLOCK_LINES", 250)
        self.setattr(assemble, "SHARD_SOURCES", 1000)
        self.setattr(module, "SMALL", 0)
        return self

    def __exit__(self, *_):
        self.undo()


@pytest.mark.parametrize("processes", [1, 3])
def test_bytes_do_not_depend_on_the_processes(language, tmp_path, processes):
    arguments, expected = language
    with small_blocks() as patch:
        prepare(**arguments, output=tmp_path / "corpus", processes=processes)
        patch.setattr(module, "SMALL", 1 << 30)
        prepare(**arguments, output=tmp_path / "alone")
    assert content(tmp_path / "corpus") == content(tmp_path / "alone") == expected
    assert content_names(tmp_path) == ["alone", "corpus"]


class Stop(BaseException):
    """Stands for a kill: no code of prepare's may run after it but what a dying process would do."""


@pytest.mark.parametrize(
    ("function", "calls"),
    [("inspect", 1), ("learn_tokenizer", 1), ("encode_block", 1), ("encode_block", 9), ("write_shards", 1)],
)
def test_stopped_run_goes_on_to_the_same_bytes(language, tmp_path, monkeypatch, capsys, function, calls):
    arguments, expected = language
    original = getattr(module, function)
    seen = []

    def stopping(*args):
        seen.append(args)
        if len(seen) == calls:
            raise Stop
        return original(*args)

    with small_blocks() as patch:
        patch.setattr(module, "SMALL", 1 << 30)
        patch.setattr(module, function, stopping)
        with pytest.raises(Stop):
            prepare(**arguments, output=tmp_path / "corpus")
        assert content_names(tmp_path) == [".corpus.partial"]
        seen.clear()
        patch.setattr(module, function, lambda *args: (seen.append(args), original(*args))[1])
        prepare(**arguments, output=tmp_path / "corpus")
    assert content(tmp_path / "corpus") == expected
    assert content_names(tmp_path) == ["corpus"]
    if function == "encode_block":
        assert len(seen) == 25 - (calls - 1)  # finished parts are not made again
    assert ("going on" in capsys.readouterr().err) == (function != "inspect")


def test_bad_pairs_are_refused_also_by_a_run_that_goes_on(tmp_path, tokenizer, monkeypatch):
    files = write_pair(tmp_path, [("one", "eins"), ("two", ""), ("three", "drei")])
    arguments = {"train": [files], "valid": [write_pair(tmp_path, [("one", "eins")], name="valid")]}
    arguments |= {"output": tmp_path / "corpus", "tokenizer": tokenizer, "bad": "refuse"}
    encode = module.encode_block

    def stop_after(*args):
        encode(*args)
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(module, "encode_block", stop_after)
        with pytest.raises(Stop):
            prepare(**arguments)
    with pytest.raises(DataError, match="mend it, or let such pairs be dropped"):
        prepare(**arguments)


def test_bad_validation_text_is_told_before_the_long_work(pair, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "encode_block", lambda *_: pytest.fail("all was encoded first"))
    empty = write_pair(tmp_path, [("one", "")])
    with pytest.raises(DataError):
        prepare(train=[pair], valid=[empty], output=tmp_path / "corpus", tokenizer=tokenizer)


def test_other_settings_or_other_text_start_anew(language, tokenizer, tmp_path, monkeypatch, capsys):
    arguments, expected = language
    with small_blocks() as patch:
        patch.setattr(module, "SMALL", 1 << 30)
        for change in ({"max_tokens": 900}, {"train": [write_pair(tmp_path, [("one", "eins")] * 99)]}):
            with monkeypatch.context() as stop:
                stop.setattr(module, "publish", lambda *_: exec("raise KeyboardInterrupt"))
                with pytest.raises(KeyboardInterrupt):
                    prepare(**{**arguments, "tokenizer": tokenizer, **change}, output=tmp_path / "corpus")
        prepare(**arguments, output=tmp_path / "corpus")
    assert capsys.readouterr().err.count("starting anew") == 2
    assert content(tmp_path / "corpus") == expected


KILLED = """
import sys
from pathlib import Path
from nmla.data import assemble, pairs, prepare as module
pairs.BLOCK_LINES, assemble.SHARD_SOURCES, module.SMALL = 250, 1000, 0
source, target, output = map(Path, sys.argv[1:])
files = [(source, target)]
module.prepare(train=files, valid=files, vocab_size=200, group=True, output=output, processes=2)
"""


def test_killed_run_goes_on_to_the_same_bytes(language, tmp_path):
    """Real kills at random moments, workers and all, until a run comes to its end; the script needs no main guard."""
    arguments, expected = language
    script = write(tmp_path / "killed.py", KILLED)
    command = [sys.executable, str(script), *map(str, arguments["train"][0]), str(tmp_path / "corpus")]
    rng = random.Random(1)
    kills = 0
    while not (tmp_path / "corpus").exists():
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            process.wait(rng.uniform(0.2, 1.2) if kills < 6 else 60)
            assert process.returncode == 0
        except subprocess.TimeoutExpired:
            process.send_signal(rng.choice((signal.SIGKILL, signal.SIGINT, signal.SIGTERM)))
            process.wait(20)
            kills += 1
    for _ in range(100):  # a killed run's workers leave, and what they leave unlocked can be removed
        if content_names(tmp_path) == ["corpus", "killed.py"]:
            break
        time.sleep(0.05)
    assert content(tmp_path / "corpus") == expected


def test_text_that_changes_is_refused(pair, tokenizer, tmp_path, monkeypatch):
    blocks = pairs.read_blocks

    def growing(files):
        for path in files[0]:
            path.write_bytes(path.read_bytes() + b"one\n")
        return blocks(files)

    monkeypatch.setattr(module, "read_blocks", growing)
    with pytest.raises(DataError, match="must not change while it is read, but had 30 lines and then 31"):
        prepare(
            train=[pair],
            valid=[write_pair(tmp_path, [("one", "eins")], name="valid")],
            output=tmp_path / "corpus",
            tokenizer=tokenizer,
        )


def test_two_runs_do_not_share_their_work(language, tmp_path, monkeypatch):
    arguments, _ = language

    def second(*_):
        with pytest.raises(UsageError, match="must be made by one process at a time"):
            prepare(**arguments, output=tmp_path / "corpus")
        raise Stop

    monkeypatch.setattr(module, "inspect", second)
    with pytest.raises(Stop):
        prepare(**arguments, output=tmp_path / "corpus")


def test_lost_worker_is_told():
    with (
        Workers(1) as workers,
        pytest.raises(NmlaError, match="must live until its work is done, but ended with code 9"),
    ):
        list(workers.map(os._exit, [(9,)]))


def test_error_in_a_worker_is_the_callers():
    with Workers(2) as workers:
        assert list(workers.map(int, [("1",), ("2",), ("3",)])) == [1, 2, 3]
        with pytest.raises(ValueError, match="invalid literal"):
            list(workers.map(int, [("1",), ("x",)]))
        assert list(workers.map(print, [("to stderr",)])) == [None]


def test_workers_hold_nothing_heavy():
    with Workers(1) as workers:
        [_, heavy] = workers.map(
            eval, [("bool(__import__('nmla.data.encode'))",), ("'torch' in __import__('sys').modules",)]
        )
    assert not heavy
