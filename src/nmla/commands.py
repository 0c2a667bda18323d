"""What each command does with its arguments. Nothing heavy is imported until one runs."""

import argparse
import glob
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nmla.errors import DataError, NmlaError, Stopped, UsageError

if TYPE_CHECKING:
    from nmla.decoding.ngram_lm import NgramLM
    from nmla.decoding.translator import Translator
    from nmla.text.tokenizer import Tokenizer

# Options that go to the translator.
DECODING = ("beam_size", "num_hypotheses", "alpha", "beta", "blank_penalty", "fast")
SPLIT_ALREADY = 100  # outputs that end in a full stop with a space before it are no accident


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

    translate_files(_translator(args), args.files, args.output, args.format, **_decoding(args))


def _translator(args: argparse.Namespace) -> "Translator":
    from nmla.decoding.translator import Translator

    translator = Translator.load(args.model, args.lm, args.teacher)
    if args.lm is not None:
        if (family := translator.model.config.family) not in ("ctc", "sctc"):
            raise UsageError(f"--lm is for the search of ctc and sctc models, but this is {family}")
        settings = translator.settings(**_decoding(args))
        if settings.beam_size == 1 or not settings.alpha:
            raise UsageError(
                "--lm must come with a search and a weight above 0, but beam_size is "
                f"{settings.beam_size} and alpha {settings.alpha:g}; give --beam-size and --alpha, or tune"
            )
    return translator


def _decoding(args: argparse.Namespace) -> dict[str, Any]:
    """The settings of decoding that were given; the others are the model's."""
    return {name: value for name, value in vars(args).items() if name in DECODING and value is not None}


def run_score(args: argparse.Namespace) -> None:
    from nmla.progress import say
    from nmla.text.lines import decode_lines, read_lines, standard_input

    if (args.model is None) != (args.source is None):
        raise UsageError("--model and --source must be given together: the model translates the source")
    of_models = [*_decoding(args), *(name for name in ("lm", "teacher") if getattr(args, name) is not None)]
    if args.model is None and of_models:
        raise UsageError(f"--{of_models[0].replace('_', '-')} is for what a model does, but there is no --model")
    if args.meteor_jar is not None and args.meteor is None:
        raise UsageError("--meteor-jar must come with --meteor LANGUAGE, but does not")
    if args.meteor is not None:
        from nmla.evaluation.meteor import find_meteor, meteor

        find_meteor(args.meteor, args.meteor_jar)

    from nmla.evaluation.measure import SAMPLES, Measured, check_parallel, measure, read_references, table
    from nmla.evaluation.systems import System, is_translation

    references = read_references(args.reference)
    compared: list[tuple[str, Sequence[str | None]]] = [*zip(map(str, args.reference), references, strict=True)]
    baseline = System.of_file("baseline", args.baseline).outputs if args.baseline else None
    if baseline is not None:
        compared.append((str(args.baseline), baseline))
    entropy = None
    if args.model is not None:
        from nmla.evaluation.score import mean_entropy

        sources = read_lines(args.source)
        check_parallel(sources, compared, f"line of {args.source}")  # before the long work
        translator = _translator(args)
        if args.tokenised and not translator.tokenizer.pretokenised:
            raise UsageError("--tokenised needs outputs that are split into tokens, but this model writes plain text")
        translations = translator.translate_batch(sources, **_decoding(args), return_scores=True)
        hypotheses = [translation.text for translation in translations]
        entropy = mean_entropy(translations)
    else:
        hypotheses = list(decode_lines(standard_input(), "stdin"))
        if hypotheses and is_translation(hypotheses[0]):
            raise DataError(
                "stdin: must be text, but is JSON; nmla analyse takes that, from a file that ends in .jsonl"
            )
        check_parallel(hypotheses, compared)
    samples = SAMPLES if args.intervals or baseline is not None else 0
    if samples and len(hypotheses) == 1:
        say("nmla score: a single sentence has no interval: drawn anew, it is always the same")
    measured = measure(hypotheses, references, baseline=baseline, samples=samples, tokenised=args.tokenised)
    if not args.tokenised and sum(line.endswith(" .") for line in hypotheses) >= SPLIT_ALREADY:
        say("nmla score: outputs seem to be split into tokens; join them, or count them as they are by --tokenised")
    if entropy is not None:
        measured.append(Measured("entropy", entropy, "nats per output position"))
    try:
        if args.meteor is not None:
            language, jar = args.meteor, args.meteor_jar
            measured.append(meteor(hypotheses, references, language, jar, baseline=baseline, samples=samples))
    finally:  # whatever becomes of it, the rest was asked for too
        print(table(measured, args.format))


