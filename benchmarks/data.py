"""What the data pipeline costs beside sentencepiece alone, on all cores. Prints Markdown.

    python benchmarks/data.py --train SOURCE TARGET [--train SOURCE2 TARGET2 ...]

Without files it makes its own text. `nmla prepare` reads, checks, encodes and writes a whole corpus, with a vocabulary
that is there already; sentencepiece encodes the same lines from memory, in its own threads and in a pool of processes,
and the faster of these is the measure. Rivals take turns, and the best of the turns counts, so that a busy moment of
the machine hits all of them. Peak memory is the sum over all processes of `prepare`, looked at twenty times a second
(Linux).
"""

import argparse
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import sentencepiece

from nmla.config import ModelConfig, TrainConfig
from nmla.data.batching import epoch_batches
from nmla.data.corpus import TOKENIZER, Corpus
from nmla.data.synthetic import HEADLINE, generate
from nmla.text.lines import read_lines
from nmla.training.feed import Examples
from tables import header, row, verdict

PAIRS = 100_000  # of generated text
VOCAB_SIZE, GENERATED_VOCAB_SIZE = 32000, 400
TURNS = 2
LINES_AT_ONCE = 4096
CORES = len(os.sched_getaffinity(0))
MIB = 1 << 20
MAX_TOKENS = 8192  # positions in a batch
SOME_BATCHES = 200  # are made, to time it


def generated(directory: Path) -> list[Path]:
    sentences = generate(HEADLINE, PAIRS, seed=1)
    files = [directory / "train.source", directory / "train.target"]
    files[0].write_text("".join(f"{sentence.source}\n" for sentence in sentences))
    files[1].write_text("".join(f"{sentence.target}\n" for sentence in sentences))
    return files


def prepare(train: list[list[Path]], output: Path, *options: str) -> tuple[float, float]:
    """Seconds and peak MiB of the whole command."""
    files = [argument for pair in train for argument in ("--train", *map(str, pair))]
    valid = output.with_name("valid.tsv")
    valid.write_text("one line\tis enough\n")
    command = [sys.executable, "-m", "nmla.cli", "prepare", *files, "--valid", str(valid), *options]
    shutil.rmtree(output, ignore_errors=True)
    peak, start = 0, time.perf_counter()
    process = subprocess.Popen([*command, "--output", str(output)], stdout=subprocess.DEVNULL)
    while process.poll() is None:
        peak = max(peak, resident(process.pid))
        time.sleep(0.05)
    if process.returncode:
        sys.exit(process.returncode)
    return time.perf_counter() - start, peak / MIB


