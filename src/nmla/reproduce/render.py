"""A table of results as Markdown and as a page: every number with the command that prints it."""

import itertools
import shlex
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nmla.evaluation.analysis_table import ABSENT
from nmla.evaluation.document import Block, Code, Figures, Picture, to_html, to_markdown
from nmla.evaluation.measure import SAMPLES
from nmla.evaluation.runs import Outcome, Run, report
from nmla.files import write_text
from nmla.reproduce.record import SHOWN, Of, Record, Wanted, analysis_command, pairs, shown_first, trainings
from nmla.reproduce.stages import OUTPUTS, Stage, recipe_of
from nmla.reproduce.table import Table

Results = dict[Of, dict[str, Any]]


def render(
    path: Path,
    table: Table,
    wanted: Wanted,
    missing: Sequence[Of],
    lm: Stage | None,
    root: Path,
    record: Record,
    test: Outcome | None,
) -> str:
    """The table from what is known of it as Markdown; also written beside its stages, with its curves, as JSON and as a
    page, which tells what is on the `test` set too.

    What is `missing` is named as not run. `lm` is what perplexities were told by, if they were.
    """
    names = {of: stage.directory(root).name for of, stage in wanted.items()}
    results = {of: record.measured[name] for of, name in names.items()}
    first, baseline, beside = pairs(table, wanted)
    shown = shown_first(table, wanted, wanted)
    blocks: list[Block] = [
        table.about.strip(),
        Code(shlex.join(["nmla", "reproduce", str(path)])),
        _scores(table, results),
    ]
    if baseline is not None:
        tests = {of[:2]: results[of]["beyond"].get(names[baseline]) for of in first.values() if of != baseline}
        if tests:
            blocks.append(_beyond(table, f"BLEU beyond {', '.join(baseline[:2])}", tests))
    if beside:
        tests = {
            (f"{of[0]} beyond {other[0]}", of[1]): results[of]["beyond"].get(names[other])
            for of, other in beside.items()
        }
        blocks.append(_beyond(table, "BLEU, in the same way", tests))
    if (by_seed := _by_seed(table, results)).rows:
        blocks.append(by_seed)
    if any(row.published for row in table.rows):
        blocks += [_published(table, results), f"Published: {table.published.strip()}"]
    blocks += [_details(results), _beside(shown, record, root), _legend(results)]
    if missing:
        blocks.append(f"Not run yet: {'; '.join(_named(table, shown, missing))}.")
    command = shlex.join(analysis_command(table, shown, lm, root, record))
    commands = [command]
    for of, stage in wanted.items():
        row, way, seed = of
        told = table, stage, results[of], root
        other = wanted[baseline] if baseline is not None and of[:2] != baseline[:2] else None
        commands.append(f"{_command(*told, other)}  # {row}, {way}, seed {seed}")
        if of in beside:
            control = beside[of]
            commands.append(f"{_command(*told, wanted[control])}  # {row} beyond {control[0]}, {way}, seed {seed}")
    blocks += ["Single numbers:", Code("\n".join(commands))]
    sections = report(_runs(shown, record, root), test, [command])
    curves = next(block for _, of in sections for block in of if isinstance(block, Picture))
    text = to_markdown(table.title, [("", [*blocks, curves])], [f"{path.stem}.svg"])
    page = to_html(table.title, [("The table", blocks), *sections])
    for ending, content in (("svg", curves.svg), ("md", text), ("json", record.as_json()), ("html", page)):
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


def _runs(shown: Mapping[str, Stage], record: Record, root: Path) -> list[Run]:
    """The trainings of all rows, from their first seeds; the last of each is called as its row."""
    names: dict[str, str] = {}
    for row, scored in shown.items():
        *before, last = (of.directory(root).name for of in trainings(scored.inputs["model"]))
        for name in before:
            names.setdefault(name, name)
        names[last] = row
    runs: dict[str, Run] = {}
    for scored in shown.values():
        parent = None
        for stage in trainings(scored.inputs["model"]):
            directory = stage.directory(root)
            name = directory.name
            if name not in runs and name in record.trainings:
                began = "random" if "start" not in stage.inputs else stage.inputs["start"].directory(root).name
                recipe = recipe_of(stage, directory, root)
                runs[name] = Run(names[name], directory, recipe, record.trainings[name], began, parent)
            parent = runs.get(name)
    return [*runs.values()]


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


def _beyond(table: Table, title: str, tests: Mapping[tuple[str, str], Sequence[float] | None]) -> Figures:
    """How far every row is from another in every way that any of them is decoded in."""

    def cell(test: Sequence[float] | None) -> str:
        if test is None or len(test) == 1:  # a single sentence has no interval
            return "—"
        difference, low, high = test
        return f"{difference:+.1f} [{low:+.1f}, {high:+.1f}]"

    return _by_way(table, title, {of: cell(test) for of, test in tests.items()})


def _by_seed(table: Table, results: Results) -> Figures:
    """How far rows of several seeds are from their control, each seed from its own."""
    cells = {}
    for row, way in itertools.product(table.rows, table.ways):
        same = [((row.name, way, seed), (row.control, way, seed)) for seed in table.seeds_of(row)]
        differences = [
            results[own]["BLEU"] - results[other]["BLEU"] for own, other in same if {own, other} <= {*results}
        ]
        if len(differences) > 1:
            each = ", ".join(f"{of:+.1f}" for of in differences)
            spread = f"{statistics.fmean(differences):+.1f} ± {statistics.stdev(differences):.1f}"
            cells[f"{row.name} beyond {row.control}", way] = f"{spread} ({each})"
    return _by_way(table, "BLEU, each seed beside the same", cells)


def _by_way(table: Table, title: str, cells: Mapping[tuple[str, str], str]) -> Figures:
    ways = [way for way in table.ways if any(of[1] == way for of in cells)]
    rows = [[row, *(cells.get((row, way), "—") for way in ways)] for row in dict.fromkeys(row for row, _ in cells)]
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


def _beside(shown: Mapping[str, Stage], record: Record, root: Path) -> Figures:
    """What the analysis says of each row, and of the reference."""
    told = {row: record.measured[stage.directory(root).name]["analysis"] for row, stage in shown.items()}
    told["the reference"] = record.reference
    columns = [*dict.fromkeys(column for of in told.values() for column in of)]
    columns.sort(key=lambda column: SHOWN.index(column) if column in SHOWN else -1)  # a record may lack some
    return Figures(
        ["system", *columns], [[row, *(of.get(column, ABSENT) for column in columns)] for row, of in told.items()]
    )


def _legend(results: Results) -> str:
    signatures = {
        name: of for result in results.values() for name, of in result["signatures"].items() if name in result
    }
    named = "; ".join(
        f"{name}: `{signatures[name]}`" for name in ("BLEU", "chrF", "TER", "METEOR") if name in signatures
    )
    return (
        "BP is BLEU's brevity penalty. ± is the standard deviation over seeds, where there are several. Differences "
        f"are with their 95 % interval (paired bootstrap, {SAMPLES} samples, the first seeds); where several seeds "
        "have a control, also each seed's. The last two tables are of each row's first way of decoding: length "
        "relative to the reference's, entropy in nats per output position, steps of each of the model's own stages, "
        "and minutes that these take at their median pace, validation not counted; then, of the first seeds, BLEU by "
        "the length of the reference, with the number of sentences, the share of words equal to the one before, "
        "perplexity under the table's language model if it has one, the share of pairs of words that stand in another "
        f"order than in the reference, and the share of positions that are blank. {named}."
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
