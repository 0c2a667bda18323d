"""What is known of a table in numbers alone: from its stages, or as they told it on another machine."""

import base64
import itertools
import json
import math
import statistics
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from nmla.decoding.ngram_lm import NgramLM
from nmla.errors import DataError
from nmla.evaluation.analysis import analyse, splits_text
from nmla.evaluation.analysis_table import by_system, rows
from nmla.evaluation.measure import Counts, bleu_beyond, bleu_counts, read_references
from nmla.evaluation.runs import Outcome, read_log
from nmla.evaluation.systems import System
from nmla.reproduce.stages import METEOR, TRANSLATIONS, Stage, check_test_set, judging
from nmla.reproduce.table import Table
from nmla.text.lines import read_lines, require_file
from nmla.text.tokenizer import Tokenizer

QUANTILES = 4  # parts of the test set, by length
SHOWN = ("repeats", "perplexity", "discordant pairs", "blanks")  # of an analysis, beside BLEU by length
FIGURES = ("BLEU", "brevity penalty", "length ratio", "chrF", "TER", "entropy")  # that every stage which scored has
BLEU_COUNTS = 10  # of a sentence: words of output and reference, n-grams that match and all, of four orders
POINTS = 25  # of a training's losses that are kept, for its curve

Of = tuple[str, str, int]  # row, way and seed
Wanted = Mapping[Of, Stage]


@dataclass(frozen=True)
class Record:
    """Enough to tell a table again where its stages are not. Stages go by the names of their directories."""

    measured: dict[str, dict[str, Any]] = field(default_factory=dict)  # what each stage that scored found
    trainings: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # what each training logged, thinned
    reference: dict[str, str] = field(default_factory=dict)  # what the analysis says of the reference
    lm: str = ""  # what perplexities are by

    def as_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"


def read_record(path: Path) -> Record:
    require_file(path)
    try:
        record = Record(**json.loads(path.read_text(encoding="utf-8")))
        for entry in record.measured.values():
            _check_measured(entry)
        for log in record.trainings.values():
            cost(log)
            figures = [of[name] for of in log for name in ("step", "seconds", "loss", "bleu", "entropy") if name in of]
            if not all(map(math.isfinite, figures)):
                raise ValueError
        texts = [record.reference, *(entry["analysis"] for entry in record.measured.values())]
        if not all(isinstance(text, str) for of in texts for text in of.values()):
            raise TypeError
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, ArithmeticError, RecursionError, zlib.error):
        raise DataError(f"{path}: must be the JSON that nmla reproduce writes of a table, but is not") from None
    return record


def merged(older: Record, newer: Record) -> Record:
    """What either tells; of what both tell, what the newer says."""
    if newer.measured and older.lm != newer.lm:
        older = _without_perplexities(older)
    return Record(
        older.measured | newer.measured,
        older.trainings | newer.trainings,
        older.reference | newer.reference,
        newer.lm if newer.measured else older.lm,
    )


def _check_measured(entry: dict[str, Any]) -> None:
    """Look at all that is told of one, as it will be: what is not there or of another kind raises."""
    figures = [entry[name] for name in FIGURES]
    figures += [entry["METEOR"]] if "METEOR" in entry else []
    figures += [entry["decoding"][name] for name in ("beam_size", "alpha", "beta", "blank_penalty")]
    for test in entry["beyond"].values():
        figures += test if len(test) in (1, 3) else [None]
    for of in zip(entry["steps"], entry["seconds"], strict=True):
        figures += of
    if "counts" in entry:
        _unpacked(entry["counts"])
    texts = [entry["judged"], *entry["signatures"].values()]
    if not all(map(math.isfinite, figures)) or not all(isinstance(one, str) for one in texts):
        raise TypeError


