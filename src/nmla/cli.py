"""The command line: one table, command to function. Nothing heavy is imported until a command runs."""

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from nmla import __version__
from nmla.errors import NmlaError, Stopped, UsageError

if TYPE_CHECKING:
    from nmla.decoding.ngram_lm import NgramLM
    from nmla.text.tokenizer import Tokenizer

WRONG_PATH = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError)


def run_demo(args: argparse.Namespace) -> None:
    from nmla.demo import demo, study

    run, default = (study, "runs/study") if args.study else (demo, "runs/demo")
    run(args.output or Path(default), args.overrides)


def run_prepare(args: argparse.Namespace) -> None:
    from nmla.data.prepare import prepare

    if args.tokenizer is not None and args.vocab_size is not None:
        raise UsageError("--vocab-size must not be given with --tokenizer, which has a vocabulary already")
    counts = prepare(
        train=args.train,
        valid=args.valid,
        output=args.output,
        vocab_size=32000 if args.vocab_size is None else args.vocab_size,
        tokenizer=args.tokenizer,
        pretokenised=args.pretokenised,
        group=args.group,
        max_tokens=args.max_tokens,
        max_ratio=args.max_ratio,
        upsample=args.upsample,
        bad=args.bad,
        processes=args.processes,
    )
    for name, count in counts.items():
        if count or "_dropped_" not in name:
            print(f"{name}\t{count}")


def run_distill(args: argparse.Namespace) -> None:
    from nmla.decoding.teacher import Format
    from nmla.distillation.distill import distill

    counts = distill(
        corpus=args.corpus,
        teachers=args.teacher,
        output=args.output,
        beam_size=args.beam_size,
        compute_type=args.compute_type,
        form=Format(args.source_prefix, args.source_suffix, args.target_prefix),
        threads=args.threads,
    )
    for name, count in counts.items():
        print(f"{name}\t{count}")


def run_train(args: argparse.Namespace) -> None:
    from nmla.config import load_recipe

    recipe = load_recipe(args.recipe, args.overrides)  # before the slow imports: a mistyped setting is told at once
    from nmla.distillation.recipe import train_with_teachers
    from nmla.training.machine import start_fabric

    fabric = start_fabric(recipe.machine)
    try:
        model = train_with_teachers(recipe, fabric)
        if fabric.is_global_zero:
            print(model)
    except NmlaError as error:
        # What one process found and all were told, or all were asked for, one of them tells.
        if fabric.is_global_zero or not (isinstance(error, Stopped) or getattr(error, "told", False)):
            raise


def run_translate(args: argparse.Namespace) -> None:
    from nmla.decoding.pipe import translate_files
    from nmla.decoding.translator import Translator

    translator = Translator.load(args.model, args.lm, args.teacher)
    translate_files(translator, args.files, args.output, args.format, **_decoding(args))


def _decoding(args: argparse.Namespace) -> dict[str, Any]:
    """The settings of decoding that were given; the others are the model's."""
    return {name: value for name, value in vars(args).items() if name in DECODING and value is not None}


def run_score(args: argparse.Namespace) -> None:
    from nmla.text.lines import decode_lines, read_lines, standard_input

    if (args.model is None) != (args.source is None):
        raise UsageError("--model and --source must be given together: the model translates the source")
    of_models = [*_decoding(args), *(name for name in ("lm", "teacher") if getattr(args, name) is not None)]
    if args.model is None and of_models:
        raise UsageError(f"--{of_models[0].replace('_', '-')} is for what a model does, but there is no --model")
    if args.meteor_jar is not None and args.meteor is None:
        raise UsageError("--meteor-jar must come with --meteor LANGUAGE, but does not")
    references = [read_lines(path) for path in args.reference]
    baseline = read_lines(args.baseline) if args.baseline else None
    entropy = None
    if args.model is not None:
        from nmla.decoding.translator import Translator
        from nmla.evaluation.score import mean_entropy

        translator = Translator.load(args.model, args.lm, args.teacher)
        translations = translator.translate_batch(read_lines(args.source), **_decoding(args), return_scores=True)
        hypotheses = [translation.text for translation in translations]
        entropy = mean_entropy(translations)
    else:
        hypotheses = list(decode_lines(standard_input(), "stdin"))

    from nmla.evaluation.measure import SAMPLES, Measured, check_parallel, measure, table

    others = [*zip(map(str, args.reference), references, strict=True)]
    check_parallel(hypotheses, [*others, *([(str(args.baseline), baseline)] if baseline is not None else [])])
    samples = SAMPLES if args.intervals or baseline is not None else 0
    measured = measure(hypotheses, references, baseline=baseline, samples=samples, tokenised=args.tokenised)
    if args.meteor is not None:
        from nmla.evaluation.meteor import meteor

        measured.append(meteor(hypotheses, references, args.meteor, args.meteor_jar))
    if entropy is not None:
        measured.append(Measured("entropy", entropy, "nats per output position"))
    print(table(measured, args.format))


