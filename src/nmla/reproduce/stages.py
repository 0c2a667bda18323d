"""The stages of a table: what each row needs, each known by the hash of all that it depends on, so that rows share them
and nothing is done twice."""

import fcntl
import hashlib
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache, cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

from nmla import __version__
from nmla.config import Decoding, ModelConfig, Recipe, TrainConfig, parse_recipe
from nmla.data.corpus import TOKENIZER, content_hash
from nmla.errors import DataError, NmlaError
from nmla.files import remove_leftovers, sha256, write_text
from nmla.reproduce.table import LanguageModelConfig, Table, Way
from nmla.text.lines import require_file

DONE = "done.json"  # in the directory of a stage that is finished
OUTPUTS = "outputs.txt"  # of one that scored: what the model wrote
TRANSLATIONS = "translations.jsonl"  # and what it thought of that
METEOR = "meteor.json"  # of one that judged it
# Raised when what a kind of stage makes of the same settings changes, a default among them, so that nothing made before
# is taken for it.
VERSIONS = {"train": 1, "distill": 1, "lm": 1, "tune": 3, "score": 3, "meteor": 2}
FREE = ("keep_best", "keep_last")  # settings of a training that change what is kept; for an average, the last counts


@dataclass(frozen=True)
class Stage:
    """A piece of work with one directory. Where things are found, `paths`, does not change its key, only what they hold
    does, which `settings` tell."""

    kind: str  # one of RUN
    label: str  # for people
    settings: Mapping[str, Any]
    inputs: Mapping[str, "Stage"] = field(default_factory=dict)
    paths: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def key(self) -> str:
        whole = [
            self.kind,
            VERSIONS[self.kind],
            self.settings,
            {name: stage.key for name, stage in self.inputs.items()},
        ]
        return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:12]

    def directory(self, root: Path) -> Path:
        return root / f"{self.label}-{self.key}"

    def done(self, root: Path) -> bool:
        return (self.directory(root) / DONE).exists()

    def needed(self, root: Path) -> Iterator["Stage"]:
        """All that must be done before it, and itself: what it was made of may be gone once it is done."""
        if not self.done(root):
            for stage in self.inputs.values():
                yield from stage.needed(root)
        yield self


def training(recipe: Recipe, seed: int) -> tuple[Stage, Stage | None]:
    """The stage that gives a recipe's model, with all before it, and its first teacher if it has one."""
    corpus: dict[str, Any] = {"paths": {"corpus": recipe.data.corpus}}
    content = {"corpus": content_hash(Path(recipe.data.corpus))}
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


def file_hash(path: str) -> str:
    require_file(Path(path))
    found = Path(path).stat()
    return _file_hash(path, found.st_mtime_ns, found.st_size)


@cache
def _file_hash(path: str, modified: int, size: int) -> str:
    return sha256(Path(path))


def _train(
    recipe: Recipe, model: ModelConfig, stage: TrainConfig, seed: int, content: dict[str, str], corpus: dict[str, Any]
) -> Stage:
    machine = recipe.machine
    # One process for each stage: it takes the batches of all devices one after the other.
    stage = replace(stage, accumulate=stage.accumulate * machine.devices * machine.nodes)
    free = FREE if stage.final != "average" else FREE[:1]
    settings = {
        "model": _changed(model),
        "train": {name: value for name, value in _changed(stage).items() if name not in free},
        "seed": seed,
        "precision": machine.precision,
        **content,
    }
    own = {"model": asdict(model), "train": asdict(stage), "seed": seed}
    own["machine"] = asdict(replace(machine, devices=1, nodes=1))
    order = f"{stage.ngram}" if stage.loss in ("ngram", "bag") else ""
    paths = {**corpus.get("paths", {}), "recipe": own}
    return Stage("train", f"{model.family}-{stage.loss}{order}", settings, corpus.get("inputs", {}), paths)


def _changed(settings: Any) -> dict[str, Any]:
    """What differs from the defaults: a setting that is new, and left alone, changes no key."""
    return {
        of.name: getattr(settings, of.name)
        for of in fields(settings)
        if getattr(settings, of.name) != (of.default_factory() if callable(of.default_factory) else of.default)
    }


def scoring(table: Table, way: Way, recipe: Recipe, seed: int) -> Stage:
    """The stage that scores a recipe's model on the test set, decoded in one way."""
    model, teacher = training(recipe, seed)
    inputs = {"model": model}
    corpus = Path(recipe.data.corpus)
    if way.lm and table.lm is not None:
        inputs["lm"] = language_model(table.lm, corpus)
    if way.tune:
        inputs["decoding"] = Stage(
            "tune",
            f"tuned-{way.beam_size}",
            {"beam_size": way.beam_size, "corpus": content_hash(corpus)},
            dict(inputs),
            {"corpus": str(corpus)},
        )
    if way.teacher and teacher is not None:
        inputs["teacher"] = teacher
    source, references = table.test.source, list(table.test.references)
    content = {"source": file_hash(source), "references": [file_hash(of) for of in references]}
    content["sacrebleu"] = version("sacrebleu")
    test = {"source": source, "references": references}
    return Stage("score", f"scored-{way.beam_size}", {"beam_size": way.beam_size, **content}, inputs, test)


