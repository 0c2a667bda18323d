"""The demo: a language whose valid translations are all known, three trainings, and what each of them writes.

CTC trains a model; from there CTC goes on in one arm and NMLA begins in the other, for equally many steps, with the
same optimizer settings, through the same code as any other training.
"""

import difflib
import itertools
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

import sacrebleu
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nmla.config import Recipe, parse_recipe, recipe_yaml
from nmla.data.corpus import Corpus
from nmla.data.prepare import prepare
from nmla.data.synthetic import HEADLINE, ONE_MODE, THREE_ORDERS, Grammar, Sentence, generate
from nmla.decoding.translator import Translator
from nmla.errors import UsageError
from nmla.evaluation.report import curves, heat_map, page, table
from nmla.evaluation.score import mean_entropy, score
from nmla.files import write_text
from nmla.progress import say
from nmla.text.tokenizer import BLANK
from nmla.training.loop import train_stage

RECIPE = """
data: {corpus: corpus}
output: .
model: {d_model: 128, heads: 4, feed_forward: 512, encoder_layers: 2, decoder_layers: 2, upsample: 3}
train: {loss: ctc, steps: 800, learning_rate: 1.0e-3, warmup_steps: 200, max_tokens: 1536, validate_every: 100}
finetune: {loss: ngram, steps: 300, learning_rate: 5.0e-4, warmup_steps: 50, max_tokens: 1536, validate_every: 50}
seed: 1
"""
TRAIN_PAIRS, VALID_PAIRS, TEST_PAIRS = 20_000, 250, 500
VOCAB_SIZE = 280  # small enough that half of the words take several pieces
THREADS = 2  # rounding depends on how many threads share a sum: the same everywhere gives the same figures everywhere
EXAMPLES = 6
STEEP = 3.0  # a loss above this is that of the first steps, and would flatten the rest of the curve
NAMES = {"ctc": "CTC", "ctc_continued": "CTC continued", "nmla": "CTC, then NMLA"}


@dataclass(frozen=True)
class Result:
    """What one system does on the test set; the fields of results.json."""

    system: str
    bleu: float  # against one reference
    bleu_all: float  # against all valid targets
    valid: float  # share of outputs that are exactly one of the valid targets
    entropy: float  # nats per output position
    length_ratio: float
    seconds: float  # of training this stage


def demo(output: Path, overrides: Sequence[str] = ()) -> list[Result]:
    """The headline: where one source has many good translations, NMLA makes the model decide for one."""
    return _run("What NMLA does", HEADLINE, output, overrides)


def study(output: Path, overrides: Sequence[str] = ()) -> None:
    """The two languages in which NMLA does not win, each with a report of its own below `output`."""
    _run("Control: one valid translation per source", ONE_MODE, output / "one-mode", overrides)
    _run("Control: three word orders", THREE_ORDERS, output / "three-orders", overrides)


def _run(title: str, grammar: Grammar, output: Path, overrides: Sequence[str]) -> list[Result]:
    torch.set_num_threads(min(THREADS, os.cpu_count() or 1))
    recipe = _recipe(output, overrides)
    _clear(output)
    sentences = generate(grammar, TRAIN_PAIRS + VALID_PAIRS + TEST_PAIRS, recipe.seed)
    test = sentences[TRAIN_PAIRS + VALID_PAIRS :]
    say(f"{title}. Training three times on {TRAIN_PAIRS} generated pairs; this takes a few minutes.")
    _prepare(sentences, output)
    corpus = Corpus.load(output / "corpus")

    assert recipe.finetune is not None
    start = train_stage(recipe, recipe.train, corpus, output / "ctc")
    train_stage(recipe, replace(recipe.finetune, loss="ctc"), corpus, output / "ctc_continued", start=start)
    train_stage(recipe, recipe.finetune, corpus, output / "nmla", start=start)

    outputs = {}
    results = []
    bleu_all = _bleu_of_all_valid(test)
    for system in NAMES:
        outputs[system], result = _test(system, test, bleu_all, output / system)
        results.append(result)
    write_text(output / "results.json", json.dumps({"systems": [asdict(r) for r in results]}, indent=2) + "\n")
    examples = list(zip(test, outputs["ctc_continued"], outputs["nmla"], strict=True))[:EXAMPLES]
    _print(title, results, examples)
    report = _write_report(title, recipe, results, examples, _telling_sentence(outputs, test))
    print(f"\nReport: {report}")
    return results