def run_analyse(args: argparse.Namespace) -> None:
    from nmla.evaluation.analysis import analyse_files
    from nmla.evaluation.analysis_table import render

    analysis = analyse_files(
        args.system,
        args.reference,
        source=args.source,
        lm=args.lm,
        tokenizer=_tokenizer(args.tokenizer) if args.tokenizer else None,
        bounds=args.buckets,
        quantiles=args.quantiles,
        examples=args.examples,
    )
    print(render(analysis, args.format))


def run_tune(args: argparse.Namespace) -> None:
    from nmla.evaluation.tune import lines, tune_model

    tried = tune_model(args.model, args.source, args.reference, args.lm, args.beam_size, args.picture)
    print("\n".join(lines(tried)))
    print(f"nmla tune: {args.model} decodes with the first of these from now on", file=sys.stderr)


def run_report(args: argparse.Namespace) -> None:
    from nmla.decoding.translator import Translator
    from nmla.evaluation.analysis import System
    from nmla.evaluation.document import to_html, to_markdown
    from nmla.evaluation.measure import check_parallel
    from nmla.evaluation.runs import find_runs, report
    from nmla.files import check_output, write_text
    from nmla.text.lines import read_lines

    if (args.source is None) != (not args.reference):
        raise UsageError("--source and --reference must be given together: they are the test set")
    if args.output.suffix not in (".html", ".md"):
        raise UsageError(f"{args.output}: must end in .html or .md, but does not")
    check_output(args.output)
    runs = find_runs(args.runs)
    test: dict[str, Any] = {}
    if args.source is not None:
        sources, *references = (read_lines(path) for path in (args.source, *args.reference))
        check_parallel(sources, [*zip(map(str, args.reference), references, strict=True)])
        test = {"sources": sources, "references": references, "examples": args.examples}
        test["systems"] = [System.of_model(run.name, Translator.load(run.directory / "model"), sources) for run in runs]
        files = f"--source {args.source} " + " ".join(f"--reference {path}" for path in args.reference)
        test["commands"] = [f"nmla score --model {run.directory / 'model'} {files}" for run in runs]
    sections = report(runs, **test)
    write_text(args.output, (to_html if args.output.suffix == ".html" else to_markdown)(args.title, sections))
    print(args.output)


def run_reproduce(args: argparse.Namespace) -> None:
    from nmla.reproduce.run import reproduce

    print(reproduce(args.table, args.jobs), end="")


def run_average(args: argparse.Namespace) -> None:
    from nmla.errors import DataError
    from nmla.files import new_directory
    from nmla.models.pretrained import CONFIG, load_model, save_model
    from nmla.training.checkpoint import average

    if args.output.exists():
        raise UsageError(f"{args.output}: must not exist yet, but does; choose another output, or remove it")
    for path in args.weights:
        if not path.is_dir():
            raise UsageError(f"{path}: must be the directory of a model or a checkpoint, but is none")
    models = [path for path in (args.model, *args.weights) if path and (path / CONFIG).exists()]
    if not models:
        raise UsageError("--model must tell which model the checkpoints belong to, but is not given")
    loaded = [load_model(path) for path in models]
    model, tokenizer = loaded[0]
    for path, (other, other_tokenizer) in zip(models, loaded, strict=True):
        if (other.config, other_tokenizer.model) != (model.config, tokenizer.model):
            raise DataError(f"{path}: must be a model of the same kind and vocabulary as {models[0]}, but is not")
    try:
        model.load_state_dict(average(args.weights))
    except RuntimeError:
        raise DataError(f"{args.weights[0]}: must fit the model {models[0]}, but does not") from None
    about = {"average of": ", ".join(map(str, args.weights))}
    with new_directory(args.output) as directory:
        save_model(model, tokenizer, directory, about)
    print(args.output)


