"""The stages of a table: what each row needs, each known by the hash of all that it depends on, so that rows share them
and nothing is done twice."""

import hashlib
import json
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from nmla import __version__
from nmla.config import DataConfig, MachineConfig, ModelConfig, Recipe, TrainConfig, parse_recipe
from nmla.data.corpus import TOKENIZER
from nmla.errors import NmlaError, Stopped
from nmla.files import MANIFEST, locked, sha256, write_text
from nmla.reproduce.table import Row, Table, Way

DONE = "done.json"  # in the directory of a stage that is finished


@dataclass(frozen=True)
class Stage:
    """A piece of work with one directory. Where things are found does not change its key, only what they hold."""

    kind: str  # one of RUN
    label: str  # for people
    settings: Mapping[str, Any]
    inputs: Mapping[str, "Stage"] = field(default_factory=dict)
    paths: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def key(self) -> str:
        whole = [self.kind, self.settings, {name: stage.key for name, stage in self.inputs.items()}]
        return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:12]

    def directory(self, root: Path) -> Path:
        return root / f"{self.label}-{self.key}"

    def done(self, root: Path) -> bool:
        return (self.directory(root) / DONE).exists()

    def needed(self) -> Iterator["Stage"]:
        """All that come before it, and itself."""
        for stage in self.inputs.values():
            yield from stage.needed()
        yield self


def training(recipe: Recipe, seed: int) -> tuple[Stage, Stage | None]:
    """The stage that gives a recipe's model, with all before it, and its first teacher if it has one."""
    corpus: dict[str, Any] = {"paths": {"corpus": recipe.data.corpus}}
    content = {"corpus": sha256(Path(recipe.data.corpus) / MANIFEST)}
    teacher = None
    if recipe.teacher is not None:
        teachers = [
            _train(recipe, recipe.teacher.model, recipe.teacher.train, of, content, corpus)
            for of in recipe.teacher.seeds
        ]
        teacher = teachers[0]
        how = {"beam_size": recipe.teacher.beam_size, "compute_type": recipe.teacher.compute_type}
        distilled = Stage(
            "distill",
            f"distilled-{len(teachers)}",
            {**how, **content},
            {f"teacher-{n}": of for n, of in enumerate(teachers, start=1)},
            corpus["paths"],
        )
        corpus, content = {"inputs": {"corpus": distilled}}, {}
    model = _train(recipe, recipe.model, recipe.train, seed, content, corpus)
    if recipe.finetune is not None:
        with_start = {**corpus, "inputs": {**corpus.get("inputs", {}), "start": model}}
        model = _train(recipe, recipe.model, recipe.finetune, seed, content, with_start)
    return model, teacher


def _train(
    recipe: Recipe, model: ModelConfig, stage: TrainConfig, seed: int, content: dict[str, str], corpus: dict[str, Any]
) -> Stage:
    own = replace(
        recipe,
        model=model,
        train=stage,
        finetune=None,
        teacher=None,
        seed=seed,
        output="",
        data=DataConfig(""),
        machine=MachineConfig(precision=recipe.machine.precision),
    )
    order = f"{stage.ngram}" if stage.loss in ("ngram", "bag") else ""
    return Stage("train", f"{model.family}-{stage.loss}{order}", {"recipe": asdict(own), **content}, **corpus)


def scoring(table: Table, way: Way, recipe: Recipe, seed: int) -> Stage:
    """The stage that scores a recipe's model on the test set, decoded in one way."""
    model, teacher = training(recipe, seed)
    inputs = {"model": model}
    corpus = Path(recipe.data.corpus)
    if way.lm and table.lm is not None:
        inputs["lm"] = Stage(
            "lm",
            f"lm-{table.lm.order}",
            {"order": table.lm.order, "text": sha256(Path(table.lm.text)), "tokenizer": sha256(corpus / TOKENIZER)},
            paths={"text": table.lm.text, "tokenizer": str(corpus / TOKENIZER)},
        )
    if way.tune:
        inputs["decoding"] = Stage(
            "tune",
            f"tuned-{way.beam_size}",
            {"beam_size": way.beam_size, "valid": sha256(corpus / MANIFEST)},
            dict(inputs),
            {"corpus": str(corpus)},
        )
    if way.teacher and teacher is not None:
        inputs["teacher"] = teacher
    source, references = table.test.source, list(table.test.references)
    content = {"source": sha256(Path(source)), "references": [sha256(Path(of)) for of in references]}
    test = {"source": source, "references": references}
    return Stage("score", f"scored-{way.beam_size}", {"beam_size": way.beam_size, **content}, inputs, test)


def stages(table: Table, recipes: Mapping[str, Recipe]) -> dict[tuple[str, str, int], Stage]:
    """What is to be scored: of each row, in each way, from each seed."""
    return {
        (row.name, name, seed): scoring(table, way, recipes[row.name], seed)
        for row in table.rows
        for name, way in table.ways_of(row, recipes[row.name])
        for seed in seeds(table, row)
    }


def seeds(table: Table, row: Row) -> list[int]:
    return row.seeds or table.seeds