def gather(table: Table, wanted: Wanted, lm: Stage | None, root: Path, before: Record) -> tuple[Record, Outcome | None]:
    """All that is wanted, each from its stage or, where that is not done, from `before`; and what those stages say of
    the test set. Perplexities are told if `lm` is done."""
    by = lm.directory(root).name if lm is not None else ""
    before = before if before.lm == by else _without_perplexities(before)
    done = {of: stage for of, stage in wanted.items() if stage.done(root)}
    for stage in done.values():
        check_test_set(stage)
    record = Record(dict(before.measured), dict(before.trainings), dict(before.reference), by)
    for (row, way, seed), stage in wanted.items():
        name = stage.directory(root).name
        known: dict[str, Any] = {"analysis": {}, "beyond": {}, "signatures": {}, **before.measured.get(name, {})}
        known |= {"row": row, "way": way, "seed": seed}  # of rows that share it the last, for people
        judged = judging(table, stage).directory(root).name if table.meteor else ""
        if known.get("judged") != judged:
            known.pop("METEOR", None)
            known["judged"] = ""
        if (row, way, seed) in done:
            scored = _scored(table, stage, root, known)
            if known.get("BLEU") != scored["BLEU"]:  # made anew, by another machine's sums
                known["beyond"] = {}
                known.pop("counts", None)
            known |= scored
        record.measured[name] = known
        for training in trainings(stage.inputs["model"]):
            if training.done(root):
                record.trainings[training.directory(root).name] = _thinned(read_log(training.directory(root)))
    _compare(table, wanted, done, root, record)
    return record, _analyse(table, shown_first(table, wanted, done), lm, root, record)


def _without_perplexities(record: Record) -> Record:
    """What was told by another language model is not what this table tells."""

    def rest(of: dict[str, str]) -> dict[str, str]:
        return {name: text for name, text in of.items() if name != "perplexity"}

    measured = {name: {**entry, "analysis": rest(entry["analysis"])} for name, entry in record.measured.items()}
    return replace(record, measured=measured, reference=rest(record.reference))


def shown_first(table: Table, wanted: Wanted, among: Wanted) -> dict[str, Stage]:
    """Of each row, the stage that is analysed: its first way and seed. What all are compared with comes first."""
    first: dict[str, Of] = {}
    for of in wanted:
        first.setdefault(of[0], of)
    chosen = {row: among[of] for row, of in first.items() if of in among}
    return dict(sorted(chosen.items(), key=lambda one: one[0] != baseline_row(table)))


def baseline_row(table: Table) -> str:
    return table.baseline or table.rows[0].name


def pairs(table: Table, wanted: Wanted) -> tuple[dict[tuple[str, str], Of], Of | None, dict[Of, Of]]:
    """First seeds by row and way; the one that all are tested against; and those with a control, in the same way."""
    seeds = {row.name: table.seeds_of(row) for row in table.rows}
    first = {of[:2]: of for of in wanted if of[2] == seeds[of[0]][0]}
    baseline = next((of for of in first.values() if of[0] == baseline_row(table)), None)
    controls = {row.name: row.control for row in table.rows}
    beside: dict[Of, Of] = {}
    for (row, way), of in first.items():
        if (other := first.get((controls[row], way))) is not None:
            same = (*other[:2], of[2])  # the same seed, if there is one
            beside[of] = same if same in wanted else other
    return first, baseline, beside


def trainings(model: Stage) -> list[Stage]:
    """A model's own trainings, first to last; not those of its teachers."""
    return [*(trainings(model.inputs["start"]) if "start" in model.inputs else []), model]


def analysis_command(
    table: Table, shown: Mapping[str, Stage], lm: Stage | None, root: Path, record: Record
) -> list[str]:
    command = ["nmla", "analyse", "--source", table.test.source, "--quantiles", str(QUANTILES)]
    for reference in table.test.references:
        command += ["--reference", reference]
    for row, scored in shown.items():
        command += ["--system", f"{row}={scored.directory(root) / TRANSLATIONS}"]
    if lm is not None and "perplexity" in record.reference:
        command += ["--lm", str(lm.directory(root) / "lm.lm"), "--tokenizer", lm.paths["tokenizer"]]
    return command


def _scored(table: Table, stage: Stage, root: Path, known: dict[str, Any]) -> dict[str, Any]:
    scores = json.loads((stage.directory(root) / "scores.json").read_text(encoding="utf-8"))
    result = {one["name"]: one["score"] for one in scores["measured"]}
    signatures = known["signatures"] | {one["name"]: one["signature"] for one in scores["measured"]}
    if table.meteor and (judged := judging(table, stage)).done(root):
        one = json.loads((judged.directory(root) / METEOR).read_text(encoding="utf-8"))
        result |= {"METEOR": one["score"], "judged": judged.directory(root).name}
        signatures["METEOR"] = one["signature"]
    own = [of.directory(root) for of in trainings(stage.inputs["model"])]
    if "steps" not in known or all((of / "log.jsonl").exists() for of in own):
        costs = [cost(read_log(of)) for of in own]
        result |= {"steps": [steps for steps, _ in costs], "seconds": [seconds for _, seconds in costs]}
    return {**result, "signatures": signatures, "entropy": scores["entropy"], "decoding": scores["decoding"]}


