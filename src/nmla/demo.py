"""The demo: a language whose valid translations are all known, three trainings, and what each of them writes.

CTC trains a model; from there CTC goes on in one arm and NMLA begins in the other, for equally many steps, with the
same optimizer settings, through the same code as any other training.
"""

import itertools
import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import sacrebleu
import torch

from nmla.config import DataConfig, Recipe, TrainConfig, parse_recipe
from nmla.data.corpus import Corpus
from nmla.data.prepare import prepare
from nmla.data.synthetic import HEADLINE, ONE_MODE, THREE_ORDERS, Grammar, Sentence, generate
from nmla.decoding.translator import Translator
from nmla.demo_report import LEGEND, NAMES, Result, print_results, telling_sentence, write_report
from nmla.errors import Stopped, UsageError
from nmla.evaluation.runs import read_log
from nmla.evaluation.score import mean_entropy
from nmla.files import write_text
from nmla.progress import say
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
VOCAB_SIZE = 280  # small enough that a third of the target words take several pieces
EXAMPLES = 6
MARK = ".nmla-demo"


def demo(output: Path, overrides: Sequence[str] = ()) -> list[Result]:
    """The headline: where one source has many good translations, NMLA makes the model decide for one."""
    return _run("What NMLA does", HEADLINE, output, overrides)


def study(output: Path, overrides: Sequence[str] = ()) -> None:
    """The two languages in which NMLA does not win, each with a report of its own below `output`."""
    _run("Control: one valid translation per source", ONE_MODE, output / "one-mode", overrides)
    _run("Control: three word orders", THREE_ORDERS, output / "three-orders", overrides)


def _run(title: str, grammar: Grammar, output: Path, overrides: Sequence[str]) -> list[Result]:
    # How threads share a sum changes its rounding: with one, the figures are the same on every number of cores. Two are
    # hardly faster on matrices this small, and much slower as soon as something else is running.
    torch.set_num_threads(1)
    recipe, control = _recipe(output, overrides)
    _clear(output)
    sentences = generate(grammar, TRAIN_PAIRS + VALID_PAIRS + TEST_PAIRS, recipe.seed)
    test = sentences[TRAIN_PAIRS + VALID_PAIRS :]
    say(f"{title}. Training three times on {TRAIN_PAIRS} generated pairs; this takes a few minutes.")
    _prepare(sentences, output)
    corpus = Corpus.load(output / "corpus")

    assert recipe.finetune is not None
    try:
        start = train_stage(recipe, recipe.train, corpus, output / "ctc")
        train_stage(recipe, control, corpus, output / "ctc_continued", start=start)
        train_stage(recipe, recipe.finetune, corpus, output / "nmla", start=start)
    except Stopped as stopped:
        raise Stopped(stopped.exit_code - 128, f"{output}: stopped; the demo begins anew each time") from None

    outputs = {}
    results = []
    bleu = sacrebleu.BLEU(references=[[sentence.target for sentence in test]])
    bleu_all = _bleu_of_all_valid(test)
    for system in NAMES:
        outputs[system], result = _test(system, test, bleu, bleu_all, output / system)
        results.append(result)
    signatures = {"bleu": str(bleu.get_signature()), "bleu_all": str(bleu_all.get_signature())}
    figures = {"systems": [asdict(result) for result in results], "signatures": signatures, "seed": recipe.seed}
    write_text(output / "results.json", json.dumps(figures, indent=2) + "\n")
    examples = list(zip(test, outputs["ctc_continued"], outputs["nmla"], strict=True))[:EXAMPLES]
    legend = LEGEND + "\nBLEU: {bleu}\nBLEU all: {bleu_all}".format_map(signatures)
    print_results(title, results, legend, examples)
    report = write_report(title, recipe, results, legend, examples, telling_sentence(outputs, test))
    print(f"\nReport: {report}")
    say(f"Try it: echo '{test[0].source}' | nmla translate --model {output / 'nmla' / 'model'}")
    return results


def _recipe(output: Path, overrides: Sequence[str]) -> tuple[Recipe, TrainConfig]:
    """The recipe, and the stage that NMLA is compared with: the same steps, of the first stage's loss."""
    for override in overrides:
        if override.partition("=")[0].split(".")[0] in ("output", "data", "teacher", "machine"):
            raise UsageError(f"an override of the demo must be of its model or training, but is {override!r}")
    recipe = parse_recipe(RECIPE, overrides, name="demo")
    if recipe.finetune is None or recipe.finetune.loss != "ngram":
        raise UsageError("finetune.loss must be ngram: the demo compares it with CTC")
    # Without what only n-grams have.
    loss, references = recipe.train.loss, recipe.train.references
    control = replace(recipe.finetune, loss=loss, references=references, recall_weight=1.0, ctc_weight=0.0)
    return replace(recipe, data=DataConfig(str(output / "corpus")), output=str(output)), control


def _clear(output: Path) -> None:
    """Every demo starts anew, whatever an earlier one left; but only where one left its mark."""
    mark = output / MARK
    if mark.exists():
        for path in output.iterdir():  # not itself: it may be a link, or where somebody stands
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path != mark:
                path.unlink()
    elif output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise UsageError(f"{output}: must be empty or an earlier demo, but is neither; choose another --output")
    write_text(mark, "nmla demo may remove this directory\n")


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
        train=[(text / "train.source", text / "train.target")],
        valid=[(text / "valid.source", text / "valid.target")],
        output=output / "corpus",
        vocab_size=VOCAB_SIZE,
    )


def _test(
    system: str, test: list[Sentence], bleu: sacrebleu.BLEU, bleu_all: sacrebleu.BLEU, stage: Path
) -> tuple[list[str], Result]:
    sources = [sentence.source for sentence in test]
    translations = Translator.load(stage / "model").translate_batch(sources, return_scores=True)
    outputs = [translation.text for translation in translations]
    valid = sum(out in sentence.valid_targets() for out, sentence in zip(outputs, test, strict=True))
    one = bleu.corpus_score(outputs, None)
    result = Result(
        system=system,
        bleu=one.score,
        bleu_all=bleu_all.corpus_score(outputs, None).score,
        valid=valid / len(test),
        entropy=mean_entropy(translations),
        length_ratio=one.sys_len / one.ref_len,
        seconds=read_log(stage)[-1]["seconds"],
    )
    return outputs, result


def _bleu_of_all_valid(test: list[Sentence]) -> sacrebleu.BLEU:
    """BLEU against every valid target of each sentence; None where a sentence has fewer than others."""
    references: Any = itertools.zip_longest(*(sentence.valid_targets() for sentence in test))
    return sacrebleu.BLEU(references=[list(column) for column in references])