def _recipe(output: Path, overrides: Sequence[str]) -> Recipe:
    paths = [f"data.corpus={output / 'corpus'}", f"output={output}"]
    recipe = parse_recipe(RECIPE, [*overrides, *paths], name="demo")
    if recipe.finetune is None:
        raise UsageError("finetune must be a section, but is null: the demo compares fine-tunings")
    return recipe


def _clear(output: Path) -> None:
    """Every demo starts anew; but what is not a demo's is left alone."""
    known = {"text", "corpus", *NAMES, "results.json", "report.html", "curves.svg", "recipe.yaml"}
    found = {path.name for path in output.iterdir()} if output.is_dir() else set()
    if (output.exists() and not output.is_dir()) or found - known:
        raise UsageError(f"{output}: must be empty or an earlier demo, but holds other files; choose another --output")
    for name in found:
        path = output / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _prepare(sentences: list[Sentence], output: Path) -> None:
    """Write the language as plain text files, then make a corpus of them as of any others."""
    splits = {
        "train": sentences[:TRAIN_PAIRS],
        "valid": sentences[TRAIN_PAIRS : TRAIN_PAIRS + VALID_PAIRS],
        "test": sentences[TRAIN_PAIRS + VALID_PAIRS :],
    }
    text = output / "text"
    for split, of_split in splits.items():
        write_text(text / f"{split}.source", "".join(f"{sentence.source}\n" for sentence in of_split))
        write_text(text / f"{split}.target", "".join(f"{sentence.target}\n" for sentence in of_split))
    prepare(
        train=(text / "train.source", text / "train.target"),
        valid=(text / "valid.source", text / "valid.target"),
        output=output / "corpus",
        vocab_size=VOCAB_SIZE,
    )


def _test(system: str, test: list[Sentence], bleu_all: sacrebleu.BLEU, stage: Path) -> tuple[list[str], Result]:
    translations = Translator.load(stage / "model").translate_batch([sentence.source for sentence in test])
    outputs = [translation.text for translation in translations]
    valid = sum(out in sentence.valid_targets() for out, sentence in zip(outputs, test, strict=True))
    scores = score(outputs, [[sentence.target for sentence in test]])
    result = Result(
        system=system,
        bleu=scores.bleu,
        bleu_all=bleu_all.corpus_score(outputs, None).score,
        valid=valid / len(test),
        entropy=mean_entropy(translations),
        length_ratio=scores.length_ratio,
        seconds=_log(stage)[-1]["seconds"],
    )
    return outputs, result


def _bleu_of_all_valid(test: list[Sentence]) -> sacrebleu.BLEU:
    """BLEU against every valid target of each sentence; None where a sentence has fewer than others."""
    references: Any = itertools.zip_longest(*(sentence.valid_targets() for sentence in test))
    return sacrebleu.BLEU(references=[list(column) for column in references])


def _log(stage: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (stage / "log.jsonl").read_text(encoding="utf-8").splitlines()]


HEADER = ("system", "BLEU", "BLEU all", "valid", "entropy", "length", "seconds")
LEGEND = (
    "BLEU against one reference and against all valid translations; valid: outputs that are exactly one of them;\n"
    "entropy in nats per position; length of the outputs to the reference's; seconds of training this stage."
)


def _row(result: Result) -> list[str]:
    return [
        NAMES[result.system],
        f"{result.bleu:.1f}",
        f"{result.bleu_all:.1f}",
        f"{result.valid:.1%}",
        f"{result.entropy:.3f}",
        f"{result.length_ratio:.3f}",
        f"{result.seconds:.0f}",
    ]


def mark_invalid(output: str, sentence: Sentence) -> list[tuple[str, bool]]:
    """The output's words, each with whether it is wrong when compared with the nearest valid target.

    Words that are missing appear as "…", wrong too.
    """
    words = output.split()
    matchers = [difflib.SequenceMatcher(None, words, target.split(), False) for target in sentence.valid_targets()]
    nearest = max(matchers, key=difflib.SequenceMatcher.ratio)
    marked = []
    for kind, start, end, _, _ in nearest.get_opcodes():
        marked += [(word, kind != "equal") for word in words[start:end]] or [("…", True)]
    return marked


Example = tuple[Sentence, str, str]