def cost(log: list[dict[str, Any]]) -> tuple[int, float]:
    """The last step of a training, and the seconds that so many take at their median pace: whatever else the machine
    did for a while, or a halt of the whole process, does not count."""
    events = [event for event in log if event["event"] == "train"] or log[-1:]  # one that gave up early logged none
    paces = [
        (event["seconds"] - before["seconds"]) / (event["step"] - before["step"])
        for before, event in itertools.pairwise(({"step": 0, "seconds": 0.0}, *events))
    ]
    return log[-1]["step"], log[-1]["step"] * statistics.median(paces)


def _compare(table: Table, wanted: Wanted, done: Wanted, root: Path, record: Record) -> None:
    """Test each first seed against the baseline and its control, where it is known what BLEU counts in both."""
    references = read_references([*map(Path, table.test.references)])
    first, baseline, beside = pairs(table, wanted)
    known = {of: record.measured[wanted[of].directory(root).name] for of in first.values()}
    known |= {of: record.measured[wanted[of].directory(root).name] for of in beside.values()}
    counts = {}
    for of, entry in known.items():
        if of in done:
            outputs = System.of_file(of[0], done[of].directory(root) / TRANSLATIONS).outputs
            entry["counts"] = _packed(bleu_counts(outputs, references))
        if "counts" in entry:
            counts[of] = _unpacked(entry["counts"])
            if len(counts[of]) != len(references[0]):
                raise DataError(
                    f"the record of {', '.join(of[:2])} must count in {len(references[0])} sentences, but does in "
                    f"{len(counts[of])}"
                )
    for of in counts:
        for other in (baseline, beside.get(of)):
            if other is None or other == of or other not in counts:
                continue
            known[of]["beyond"][wanted[other].directory(root).name] = bleu_beyond(counts[of], counts[other])


def _packed(counts: Counts) -> str:
    """Small whole numbers, a row for each sentence, as text that is a tenth of them written out."""
    return base64.b64encode(zlib.compress(counts.astype("<u4").tobytes(), 9)).decode()


def _unpacked(text: str) -> Counts:
    found = np.frombuffer(zlib.decompress(base64.b64decode(text, validate=True)), "<u4")
    return found.reshape(-1, BLEU_COUNTS).astype(np.float64)


def _analyse(table: Table, shown: Mapping[str, Stage], lm: Stage | None, root: Path, record: Record) -> Outcome | None:
    if not shown:
        return None
    fluency: dict[str, Any] = {}
    if lm is not None and lm.done(root):
        tokenizer = Tokenizer.load(Path(lm.paths["tokenizer"]))
        if splits_text(tokenizer):
            fluency = {"lm": NgramLM.load(lm.directory(root) / "lm.lm", tokenizer), "tokenizer": tokenizer}
    systems = [System.of_file(row, stage.directory(root) / TRANSLATIONS) for row, stage in shown.items()]
    sources, references = read_lines(Path(table.test.source)), read_references([*map(Path, table.test.references)])
    analysis = analyse(systems, references, sources=sources, quantiles=QUANTILES, **fluency)
    measures = [row for row in rows(analysis) if row.name.startswith("BLEU, ") or row.name in SHOWN]
    figures = by_system(analysis, measures)
    *told, of_reference = [dict(zip(figures.header[1:], line[1:], strict=True)) for line in figures.rows]
    for stage, columns in zip(shown.values(), told, strict=True):
        known = record.measured[stage.directory(root).name]
        known["analysis"] = known["analysis"] | columns
    record.reference.update(of_reference)
    return Outcome(sources, references, systems, analysis)


def _thinned(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All validations, and of the rest what a curve needs."""
    losses = [event for event in log if event["event"] == "train"]
    kept = losses[:: max(len(losses) // POINTS, 1)] + losses[-1:]
    return [
        event if event["event"] != "train" else {name: event.get(name) for name in ("event", "step", "seconds", "loss")}
        for event in log
        if event["event"] != "train" or any(event is one for one in kept)
    ]
