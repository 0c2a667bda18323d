"""What a run of `nmla bench speed` found, as tables and as a picture."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from statistics import median

from nmla.evaluation.document import markdown_table
from nmla.evaluation.report import curves
from nmla.evaluation.speed import ALL, GROUPS, Figure, Speed

NONE = "–"


def table(speed: Speed, form: str) -> str:
    """Markdown for people; TSV with a line for each figure; JSON with all turns of them."""
    match form:
        case "json":
            figures = [{**asdict(one), **_summary(one)} for one in speed.figures]
            return json.dumps({**asdict(speed), "figures": figures}, indent=2)
        case "tsv":
            rows = [
                [one.system, one.threads, one.batch_size, one.group, one.sentences, one.words, *_summary(one).values()]
                for one in speed.figures
            ]
            names = ("system", "threads", "batch_size", "group", "sentences", "words", *_summary(speed.figures[0]))
            return "\n".join("\t".join(map(_plain, row)) for row in (names, *rows))
    return "\n".join(_markdown(speed))


def _summary(of: Figure) -> dict[str, float | None]:
    """The best of the turns and how far they spread; of ratios the median, for they are paired already."""
    found: dict[str, float | None] = {
        "sentences_per_second": of.sentences / min(of.seconds),
        "sentences_per_second_lowest": of.sentences / max(of.seconds),
        "words_per_second": of.words / min(of.seconds),
    }
    for name, values in (("median_ms", of.medians), ("ninetieth_ms", of.ninetieths)):
        found |= {name: min(values, default=None), f"{name}_highest": max(values, default=None)}
    return found | {
        "speedup": median(of.ratios) if of.ratios else None,
        "speedup_lowest": min(of.ratios, default=None),
        "speedup_highest": max(of.ratios, default=None),
    }


def _plain(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _markdown(speed: Speed) -> Iterator[str]:
    yield ", ".join(f"{name} {value}" for name, value in speed.machine.items())
    yield ""
    sentences, turns = (
        f"{count} {name}{'s' * (count != 1)}" for count, name in ((speed.sentences, "sentence"), (speed.turns, "turn"))
    )
    yield (
        f"{sentences} of {speed.words / speed.sentences:.1f} words, {turns}. "
        "Times and speeds: the best turn's (the worst's)."
    )
    yield (
        f"Speed-ups: beside {speed.baseline}, in the same turn, the median (lowest to highest); of batches of 1 by the "
        "sentences' medians."
    )
    for threads in dict.fromkeys(one.threads for one in speed.figures):
        figures = [one for one in speed.figures if one.threads == threads]
        on = _on(threads)
        if alone := [one for one in figures if one.batch_size == 1 and one.group == ALL]:
            yield from ("", f"## Latency: one sentence at a time, {on}", "")
            yield markdown_table(
                ["system", "ms, median", "ms, 90th percentile", "speed-up"],
                [
                    [one.system, _spread(one.medians, min, max), _spread(one.ninetieths, min, max), _speedup(one)]
                    for one in alone
                ],
            )
        sizes = sorted({one.batch_size for one in figures})
        whole = {(one.system, one.batch_size): one for one in figures if one.group == ALL}
        batched = [name for name in dict.fromkeys(one.system for one in figures) if (name, sizes[-1]) in whole]
        for title, cell in (
            ("Sentences a second", _sentences),
            ("Source words a second", _source_words),
            ("Speed-up", _speedup),
        ):
            yield from ("", f"## {title} by batch size, {on}", "")
            rows = [[name, *(cell(whole[name, size]) for size in sizes)] for name in batched]
            yield markdown_table(["system", *map(str, sizes)], rows)
        yield from _by_length(speed, figures, on)


def _by_length(speed: Speed, figures: Sequence[Figure], on: str) -> Iterator[str]:
    grouped = {(one.batch_size, one.system, one.group): one for one in figures if one.group != ALL}
    for size in dict.fromkeys(size for size, *_ in sorted(grouped)):
        for title, cell in (("Sentences a second", _sentences), ("Speed-up", _speedup)):
            yield from ("", f"## {title} by source length, batches of {size}, {on}", "")
            tokens = (f"{group}, {low} to {high} tokens" for group in GROUPS for low, high in [speed.lengths[group]])
            names = dict.fromkeys(system for of, system, _ in grouped if of == size)
            rows = [[name, *(cell(grouped[size, name, group]) for group in GROUPS)] for name in names]
            yield markdown_table(["system", *tokens], rows)


def _on(threads: int) -> str:
    return f"{threads} thread" + ("s" if threads > 1 else "")


def _spread(
    values: Sequence[float], best: Callable[[Sequence[float]], float], worst: Callable[[Sequence[float]], float]
) -> str:
    return f"{_short(best(values))} ({_short(worst(values))})"


def _sentences(of: Figure) -> str:
    return _spread([of.sentences / seconds for seconds in of.seconds], max, min)


def _source_words(of: Figure) -> str:
    return _spread([of.words / seconds for seconds in of.seconds], max, min)


def _speedup(of: Figure) -> str:
    if not of.ratios:
        return NONE
    return f"{_short(median(of.ratios))} ({_short(min(of.ratios))} to {_short(max(of.ratios))})"


def _short(value: float) -> str:
    """Three digits, but no fewer than stand before the point."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def picture(speed: Speed) -> str:
    """An SVG of the speed-up by batch size, a panel for each number of threads."""
    sizes = sorted({one.batch_size for one in speed.figures})
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    baseline = f"{speed.baseline} = 1"
    for one in speed.figures:
        if one.group == ALL and one.ratios:
            lines = panels.setdefault(f"speed-up, {_on(one.threads)}", {baseline: []})  # first: the grey line
            if (one.batch_size, 1.0) not in lines[baseline]:
                lines[baseline].append((one.batch_size, 1.0))
            if one.system != speed.baseline:
                lines.setdefault(one.system, []).append((one.batch_size, median(one.ratios)))
    if len(sizes) > 1:  # who was measured one sentence at a time only has no line
        long = {title: {name: line for name, line in of.items() if len(line) > 1} for title, of in panels.items()}
        panels = long if any(long.values()) else panels
    return curves(panels, "sentences a batch", sizes)
