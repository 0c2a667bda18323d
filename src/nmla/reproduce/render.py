"""A table of results as Markdown and as a page: every number with the command that prints it."""

import itertools
import json
import shlex
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nmla.decoding.ngram_lm import NgramLM
from nmla.evaluation.analysis import Analysis, analyse, splits_text
from nmla.evaluation.analysis_table import by_system
from nmla.evaluation.analysis_table import rows as measures
from nmla.evaluation.document import Block, Code, Figures, Picture, to_html, to_markdown
from nmla.evaluation.measure import SAMPLES, Measured, References, measure, read_references
from nmla.evaluation.runs import Outcome, Run, find_runs, read_log, report
from nmla.evaluation.systems import System
from nmla.files import write_text
from nmla.reproduce.stages import METEOR, OUTPUTS, TRANSLATIONS, Stage, judging
from nmla.reproduce.table import Table
from nmla.text.lines import read_lines
from nmla.text.tokenizer import Tokenizer

QUANTILES = 4  # parts of the test set, by length
SHOWN = ("repeats", "perplexity", "discordant pairs", "blanks")  # of an analysis, beside BLEU by length

Of = tuple[str, str, int]  # row, way and seed
Wanted = Mapping[Of, Stage]
Results = dict[Of, dict[str, Any]]


def render(path: Path, table: Table, wanted: Wanted, missing: Sequence[Of], lm: Stage | None, root: Path) -> str:
    """The table from its finished stages as Markdown; also written beside them, with its curves, as JSON and as a page.

    What is `missing` is named as not run. Perplexities are told if `lm` is done.
    """
    results = {of: _result(table, stage, root) for of, stage in wanted.items()}
    seeds = {row.name: table.seeds_of(row) for row in table.rows}
    first = {(row, way): stage for (row, way, seed), stage in wanted.items() if seed == seeds[row][0]}
    shown: dict[str, Stage] = {}  # of each row, its first way
    for (row, _, _), stage in wanted.items():
        shown.setdefault(row, stage)
    systems = {of: System.of_file(of[0], stage.directory(root) / TRANSLATIONS) for of, stage in first.items()}
    references = read_references([*map(Path, table.test.references)])
    name = table.baseline or table.rows[0].name
    baseline = next((of for of in first if of[0] == name), None)
    blocks: list[Block] = [
        table.about.strip(),
        Code(shlex.join(["nmla", "reproduce", str(path)])),
        _scores(table, results),
    ]

    def beyond(of: tuple[str, str], other: tuple[str, str]) -> Measured:
        outputs, others = systems[of].outputs, systems[other].outputs
        return measure(outputs, references, baseline=others, samples=SAMPLES, only=["BLEU"])[0]

    if baseline is not None:
        tests = {of: beyond(of, baseline) for of in systems if of != baseline}
        blocks.append(_beyond(table, f"BLEU beyond {', '.join(baseline)}", tests))
    controls = {row.name: row.control for row in table.rows}
    beside = {(row, way): (controls[row], way) for row, way in first if (controls[row], way) in first}
    if beside:
        tests = {(f"{of[0]} beyond {other[0]}", of[1]): beyond(of, other) for of, other in beside.items()}
        blocks.append(_beyond(table, "BLEU, in the same way", tests))
    if any(row.published for row in table.rows):
        blocks += [_published(table, results), f"Published: {table.published.strip()}"]
    # What all are compared with comes first.
    shown = dict(sorted(shown.items(), key=lambda of: baseline is None or of[0] != baseline[0]))
    test, command = _test(table, shown, references, lm, root)
    blocks += [_details(results), _beside(test.analysis), _legend(results)]
    if missing:
        blocks.append(f"Not run yet: {'; '.join(_named(table, shown, missing))}.")
    commands = [command]
    for (row, way, seed), stage in wanted.items():
        told = table, stage, results[row, way, seed], root
        other = first[baseline] if baseline is not None and (row, way) != baseline else None
        commands.append(f"{_command(*told, other)}  # {row}, {way}, seed {seed}")
        if (row, way) in beside and stage is first.get((row, way)):
            control = beside[row, way]
            commands.append(f"{_command(*told, first[control])}  # {row} beyond {control[0]}, {way}, seed {seed}")
    blocks += ["Single numbers:", Code("\n".join(commands))]
    whole = [
        {"row": row, "way": way, "seed": seed, "stage": wanted[row, way, seed].directory(root).name, **result}
        for (row, way, seed), result in results.items()
    ]
    sections = report(_runs(shown, root), test, [command])
    curves = next(block for _, of in sections for block in of if isinstance(block, Picture))
    text = to_markdown(table.title, [("", [*blocks, curves])], [f"{path.stem}.svg"])
    page = to_html(table.title, [("The table", blocks), *sections])
    for ending, content in (
        ("svg", curves.svg),
        ("md", text),
        ("json", json.dumps(whole, indent=2) + "\n"),
        ("html", page),
    ):
        write_text(Path(table.output) / f"{path.stem}.{ending}", content)
    return text


