"""Trainings as they lie on the disk, and a report on some of them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import sacrebleu
import torch

from nmla.config import Recipe, load_recipe, recipe_yaml
from nmla.decoding.ngram_lm import NgramLM
from nmla.decoding.translator import Translator
from nmla.errors import UsageError
from nmla.evaluation.analysis import System, analyse
from nmla.evaluation.analysis_table import cells, shown
from nmla.evaluation.document import Code, Figures, Picture, Section
from nmla.evaluation.report import curves, heat_map
from nmla.files import sha256
from nmla.models.pretrained import WEIGHTS
from nmla.text.tokenizer import BLANK

STEEP = 3.0  # of the loss that a training ends with: what is above it would flatten the curve
LONGEST_SHOWN = 12  # words of a source whose probabilities are drawn


@dataclass(frozen=True)
class Run:
    """One stage of training, and the one whose weights it began from, if that is known."""

    name: str
    directory: Path
    recipe: Recipe
    log: list[dict[str, Any]]
    parent: "Run | None" = None

    @property
    def steps(self) -> int:
        return int(self.log[-1]["step"])

    @property
    def first(self) -> int:
        """The steps that its weights had when it began."""
        return self.parent.first + self.parent.steps if self.parent else 0

    def line(self, event: str, value: str) -> list[tuple[float, float]]:
        """Steps, those before it included, and what was logged then."""
        return [(self.first + of["step"], of[value]) for of in self.log if of["event"] == event and value in of]


def read_log(stage: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (stage / "log.jsonl").read_text(encoding="utf-8").splitlines()]


def find_runs(paths: Sequence[Path], names: Mapping[Path, str] = MappingProxyType({})) -> list[Run]:
    """The finished trainings in or below some directories, each after the one it began from.

    They are called as in `names`, or else as their directories.
    """
    runs: dict[Path, Run] = {}
    by_weights: dict[str, Path] = {}
    began: dict[Path, str] = {}
    for path in paths:
        done = [log.parent for log in sorted(path.rglob("log.jsonl")) if (log.parent / "model" / WEIGHTS).is_file()]
        if not done:
            raise UsageError(f"{path}: must hold a finished training, but holds none")
        for directory in done:
            name = names.get(directory, str(Path(path.resolve().name) / directory.relative_to(path)))
            runs[directory] = Run(name, directory, load_recipe(directory / "recipe.yaml"), read_log(directory))
            by_weights.setdefault(sha256(directory / "model" / WEIGHTS), directory)
            began[directory] = json.loads((directory / "start.json").read_text(encoding="utf-8"))["weights"]
    whole: dict[Path, Run] = {}

    def add(directory: Path) -> Run:
        if directory not in whole:
            parent = by_weights.get(began[directory], directory)
            whole[directory] = replace(runs[directory], parent=add(parent) if parent != directory else None)
        return whole[directory]

    for directory in runs:
        add(directory)
    return list(whole.values())


def report(
    runs: Sequence[Run],
    source: Path | None = None,
    references: Sequence[Path] = (),
    *,
    lines: Sequence[Sequence[str]] = (),
    lm: Path | None = None,
    examples: int = 5,
) -> list[Section]:
    """What there is to say about some trainings: how they went and, with a test set, what became of them.

    `lines` are those of the source and of each reference; a language model `lm` tells perplexities.
    """
    sections: list[Section] = [("Trainings", [_trainings(runs), Picture(_curves(runs))])]
    if source is not None:
        texts, *targets = lines
        translators = {run.name: Translator.load(run.directory / "model") for run in runs}
        systems = [System.of_model(name, translator, texts) for name, translator in translators.items()]
        fluency: dict[str, Any] = {}
        if lm is not None:
            tokenizer = next(iter(translators.values())).tokenizer
            fluency = {"lm": NgramLM.load(lm, tokenizer), "tokenizer": tokenizer}
        analysis = analyse(systems, targets, sources=texts, examples=examples, **fluency)
        header, *rows = cells(analysis)
        sections.append(("On the test set", [Figures(header, rows)]))
        sections += _before_and_after(runs, systems, translators, texts, targets[0])
        for comparison in analysis.comparisons:
            for change, found in (("gained", comparison.gained), ("lost", comparison.lost)):
                if found:
                    heading = f"Where {comparison.name} {change} most against {comparison.baseline}"
                    told = [shown(comparison, example) for example in found]
                    names = [name for name, _ in told[0]]
                    sections.append((heading, [Figures(names, [[text for _, text in of] for of in told], text=True)]))
    sections.append(("How it was made", list(_commands(runs, source, references))))
    return sections


def _trainings(runs: Sequence[Run]) -> Figures:
    header = ["training", "model", "loss", "from", "steps", "minutes", "best BLEU, validation", "at step"]
    rows = []
    for run in runs:
        valid = run.line("valid", "bleu")
        step, bleu = max(valid, key=lambda of: of[1], default=(0, 0.0))
        minutes = run.log[-1]["seconds"] / 60
        numbers = [f"{run.steps:,}", f"{minutes:.1f}", f"{bleu:.2f}" if valid else "-", f"{step - run.first:,.0f}"]
        began = run.parent.name if run.parent else "random"
        rows.append([run.name, run.recipe.model.family, run.recipe.train.loss, began, *numbers])
    return Figures(header, rows)


def _curves(runs: Sequence[Run]) -> str:
    """Losses of each kind, and what validation found; a stage goes on where the one before it ended."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for run in runs:
        loss = run.line("train", "loss")
        ceiling = abs(loss[-1][1]) * STEEP if loss else 0.0
        drawn = [(step, value) for step, value in loss if value <= ceiling]
        panels.setdefault(f"loss: {run.recipe.train.loss}", {})[run.name] = drawn
    for value, title in (("bleu", "BLEU, validation"), ("length_ratio", "length ratio"), ("entropy", "entropy, nats")):
        of_all = {run.name: run.line("valid", value) for run in runs}
        for run in runs:
            if run.parent is not None and run.parent.name in of_all and of_all[run.parent.name]:
                of_all[run.name] = of_all[run.parent.name][-1:] + of_all[run.name]
        panels[title] = of_all
    return curves(panels, unit="steps")


