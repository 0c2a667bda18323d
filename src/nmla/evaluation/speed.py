"""How fast systems translate, from text to text: rivals take turns in one run, and are compared turn by turn."""

import os
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import ctranslate2  # noqa: F401  # before torch, or its threads would be counted with torch's, and sleep at once
import numpy as np
import torch

from nmla import __version__
from nmla.data.workers import cores
from nmla.errors import DataError, UsageError
from nmla.progress import progress_bar, say

BATCH_SIZES = (1, 8, 32, 100, 400)
THREADS = (1, 2)
TURNS = 3
WARM_UP = 16  # sentences at least, for each batch size
ALL, GROUPS = "all", ("short", "middle", "long")  # of the sentences, by source tokens

Texts = Sequence[str]
Translate = Callable[[Texts, int, int], object]  # texts, so many together, on so many threads


@dataclass(frozen=True)
class System:
    """A rival."""

    name: str
    seconds: Callable[[Sequence[Texts], int, int], list[float]]  # of each of several calls of what translates
    lengths: Callable[[Texts], list[int]]  # the texts' source tokens
    longest: int  # the most source tokens that it takes in one piece
    alone: bool = False  # measured one sentence at a time only
    reference: str = ""  # what others are compared with, unless another is named; its forms share this name


@dataclass(frozen=True)
class Figure:
    """What a system took for some sentences, turn by turn."""

    system: str
    threads: int
    batch_size: int
    group: str  # all sentences, or those of like length
    sentences: int
    words: int  # of their sources
    seconds: tuple[float, ...]
    ratios: tuple[float, ...]  # the baseline's seconds to these; none where the baseline was not measured
    medians: tuple[float, ...] = ()  # milliseconds a sentence, if they came one at a time
    ninetieths: tuple[float, ...] = ()  # what nine sentences of ten stay below


@dataclass(frozen=True)
class Speed:
    """All figures of a run, and where it ran."""

    baseline: str
    turns: int
    sentences: int
    words: int
    lengths: dict[str, tuple[int, int]]  # the fewest and the most source tokens of each group
    machine: dict[str, str]
    figures: list[Figure]


