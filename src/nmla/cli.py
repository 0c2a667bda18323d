"""The command line: one table, command to function."""

import argparse
import io
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from nmla import __version__, commands
from nmla.errors import NmlaError, UsageError

WRONG_PATH = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError)


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
        "help": "translations that a search weighs, or lengths that a fixed-length model tries "
        "(default: the model's own, or 1)",
    },
    "--teacher": {"type": Path, "help": "an autoregressive model that chooses among these (default: the model itself)"},
    "--num-hypotheses": {"type": int, "help": "translations that are told, in jsonl (default: 1)"},
    "--lm": {"type": Path, "help": "a language model for a CTC model's search (default: the model's own, if any)"},
    "--alpha": {"type": float, "help": "its weight (default: the model's own, or 0)"},
    "--beta": {
        "type": float,
        "help": "weight of the logarithm of the length in that search (default: the model's own, or 0)",
    },
    "--blank-penalty": {
        "type": float,
        "help": "above 0, a CTC model's outputs get longer (default: the model's own, or 0)",
    },
}
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
        commands.run_demo,
        {
            "overrides": OVERRIDES,
            "--output": {"type": Path, "help": "where to write (default: runs/demo, or runs/study)"},
            "--study": {"action": "store_true", "help": "the two languages where NMLA does not win, instead"},
        },
    ),
    "prepare": Command(
        "make a corpus from parallel text; called again after a stop, it goes on",
        "nmla prepare --train train.en train.de --valid valid.en valid.de --vocab-size 300 --output corpora/mine",
        commands.run_prepare,
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
        commands.run_train,
        {"recipe": {"type": Path, "help": "a YAML file"}, "overrides": OVERRIDES},
    ),
    "distill": Command(
        "make a corpus whose targets are a teacher's translations; called again, it goes on, or joins in",
        "nmla distill --teacher runs/teacher/train/model --corpus corpora/mine --output corpora/distilled",
        commands.run_distill,
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
        commands.run_average,
        {
            "weights": {"nargs": "+", "type": Path, "metavar": "DIR", "help": "model or checkpoint directories"},
            "--model": {
                "type": Path,
                "help": "what the checkpoints belong to (default: the first DIR that is a model)",
            },
            "--output": {"type": Path, "required": True, "help": "the model directory to make"},
        },
    ),
    "translate": Command(
        "translate files, or standard input, line by line",
        "nmla translate --model runs/mine/train/model < valid.en > output.de",
        commands.run_translate,
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
        commands.run_tune,
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
        commands.run_score,
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
        commands.run_analyse,
        {
            "--system": {
                "required": True,
                "action": "append",
                "metavar": "NAME=PATH",
                "help": "a file of outputs, one a line, or of what nmla translate --format jsonl writes if it ends in "
                ".jsonl, or a model directory; give it again for more systems, which are compared with the first",
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
                "help": "sentences shown that gained most, and lost; of one system its best, and worst (default: 5)",
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
        "nmla report runs/mine --source valid.en --reference valid.de --lm lm.lm --output report.html",
        commands.run_report,
        {
            "runs": {"nargs": "+", "type": Path, "metavar": "RUN", "help": "directories that hold finished trainings"},
            "--source": {"type": Path, "help": "a test set, one sentence a line (default: tell of the training alone)"},
            "--reference": {
                "type": Path,
                "action": "append",
                "default": [],
                "help": "its translations; give it again for more references",
            },
            "--lm": {
                "type": Path,
                "help": "a language model over the first model's tokens, for the outputs' perplexity",
            },
            "--output": {"type": Path, "required": True, "help": "what to write: a page if it ends in .html, or .md"},
            "--title": {"default": "Trainings", "help": "what it is called"},
            "--examples": {
                "type": int,
                "default": 5,
                "help": "sentences shown that gained most, and lost; of one system its best, and worst (default: 5)",
            },
        },
    ),
    "reproduce": Command(
        "make a whole table of results, or what is missing of it; called again after a stop, it goes on",
        "nmla reproduce table.yaml --jobs 2",
        commands.run_reproduce,
        {
            "table": {"type": Path, "help": "a YAML file: rows, each a recipe, and the test set"},
            "--jobs": {"type": int, "default": 1, "help": "stages that run at once, sharing the cores (default: 1)"},
            "--so-far": {"action": "store_true", "help": "make nothing, show what is done"},
            "--record": {
                "type": Path,
                "help": "the JSON of this table as it was made elsewhere: what it tells is not made again",
            },
        },
    ),
    "lm train": Command(
        "estimate an n-gram language model from text (interpolated modified Kneser-Ney)",
        "nmla lm train --tokenizer corpora/mine --text train.de --output lm.arpa.gz",
        commands.run_lm_train,
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
        commands.run_lm_convert,
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
        commands.run_bench_speed,
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
                "with beam 5, in its faster compute type each time, or else the first system)",
            },
            "--batch-sizes": {**NUMBERS, "default": (1, 8, 32, 100, 400), "help": "(default: 1 8 32 100 400)"},
            "--threads": {**NUMBERS, "default": (1, 2), "help": "how many work on a batch (default: 1 2)"},
            "--turns": {"type": int, "default": 3, "help": "how often each is measured (default: 3)"},
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
                "help": "also measure the others with a search of this size (default: their own; with --lm, else 20)",
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


def _say(message: str) -> None:
    from nmla.progress import say  # when it is needed: it takes its time to load

    say(message)


def main(argv: list[str] | None = None) -> int:
    """Run one command; a mistake of the user's becomes one line on stderr and an exit code."""
    top = parser()
    args, rest = top.parse_known_args(argv)
    if rest:
        command, first = f"nmla {args.command}", rest[0]
        what = (
            f"there is no option {first}"
            if first.startswith("-")
            else f"{first!r} must stand beside what else has no option before it, but does not"
        )
        top.exit(UsageError.exit_code, f"{command}: {what}; see {command} --help\n")
    # Tensors of megabytes on huge pages, where the system has them: each training step makes these anew, and the page
    # faults of small pages were a fifth of it. torch asks when it is first used.
    if os.path.exists("/sys/kernel/mm/transparent_hugepage"):
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    if isinstance(sys.stdout, io.TextIOWrapper):  # text is UTF-8 wherever it goes, and what is none is told
        sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")
    try:
        COMMANDS[args.command].run(args)
        if sys.stdout is not None:
            sys.stdout.flush()
    except NmlaError as error:
        _say(f"nmla {args.command}: {error}")
        return error.exit_code
    except BrokenPipeError:  # the reader of stdout, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _say(f"nmla {args.command}: {where}{error.strerror or error}")
        return UsageError.exit_code if isinstance(error, WRONG_PATH) else 1
    except KeyboardInterrupt:
        _say(f"nmla {args.command}: stopped")
        # At once: CTranslate2 would first do all that it was given. What is open is closed by now, and a kill safe.
        os._exit(130)
    return 0


if __name__ == "__main__":
    sys.exit(main())