def _before_and_after(
    runs: Sequence[Run],
    systems: Sequence[System],
    translators: dict[str, Translator],
    sources: Sequence[str],
    references: Sequence[str],
) -> Iterator[Section]:
    """What each position wants to say, before the last fine-tuning and after, of the short source that gained most."""
    pairs = [run for run in runs if run.parent is not None and run.recipe.model.family in ("ctc", "sctc")]
    names = {system.name: system for system in systems}
    if not pairs or pairs[-1].parent is None or pairs[-1].parent.name not in names:
        return
    before, after = names[pairs[-1].parent.name], names[pairs[-1].name]

    def gain(line: int) -> float:
        scores = [sacrebleu.sentence_chrf(of.outputs[line], [references[line]]).score for of in (before, after)]
        return scores[1] - scores[0]

    short = [line for line, text in enumerate(sources) if 2 < len(text.split()) <= LONGEST_SHOWN]
    if not short:
        return
    line = max(short, key=gain)
    maps = heat_maps(sources[line], {system.name: translators[system.name] for system in (before, after)})
    about = (
        f"Source: {sources[line]} Reference: {references[line]} A column is an output position, a row a token, the "
        "shade its probability."
    )
    yield "What each position wants to say", [about, *map(Picture, maps)]


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


def _commands(runs: Sequence[Run], source: Path | None, references: Sequence[Path]) -> Iterator[Code]:
    if source is not None:
        test = f"--source {source} " + " ".join(f"--reference {path}" for path in references)
        yield Code("\n".join(f"nmla score --model {run.directory / 'model'} {test}" for run in runs))
    for run in runs:
        yield Code(recipe_yaml(run.recipe), folded=f"{run.name}, the recipe of this stage")