def _named(table: Table, shown: Mapping[str, Stage], missing: Sequence[Of]) -> Iterator[str]:
    """What is missing: a row, or one of its ways, or seeds of that."""
    for row in table.rows:
        if row.name not in shown:
            yield row.name
            continue
        for way in table.ways:
            if seeds := [seed for name, of, seed in missing if (name, of) == (row.name, way)]:
                some = len(seeds) < len(table.seeds_of(row))
                yield f"{row.name}, {way}" + (f", seed {', '.join(map(str, seeds))}" if some else "")


def _runs(shown: Mapping[str, Stage], root: Path) -> list[Run]:
    """The trainings of all rows, from their first seeds; the last of each is called as its row."""
    names: dict[Path, str] = {}
    for row, scored in shown.items():
        *before, last = _path(scored.inputs["model"])
        for of in before:
            names.setdefault(of.directory(root), of.directory(root).name)
        names[last.directory(root)] = row
    return find_runs(list(names), names)


def _test(
    table: Table, shown: Mapping[str, Stage], references: References, lm: Stage | None, root: Path
) -> tuple[Outcome, str]:
    """What each row says of the test set in the way that is shown, and the command that analyses it."""
    command = ["nmla", "analyse", "--source", table.test.source, "--quantiles", str(QUANTILES)]
    for reference in table.test.references:
        command += ["--reference", reference]
    for row, scored in shown.items():
        command += ["--system", f"{row}={scored.directory(root) / TRANSLATIONS}"]
    fluency: dict[str, Any] = {}
    if lm is not None and lm.done(root):
        path, file = lm.paths["tokenizer"], lm.directory(root) / "lm.lm"
        tokenizer = Tokenizer.load(Path(path))
        if splits_text(tokenizer):
            fluency = {"lm": NgramLM.load(file, tokenizer), "tokenizer": tokenizer}
            command += ["--lm", str(file), "--tokenizer", path]
    systems = [System.of_file(row, stage.directory(root) / TRANSLATIONS) for row, stage in shown.items()]
    sources = read_lines(Path(table.test.source))
    analysis = analyse(systems, references, sources=sources, quantiles=QUANTILES, **fluency)
    return Outcome(sources, references, systems, analysis), shlex.join(command)


def _result(table: Table, stage: Stage, root: Path) -> dict[str, Any]:
    scores = json.loads((stage.directory(root) / "scores.json").read_text(encoding="utf-8"))
    result = {one["name"]: one["score"] for one in scores["measured"]}
    signatures = {one["name"]: one["signature"] for one in scores["measured"]}
    if table.meteor and (judged := judging(table, stage)).done(root):
        one = json.loads((judged.directory(root) / METEOR).read_text(encoding="utf-8"))
        result["METEOR"], signatures["METEOR"] = one["score"], one["signature"]
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
    """The last step of a training, and the seconds that so many take at their median pace: whatever else the machine
    did for a while, or a halt of the whole process, does not count."""
    log = read_log(stage.directory(root))
    events = [event for event in log if event["event"] == "train"] or log[-1:]  # one that gave up early logged none
    paces = [
        (event["seconds"] - before["seconds"]) / (event["step"] - before["step"])
        for before, event in itertools.pairwise(({"step": 0, "seconds": 0.0}, *events))
    ]
    return log[-1]["step"], log[-1]["step"] * statistics.median(paces)


def _scores(table: Table, results: Results) -> Figures:
    """BLEU of every row in every way that is done, the brevity penalty beside it."""
    rows = []
    of_rows = {row.name: table.seeds_of(row) for row in table.rows}
    ways = [way for way in table.ways if any(of[1] == way for of in results)]
    for row in dict.fromkeys(row for row, _, _ in results):
        cells = [row]
        for way in ways:
            found = [result for of, result in results.items() if of[:2] == (row, way)]
            bleu, seeds = _spread([of["BLEU"] for of in found]), of_rows[row]
            if 0 < len(found) < len(seeds):
                bleu += f" ({len(found)} of {len(seeds)} seeds)"
            cells += [bleu, _mean([of["brevity penalty"] for of in found], 2)]
        rows.append(cells)
    header = ["system", *(name for way in ways for name in (f"BLEU, {way}", "BP"))]
    return Figures(header, rows)