def _print(title: str, results: list[Result], examples: list[Example]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    figures = Table(*HEADER, title=title, title_justify="left")
    for column in figures.columns[1:]:
        column.justify = "right"
    for result in results:
        figures.add_row(*_row(result))
    console.print(figures)
    console.print(LEGEND)
    console.print("\nThe same sources in both arms; *marked* words are in no valid translation there, … is missing.")
    for sentence, continued, nmla in examples:
        console.print(f"\n  {'source':16}{sentence.source}")
        for system, output in (("ctc_continued", continued), ("nmla", nmla)):
            words = (
                Text(f"*{word}*" if wrong else word, style="bold red" if wrong else "")
                for word, wrong in mark_invalid(output, sentence)
            )
            console.print(Text(f"  {NAMES[system]:16}") + Text(" ").join(words))


def _write_report(title: str, recipe: Recipe, results: list[Result], examples: list[Example], shown: Sentence) -> Path:
    output = Path(recipe.output)
    picture = _curves(output)
    write_text(output / "curves.svg", picture)
    rows = [
        [escape(sentence.source), *(_marked_html(out, sentence) for out in (continued, nmla))]
        for sentence, continued, nmla in examples
    ]
    before, after = _heat_maps(shown.source, output)
    sections = [
        ("On the test set", table(HEADER, [list(map(escape, _row(r))) for r in results]) + f"<p>{escape(LEGEND)}</p>"),
        ("While training", f'<div class="wide">{picture}</div>'),
        ("Six sources", table(("source", NAMES["ctc_continued"], NAMES["nmla"]), rows, kind="text")),
        (
            "What each position wants to say",
            f"<p>Source: <code>{escape(shown.source)}</code>. A column is an output position, a row a token, the shade "
            "its probability. Where several translations are good, CTC spreads each position over all of them, and the "
            "most probable tokens may not fit together. After NMLA every position has decided.</p>"
            f'<div class="wide">{before}</div><div class="wide">{after}</div>',
        ),
        ("How it was made", f"<pre>{escape(recipe_yaml(recipe))}</pre>"),
    ]
    write_text(output / "report.html", page(title, sections))
    return output / "report.html"


def _marked_html(output: str, sentence: Sentence) -> str:
    return " ".join(
        f"<mark>{escape(word)}</mark>" if wrong else escape(word) for word, wrong in mark_invalid(output, sentence)
    )


def _curves(output: Path) -> str:
    """Loss, BLEU and entropy over the steps of training; both arms start where CTC's training ended."""
    logs = {system: _log(output / system) for system in NAMES}
    start = logs["ctc"][-1]["step"]

    def lines(event: str, value: str, *systems: str) -> dict[str, list[tuple[float, float]]]:
        return {
            NAMES[system]: [
                (record["step"] + (system != "ctc") * start, record[value])
                for record in logs[system]
                if record["event"] == event and (value != "loss" or record[value] < STEEP)
            ]
            for system in systems
        }

    return curves(
        {
            "CTC loss per token": lines("train", "loss", "ctc", "ctc_continued"),
            "NMLA loss: −F1 of 2-grams": lines("train", "loss", "nmla"),
            "BLEU, validation": lines("valid", "bleu", *NAMES),
            "Entropy per position, nats": lines("valid", "entropy", *NAMES),
        },
        unit="steps",
    )


def _telling_sentence(outputs: dict[str, list[str]], test: list[Sentence]) -> Sentence:
    """The first test sentence that CTC gets wrong and NMLA right, or just the first."""
    for sentence, continued, nmla in zip(test, outputs["ctc_continued"], outputs["nmla"], strict=True):
        valid = sentence.valid_targets()
        if continued not in valid and nmla in valid:
            return sentence
    return test[0]


def _heat_maps(source: str, output: Path) -> tuple[str, str]:
    """Probabilities before and after, over the same rows: all tokens that have weight in either."""
    translators = [Translator.load(output / system / "model") for system in ("ctc_continued", "nmla")]
    before, after = (translator.probabilities(source) for translator in translators)
    weighty = torch.maximum(before, after).amax(0) > 0.1
    # By where each token is likeliest, so that a sentence is a slope; blank, which is everywhere, below.
    place = torch.maximum(before, after).argmax(0)
    place[BLANK] = len(place)
    tokens = [int(token) for token in place.argsort(stable=True) if weighty[token]]
    names = [translators[0].tokenizer.piece(token) for token in tokens]
    return (
        heat_map(f"{NAMES['ctc_continued']}: {translators[0].translate(source)}", names, before.T[tokens].tolist()),
        heat_map(f"{NAMES['nmla']}: {translators[1].translate(source)}", names, after.T[tokens].tolist()),
    )