def run_lm_train(args: argparse.Namespace) -> None:
    from nmla.decoding.lm_train import train_lm

    _tell_lm(train_lm(args.text, _tokenizer(args.tokenizer), args.output, args.order))


def run_lm_convert(args: argparse.Namespace) -> None:
    from nmla.decoding.arpa import convert_lm

    _tell_lm(convert_lm(args.input, args.output, _tokenizer(args.tokenizer)))


def run_bench_speed(args: argparse.Namespace) -> None:
    from nmla.errors import DataError
    from nmla.evaluation.speed import check_settings, choose_sentences, load_systems, measure_speed
    from nmla.evaluation.speed_report import picture, table
    from nmla.files import write_text
    from nmla.text.lines import read_lines

    directories = _systems(args.system)
    check_settings(args.batch_sizes, args.threads, args.turns, args.sentences)
    if args.picture is not None and args.picture.is_dir():
        raise UsageError(f"{args.picture}: must be a file to write, but is a directory")
    lines = read_lines(args.source)
    if not lines:  # told before the models are loaded
        raise DataError(f"{args.source}: must hold at least one line, but is empty")
    search = {name: getattr(args, name) for name in ("lm", "beam_size", "alpha", "beta")}
    systems = load_systems(directories, threads=args.threads, compute_types=args.compute_types, **search)
    speed = measure_speed(
        systems,
        choose_sentences(lines, args.sentences, systems, str(args.source)),
        batch_sizes=args.batch_sizes,
        threads=args.threads,
        turns=args.turns,
        baseline=args.baseline,
    )
    print(table(speed, args.format))
    if args.format == "tsv":  # which has no place for it
        print("; ".join(f"{name}: {value}" for name, value in speed.machine.items()), file=sys.stderr)
    if args.picture is not None:
        write_text(args.picture, picture(speed))


def _systems(given: list[str]) -> dict[str, Path]:
    """NAME=DIR, any number of them."""
    systems: dict[str, Path] = {}
    for one in given:
        name, _, directory = one.partition("=")
        if not (name.strip() and name.isprintable() and directory):
            raise UsageError(f"--system must be NAME=DIR, but is {one!r}")
        if name in systems:
            raise UsageError(f"systems must have names of their own, but two are called {name!r}")
        systems[name] = Path(directory)
    return systems


def _tokenizer(path: Path) -> "Tokenizer":
    from nmla.data.corpus import TOKENIZER
    from nmla.text.tokenizer import Tokenizer

    return Tokenizer.load(path / TOKENIZER if path.is_dir() else path)


def _tell_lm(lm: "NgramLM") -> None:
    for order, size in enumerate(lm.sizes, start=1):
        print(f"{order}-grams\t{size}")


@dataclass(frozen=True)
class Command:
    help: str
    example: str  # a test runs it
    run: Callable[[argparse.Namespace], None]
    options: dict[str, dict[str, Any]]


