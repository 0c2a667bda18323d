"""What the demo shows: a table, marked examples, curves and heat maps, on the terminal and as a page."""

import difflib
from dataclasses import dataclass
from html import escape
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from nmla.config import Recipe, recipe_yaml
from nmla.data.synthetic import Sentence
from nmla.decoding.translator import Translator
from nmla.evaluation.report import curves, page, table
from nmla.evaluation.runs import heat_maps, read_log
from nmla.files import write_text

NAMES = {"ctc": "CTC", "ctc_continued": "CTC continued", "nmla": "CTC, then NMLA"}
STEEP = 3.0  # a loss above this is that of the first steps, and would flatten the rest of the curve


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


def print_results(title: str, results: list[Result], legend: str, examples: list[Example]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    figures = Table(*HEADER, title=title, title_justify="left")
    for column in figures.columns[1:]:
        column.justify = "right"
    for result in results:
        figures.add_row(*_row(result))
    console.print(figures)
    console.print(legend)
    console.print(
        "\nThe same sources in both arms; *marked* words differ from the nearest valid translation, … is missing."
    )
    for sentence, continued, nmla in examples:
        console.print(f"\n  {'source':16}{sentence.source}")
        for system, output in (("ctc_continued", continued), ("nmla", nmla)):
            words = (
                Text(f"*{word}*" if wrong else word, style="bold red" if wrong else "")
                for word, wrong in mark_invalid(output, sentence)
            )
            console.print(Text(f"  {NAMES[system]:16}") + Text(" ").join(words))


def write_report(
    title: str, recipe: Recipe, results: list[Result], legend: str, examples: list[Example], shown: Sentence
) -> Path:
    output = Path(recipe.output)
    picture = _curves(output)
    write_text(output / "curves.svg", picture)
    rows = [
        [escape(sentence.source), *(_marked_html(out, sentence) for out in (continued, nmla))]
        for sentence, continued, nmla in examples
    ]
    arms = {NAMES[system]: Translator.load(output / system / "model") for system in ("ctc_continued", "nmla")}
    before, after = heat_maps(shown.source, arms)
    sections = [
        (
            "On the test set",
            table(HEADER, [list(map(escape, _row(r))) for r in results])
            + f"<p>{'<br>'.join(map(escape, legend.splitlines()))}</p>",
        ),
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
    logs = {system: read_log(output / system) for system in NAMES}
    start = logs["ctc"][-1]["step"]

    def lines(event: str, value: str, *systems: str) -> dict[str, list[tuple[float, float]]]:
        drawn = {
            system: [
                (record["step"] + (system != "ctc") * start, record[value])
                for record in logs[system]
                if record["event"] == event and (value != "loss" or record[value] < STEEP)
            ]
            for system in systems
        }
        for system in drawn:
            if event == "valid" and system != "ctc":  # both arms begin with what CTC has reached
                drawn[system] = drawn["ctc"][-1:] + drawn[system]
        return {NAMES[system]: line for system, line in drawn.items()}

    return curves(
        {
            "CTC loss per token": lines("train", "loss", "ctc", "ctc_continued"),
            "NMLA loss: −F1 of n-grams": lines("train", "loss", "nmla"),
            "BLEU, validation": lines("valid", "bleu", *NAMES),
            "Entropy per position, nats": lines("valid", "entropy", *NAMES),
        },
        unit="steps",
    )


def telling_sentence(outputs: dict[str, list[str]], test: list[Sentence]) -> Sentence:
    """The first test sentence that CTC gets wrong and NMLA right, or just the first."""
    for sentence, continued, nmla in zip(test, outputs["ctc_continued"], outputs["nmla"], strict=True):
        valid = sentence.valid_targets()
        if continued not in valid and nmla in valid:
            return sentence
    return test[0]
