"""Trials of translation that take minutes: the same bytes in many batchings, text of all kinds, memory on a long input.

    python tests/decoding/trials.py --model MODEL --source FILE [--sentences 10000] [--batchings 20] [--strings 100000]

`pytest` runs small ones of each.
"""

import argparse
import itertools
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import nmla
from nmla.decoding.translator import Translator
from nmla.text.lines import read_lines


def batchings(translator: Translator, lines: list[str], count: int, seed: int = 1, **options: object) -> int:
    """Translate the lines in `count` orders and batches; return how many translations ever differed in any bit."""
    drawn = random.Random(seed)
    expected: dict[int, object] = {}
    differ = 0
    for trial in range(count):
        rows = list(range(len(lines)))
        drawn.shuffle(rows)
        while rows:
            size = min(len(rows), drawn.choice([1, 2, 7, 64, 500, 2048]))
            chunk, rows = rows[:size], rows[size:]
            found = translator.translate_batch([lines[row] for row in chunk], return_scores=True, **options)
            for row, translation in zip(chunk, found, strict=True):
                differ += expected.setdefault(row, translation) != translation
        print(f"batching {trial + 1} of {count}: {differ} differ", file=sys.stderr, flush=True)
    return differ


def random_strings(count: int, seed: int = 1) -> Iterator[bytes]:
    """Lines of all kinds: any Unicode character, control characters, long ones, blank ones; never a line end."""
    drawn = random.Random(seed)
    for number in range(count):
        kind = drawn.random()
        length = 100000 if number % 5000 == 4999 else drawn.choice([0, 1, 2, 5, 12, 30])
        if kind < 0.5:  # all of Unicode but surrogates, which UTF-8 cannot hold
            points = (drawn.choice([drawn.randrange(0xD800), drawn.randrange(0xE000, 0x110000)]) for _ in range(length))
            text = "".join(map(chr, points))
        elif kind < 0.7:
            text = "".join(chr(drawn.randrange(0x20)) for _ in range(length))
        elif kind < 0.8:
            text = drawn.choice([" ", "\t", "\u3000", "\u2028", "\u0085", "▁", "\ufeff", "e\u0301"]) * length
        else:
            text = "".join(drawn.choices("the dog sees a man , . 1 2 3", k=length))
        yield text.replace("\n", " ").removesuffix("\r").encode()


def kept_lines(model: Path, strings: int) -> tuple[int, int]:
    """Lines in and lines out of `nmla translate`."""
    text = b"".join(line + b"\n" for line in random_strings(strings))
    done = subprocess.run(
        [sys.executable, "-m", "nmla.cli", "translate", "--model", str(model)], input=text, stdout=subprocess.PIPE
    )
    assert done.returncode == 0, done.returncode
    return text.count(b"\n"), done.stdout.count(b"\n")


def long_input(lines: list[str]) -> Iterator[bytes]:
    """Blank lines, which pass at once, and among them sentences, each with words that never came before."""
    for number in itertools.count():
        sentence = f"{lines[number % len(lines)]} {number:x} w{number * 7919:x}\n"
        yield (b" " * 200_000 + b"\n" if number % 4 == 0 else b"") + sentence.encode()


def memory_of_a_long_input(model: Path, lines: Iterator[bytes], total: int) -> list[int]:
    """Megabytes that `nmla translate` holds at each tenth of an input of `total` bytes."""
    command = [sys.executable, "-m", "nmla.cli", "translate", "--model", str(model)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    assert process.stdin is not None
    held = []
    written = 0
    for tenth in range(1, 11):
        while written < total * tenth / 10:
            written += process.stdin.write(next(lines))
        status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
        held.append(int(status.split("VmRSS:")[1].split()[0]) // 1024)
        print(f"{written >> 20} MiB, {held[-1]} MiB held", file=sys.stderr, flush=True)
    process.stdin.close()
    assert process.wait() == 0
    return held


def main() -> None:
    parser = argparse.ArgumentParser(description="Trials of translation.")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--sentences", type=int, default=10_000)
    parser.add_argument("--batchings", type=int, default=20)
    parser.add_argument("--strings", type=int, default=100_000)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    args = parser.parse_args()
    lines = read_lines(args.source)[: args.sentences]
    if args.batchings:
        differ = batchings(nmla.load(args.model), lines, args.batchings)
        print(f"{len(lines)} sentences in {args.batchings} batchings: {differ} differ")
    if args.strings:
        print("{} random lines in, {} out".format(*kept_lines(args.model, args.strings)))
    if args.gigabytes:
        held = memory_of_a_long_input(args.model, long_input(lines), int(args.gigabytes * (1 << 30)))
        print(f"{args.gigabytes:g} GiB: {held[0]} MiB held after a tenth, {held[-1]} at the end")


if __name__ == "__main__":
    main()