def _beyond(table: Table, title: str, tests: Mapping[tuple[str, str], Measured]) -> Figures:
    """How far every row is from another in every way that any of them is decoded in."""

    def cell(test: Measured | None) -> str:
        if test is None or test.difference_interval is None:
            return "—"
        low, high = test.difference_interval
        return f"{test.difference:+.1f} [{low:+.1f}, {high:+.1f}]"

    ways = [way for way in table.ways if any(of[1] == way for of in tests)]
    rows = [[row, *(cell(tests.get((row, way))) for way in ways)] for row in dict.fromkeys(row for row, _ in tests)]
    return Figures([title, *ways], rows)


def _published(table: Table, results: Results) -> Figures:
    """BLEU of the rows that have figures elsewhere, beside these."""
    ways = [way for way in table.ways if any(way in row.published for row in table.rows)]
    rows = []
    for row in table.rows:
        if row.published:
            cells = [row.name]
            for way in ways:
                found = _spread([result["BLEU"] for of, result in results.items() if of[:2] == (row.name, way)])
                cells += [found, _number(row.published.get(way), 2)]
            rows.append(cells)
    return Figures(["system", *(name for way in ways for name in (f"BLEU, {way}", "published"))], rows)


def _details(results: Results) -> Figures:
    """The rest of each row's first way, of all its seeds."""
    first = {row: way for row, way, _ in reversed(results)}
    digits = {"chrF": 1, "TER": 1, "METEOR": 3, "length ratio": 2, "entropy": 2}
    if not any("METEOR" in result for result in results.values()):
        del digits["METEOR"]
    rows = []
    for row in dict.fromkeys(row for row, _, _ in results):
        found = [result for of, result in results.items() if of[:2] == (row, first[row])]
        means = [_mean([of[name] for of in found if name in of], to) for name, to in digits.items()]
        steps = " + ".join(f"{steps:,}" for steps in found[0]["steps"])
        rows.append([row, *means, steps, " + ".join(f"{seconds / 60:.0f}" for seconds in found[0]["seconds"])])
    return Figures(["system", *digits, "steps", "minutes"], rows)


def _beside(analysis: Analysis) -> Figures:
    """What the analysis says of each row, and of the reference."""
    return by_system(
        analysis, [row for row in measures(analysis) if row.name.startswith("BLEU, ") or row.name in SHOWN]
    )


def _legend(results: Results) -> str:
    signatures = {name: of for result in results.values() for name, of in result["signatures"].items()}
    named = "; ".join(
        f"{name}: `{signatures[name]}`" for name in ("BLEU", "chrF", "TER", "METEOR") if name in signatures
    )
    return (
        "BP is BLEU's brevity penalty. ± is the standard deviation over seeds, where there are several. Differences "
        f"are with their 95 % interval (paired bootstrap, {SAMPLES} samples, the first seeds). The last two tables are "
        "of each row's first way of decoding: length relative to the reference's, entropy in nats per output position, "
        "steps of each of the model's own stages, and minutes that these take at their median pace, validation not "
        "counted; then, of the first seeds, BLEU by the length of the reference, with the number of sentences, the "
        "share of words equal to the one before, perplexity under the table's language model if it has one, the share "
        "of pairs of words that stand in another order than in the reference, and the share of positions that are "
        f"blank. {named}."
    )


def _command(table: Table, stage: Stage, result: dict[str, Any], root: Path, baseline: Stage | None) -> str:
    """What prints one number of the table alone, and beside a baseline what it is beyond that."""
    model = stage.inputs["model"].directory(root) / "model"
    command = ["nmla", "score", "--model", str(model), "--source", stage.paths["source"]]
    for path in stage.paths["references"]:
        command += ["--reference", path]
    # All that counts, whatever the model has been tuned to since.
    decoding, family = result["decoding"], stage.inputs["model"].paths["recipe"]["model"]["family"]
    names = ["beam_size"]
    if family in ("ctc", "sctc"):
        names += ["blank_penalty"] if decoding["beam_size"] == 1 else ["alpha", "beta", "blank_penalty"]
    for name in names:
        command += [f"--{name.replace('_', '-')}", f"{decoding[name]:g}"]
    for name, file in (("lm", "lm.lm"), ("teacher", "model")):
        if name in stage.inputs and (name != "lm" or decoding["alpha"]):  # which may have been tuned to none
            command += [f"--{name}", str(stage.inputs[name].directory(root) / file)]
    if baseline is not None:
        command += ["--baseline", str(baseline.directory(root) / OUTPUTS)]
    if "METEOR" in result:
        command += ["--meteor", table.meteor]
    return shlex.join(command)


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "—"
    mean = f"{statistics.fmean(values):.1f}"
    return f"{mean} ± {statistics.stdev(values):.1f}" if len(values) > 1 else mean


def _number(value: float | None, digits: int) -> str:
    return "—" if value is None else f"{value:.{digits}f}"


def _mean(values: Sequence[float], digits: int) -> str:
    return _number(statistics.fmean(values) if values else None, digits)
