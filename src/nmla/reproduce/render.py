"""A table of results as Markdown and as a page: every number with the command that prints it."""

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nmla.evaluation.document import Block, Code, Figures, Section, to_html, to_markdown
from nmla.evaluation.measure import SAMPLES, Measured, measure
from nmla.evaluation.runs import find_runs, report
from nmla.files import write_text
from nmla.reproduce.stages import Stage, seeds
from nmla.reproduce.table import Row, Table
from nmla.text.lines import read_lines

Wanted = Mapping[tuple[str, str, int], Stage]


def render(path: Path, table: Table, wanted: Wanted, root: Path) -> str:
    """The table from its finished stages as Markdown; also written beside them, as Markdown, JSON and a page."""
    results = {of: _result(stage, root) for of, stage in wanted.items()}
    tests = _tests(table, wanted, root)
    blocks: list[Block] = [table.about.strip(), Code(f"nmla reproduce {path}")]
    blocks += [_scores(table, results), _details(table, results, tests), _legend(results)]
    blocks += ["Single rows:", Code("\n".join(_commands(table, wanted, root)))]
    name = Path(table.output) / path.stem
    text = to_markdown(table.title, [("", blocks)])
    write_text(name.with_suffix(".md"), text)
    told = [
        {"row": row, "way": way, "seed": seed, "stage": wanted[row, way, seed].directory(root).name, **result}
        for (row, way, seed), result in results.items()
    ]
    write_text(name.with_suffix(".json"), json.dumps(told, indent=2) + "\n")
    write_text(name.with_suffix(".html"), to_html(table.title, [("The table", blocks), *_report(table, wanted, root)]))
    return text


def _report(table: Table, wanted: Wanted, root: Path) -> list[Section]:
    """On the trainings of all rows, from their first seeds."""
    names: dict[Path, str] = {}
    lm = None
    for (row, _, _), stage in wanted.items():
        *before, last = _path(stage.inputs["model"])
        if row not in names.values():
            for of in before:
                names.setdefault(of.directory(root), of.directory(root).name)
            names[last.directory(root)] = row
        if "lm" in stage.inputs:
            lm = stage.inputs["lm"].directory(root) / "lm.lm"
    source, references = Path(table.test.source), [Path(path) for path in table.test.references]
    lines = [read_lines(of) for of in (source, *references)]
    return report(find_runs(list(names), names), source, references, lines=lines, lm=lm)


def _result(stage: Stage, root: Path) -> dict[str, Any]:
    scores = json.loads((stage.directory(root) / "scores.json").read_text(encoding="utf-8"))
    result = {one["name"]: one["score"] for one in scores["measured"]}
    signatures = {one["name"]: one["signature"] for one in scores["measured"]}
    trained = [_trained(of, root) for of in _path(stage.inputs["model"])]
    return {
        **result,
        "signatures": signatures,
        "entropy": scores["entropy"],
        "decoding": scores["decoding"],
        "steps": [steps for steps, _ in trained],
        "seconds": [seconds for _, seconds in trained],
    }


def _path(model: Stage) -> list[Stage]:
    """A model's own trainings, first to last; not those of its teachers."""
    return [*(_path(model.inputs["start"]) if "start" in model.inputs else []), model]


def _trained(stage: Stage, root: Path) -> tuple[int, float]:
    """The last step of a training, and its seconds."""
    log = (stage.directory(root) / "log.jsonl").read_text(encoding="utf-8").strip().split("\n")
    last = json.loads(log[-1])
    return last["step"], last["seconds"]


def _tests(table: Table, wanted: Wanted, root: Path) -> dict[str, Measured]:
    """BLEU of each row against the baseline's, both from the first of their seeds and ways."""
    outputs = {}
    for (row, _, _), stage in wanted.items():
        if row not in outputs:
            outputs[row] = read_lines(stage.directory(root) / "outputs.txt")
    references = [read_lines(Path(reference)) for reference in table.test.references]
    baseline = outputs[table.baseline or table.rows[0].name]
    return {row: next(iter(measure(of, references, baseline=baseline, samples=SAMPLES))) for row, of in outputs.items()}