@dataclass(frozen=True)
class _Pass:
    """Sentences that all rivals translate, one rival after the other."""

    threads: int
    batch_size: int
    group: str
    rows: list[int]

    @property
    def batches(self) -> int:
        return -(-len(self.rows) // self.batch_size)


def measure_speed(
    systems: Sequence[System],
    sources: Sequence[str],
    *,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    threads: Sequence[int] = THREADS,
    turns: int = TURNS,
    baseline: str | None = None,
) -> Speed:
    """Time all systems on all sources: in each turn, with each number of threads and batch size, one after the other.

    Who begins changes from turn to turn. What a busy machine does to one it does to its neighbours too, so that ratios
    within a turn say more than times. With batches of one, each sentence is timed; else all of them together, and
    the batches are of like length. Short, middle and long sentences, by the source tokens of the first system, are
    measured with the smallest and the largest batches that a third of the sentences fills.
    """
    check_settings(batch_sizes, threads, turns)
    forms = _baseline(systems, baseline)
    if not sources:
        raise DataError("there must be at least one sentence to translate, but there is none")
    sizes, thread_counts = sorted(set(batch_sizes)), sorted(set(threads))
    if sizes[0] > 1 and all(system.alone for system in systems if system.name in forms):
        raise UsageError(
            f"batch sizes must hold 1, as {forms[0]} is measured one sentence at a time only, but the smallest is "
            f"{sizes[0]}; name another baseline, or add 1"
        )
    if sizes[-1] > len(sources):
        say(f"batches of {sizes[-1]} are not full: there are {len(sources)} sentences")
    if thread_counts[-1] > (found := cores()):
        say(f"{thread_counts[-1]} threads are more than this machine's cores, {found}: they wait for each other")
    lengths = systems[0].lengths(sources)
    groups = _groups(lengths)
    plan = [one for n in thread_counts for one in _passes(n, sizes, groups)]
    machine = describe_machine()  # before its load is our own
    taken = _take_turns(systems, sources, plan, groups, turns)
    return Speed(
        baseline=forms[0] if len(forms) == 1 else f"{' or '.join(forms)}, whichever is faster",
        turns=turns,
        sentences=len(sources),
        words=_words(sources, groups[ALL]),
        lengths={group: _ends([lengths[row] for row in rows]) for group, rows in groups.items()},
        machine=machine,
        figures=[_figure(key, taken, [(of, *key[1:]) for of in forms], sources, groups[key[3]]) for key in taken],
    )


def check_settings(batch_sizes: Sequence[int], threads: Sequence[int], turns: int, sentences: int = 1) -> None:
    """Refuse, before any long work, what cannot be measured."""
    for name, values in (
        ("batch sizes", batch_sizes),
        ("threads", threads),
        ("turns", [turns]),
        ("sentences", [sentences]),
    ):
        if not values:
            raise UsageError(f"{name} must be at least one number, but there is none")
        if min(values) < 1:
            raise UsageError(f"{name} must be at least 1, but there is {min(values)}")


def _baseline(systems: Sequence[System], named: str | None) -> list[str]:
    """The forms of what all are compared with: a form that suits few threads may be the slowest with many."""
    if not systems:
        raise UsageError("there must be at least one system to measure, but there is none")
    names = [system.name for system in systems]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"systems must have names of their own, but two are called {twice[0]!r}")
    if named is None:
        reference = next((system.reference for system in systems if system.reference), None)
        return [system.name for system in systems if system.reference == reference] or names[:1]
    if named not in names:
        raise UsageError(f"the baseline must be one of {', '.join(map(repr, names))}, but is {named!r}")
    return [named]


