"""An analysis as text: tables of systems side by side, as TSV or Markdown, or JSON with all digits."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from nmla.evaluation.analysis import Analysis, Bucket, Comparison, Example
from nmla.evaluation.document import Figures, markdown_table

FORMATS = ("tsv", "json", "markdown")
ABSENT = "-"


@dataclass(frozen=True)
class Row:
    """A measure of all systems, and where it has one, of the reference."""

    name: str
    values: Sequence[float | None]
    digits: int
    note: str
    reference: float | None = None
    sentences: int | None = None  # that it is of, if not of all


def render(analysis: Analysis, form: str) -> str:
    """The analysis in one of `FORMATS`."""
    if form == "json":
        return json.dumps(asdict(analysis), ensure_ascii=False, indent=2)
    return _markdown(analysis) if form == "markdown" else _tsv(analysis)


def rows(analysis: Analysis) -> Iterator[Row]:
    """All measures; what no system has, such as the entropy of files, is left out."""
    systems = analysis.systems
    scores = [one.scores for one in systems]
    yield Row("BLEU", [of.bleu for of in scores], 2, scores[0].bleu_signature)
    yield Row("chrF", [of.chrf for of in scores], 2, scores[0].chrf_signature)
    yield Row("brevity penalty", [of.brevity_penalty for of in scores], 3, "of BLEU")
    length = "of outputs to references, in BLEU's words"
    yield Row("length ratio", [of.length_ratio for of in scores], 3, length)
    for order in range(len(scores[0].precisions)):
        yield Row(f"{order + 1}-gram precision", [of.precisions[order] for of in scores], 2, "percent, of BLEU")
    for number, bucket in enumerate(systems[0].buckets):
        if not bucket.sentences:
            continue
        where, count = _words(bucket), f"{bucket.sentences} sentence{'s' * (bucket.sentences != 1)}"
        buckets = [one.buckets[number] for one in systems]
        yield Row(f"BLEU, {where}", [of.bleu for of in buckets], 2, count, sentences=bucket.sentences)
        yield Row(
            f"brevity penalty, {where}", [of.brevity_penalty for of in buckets], 3, count, sentences=bucket.sentences
        )
    reference, texts = analysis.reference, [one.fluency for one in systems]
    repeated = "share of words equal to the one before"
    yield Row("repeats", [of.repeats for of in texts], 4, repeated, reference.repeats)
    orders = [one.order for one in systems]
    discordant = "share of pairs of matched words in the other order (Kendall's tau distance)"
    displacement = "of matched words, mean, as a share of the sentence"
    rest = [
        Row("perplexity", [of.perplexity for of in texts], 2, "per token, ends included", reference.perplexity),
        Row("discordant pairs", [of.discordant for of in orders], 4, discordant),
        Row("displacement", [of.displacement for of in orders], 4, displacement),
        Row("entropy", [one.entropy for one in systems], 3, "nats per output position"),
        Row("blanks", [one.blanks for one in systems], 4, "share of output positions"),
    ]
    yield from (row for row in rest if any(value is not None for value in row.values))


def _words(bucket: Bucket) -> str:
    if bucket.longest is None:
        return f"over {bucket.shortest - 1} words" if bucket.shortest else "any length"
    if bucket.shortest == bucket.longest:
        return f"{bucket.longest} word{'s' * (bucket.longest != 1)}"
    return f"{bucket.shortest} to {bucket.longest} words" if bucket.shortest else f"up to {bucket.longest} words"


def cells(analysis: Analysis) -> list[list[str]]:
    """The table of all measures, its header first."""
    header = ["measure", *(one.name for one in analysis.systems), "reference", "note"]
    table = [header]
    for row in rows(analysis):
        table.append([row.name, *(_number(value, row) for value in (*row.values, row.reference)), row.note])
    return [[_one_line(cell) for cell in line] for line in table]


def _number(value: float | None, row: Row) -> str:
    return ABSENT if value is None else f"{value:.{row.digits}f}"


def by_system(analysis: Analysis, measures: Sequence[Row]) -> Figures:
    """Some measures of all systems and of the reference, a system a line: for more than fit beside each other."""
    header = [row.name if row.sentences is None else f"{row.name} ({row.sentences})" for row in measures]
    names = [*(one.name for one in analysis.systems), "the reference"]
    columns = [[_number(value, row) for value in (*row.values, row.reference)] for row in measures]
    return Figures(["system", *header], [[name, *of] for name, *of in zip(names, *columns, strict=True)])


def _tsv(analysis: Analysis) -> str:
    """Tables one after the other, an empty line between them."""
    tables = [cells(analysis)]
    for one in analysis.comparisons:
        told = [(end, example) for end, _, examples in ends(one) for example in examples]
        if told:
            names = [name for name, _ in shown(one, told[0][1])]
            scored = [one.name] if one.baseline is None else [one.baseline, one.name]
            tables.append([["change", "line", *(f"chrF of {name}" for name in scored), *names]])
        for end, example in told:
            numbers = [f"{of:.2f}" for of in (example.baseline_chrf, example.chrf) if of is not None]
            tables[-1].append([end, str(example.line), *numbers, *(text for _, text in shown(one, example))])
    return "\n\n".join("\n".join("\t".join(map(_one_line, cells)) for cells in table) for table in tables)


def _markdown(analysis: Analysis) -> str:
    header, *numbers = cells(analysis)
    lines = [markdown_table(header, numbers)]
    for comparison in analysis.comparisons:
        for _, title, examples in ends(comparison):
            if examples:
                lines += ["", f"## {title}"]
            for example in examples:
                texts = shown(comparison, example)
                width = max(len(name) for name, _ in texts)
                chrf = " to ".join(f"{of:.1f}" for of in (example.baseline_chrf, example.chrf) if of is not None)
                lines += ["", f"Line {example.line}, chrF {chrf}:", ""]
                # As code: a sentence may hold anything that Markdown would take for its own.
                lines += [f"    {name:{width}}  {_one_line(text)}" for name, text in texts]
    return "\n".join(lines)


def ends(comparison: Comparison) -> list[tuple[str, str, tuple[Example, ...]]]:
    """The sentences at both ends: in a word, as a title, and themselves."""
    name, other = comparison.name, comparison.baseline
    if other is None:
        return [("best", f"Best of {name}", comparison.gained), ("worst", f"Worst of {name}", comparison.lost)]
    both = (("gained", comparison.gained), ("lost", comparison.lost))
    return [(change, f"Where {name} {change} most against {other}", examples) for change, examples in both]


def shown(comparison: Comparison, example: Example) -> list[tuple[str, str]]:
    """What is shown of a sentence, each with its name."""
    source = [("source", example.source)] if example.source is not None else []
    numbered = enumerate(example.references, start=1)
    references = [("reference" if number == 1 else f"reference {number}", text or "") for number, text in numbered]
    baseline = [] if comparison.baseline is None else [(comparison.baseline, example.baseline or "")]
    return [*source, *references, *baseline, (comparison.name, example.output)]


def _one_line(text: str) -> str:
    return re.sub(r"\s", " ", text)