def run_analyse(args: argparse.Namespace) -> None:
    from nmla.evaluation.analysis import analyse_files
    from nmla.evaluation.analysis_table import render

    analysis = analyse_files(
        _systems(args.system),
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
    from nmla.files import check_output
    from nmla.models.pretrained import DECODING
    from nmla.progress import say

    for path in (args.picture, args.model / DECODING):  # before the long work
        if path is not None:
            check_output(path)
    if args.lm is not None and args.beam_size == 1:
        raise UsageError("--lm: a language model is used by a search, so --beam-size must be above 1, but is 1")
    tried = tune_model(args.model, args.source, args.reference, args.lm, args.beam_size, args.picture)
    print("\n".join(lines(tried)))
    say(f"nmla tune: {args.model} decodes with the first of these from now on")


def run_report(args: argparse.Namespace) -> None:
    from nmla.decoding.translator import Translator
    from nmla.evaluation.analysis import EXAMPLES, analyse, check_settings, check_vocabulary
    from nmla.evaluation.document import write_document
    from nmla.evaluation.measure import check_parallel, read_references
    from nmla.evaluation.runs import Outcome, find_runs, report
    from nmla.evaluation.systems import System
    from nmla.files import check_output
    from nmla.text.lines import read_lines

    if (args.source is None) != (not args.reference):
        raise UsageError("--source and --reference must be given together: they are the test set")
    if args.output.suffix not in (".html", ".md"):
        raise UsageError(f"{args.output}: must end in .html or .md, but does not")
    if args.lm is not None and args.source is None:
        raise UsageError("--lm is for what models write, so --source and --reference must be given too, but are not")
    check_settings(examples=args.examples)
    check_output(args.output)
    if args.output.suffix == ".md" and not args.output.exists():
        for path in args.output.parent.glob(f"{glob.escape(args.output.stem)}-[0-9]*.svg"):
            raise UsageError(f"{path}: must not be there before {args.output.name}, whose pictures would replace it")
    runs = find_runs(args.runs)
    fluency: dict[str, Any] = {}
    if args.lm is not None:
        from nmla.decoding.ngram_lm import NgramLM

        tokenizer = _tokenizer(runs[0].directory / "model")
        check_vocabulary(tokenizer)  # before the long work
        fluency = {"lm": NgramLM.load(args.lm, tokenizer), "tokenizer": tokenizer}
    test, commands = None, []
    if args.source is not None:
        sources, references = read_lines(args.source), read_references(args.reference)
        check_parallel(sources, [*zip(map(str, args.reference), references, strict=True)], f"line of {args.source}")
        systems = [System.of_model(run.name, Translator.load(run.directory / "model"), sources) for run in runs]
        analysis = analyse(systems, references, sources=sources, examples=args.examples, **fluency)
        test = Outcome(sources, references, systems, analysis)
        lm = ["--lm", args.lm] if args.lm is not None else []
        files = ["--source", args.source, *(of for path in args.reference for of in ("--reference", path))]
        named = [of for run in runs for of in ("--system", f"{run.name}={run.directory / 'model'}")]
        scored = [["nmla", "score", "--model", run.directory / "model", *files] for run in runs]
        examples = ["--examples", args.examples] if args.examples != EXAMPLES else []
        commands = [shlex.join(map(str, of)) for of in (["nmla", "analyse", *files, *named, *lm, *examples], *scored)]
    write_document(args.output, args.title, report(runs, test, commands))
    print(args.output)


def run_reproduce(args: argparse.Namespace) -> None:
    from nmla.reproduce.run import reproduce

    print(reproduce(args.table, args.jobs, args.so_far, args.record), end="")


def run_average(args: argparse.Namespace) -> None:
    from nmla.config import load_recipe
    from nmla.errors import DataError
    from nmla.files import new_directory
    from nmla.models.pretrained import CONFIG, load_model, save_model
    from nmla.training.checkpoint import average

    if args.output.exists():
        raise UsageError(f"{args.output}: must not exist yet, but does; choose another output, or remove it")
    for path in args.weights:
        if not path.is_dir():
            raise UsageError(f"{path}: must be the directory of a model or a checkpoint, but is none")
    own = [] if args.model is None else [args.model]
    models = [*own, *(path for path in args.weights if (path / CONFIG).exists())]
    if not models:
        raise UsageError("--model must tell which model the checkpoints belong to, but is not given")
    loaded = [load_model(path) for path in models]
    model, tokenizer = loaded[0]
    for path, (other, other_tokenizer) in zip(models, loaded, strict=True):
        if (other.config, other_tokenizer.model) != (model.config, tokenizer.model):
            raise DataError(f"{path}: must be a model of the same kind and vocabulary as {models[0]}, but is not")
    for path in args.weights:
        of_run = path.parent.parent / "recipe.yaml"  # families differ in what they compute, not in their weights
        if path.parent.name == "checkpoints" and of_run.is_file() and load_recipe(of_run).model != model.config:
            raise DataError(f"{path}: must be a checkpoint of a model like {models[0]}, but {of_run} has another")
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
    from nmla.evaluation.rivals import load_systems
    from nmla.evaluation.speed import check_settings, choose_sentences, measure_speed
    from nmla.evaluation.speed_report import picture, table
    from nmla.files import check_output, write_text
    from nmla.progress import say
    from nmla.text.lines import read_lines

    directories = _systems(args.system)
    check_settings(args.batch_sizes, args.threads, args.turns, args.sentences)
    if args.picture is not None:
        check_output(args.picture)
    lines = read_lines(args.source)
    if not lines:  # told before the models are loaded
        raise DataError(f"{args.source}: must hold at least one line, but is empty")
    search = {name: getattr(args, name) for name in ("lm", "beam_size", "alpha", "beta")}
    with load_systems(directories, threads=args.threads, compute_types=args.compute_types, **search) as systems:
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
        about = {**speed.machine, "speed-ups beside": speed.baseline}
        say("; ".join(f"{name}: {value}" for name, value in about.items()))
    if args.picture is not None:
        write_text(args.picture, picture(speed))


def _systems(given: list[str]) -> dict[str, Path]:
    """NAME=PATH, any number of them."""
    systems: dict[str, Path] = {}
    for one in given:
        name, _, path = one.partition("=")
        if not (name.strip() and name.isprintable() and path):
            raise UsageError(f"--system must be NAME=PATH, but is {one!r}")
        if name in systems:
            raise UsageError(f"systems must have names of their own, but two are called {name!r}")
        systems[name] = Path(path)
    return systems


def _tokenizer(path: Path) -> "Tokenizer":
    from nmla.data.corpus import TOKENIZER
    from nmla.text.tokenizer import Tokenizer

    return Tokenizer.load(path / TOKENIZER if path.is_dir() else path)


def _tell_lm(lm: "NgramLM") -> None:
    for order, size in enumerate(lm.sizes, start=1):
        print(f"{order}-grams\t{size}")
