"""Trainings as they lie on the disk, and a report on some of them."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import sacrebleu
import torch

from nmla.config import Recipe, load_recipe, recipe_yaml
from nmla.decoding.translator import Translator
from nmla.errors import DataError, UsageError
from nmla.evaluation.analysis import Analysis
from nmla.evaluation.analysis_table import by_system, cells, ends, rows, shown
from nmla.evaluation.document import Block, Code, Figures, Picture, Section
from nmla.evaluation.measure import References, first_references
from nmla.evaluation.report import curves, heat_map
from nmla.evaluation.systems import System
from nmla.files import sha256
from nmla.models.pretrained import WEIGHTS
from nmla.text.tokenizer import BLANK

STEEP = 3.0  # of the loss that a training ends with: what is above it would flatten the curve
MOST_BESIDE = 6  # systems as columns: more would not fit on a page
WORDS_SHOWN, LETTERS_SHOWN = 12, range(5, 101)  # of a source whose probabilities are drawn


@dataclass(frozen=True)
class Run:
    """One stage of training, and the one whose weights it began from, if that is known."""

    name: str
    directory: Path
    recipe: Recipe
    log: list[dict[str, Any]]
    began: str  # the hash of the weights it began from, or "random"
    parent: "Run | None" = None

    @property
    def steps(self) -> int:
        return int(self.log[-1]["step"])

    @property
    def first(self) -> int:
        """The steps that its weights had when it began."""
        return self.parent.first + self.parent.steps if self.parent else 0

    @property
    def whole(self) -> Recipe | None:
        """What makes it anew from random weights, the stage before it included, if all of that is known."""
        made = replace(self.recipe, output=f"runs/{self.name.replace('/', '-')}-anew")
        if self.began == "random":
            return made
        if self.parent is None or self.parent.began != "random":
            return None
        before = replace(self.parent.recipe, output=made.output)
        alike = replace(before, train=made.train, machine=made.machine) == made  # but for where they ran
        same = alike and before.machine.precision == made.machine.precision
        return replace(before, finetune=made.train) if same else None

    def line(self, event: str, value: str) -> list[tuple[float, float]]:
        """Steps, those before it included, and what was logged then."""
        return [
            (self.first + of["step"], of[value])
            for of in self.log
            if of["event"] == event and of.get(value) is not None  # what was not finite is null
        ]


def read_log(stage: Path) -> list[dict[str, Any]]:
    """What a training wrote down; a last line that a kill cut is left out."""
    whole = []
    for line in (stage / "log.jsonl").read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            break
        if not isinstance(event, dict) or not {"event", "step", "seconds"} <= event.keys():
            break
        if not all(isinstance(of, (int, float)) for name, of in event.items() if name != "event" and of is not None):
            break
        whole.append(event)
    if not whole:
        raise DataError(f"{stage / 'log.jsonl'}: must tell of a training, but tells nothing")
    return whole


def find_runs(paths: Sequence[Path]) -> list[Run]:
    """The finished trainings in or below some directories, each after the one it began from.

    They are called as their directories, as shortly as tells them apart.
    """
    within: dict[Path, Path] = {}  # each directory, and below which path
    known: set[Path] = set()
    for path in paths:
        done = [log.parent for log in sorted(path.rglob("log.jsonl")) if (log.parent / "model" / WEIGHTS).is_file()]
        if not done:
            raise UsageError(f"{path}: must hold a finished training, but holds none")
        within |= {of: path for of in done if of.resolve() not in known}
        known |= {of.resolve() for of in done}
    short = {of: Path(path.resolve().name) / of.relative_to(path) for of, path in within.items()}
    taken = Counter(short.values())
    # An equals sign would end the name in commands.
    called = {of: str(short[of] if taken[short[of]] == 1 else of).replace("=", "-") for of in within}
    if twins := [name for name, count in Counter(called.values()).items() if count > 1]:
        raise UsageError(f"trainings must have names of their own, but two are called {twins[0]}; rename a directory")
    by_weights: dict[str, list[Path]] = {}
    for of in within:
        by_weights.setdefault(sha256(of / "model" / WEIGHTS), []).append(of)
    whole: dict[Path, Run] = {}

    def add(directory: Path) -> Run:
        if directory not in whole:
            try:
                start = json.loads((directory / "start.json").read_text(encoding="utf-8"))
                began, batches = str(start["weights"]), int(start["batches a step"])
            except (OSError, ValueError, KeyError, TypeError):
                message = "must tell what a training began from, but does not"
                raise DataError(f"{directory / 'start.json'}: {message}") from None
            parents = [of for of in by_weights.get(began, []) if of != directory]
            parents.sort(key=lambda of: of.parent != directory.parent)  # of copies, the one beside it
            before = add(parents[0]) if parents else None
            # As one process does it: how many there were, a launcher may have told.
            recipe = load_recipe(directory / "recipe.yaml")
            machine = replace(recipe.machine, devices=1, nodes=1)
            recipe = replace(recipe, machine=machine, train=replace(recipe.train, accumulate=batches))
            whole[directory] = Run(called[directory], directory, recipe, read_log(directory), began, before)
        return whole[directory]

    for directory in within:
        add(directory)
    return list(whole.values())


@dataclass(frozen=True)
class Outcome:
    """What became of some trainings on a test set: the outputs of their models, by the same names, analysed."""

    sources: Sequence[str]
    references: References
    systems: Sequence[System]
    analysis: Analysis


def report(runs: Sequence[Run], test: Outcome | None = None, commands: Sequence[str] = ()) -> list[Section]:
    """What there is to say about some trainings: how they went and, with a test set, what became of them.

    `commands` are what prints the latter.
    """
    sections: list[Section] = [("Trainings", [_trainings(runs), Picture(_curves(runs))])]
    if test is not None:
        sections.append(("On the test set", _on_the_test_set(test.analysis)))
        sections += _before_and_after(runs, test)
        for comparison in test.analysis.comparisons:
            for _, heading, found in ends(comparison):
                if found:
                    told = [shown(comparison, example) for example in found]
                    names = [name for name, _ in told[0]]
                    sections.append((heading, [Figures(names, [[text for _, text in of] for of in told], text=True)]))
    made: list[Block] = [Code("\n".join(commands))] if commands else []
    made.append("Each model: `nmla train recipe.yaml`, where recipe.yaml is what stands below under its name.")
    for run in runs:
        before = run.parent.name if run.parent else "weights that are not here"
        of_stage = "" if run.whole else f", this stage alone: it began from {before}"
        made.append(Code(recipe_yaml(run.whole or run.recipe), folded=f"{run.name}, recipe.yaml{of_stage}"))
    sections.append(("How it was made", made))
    return sections


def _on_the_test_set(analysis: Analysis) -> list[Block]:
    if len(analysis.systems) <= MOST_BESIDE:
        header, *lines = cells(analysis)
        return [Figures(header, lines)]
    measures = [row for row in rows(analysis) if not row.name.startswith("brevity penalty, ")]
    notes = "; ".join(f"{row.name}: {row.note}" for row in measures if row.sentences is None)
    return [by_system(analysis, measures), f"Sentences of a length in brackets. {notes}."]


def _trainings(runs: Sequence[Run]) -> Figures:
    header = ["training", "model", "loss", "from", "steps", "minutes", "best BLEU, validation", "at step"]
    rows = []
    for run in runs:
        valid = run.line("valid", "bleu")
        step, bleu = max(valid, key=lambda of: of[1], default=(0, 0.0))
        minutes = run.log[-1]["seconds"] / 60
        best = [f"{bleu:.2f}", f"{step - run.first:,.0f}"] if valid else ["-", "-"]
        numbers = [f"{run.steps:,}", f"{minutes:.1f}", *best]
        began = run.parent.name if run.parent else run.began if run.began == "random" else "weights that are not here"
        rows.append([run.name, run.recipe.model.family, run.recipe.train.loss, began, *numbers])
    return Figures(header, rows)


def _curves(runs: Sequence[Run]) -> str:
    """Losses of each kind, and what validation found; a stage goes on where the one before it ended."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for run in runs:
        loss = run.line("train", "loss")
        ceiling = abs(loss[-1][1]) * STEEP if loss else 0.0
        drawn = [(step, min(value, ceiling or value)) for step, value in loss]
        panels.setdefault(f"loss: {run.recipe.train.loss}", {})[run.name] = drawn
    for value, title in (("bleu", "BLEU, validation"), ("length_ratio", "length ratio"), ("entropy", "entropy, nats")):
        of_all = {run.name: run.line("valid", value) for run in runs}
        for run in runs:
            if run.parent is not None and run.parent.name in of_all:
                of_all[run.name] = [*_start(run, run.parent, value), *of_all[run.name]]
        panels[title] = of_all
    return curves(panels, unit="steps")