# What a process of its own does for each kind, in the stage's directory.


def run(stage: Stage, root: Path) -> None:
    """Do the work of a stage whose inputs are done; called again after a stop, it goes on."""
    directory = stage.directory(root)
    directory.mkdir(parents=True, exist_ok=True)
    given = {name: of.directory(root) for name, of in stage.inputs.items()}
    began = time.perf_counter()
    with locked(directory / "stage.lock", directory):
        RUN[stage.kind](stage, directory, given)
    about = {"seconds": round(time.perf_counter() - began, 1), "nmla": __version__, "label": stage.label}
    write_text(directory / DONE, json.dumps(about, indent=2) + "\n")


def _run_train(stage: Stage, directory: Path, given: dict[str, Path]) -> None:
    from nmla.data.corpus import Corpus
    from nmla.training.loop import train_stage

    corpus = given["corpus"] / "corpus" if "corpus" in given else Path(stage.paths["corpus"])
    recipe = parse_recipe(
        json.dumps(stage.settings["recipe"]), [f"output={directory}", f"data.corpus={corpus}"], stage.label
    )
    start = given["start"] / "model" if "start" in given else None
    train_stage(recipe, recipe.train, Corpus.load(corpus), directory, start)


def _run_distill(stage: Stage, directory: Path, given: dict[str, Path]) -> None:
    from nmla.distillation.distill import distill

    distill(
        corpus=Path(stage.paths["corpus"]),
        teachers=[of / "model" for of in given.values()],
        output=directory / "corpus",
        beam_size=stage.settings["beam_size"],
        compute_type=stage.settings["compute_type"],
    )


def _run_lm(stage: Stage, directory: Path, given: dict[str, Path]) -> None:
    from nmla.decoding.lm_train import train_lm
    from nmla.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(Path(stage.paths["tokenizer"]))
    train_lm([Path(stage.paths["text"])], tokenizer, directory / "lm.lm", stage.settings["order"])


def _run_tune(stage: Stage, directory: Path, given: dict[str, Path]) -> None:
    from nmla.data.corpus import Corpus
    from nmla.decoding.translator import Translator, save_decoding
    from nmla.evaluation.score import aligned
    from nmla.evaluation.tune import lines, picture, tune

    corpus = Corpus.load(Path(stage.paths["corpus"]))
    translator = Translator.load(given["model"] / "model", given["lm"] / "lm.lm" if "lm" in given else None)
    beam_size = stage.settings["beam_size"]
    tried = tune(translator, corpus.valid_source, aligned(corpus.valid_targets), beam_size=beam_size)
    write_text(directory / "tried.tsv", "\n".join(lines(tried)) + "\n")
    write_text(directory / "tried.svg", picture(tried))
    save_decoding(next(one.decoding for one in tried if one.decoding.beam_size == beam_size), directory)


def _run_score(stage: Stage, directory: Path, given: dict[str, Path]) -> None:
    from nmla.decoding.teacher import Teacher
    from nmla.decoding.translator import Translator, load_decoding
    from nmla.evaluation.measure import check_parallel, measure
    from nmla.evaluation.score import mean_entropy
    from nmla.text.lines import read_lines

    translator = Translator.load(given["model"] / "model", given["lm"] / "lm.lm" if "lm" in given else None)
    if "decoding" in given:
        translator.decoding = load_decoding(given["decoding"])
    if "teacher" in given:
        translator.teacher = Teacher(given["teacher"] / "model")
    references = [read_lines(Path(path)) for path in stage.paths["references"]]
    began = time.perf_counter()
    translations = translator.translate_batch(
        read_lines(Path(stage.paths["source"])), beam_size=stage.settings["beam_size"], return_scores=True
    )
    seconds = time.perf_counter() - began
    outputs = [translation.text for translation in translations]
    check_parallel(outputs, [*zip(stage.paths["references"], references, strict=True)])
    result = {
        "measured": [asdict(one) for one in measure(outputs, references)],
        "entropy": mean_entropy(translations),
        "decoding": asdict(translator.decoding),
        "seconds": round(seconds, 2),
    }
    write_text(directory / "outputs.txt", "".join(f"{line}\n" for line in outputs))
    write_text(directory / "scores.json", json.dumps(result, indent=2) + "\n")


RUN = {"train": _run_train, "distill": _run_distill, "lm": _run_lm, "tune": _run_tune, "score": _run_score}


def as_json(stage: Stage) -> dict[str, Any]:
    own = {"kind": stage.kind, "label": stage.label, "settings": stage.settings, "paths": stage.paths}
    return {**own, "inputs": {name: as_json(of) for name, of in stage.inputs.items()}}


def from_json(given: dict[str, Any]) -> Stage:
    return Stage(**{**given, "inputs": {name: from_json(of) for name, of in given["inputs"].items()}})


def main() -> int:
    """Run the stage that standard input describes, below the directory that the first argument names."""
    try:
        run(from_json(json.load(sys.stdin)), Path(sys.argv[1]))
    except Stopped as error:
        return error.exit_code
    except NmlaError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