def _groups(lengths: list[int]) -> dict[str, list[int]]:
    """All rows, and if there are enough of them three groups by length, whose sizes differ by one at most."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    groups = {ALL: sorted(order)}  # as in the text: like lengths in a row would make sentences faster than they are
    if len(order) >= len(GROUPS):
        bounds = [len(order) * i // len(GROUPS) for i in range(len(GROUPS) + 1)]
        groups |= {group: order[bounds[i] : bounds[i + 1]] for i, group in enumerate(GROUPS)}
    return groups


def _ends(values: Sequence[int]) -> tuple[int, int]:
    return min(values), max(values)


def _passes(threads: int, sizes: list[int], groups: dict[str, list[int]]) -> Iterator[_Pass]:
    for size in sizes:
        yield _Pass(threads, size, ALL, groups[ALL])
    filled = [size for size in sizes if size <= min(map(len, groups.values())) and len(groups) > 1]
    for size in sorted({*filled[:1], *filled[-1:]} - {1}):  # sentences that are timed each need no pass of their own
        for group in GROUPS:
            yield _Pass(threads, size, group, groups[group])


Key = tuple[str, int, int, str]  # system, threads, batch size, group
Taken = dict[Key, list[list[float]]]  # turn by turn, the seconds of each call


def _take_turns(
    systems: Sequence[System], sources: Texts, plan: list[_Pass], groups: dict[str, list[int]], turns: int
) -> Taken:
    taken: defaultdict[Key, list[list[float]]] = defaultdict(list)
    with progress_bar(still=True) as bar:
        task = bar.add_task("warming up", total=None)
        bar.refresh()
        for one in plan:
            rows = one.rows[:: max(1, len(one.rows) // max(one.batch_size, WARM_UP))]  # of all lengths
            for system in _able(systems, one):
                _seconds(system, [sources[row] for row in rows], one)
        batches = sum(one.batches * len(_able(systems, one)) for one in plan)
        bar.reset(task, description="batches", total=turns * batches)
        for turn in range(turns):
            first = turn % len(systems)
            for one in plan:
                for system in _able([*systems[first:], *systems[:first]], one):
                    seconds = _seconds(system, [sources[row] for row in one.rows], one)
                    taken[system.name, one.threads, one.batch_size, one.group].append(seconds)
                    if one.batch_size == 1:
                        of_row = dict(zip(one.rows, seconds, strict=True))
                        for group in GROUPS if len(groups) > 1 else ():
                            key = system.name, one.threads, 1, group
                            taken[key].append([of_row[row] for row in groups[group]])
                    bar.update(task, advance=one.batches, refresh=True)
    # As the systems were given, not as they happened to begin.
    place = {system.name: i for i, system in enumerate(systems)}
    return dict(sorted(taken.items(), key=lambda item: (item[0][1], place[item[0][0]], item[0][2])))


def _able(systems: Sequence[System], one: _Pass) -> list[System]:
    return [system for system in systems if one.batch_size == 1 or not system.alone]


def _seconds(system: System, texts: list[str], one: _Pass) -> list[float]:
    """Of each sentence, or with larger batches of all together."""
    calls = [[text] for text in texts] if one.batch_size == 1 else [texts]
    return system.seconds(calls, one.batch_size, one.threads)


def timed(translate: Translate, calls: Sequence[Texts], batch_size: int, threads: int) -> list[float]:
    """What `System.seconds` is of a function in this process: ``partial(timed, translate)``."""
    seconds = []
    for texts in calls:
        start = time.perf_counter()
        translate(texts, batch_size, threads)
        seconds.append(time.perf_counter() - start)
    return seconds


def _figure(key: Key, taken: Taken, forms: Sequence[Key], sources: Sequence[str], rows: list[int]) -> Figure:
    turns = taken[key]
    baseline = [taken[form] for form in forms if form in taken]
    seconds = tuple(map(sum, turns))
    # Of one sentence at a time the medians are compared, which are told: a sum is decided by a single hiccup.
    typical: Callable[[list[float]], float] = statistics.median if key[2] == 1 else sum
    ratios = tuple(
        min(map(typical, theirs)) / typical(own) for *theirs, own in zip(*baseline, turns, strict=True) if theirs
    )
    medians: tuple[float, ...] = ()
    ninetieths: tuple[float, ...] = ()
    if key[2] == 1:
        medians = tuple(1000 * statistics.median(of_turn) for of_turn in turns)
        ninetieths = tuple(1000 * float(np.percentile(of_turn, 90)) for of_turn in turns)
    return Figure(*key, len(rows), _words(sources, rows), seconds, ratios, medians, ninetieths)


def _words(sources: Sequence[str], rows: list[int]) -> int:
    return sum(len(sources[row].split()) for row in rows)


def choose_sentences(
    lines: Sequence[str], count: int, systems: Sequence[System], name: str = "the source"
) -> list[str]:
    """`count` of the lines, from all parts of the text: none that is blank, or that a system must split."""
    filled = [line for line in lines if line.strip()]
    fit = filled
    for system in systems:
        fit = [line for line, length in zip(fit, system.lengths(fit), strict=True) if length <= system.longest]
    if not fit:
        raise DataError(f"{name}: must hold at least one sentence that all systems can take, but holds none")
    if len(fit) < len(filled):
        say(f"{name}: lines left out, as they are too long for one of the systems: {len(filled) - len(fit)}")
    count = min(count, len(fit))
    return [fit[i * len(fit) // count] for i in range(count)]


def describe_machine() -> dict[str, str]:
    """What the figures depend on, besides the models."""
    return {
        "processor": _processor(),
        "cores": str(cores()),
        "load before": f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown",
        "torch threads by default": str(torch.get_num_threads()),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "nmla": __version__,
        **{package: version(package) for package in ("torch", "ctranslate2", "sentencepiece", "numba")},
    }


def _processor() -> str:
    """As Linux names it; elsewhere what Python knows."""
    path = Path("/proc/cpuinfo")
    if path.is_file():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