FILES = {"nargs": "+", "action": "append", "type": Path, "required": True, "metavar": "FILE"}
OVERRIDES = {"nargs": "*", "metavar": "key=value", "help": "settings to change, such as train.steps=500"}
TOKENS: dict[str, Any] = {"nargs": "*", "default": (), "metavar": "TOKEN"}
DECODING_OPTIONS: dict[str, dict[str, Any]] = {
    "--beam-size": {
        "type": int,
        "help": "translations that a search weighs, or lengths that a fixed-length model tries (default: 1)",
    },
    "--teacher": {"type": Path, "help": "an autoregressive model that chooses among these (default: the model itself)"},
    "--num-hypotheses": {"type": int, "help": "translations that are told, in jsonl (default: 1)"},
    "--lm": {"type": Path, "help": "a language model for a CTC model's search (default: the model's own, if any)"},
    "--alpha": {"type": float, "help": "its weight (default: 0)"},
    "--beta": {"type": float, "help": "weight of the logarithm of the length in that search (default: 0)"},
    "--blank-penalty": {"type": float, "help": "above 0, a CTC model's outputs get longer (default: 0)"},
}
DECODING = ("beam_size", "num_hypotheses", "alpha", "beta", "blank_penalty", "fast")  # those that go to the translator
LM_OPTIONS: dict[str, dict[str, Any]] = {
    "--tokenizer": {"type": Path, "required": True, "help": "a corpus, model or tokenizer.model: whose vocabulary"},
}
LM_OUTPUT = {"type": Path, "help": "what to write: ARPA if it ends in .arpa or .arpa.gz, compact if in .lm"}
NUMBERS: dict[str, Any] = {"nargs": "+", "type": int, "metavar": "N"}
GROUPS = {  # of commands of two words
    "lm": "make a language model, or change its form",
    "bench": "measure models beside each other",
}