def _scores(table: Table, results: Mapping[tuple[str, str, int], dict[str, Any]]) -> Figures:
    """BLEU of every row in every way, the brevity penalty beside it."""
    rows = []
    for row in table.rows:
        cells = [row.name]
        for way in table.ways:
            found = [results[row.name, way, seed] for seed in seeds(table, row) if (row.name, way, seed) in results]
            cells += [_spread([of["BLEU"] for of in found]), _mean([of["brevity penalty"] for of in found], 2)]
        rows.append(cells)
    header = ["system", *(name for way in table.ways for name in (f"BLEU, {way}", "BP"))]
    return Figures(header, rows)


def _details(
    table: Table, results: Mapping[tuple[str, str, int], dict[str, Any]], tests: Mapping[str, Measured]
) -> Figures:
    """The rest of the first way of each row."""
    rows = []
    for row in table.rows:
        found = _first_way(row, table, results)
        test = tests[row.name]
        beyond = "" if test.difference is None else f"{test.difference:+.1f}"
        if test.difference_interval is not None and row.name != (table.baseline or table.rows[0].name):
            low, high = test.difference_interval
            beyond += f" [{low:+.1f}, {high:+.1f}]"
        rows.append(
            [
                row.name,
                beyond,
                _mean([of["chrF"] for of in found], 1),
                _mean([of["TER"] for of in found], 1),
                _mean([of["length ratio"] for of in found], 2),
                _mean([of["entropy"] for of in found], 2),
                " + ".join(f"{steps:,}" for steps in found[0]["steps"]),
                " + ".join(f"{seconds / 60:.0f}" for seconds in found[0]["seconds"]),
            ]
        )
    baseline = table.baseline or table.rows[0].name
    header = ["system", f"BLEU beyond {baseline}", "chrF", "TER", "length", "entropy", "steps", "minutes"]
    return Figures(header, rows)


def _first_way(row: Row, table: Table, results: Mapping[tuple[str, str, int], dict[str, Any]]) -> list[dict[str, Any]]:
    way = next(way for way in table.ways if (row.name, way, seeds(table, row)[0]) in results)
    return [results[row.name, way, seed] for seed in seeds(table, row)]


def _legend(results: Mapping[tuple[str, str, int], dict[str, Any]]) -> str:
    signatures = next(iter(results.values()))["signatures"]
    named = "; ".join(f"{name}: `{signatures[name]}`" for name in ("BLEU", "chrF", "TER"))
    return (
        "BP is BLEU's brevity penalty. ± is the standard deviation over seeds, where there are several. The second "
        "table is of each row's first way of decoding: the difference in BLEU with its 95 % interval (paired "
        f"bootstrap, {SAMPLES} samples, the first seeds), length relative to the reference's, entropy in nats per "
        f"output position, steps and minutes of each of the model's own stages. {named}."
    )


def _commands(table: Table, wanted: Wanted, root: Path) -> Iterator[str]:
    """How each row's first number is printed alone."""
    for row in table.rows:
        stage = next(of for (name, _, _), of in wanted.items() if name == row.name)
        command = ["nmla score --model", str(stage.inputs["model"].directory(root) / "model")]
        command += ["--source", table.test.source, *(f"--reference {path}" for path in table.test.references)]
        if stage.settings["beam_size"] > 1:
            command.append(f"--beam-size {stage.settings['beam_size']}")
        if "teacher" in stage.inputs:
            command.append(f"--teacher {stage.inputs['teacher'].directory(root) / 'model'}")
        yield f"{' '.join(command)}  # {row.name}"


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "—"
    mean = f"{statistics.fmean(values):.1f}"
    return f"{mean} ± {statistics.stdev(values):.1f}" if len(values) > 1 else mean


def _mean(values: Sequence[float], digits: int) -> str:
    return f"{statistics.fmean(values):.{digits}f}" if values else "—"