def _start(run: Run, parent: Run, value: str) -> list[tuple[float, float]]:
    """Where a run's curve begins: what validation said of the weights that the run before it ended with."""
    valid = parent.line("valid", value)
    if parent.recipe.train.final == "best" and valid:
        best = max(parent.line("valid", "bleu"), key=lambda of: of[1], default=valid[-1])[0]
        valid = [of for of in valid if of[0] == best]
    return [(run.first, last) for _, last in valid[-1:]]


def _before_and_after(runs: Sequence[Run], test: Outcome) -> Iterator[Section]:
    """What each position wants to say, before the last fine-tuning and after, of the short source that gained most."""
    sources, references = test.sources, first_references(test.references)
    outputs = {system.name: system.outputs for system in test.systems}
    pairs = [
        (run.parent, run)
        for run in runs
        if run.parent
        and run.recipe.model.family in ("ctc", "sctc")
        and {run.name, run.parent.name} <= outputs.keys()
        and all((of.directory / "model").is_dir() for of in (run.parent, run))  # a record has the log alone
    ]
    short = [n for n, text in enumerate(sources) if len(text) in LETTERS_SHOWN and len(text.split()) <= WORDS_SHOWN]
    if not pairs or not short:
        return
    both = pairs[-1]

    def gain(line: int) -> float:
        before, after = (sacrebleu.sentence_chrf(outputs[of.name][line], [references[line]]).score for of in both)
        return after - before

    line = max(short, key=gain)
    maps = heat_maps(sources[line], {of.name: Translator.load(of.directory / "model") for of in both})
    sentence = Figures(["source", "reference"], [[sources[line], references[line]]], text=True)
    about = "A column is an output position, a row a token, the shade its probability."
    yield "What each position wants to say", [sentence, about, *map(Picture, maps)]


def heat_maps(source: str, translators: dict[str, Translator]) -> list[str]:
    """Probabilities of some models, over the same rows: all tokens that have weight in any of them."""
    each = {name: translator.probabilities(source) for name, translator in translators.items()}
    most = torch.stack(list(each.values())).amax(0)
    # By where each token is likeliest, so that a sentence is a slope; blank, which is everywhere, below.
    place = most.argmax(0)
    place[BLANK] = len(place)
    tokens = [int(token) for token in place.argsort(stable=True) if most[:, token].max() > 0.1]
    return [
        heat_map(
            f"{name}: {translators[name].translate(source)}",
            [translators[name].tokenizer.piece(token) for token in tokens],
            probs.T[tokens].tolist(),
        )
        for name, probs in each.items()
    ]