def resident(pid: int) -> int:
    """Bytes in memory of a process and its children, theirs included; pages that they share count for each."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = {child for task in tasks for child in (task / "children").read_text().split()}
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (FileNotFoundError, ProcessLookupError):  # it has just ended
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE") + sum(resident(int(child)) for child in children)


def start_pool(model: str) -> None:
    global pieces
    pieces = sentencepiece.SentencePieceProcessor(model_file=model)


def encode_in_pool(lines: list[str]) -> int:
    return sum(map(len, pieces.encode(lines, num_threads=1)))


def in_pool(chunks: list[list[str]], model: str) -> float:
    with multiprocessing.get_context("spawn").Pool(CORES, start_pool, (model,)) as pool:
        pool.map(encode_in_pool, [["start"]] * CORES)
        start = time.perf_counter()
        sum(pool.imap_unordered(encode_in_pool, chunks))
        return time.perf_counter() - start


def in_threads(chunks: list[list[str]], model: str) -> float:
    start_pool(model)
    start = time.perf_counter()
    for chunk in chunks:
        sum(map(len, pieces.encode(chunk, num_threads=CORES)))
    return time.perf_counter() - start


def prepare_table(train: list[list[Path]], directory: Path, vocab_size: int, turns: int) -> tuple[float, float]:
    """The rate of `prepare` against the best of sentencepiece alone, and its peak memory."""
    learnt, learning_peak = prepare(train, directory / "learnt", "--vocab-size", str(vocab_size))
    model = str(directory / "learnt" / TOKENIZER)
    sides = [[line for pair in train for line in read_lines(pair[side])] for side in (0, 1)]
    count = len(sides[0])
    lines = [*sides[0], *sides[1]]
    chunks = [lines[start : start + LINES_AT_ONCE] for start in range(0, len(lines), LINES_AT_ONCE)]
    rivals: dict[str, Callable[[], float]] = {
        f"sentencepiece alone, {CORES} threads": lambda: in_threads(chunks, model),
        f"sentencepiece alone, {CORES} processes": lambda: in_pool(chunks, model),
    }
    best = dict.fromkeys([*rivals, "nmla prepare, vocabulary given"], float("inf"))
    encoding_peak = 0.0
    for _ in range(turns):
        for name, run in rivals.items():
            best[name] = min(best[name], run())
        seconds, peak = prepare(train, directory / "encoded", "--tokenizer", model)
        best["nmla prepare, vocabulary given"] = min(best["nmla prepare, vocabulary given"], seconds)
        encoding_peak = max(encoding_peak, peak)
    print(f"\n## Preparing {count:,} pairs on {CORES} cores, vocabulary of {vocab_size}\n")
    header("what", "seconds", "pairs/s", "peak MiB, all processes")
    for name, seconds in best.items():
        print(row(name, f"{seconds:.1f}", f"{count / seconds:,.0f}", "" if name in rivals else f"{encoding_peak:.0f}"))
    print(row("nmla prepare, vocabulary learnt", f"{learnt:.1f}", f"{count / learnt:,.0f}", f"{learning_peak:.0f}"))
    ours = best["nmla prepare, vocabulary given"]
    print(f"\nLearning the vocabulary takes {learnt - ours:.1f} s of that, once.")
    return min(best[name] for name in rivals) / ours, max(encoding_peak, learning_peak)


def batches_table(corpus: Corpus) -> float:
    """Padding in the batches of one epoch, and what it takes to make them; returns the worst share of padding."""
    print("\n## Batches of one epoch\n")
    header("model", "batches", "output positions", "encoder padding", "decoder padding", "in all", "ms a batch")
    worst = 0.0
    for family, loss in (("ctc", "ctc"), ("autoregressive", "cross_entropy")):
        config, stage = ModelConfig(family=family), TrainConfig(steps=1, loss=loss, max_tokens=MAX_TOKENS)
        examples = Examples.of(corpus, config, stage)
        start = time.perf_counter()
        batches = epoch_batches(examples.costs, examples.widths, stage.max_tokens, seed=1, epoch=0)
        sorting = time.perf_counter() - start
        some = batches[:SOME_BATCHES]
        start = time.perf_counter()
        for batch in some:
            examples.batch(batch)
        milliseconds = 1000 * ((time.perf_counter() - start) / len(some) + sorting / len(batches))
        source = corpus.train_source.lengths[examples.source] + 1
        sides = (source, examples.costs if family == "ctc" else examples.widths + 1)
        used = [int(side.sum()) for side in sides]
        room = [sum(len(batch) * int(side[batch].max()) for batch in batches) for side in sides]
        padding = [1 - u / r for u, r in zip([*used, sum(used)], [*room, sum(room)], strict=True)]
        shares = (f"{share:.1%}" for share in padding)
        print(row(family, len(batches), f"{examples.costs.sum():,}", *shares, f"{milliseconds:.2f}"))
        worst = max(worst, padding[2])
    print("\nWhat a batch costs beside a training step is in benchmarks/training.py.")
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description="What the data pipeline costs.")
    parser.add_argument("--train", nargs=2, action="append", type=Path, metavar=("SOURCE", "TARGET"))
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--vocab-size", type=int)
    parser.add_argument("--work", type=Path, help="where to write for the time being (default: the system's)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.work) as work:
        directory = Path(work)
        train = args.train or [generated(directory)]
        vocab_size = args.vocab_size or (VOCAB_SIZE if args.train else GENERATED_VOCAB_SIZE)
        ratio, peak = prepare_table(train, directory, vocab_size, args.turns)
        padding = batches_table(Corpus.load(directory / "learnt"))
        print("\n## The bars\n")
        header("what", "measured", "bar", "met")
        verdict("prepare, x sentencepiece alone", ratio, 0.8, at_least=True)
        verdict("peak memory of all processes, GB", peak * MIB / 1e9, 1)
        verdict("share of padding in batches", padding, 0.1)


if __name__ == "__main__":
    main()