COMMANDS = {
    "demo": Command(
        "see in minutes what NMLA does, on a generated language",
        "nmla demo train.steps=30 finetune.steps=20 --output runs/quick",
        run_demo,
        {
            "overrides": OVERRIDES,
            "--output": {"type": Path, "help": "where to write (default: runs/demo, or runs/study)"},
            "--study": {"action": "store_true", "help": "the two languages where NMLA does not win, instead"},
        },
    ),
    "prepare": Command(
        "make a corpus from parallel text; called again after a stop, it goes on",
        "nmla prepare --train train.en train.de --valid valid.en valid.de --vocab-size 300 --output corpora/mine",
        run_prepare,
        {
            "--train": {
                **FILES,
                "help": "source and target, one sentence a line, aligned by line number; or one .tsv file (source TAB "
                "target [TAB more targets]) or .jsonl file (source and target, or targets, by these names). All may "
                "also end in .gz, .xz or .zst. Give it again for more files",
            },
            "--valid": {**FILES, "help": "the same for validation; kept as text"},
            "--output": {"type": Path, "required": True, "help": "the corpus directory to make"},
            "--vocab-size": {"type": int, "help": "size of the joint vocabulary to learn (default: 32000)"},
            "--tokenizer": {
                "type": Path,
                "help": "a tokenizer.model, corpus or model whose vocabulary is used instead",
            },
            "--pretokenised": {
                "action": "store_true",
                "help": "the text is split by spaces already, with @@ where a word goes on; each unit becomes a token",
            },
            "--group": {
                "action": "store_true",
                "help": "lines with the same source, wherever they stand, become one with several references",
            },
            "--max-tokens": {"type": int, "default": 1024, "help": "longest side of a training pair (default: 1024)"},
            "--max-ratio": {"type": float, "help": "longest side in terms of the other, in tokens (default: any)"},
            "--upsample": {
                "type": int,
                "help": "drop targets that a model of this upsample has too few positions for (default: keep them)",
            },
            "--bad": {
                "choices": ("drop", "refuse"),
                "default": "drop",
                "help": "what to do with unusable pairs: drop and list them (default), or stop at the first",
            },
            "--processes": {"type": int, "help": "how many encode at once (default: one a core)"},
        },
    ),
    "train": Command(
        "train a model as a recipe says; called again, it goes on where it stopped",
        "nmla train recipe.yaml train.steps=20 output=runs/mine",
        run_train,
        {"recipe": {"type": Path, "help": "a YAML file"}, "overrides": OVERRIDES},
    ),
    "distill": Command(
        "make a corpus whose targets are a teacher's translations; called again, it goes on, or joins in",
        "nmla distill --teacher runs/teacher/train/model --corpus corpora/mine --output corpora/distilled",
        run_distill,
        {
            "--teacher": {
                "type": Path,
                "required": True,
                "action": "append",
                "help": "an autoregressive model of ours, or a CTranslate2 model with its sentencepiece models beside "
                "it; give it again for several references",
            },
            "--corpus": {"type": Path, "required": True, "help": "whose sources are translated"},
            "--output": {"type": Path, "required": True, "help": "the corpus directory to make"},
            "--beam-size": {"type": int, "default": 5, "help": "how many translations are weighed (default: 5)"},
            "--compute-type": {
                "choices": ("float32", "int8"),
                "default": "float32",
                "help": "int8 is faster and a little less exact (default: float32)",
            },
            "--threads": {"type": int, "help": "how many batches are translated at once (default: one a core)"},
            "--source-prefix": {**TOKENS, "help": "tokens that a CTranslate2 model wants before a source"},
            "--source-suffix": {**TOKENS, "default": None, "help": "and after it (default: its end of sentence)"},
            "--target-prefix": {**TOKENS, "help": "tokens that its translations begin with, such as a language"},
        },
    ),
    "average": Command(
        "average the weights of several models or checkpoints of one training",
        "nmla average runs/mine/train/checkpoints/* --model runs/mine/train/model --output runs/mine/average",
        run_average,
        {
            "weights": {"nargs": "+", "type": Path, "metavar": "DIR", "help": "model or checkpoint directories"},
            "--model": {"type": Path, "help": "the model that the checkpoints belong to (default: the first DIR)"},
            "--output": {"type": Path, "required": True, "help": "the model directory to make"},
        },
    ),
    "translate": Command(
        "translate files, or standard input, line by line",
        "nmla translate --model runs/mine/train/model < valid.en > output.de",
        run_translate,
        {
            "--model": {"type": Path, "required": True, "help": "a model directory"},
            "files": {"nargs": "*", "type": Path, "metavar": "FILE", "help": "what to translate (default: stdin)"},
            "--output": {"type": Path, "help": "where to write (default: stdout)"},
            "--format": {
                "choices": ("text", "tsv", "jsonl"),
                "default": "text",
                "help": "text: translations alone; tsv: source and translation, a TAB within either made a space; "
                "jsonl: also scores, tokens with confidence and source, alternatives (default: text)",
            },
            **DECODING_OPTIONS,
            "--fast": {
                "action": "store_true",
                "default": None,
                "help": "larger batches; a translation's last bits may then depend on the others",
            },
        },
    ),
    "tune": Command(
        "find the decoding of a CTC model that scores best on a validation set, and keep it with the model",
        "nmla tune --model runs/mine/finetune/model --source valid.en --reference valid.de --picture tuned.svg",
        run_tune,
        {
            "--model": {"type": Path, "required": True, "help": "a model directory; it gets decoding.json"},
            "--source": {"type": Path, "required": True, "help": "the validation set, one sentence a line"},
            "--reference": {
                "type": Path,
                "required": True,
                "action": "append",
                "help": "its translations; give it again for more references",
            },
            "--beam-size": {"type": int, "default": 1, "help": "also tune a search of this size (default: 1, none)"},
            "--lm": {"type": Path, "help": "a language model for the search; it is copied to the model if it helps"},
            "--picture": {"type": Path, "help": "an SVG of all that was tried"},
        },
    ),
    "score": Command(
        "score translations on standard input, or a model's of a source file",
        "nmla score --reference valid.de < output.de",
        run_score,
        {
            "--reference": {
                "type": Path,
                "required": True,
                "action": "append",
                "help": "one sentence a line; give it again for more references",
            },
            "--model": {"type": Path, "help": "translate --source with this model, and tell its entropy too"},
            "--source": {"type": Path, "help": "what --model translates"},
            "--baseline": {
                "type": Path,
                "help": "another system's outputs, to test differences (paired bootstrap)",
            },
            "--intervals": {"action": "store_true", "help": "tell 95 %% confidence intervals (bootstrap)"},
            "--tokenised": {
                "action": "store_true",
                "help": "outputs and references are split into tokens already, and BLEU counts these: only to compare "
                "with papers that did so on the same tokens",
            },
            "--meteor": {"metavar": "LANGUAGE", "help": "also METEOR 1.5, such as de; needs java and nmla[meteor]"},
            "--meteor-jar": {"type": Path, "help": "METEOR's program (default: the one of nmla[meteor])"},
            "--format": {"choices": ("tsv", "json"), "default": "tsv", "help": "json: all digits (default: tsv)"},
            **{name: option for name, option in DECODING_OPTIONS.items() if name != "--num-hypotheses"},
        },
    ),
    "analyse": Command(
        "tell what sets systems apart: scores by length, fluency, word order, the sentences that differ most",
        "nmla analyse --source valid.en --reference valid.de --system ctc=runs/mine/train/model "
        "--system nmla=runs/mine/finetune/model --system file=output.de --lm lm.lm",
        run_analyse,
        {
            "--system": {
                "required": True,
                "action": "append",
                "metavar": "NAME=PATH",
                "help": "a file of outputs, one a line, or a model directory; give it again for more systems, "
                "which are compared with the first",
            },
            "--reference": {
                "type": Path,
                "required": True,
                "action": "append",
                "help": "one sentence a line; give it again for more references: lengths and order are the first's",
            },
            "--source": {"type": Path, "help": "what models translate, and what is shown in examples"},
            "--lm": {"type": Path, "help": "a language model, for the outputs' perplexity"},
            "--tokenizer": {
                "type": Path,
                "help": "a corpus, model or tokenizer.model: the vocabulary of --lm (default: the first model's)",
            },
            "--buckets": {
                "type": int,
                "nargs": "+",
                "metavar": "WORDS",
                "help": "the longest references of all buckets but the last (default: 20 40 60)",
            },
            "--quantiles": {"type": int, "help": "instead, how many buckets of about equally many sentences"},
            "--examples": {
                "type": int,
                "default": 5,
                "help": "sentences shown that gained most, and lost (default: 5)",
            },
            "--format": {
                "choices": ("tsv", "json", "markdown"),
                "default": "tsv",
                "help": "json: all digits (default: tsv)",
            },
        },
    ),
    "report": Command(
        "write a page about trainings: tables, curves, what changed, and how to make each number anew",
        "nmla report runs/mine --source valid.en --reference valid.de --output report.html",
        run_report,
        {
            "runs": {"nargs": "+", "type": Path, "metavar": "RUN", "help": "directories that hold finished trainings"},
            "--source": {"type": Path, "help": "a test set, one sentence a line (default: tell of the training alone)"},
            "--reference": {
                "type": Path,
                "action": "append",
                "default": [],
                "help": "its translations; give it again for more references",
            },
            "--output": {"type": Path, "required": True, "help": "what to write: a page if it ends in .html, or .md"},
            "--title": {"default": "Trainings", "help": "what it is called"},
            "--examples": {
                "type": int,
                "default": 5,
                "help": "sentences shown that gained most, and lost (default: 5)",
            },
        },
    ),
    "reproduce": Command(
        "make a whole table of results, or what is missing of it; called again after a stop, it goes on",
        "nmla reproduce table.yaml --jobs 2",
        run_reproduce,
        {
            "table": {"type": Path, "help": "a YAML file: rows, each a recipe, and the test set"},
            "--jobs": {"type": int, "default": 1, "help": "stages that run at once, sharing the cores (default: 1)"},
        },
    ),
    "lm train": Command(
        "estimate an n-gram language model from text (interpolated modified Kneser-Ney)",
        "nmla lm train --tokenizer corpora/mine --text train.de --output lm.arpa.gz",
        run_lm_train,
        {
            **LM_OPTIONS,
            "--text": {
                "type": Path,
                "required": True,
                "action": "append",
                "help": "one sentence a line; may end in .gz, .xz or .zst. Give it again for more files",
            },
            "--output": {**LM_OUTPUT, "required": True},
            "--order": {"type": int, "default": 4, "help": "the longest n-grams (default: 4)"},
        },
    ),
    "lm convert": Command(
        "write a language model in the other form",
        "nmla lm convert lm.arpa.gz lm.lm --tokenizer corpora/mine",
        run_lm_convert,
        {
            "input": {"type": Path, "help": "a language model, of any program's if it is ARPA"},
            "output": LM_OUTPUT,
            **LM_OPTIONS,
        },
    ),
    "bench speed": Command(
        "measure how fast models translate, in one run in which they take turns",
        "nmla bench speed --source valid.en --system ctc=runs/mine/train/model --system ar=runs/teacher/train/model "
        "--sentences 9 --batch-sizes 1 3 --threads 1 --turns 2 --picture speed.svg",
        run_bench_speed,
        {
            "--source": {"type": Path, "required": True, "help": "what to translate, one sentence a line"},
            "--system": {
                "action": "append",
                "required": True,
                "metavar": "NAME=DIR",
                "help": "a model of any family, or a CTranslate2 model with its sentencepiece models beside it, and "
                "what it is called; give it again for more. Each is measured in all the ways it can be decoded",
            },
            "--baseline": {
                "metavar": "NAME",
                "help": "what all are compared with, as the table calls it (default: the first autoregressive model "
                "with beam 5 in float32, or else the first system)",
            },
            "--batch-sizes": {**NUMBERS, "default": (1, 8, 32, 100, 400), "help": "(default: 1 8 32 100 400)"},
            "--threads": {**NUMBERS, "default": (1, 2), "help": "how many work on a batch (default: 1 2)"},
            "--turns": {"type": int, "default": 5, "help": "how often each is measured (default: 5)"},
            "--sentences": {"type": int, "default": 400, "help": "how many, from all of the source (default: 400)"},
            "--compute-types": {
                "nargs": "+",
                "choices": ("float32", "int8"),
                "default": ("float32", "int8"),
                "help": "of autoregressive models (default: both)",
            },
            "--lm": {
                "type": Path,
                "help": "a language model for the search of CTC models (default: their own, if any)",
            },
            "--beam-size": {
                "type": int,
                "help": "also measure the others with a search of this size (default: their own, if any)",
            },
            "--alpha": DECODING_OPTIONS["--alpha"] | {"help": "its weight (default: the tuned one, or 0.3)"},
            "--beta": DECODING_OPTIONS["--beta"] | {"help": "weight of the length in it (default: the tuned one)"},
            "--format": {
                "choices": ("markdown", "json", "tsv"),
                "default": "markdown",
                "help": "json: all digits of all turns (default: markdown)",
            },
            "--picture": {"type": Path, "help": "an SVG of the speed-up by batch size"},
        },
    ),
}


class OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(UsageError.exit_code, f"{self.prog}: {message}; see {self.prog} --help\n")


def parser() -> argparse.ArgumentParser:
    top = OneLineParser(
        prog="nmla", description="Machine translation in one forward pass.", epilog="example: nmla demo"
    )
    top.add_argument("--version", action="version", version=f"nmla {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    groups = {"": commands}
    for name, command in COMMANDS.items():
        group, _, word = name.rpartition(" ")
        if group not in groups:
            about = GROUPS[group]
            of_group = commands.add_parser(group, help=about, description=about[0].upper() + about[1:] + ".")
            groups[group] = of_group.add_subparsers(dest="command", required=True, metavar="COMMAND")
        sub = groups[group].add_parser(
            word,
            help=command.help,
            description=command.help[0].upper() + command.help[1:] + ".",
            epilog=f"example:\n  {command.example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        for option, details in command.options.items():
            sub.add_argument(option, **details)
        sub.set_defaults(command=name)
    return top


def main(argv: list[str] | None = None) -> int:
    """Run one command; a mistake of the user's becomes one line on stderr and an exit code."""
    args = parser().parse_args(argv)
    try:
        COMMANDS[args.command].run(args)
        if sys.stdout is not None:
            sys.stdout.flush()
    except NmlaError as error:
        print(f"nmla {args.command}: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"nmla {args.command}: {where}{error.strerror or error}", file=sys.stderr)
        return UsageError.exit_code if isinstance(error, WRONG_PATH) else 1
    except KeyboardInterrupt:
        print(f"nmla {args.command}: stopped", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
