"""A table of results as Markdown and as a page: every number with the command that prints it."""

import json
import shlex
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nmla.config import Decoding
from nmla.decoding.ngram_lm import NgramLM
from nmla.decoding.translation import Translation
from nmla.evaluation.analysis import System
from nmla.evaluation.document import Block, Code, Figures, Section, to_html, to_markdown
from nmla.evaluation.measure import SAMPLES, Measured, measure
from nmla.evaluation.runs import find_runs, report
from nmla.files import write_text
from nmla.reproduce.stages import Stage
from nmla.reproduce.table import Table
from nmla.text.lines import read_lines
from nmla.text.tokenizer import Tokenizer

Wanted = Mapping[tuple[str, str, int], Stage]


def render(path: Path, table: Table, wanted: Wanted, root: Path) -> str:
    """The table from its finished stages as Markdown; also written beside them, as Markdown, JSON and a page."""
    results = {of: _result(stage, root) for of, stage in wanted.items()}
    first: dict[str, tuple[str, str, int]] = {}  # of each row, its first way and seed
    for of in wanted:
        first.setdefault(of[0], of)
    systems = {row: _system(row, wanted[of], root) for row, of in first.items()}
    references = [read_lines(Path(reference)) for reference in table.test.references]
    baseline = systems[table.baseline or table.rows[0].name].outputs
    tests = {
        row: measure(system.outputs, references, baseline=baseline, samples=SAMPLES, only=["BLEU"])[0]
        for row, system in systems.items()
    }
    of_first = {
        row.name: [results[row.name, first[row.name][1], seed] for seed in table.seeds_of(row)] for row in table.rows
    }
    commands = [
        _command(row, way, stage, results[row, way, seed], root)
        for (row, way, seed), stage in wanted.items()
        if seed == first[row][2]
    ]
    blocks: list[Block] = [table.about.strip(), Code(f"nmla reproduce {path}")]
    blocks += [_scores(table, results), _details(table, of_first, tests), _legend(results)]
    blocks += ["Single numbers:", Code("\n".join(commands))]
    name = Path(table.output) / path.stem
    text = to_markdown(table.title, [("", blocks)])
    write_text(name.with_suffix(".md"), text)
    told = [
        {"row": row, "way": way, "seed": seed, "stage": wanted[row, way, seed].directory(root).name, **result}
        for (row, way, seed), result in results.items()
    ]
    write_text(name.with_suffix(".json"), json.dumps(told, indent=2) + "\n")
    models = {row: wanted[first[row]].inputs["model"] for row in systems}
    sections = _report(table, wanted, models, list(systems.values()), references, root)
    write_text(name.with_suffix(".html"), to_html(table.title, [("The table", blocks), *sections]))
    return text


def _system(row: str, stage: Stage, root: Path) -> System:
    lines = (stage.directory(root) / "translations.jsonl").read_text(encoding="utf-8").splitlines()
    translations = [Translation(**json.loads(line)) for line in lines]
    family = stage.inputs["model"].paths["recipe"]["model"]["family"]
    return System(row, [one.text for one in translations], translations, family)


def _report(
    table: Table,
    wanted: Wanted,
    models: Mapping[str, Stage],
    systems: list[System],
    references: list[list[str]],
    root: Path,
) -> list[Section]:
    """On the trainings of all rows, from their first seeds, and on what each of these says in the table."""
    names: dict[Path, str] = {}
    for row, model in models.items():
        *before, last = _path(model)
        for of in before:
            names.setdefault(of.directory(root), of.directory(root).name)
        names[last.directory(root)] = row
    fluency: dict[str, Any] = {}
    for stage in wanted.values():
        if "lm" in stage.inputs:
            tokenizer = Tokenizer.load(Path(stage.inputs["lm"].paths["tokenizer"]))
            lm = NgramLM.load(stage.inputs["lm"].directory(root) / "lm.lm", tokenizer)
            fluency = {"lm": lm, "tokenizer": tokenizer}
    sources = read_lines(Path(table.test.source))
    return report(find_runs(list(names), names), systems, references, sources=sources, **fluency)


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


def _scores(table: Table, results: Mapping[tuple[str, str, int], dict[str, Any]]) -> Figures:
    """BLEU of every row in every way, the brevity penalty beside it."""
    rows = []
    for row in table.rows:
        cells = [row.name]
        for way in table.ways:
            found = [results[row.name, way, seed] for seed in table.seeds_of(row) if (row.name, way, seed) in results]
            cells += [_spread([of["BLEU"] for of in found]), _mean([of["brevity penalty"] for of in found], 2)]
        rows.append(cells)
    header = ["system", *(name for way in table.ways for name in (f"BLEU, {way}", "BP"))]
    return Figures(header, rows)


def _details(table: Table, first: Mapping[str, list[dict[str, Any]]], tests: Mapping[str, Measured]) -> Figures:
    """The rest of each row's first way, of all its seeds."""
    baseline = table.baseline or table.rows[0].name
    rows = []
    for row, found in first.items():
        beyond = "—"
        if (test := tests[row]).difference_interval is not None and row != baseline:
            low, high = test.difference_interval
            beyond = f"{test.difference:+.1f} [{low:+.1f}, {high:+.1f}]"
        rows.append(
            [
                row,
                beyond,
                _mean([of["chrF"] for of in found], 1),
                _mean([of["TER"] for of in found], 1),
                _mean([of["length ratio"] for of in found], 2),
                _mean([of["entropy"] for of in found], 2),
                " + ".join(f"{steps:,}" for steps in found[0]["steps"]),
                " + ".join(f"{seconds / 60:.0f}" for seconds in found[0]["seconds"]),
            ]
        )
    header = ["system", f"BLEU beyond {baseline}", "chrF", "TER", "length", "entropy", "steps", "minutes"]
    return Figures(header, rows)


def _legend(results: Mapping[tuple[str, str, int], dict[str, Any]]) -> str:
    signatures = next(iter(results.values()))["signatures"]
    named = "; ".join(f"{name}: `{signatures[name]}`" for name in ("BLEU", "chrF", "TER"))
    return (
        "BP is BLEU's brevity penalty. ± is the standard deviation over seeds, where there are several. The second "
        "table is of each row's first way of decoding: the difference in BLEU with its 95 % interval (paired "
        f"bootstrap, {SAMPLES} samples, the first seeds), length relative to the reference's, entropy in nats per "
        f"output position, steps and minutes of each of the model's own stages. {named}."
    )


def _command(row: str, way: str, stage: Stage, result: dict[str, Any], root: Path) -> str:
    """What prints one number of the table alone."""
    model = stage.inputs["model"].directory(root) / "model"
    command = ["nmla", "score", "--model", str(model), "--source", stage.paths["source"]]
    for path in stage.paths["references"]:
        command += ["--reference", path]
    for name in ("beam_size", "alpha", "beta", "blank_penalty"):
        if (value := result["decoding"][name]) != getattr(Decoding(), name):
            command += [f"--{name.replace('_', '-')}", f"{value:g}"]
    for name, file in (("lm", "lm.lm"), ("teacher", "model")):
        if name in stage.inputs and (name != "lm" or result["decoding"]["alpha"]):  # which may have been tuned to none
            command += [f"--{name}", str(stage.inputs[name].directory(root) / file)]
    return f"{shlex.join(command)}  # {row}, {way}"


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "—"
    mean = f"{statistics.fmean(values):.1f}"
    return f"{mean} ± {statistics.stdev(values):.1f}" if len(values) > 1 else mean


def _mean(values: Sequence[float], digits: int) -> str:
    return f"{statistics.fmean(values):.{digits}f}" if values else "—"