def language_model(config: LanguageModelConfig, corpus: Path) -> Stage:
    """The stage that makes a table's language model, over the tokens of a corpus."""
    paths = {"text": config.text, "tokenizer": str(corpus / TOKENIZER)}
    content = {name: file_hash(path) for name, path in paths.items()}
    return Stage("lm", f"lm-{config.order}", {"order": config.order, **content}, paths=paths)


def judging(table: Table, scored: Stage) -> Stage:
    """The stage that measures METEOR of what another scored."""
    references = list(table.test.references)
    content = {"language": table.meteor, "references": [file_hash(of) for of in references]}
    return Stage("meteor", f"meteor-{table.meteor}", content, {"scored": scored}, {"references": references})


def stages(table: Table, recipes: Mapping[str, Recipe]) -> dict[tuple[str, str, int], Stage]:
    """What is to be scored: of each row, in each way, from each seed."""
    return {
        (row.name, name, seed): scoring(table, way, recipes[row.name], seed)
        for row in table.rows
        for name, way in table.ways_of(row, recipes[row.name])
        for seed in table.seeds_of(row)
    }


# What a process of its own does for each kind, in the stage's directory.


def run(stage: Stage, root: Path) -> None:
    """Do the work of a stage whose inputs are done; called again after a stop, it goes on.

    Another process that does the same is waited for.
    """
    directory = stage.directory(root)
    directory.mkdir(parents=True, exist_ok=True)
    given = {name: of.directory(root) for name, of in stage.inputs.items()}
    with (directory / "stage.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if stage.done(root):
            return
        remove_leftovers(directory)
        began = time.perf_counter()
        RUN[stage.kind](stage, directory, given)
        about = {"seconds": round(time.perf_counter() - began, 1), "nmla": __version__, "label": stage.label}
        write_text(directory / DONE, json.dumps(about, indent=2) + "\n")
    tidy(stage, root)


def tidy(stage: Stage, root: Path) -> None:
    """Remove the checkpoints of a training that is done: nobody goes on from them."""
    if stage.kind == "train" and stage.done(root):
        shutil.rmtree(stage.directory(root) / "checkpoints", ignore_errors=True)


def _unchanged(stage: Stage, name: str, *found: str) -> None:
    """Refuse an input that has changed since the table was read: it would be kept under what it was before."""
    expected, paths = ([of] if isinstance(of, str) else of for of in (stage.settings[name], stage.paths[name]))
    for path, before, now in zip(paths, expected, found, strict=True):
        if before != now:
            raise DataError(f"{path}: must stay as it was when the table was begun, but has changed; begin again")


def check_test_set(scored: Stage) -> None:
    _unchanged(scored, "source", file_hash(scored.paths["source"]))
    _unchanged(scored, "references", *map(file_hash, scored.paths["references"]))


def _run_train(stage: Stage, directory: Path, given: dict[str, Path]) -> None:
    from nmla.data.corpus import Corpus
    from nmla.training.loop import train_stage

    recipe = recipe_of(stage, directory, directory.parent)
    corpus = Path(recipe.data.corpus)
    if "corpus" not in given:
        _unchanged(stage, "corpus", content_hash(corpus))
    start = given["start"] / "model" if "start" in given else None
    train_stage(recipe, recipe.train, Corpus.load(corpus), directory, start)


def recipe_of(stage: Stage, directory: Path, root: Path) -> Recipe:
    """The recipe of a training, as it runs in its directory."""
    distilled = stage.inputs.get("corpus")
    corpus = stage.paths["corpus"] if distilled is None else distilled.directory(root) / "corpus"
    return parse_recipe(
        json.dumps(stage.paths["recipe"]), [f"output={directory}", f"data.corpus={corpus}"], stage.label
    )


def _run_distill(stage: Stage, directory: Path, given: dict[str, Path]) -> None:
    import torch

    from nmla.distillation.distill import distill

    corpus = Path(stage.paths["corpus"])
    _unchanged(stage, "corpus", content_hash(corpus))
    distill(
        corpus=corpus,
        teachers=[of / "model" for of in given.values()],
        output=directory / "corpus",
        beam_size=stage.settings["beam_size"],
        compute_type=stage.settings["compute_type"],
        threads=torch.get_num_threads(),
    )


def _run_lm(stage: Stage, directory: Path, given: dict[str, Path]) -> None:
    from nmla.decoding.lm_train import train_lm
    from nmla.text.tokenizer import Tokenizer

    for name, path in stage.paths.items():
        _unchanged(stage, name, file_hash(path))
    tokenizer = Tokenizer.load(Path(stage.paths["tokenizer"]))
    (directory / "lm.lm").unlink(missing_ok=True)  # of a run that was killed just then
    train_lm([Path(stage.paths["text"])], tokenizer, directory / "lm.lm", stage.settings["order"])


def _run_tune(stage: Stage, directory: Path, given: dict[str, Path]) -> None:
    from nmla.data.corpus import Corpus
    from nmla.decoding.translator import Translator, save_decoding
    from nmla.evaluation.score import aligned
    from nmla.evaluation.tune import lines, picture, tune

    _unchanged(stage, "corpus", content_hash(Path(stage.paths["corpus"])))
    corpus = Corpus.load(Path(stage.paths["corpus"]))
    translator = Translator.load(given["model"] / "model", given["lm"] / "lm.lm" if "lm" in given else None)
    translator.decoding = Decoding()
    if "lm" not in given:
        translator.lm = None  # one that the model was tuned with
    beam_size = stage.settings["beam_size"]
    tried = tune(translator, corpus.valid_source, aligned(corpus.valid_targets), beam_size=beam_size)
    write_text(directory / "tried.tsv", "\n".join(lines(tried)) + "\n")
    write_text(directory / "tried.svg", picture(tried))
    save_decoding(next(one.decoding for one in tried if one.decoding.beam_size == beam_size), directory)


def _run_score(stage: Stage, directory: Path, given: dict[str, Path]) -> None:
    from nmla.decoding.translator import Translator, load_decoding
    from nmla.evaluation.measure import check_parallel, measure, read_references
    from nmla.evaluation.score import mean_entropy
    from nmla.text.lines import read_lines

    check_test_set(stage)
    lm, teacher = given.get("lm"), given.get("teacher")
    translator = Translator.load(given["model"] / "model", lm and lm / "lm.lm", teacher and teacher / "model")
    # Not as the model may have been tuned since.
    translator.decoding = load_decoding(given["decoding"]) if "decoding" in given else Decoding()
    references = read_references([*map(Path, stage.paths["references"])])
    decoding = translator.settings(beam_size=stage.settings["beam_size"])
    translator.decoding = decoding
    translations = translator.translate_batch(read_lines(Path(stage.paths["source"])), return_scores=True)
    outputs = [translation.text for translation in translations]
    check_parallel(outputs, [*zip(stage.paths["references"], references, strict=True)])
    result = {
        "measured": [asdict(one) for one in measure(outputs, references)],
        "entropy": mean_entropy(translations),
        "decoding": asdict(decoding),
    }
    # What the model thought of each sentence, without each token's part in it.
    thoughts = ({**asdict(replace(one, tokens=(), alternatives=()))} for one in translations)
    write_text(directory / OUTPUTS, "".join(f"{text}\n" for text in outputs))
    write_text(directory / TRANSLATIONS, "".join(f"{json.dumps(of)}\n" for of in thoughts))
    write_text(directory / "scores.json", json.dumps(result, indent=2) + "\n")


def _run_meteor(stage: Stage, directory: Path, given: dict[str, Path]) -> None:
    from nmla.evaluation.measure import read_references
    from nmla.evaluation.meteor import meteor
    from nmla.text.lines import read_lines

    _unchanged(stage, "references", *map(file_hash, stage.paths["references"]))
    references = read_references([*map(Path, stage.paths["references"])])
    measured = meteor(read_lines(given["scored"] / OUTPUTS), references, stage.settings["language"])
    write_text(directory / METEOR, json.dumps(asdict(measured), indent=2) + "\n")


RUN = {
    "train": _run_train,
    "distill": _run_distill,
    "lm": _run_lm,
    "tune": _run_tune,
    "score": _run_score,
    "meteor": _run_meteor,
}


def as_json(stage: Stage) -> dict[str, Any]:
    own = {"kind": stage.kind, "label": stage.label, "settings": stage.settings, "paths": stage.paths}
    return {**own, "inputs": {name: as_json(of) for name, of in stage.inputs.items()}}


def from_json(given: dict[str, Any]) -> Stage:
    return Stage(**{**given, "inputs": {name: from_json(of) for name, of in given["inputs"].items()}})


def main() -> int:
    """Run the stage that the first line of standard input describes, below the directory that the argument names.

    When standard input ends, whoever started this has ended, and so does this.
    """
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # by an exception, which cleans up
    stage = from_json(json.loads(sys.stdin.readline()))

    def end_with_the_parent() -> None:
        while os.read(0, 1 << 10):  # not sys.stdin, which would still be held when the interpreter ends
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end_with_the_parent, daemon=True).start()
    try:
        run(stage, Path(sys.argv[1]))
    except NmlaError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except SystemExit as stopped:
        os._exit(int(stopped.code or 0))  # at once: CTranslate2 would first do all that it was given
    return 0


if __name__ == "__main__":
    sys.exit(main())
