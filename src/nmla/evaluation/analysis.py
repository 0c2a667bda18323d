"""What sets systems apart: scores by length and by n-gram, fluency, word order, and the sentences that differ most.

Words are BLEU's: punctuation stands alone. With several references, buckets, repeats, perplexity and word order are
by the first that a sentence has, and all else takes all.
"""

import math
from bisect import bisect, insort
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import sacrebleu
from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

from nmla.data.corpus import TOKENIZER
from nmla.decoding.ngram_lm import NgramLM
from nmla.decoding.translator import Translator
from nmla.errors import UsageError
from nmla.evaluation.measure import Lines, References, check_parallel, first_references, read_references
from nmla.evaluation.score import Scores, mean_entropy, score
from nmla.evaluation.systems import System
from nmla.models.pretrained import CONFIG
from nmla.text.lines import read_lines
from nmla.text.tokenizer import Tokenizer

BOUNDS = (20, 40, 60)  # longest references of all buckets but the last, in words
EXAMPLES = 5

Words = Sequence[Sequence[str]]  # of each sentence


@dataclass(frozen=True)
class Bucket:
    """Sentences whose references are about equally long, and what BLEU is of them alone; None if there are none, or all
    have fewer words than the four that BLEU counts."""

    shortest: int  # in words
    longest: int | None  # None: any length
    sentences: int
    bleu: float | None
    brevity_penalty: float | None


@dataclass(frozen=True)
class Fluency:
    """How text reads, whatever it should say."""

    words: int
    repeats: float  # share of words that are equal to the one just before
    perplexity: float | None  # per token, ends of sentences included; None without a language model


@dataclass(frozen=True)
class WordOrder:
    """How far the output's words stand from where the reference has them; None where there is nothing to compare."""

    discordant: float | None  # Kendall's tau distance: share of the pairs of matched words that are the other way round
    displacement: float | None  # mean difference of a matched word's places, each as a share of its sentence's length


@dataclass(frozen=True)
class Report:
    """All about one system."""

    name: str
    scores: Scores
    buckets: tuple[Bucket, ...]
    fluency: Fluency
    order: WordOrder
    entropy: float | None  # of a model's prediction, in nats, mean over output positions
    blanks: float | None  # share of output positions where the blank is the most probable; None if there are none


@dataclass(frozen=True)
class Example:
    line: int  # from 1
    source: str | None
    references: tuple[str | None, ...]  # None where there is none
    baseline: str | None  # the first system's output
    output: str
    baseline_chrf: float | None  # of this sentence
    chrf: float


@dataclass(frozen=True)
class Comparison:
    """The sentences in which a system differs most from the first, by chrF, the largest difference first.

    Where there is no other system, `baseline` is None, and these are its best and its worst sentences.
    """

    name: str
    baseline: str | None
    gained: tuple[Example, ...]
    lost: tuple[Example, ...]


@dataclass(frozen=True)
class Analysis:
    sentences: int
    reference: Fluency
    systems: tuple[Report, ...]
    comparisons: tuple[Comparison, ...]  # of each other system with the first, or of one with none


def analyse_files(
    systems: Mapping[str, Path],
    references: Sequence[Path],
    *,
    source: Path | None = None,
    lm: Path | None = None,
    tokenizer: Tokenizer | None = None,
    bounds: Sequence[int] | None = None,
    quantiles: int | None = None,
    examples: int = EXAMPLES,
) -> Analysis:
    """:func:`analyse` of files. A system is by its name a file of outputs or a model's directory.

    The tokenizer of the language model is that of the first model unless another is given. What can be found wrong
    without translating is found before.
    """
    check_settings(bounds, quantiles, examples)
    models = {name: path for name, path in systems.items() if path.is_dir()}
    for path in models.values():
        if not (path / CONFIG).is_file():
            raise UsageError(f"{path}: must be a file of outputs or a model directory, but holds no {CONFIG}")
    if models and source is None:
        raise UsageError(f"--source must be given for {next(iter(models))} to translate, but is not")
    if tokenizer is not None and lm is None:
        raise UsageError("--tokenizer is for a language model, so --lm must be given too, but is not")
    language_model = None
    if lm is not None:
        if tokenizer is None and not models:
            raise UsageError(
                "--tokenizer must tell the vocabulary of --lm where no system is a model, but is not given"
            )
        tokenizer = tokenizer or Tokenizer.load(next(iter(models.values())) / TOKENIZER)
        check_vocabulary(tokenizer)
        language_model = NgramLM.load(lm, tokenizer)
    targets = read_references(references)
    sources = read_lines(source) if source is not None else None
    files = {name: System.of_file(name, path) for name, path in systems.items() if name not in models}
    named: list[tuple[str, Sequence[str | None]]] = [*zip(map(str, references), targets, strict=True)]
    named += [(str(systems[name]), system.outputs) for name, system in files.items()]
    (name, lines), *others = [*named, (str(source), sources)] if sources is not None else named
    check_parallel(lines, others, f"line of {name}")
    analysed = [
        files[name] if name in files else System.of_model(name, Translator.load(path), sources or [])
        for name, path in systems.items()
    ]
    return analyse(
        analysed,
        targets,
        sources=sources,
        lm=language_model,
        tokenizer=tokenizer,
        bounds=bounds,
        quantiles=quantiles,
        examples=examples,
    )


def analyse(
    systems: Sequence[System],
    references: References,
    *,
    sources: Lines | None = None,
    lm: NgramLM | None = None,
    tokenizer: Tokenizer | None = None,
    bounds: Sequence[int] | None = None,
    quantiles: int | None = None,
    examples: int = EXAMPLES,
) -> Analysis:
    """Analyse systems side by side; each but the first is compared with the first.

    Args:
        systems: each has one output per sentence.
        references: one or more lists of one translation per sentence; None where there is none.
        sources: for the examples.
        lm: a language model of the target language, for perplexity, with the `tokenizer` that it is of.
        bounds: longest references of all buckets but the last, in words (default: 20, 40, 60).
        quantiles: instead, into how many buckets to part the sentences, as equal as their lengths allow.
        examples: how many sentences are told that gained most, and that lost most.
    """
    check_settings(bounds, quantiles, examples)
    if not systems:
        raise UsageError("there must be at least one system to analyse, but there is none")
    if not references:
        raise UsageError("there must be at least one reference, but there is none")
    _check_names([system.name for system in systems])
    lists: list[tuple[str, Sequence[str | None]]] = [
        (f"reference {number}", lines) for number, lines in enumerate(references, start=1)
    ]
    lists += [(f"system {system.name}", system.outputs) for system in systems]
    (name, lines), *rest = [*lists, ("the source", sources)] if sources is not None else lists
    check_parallel(lines, rest, f"line of {name}")
    if (lm is None) != (tokenizer is None):
        raise UsageError("a language model and its tokenizer must be given together, but one is missing")

    first = first_references(references)
    target = words(first)
    lengths = [len(sentence) for sentence in target]
    ranges = _ranges(_quantiles(lengths, quantiles) if quantiles is not None else bounds or BOUNDS)
    every = [words([line or "" for line in lines]) for lines in references]
    longest_of = [max(map(len, of_row)) for of_row in zip(*every, strict=True)]
    rows = [
        [row for row, length in enumerate(lengths) if shortest <= length and (longest is None or length <= longest)]
        for shortest, longest in ranges
    ]
    reports = []
    for system in systems:
        output, told = words(system.outputs), system.translations
        blanks, positions = (sum(getattr(one, name) for one in told or ()) for name in ("blanks", "positions"))
        reports.append(
            Report(
                name=system.name,
                scores=score(system.outputs, references),
                buckets=tuple(
                    _bucket(*span, of_span, system.outputs, references, longest_of)
                    for span, of_span in zip(ranges, rows, strict=True)
                ),
                fluency=fluency(system.outputs, output, lm, tokenizer),
                order=word_order(output, target),
                entropy=mean_entropy(told) if told is not None else None,
                blanks=blanks / positions if blanks else None,
            )
        )
    return Analysis(
        sentences=len(references[0]),
        reference=fluency(first, target, lm, tokenizer),
        systems=tuple(reports),
        comparisons=_comparisons(systems, references, sources, examples),
    )


def words(lines: Lines) -> list[list[str]]:
    """Each line's words, as BLEU counts them."""
    tokenizer = Tokenizer13a()
    return [tokenizer(line.rstrip()).split() for line in lines]


def fluency(lines: Lines, split: Words, lm: NgramLM | None = None, tokenizer: Tokenizer | None = None) -> Fluency:
    """How often the lines, which are also given as words, stutter, and what a language model says of them."""
    count = sum(map(len, split))
    repeats = sum(word == before for line in split for before, word in pairwise(line))
    uncertain = perplexity(lines, lm, tokenizer) if lm is not None and tokenizer is not None else None
    return Fluency(words=count, repeats=repeats / max(count, 1), perplexity=uncertain)


def perplexity(lines: Lines, lm: NgramLM, tokenizer: Tokenizer) -> float:
    """Per token; the end of each line is a token too."""
    check_vocabulary(tokenizer)
    encoded = tokenizer.encode_batch(list(lines))
    return math.exp(-sum(map(lm.score, encoded)) / sum(len(ids) + 1 for ids in encoded))


def word_order(outputs: Words, references: Words) -> WordOrder:
    """How non-monotonic outputs are against their references, over all sentences."""
    discordant, pairs, displacement, matched = 0, 0, 0.0, 0
    for output, reference in zip(outputs, references, strict=True):
        matches = match(output, reference)
        seen: list[int] = []
        for place, there in matches:
            discordant += len(seen) - bisect(seen, there)  # those before it here that are behind it there
            pairs += len(seen)
            insort(seen, there)
            displacement += abs(place / len(output) - there / len(reference))
        matched += len(matches)
    return WordOrder(discordant / pairs if pairs else None, displacement / matched if matched else None)


def match(output: Sequence[str], reference: Sequence[str]) -> list[tuple[int, int]]:
    """Where equal words stand in both, in the output's order: a word's k-th occurrence belongs to its k-th."""
    waiting: defaultdict[str, deque[int]] = defaultdict(deque)
    for place, word in enumerate(reference):
        waiting[word].append(place)
    return [(place, waiting[word].popleft()) for place, word in enumerate(output) if waiting[word]]


def _quantiles(lengths: Sequence[int], count: int) -> list[int]:
    """Bounds that part the sentences into `count` buckets, or fewer where lengths are equal."""
    ordered = sorted(lengths)
    bounds = {ordered[-(-len(ordered) * k // count) - 1] for k in range(1, count)}
    return sorted(bounds - {ordered[-1]})


def _ranges(bounds: Sequence[int]) -> list[tuple[int, int | None]]:
    return list(zip([0, *(bound + 1 for bound in bounds)], [*bounds, None], strict=True))


def _bucket(
    shortest: int,
    longest: int | None,
    rows: Sequence[int],
    outputs: Lines,
    references: References,
    longest_of: Sequence[int],  # each sentence's references
) -> Bucket:
    if not rows:
        return Bucket(shortest, longest, 0, None, None)
    bleu = sacrebleu.BLEU(force=True)
    targets = [[lines[row] for row in rows] for lines in references]
    of_rows = bleu.corpus_score([outputs[row] for row in rows], targets)  # type: ignore[arg-type]  # None is right
    counts = any(longest_of[row] >= bleu.max_ngram_order for row in rows)
    return Bucket(shortest, longest, len(rows), of_rows.score if counts else None, of_rows.bp)


def _comparisons(
    systems: Sequence[System], references: References, sources: Lines | None, count: int
) -> tuple[Comparison, ...]:
    first, *others = systems
    baseline = first if others else None
    before = _chrf(first.outputs, references) if others else None
    judged = [row for row, of_row in enumerate(zip(*references, strict=True)) if any(of_row)]  # not without a reference
    comparisons = []
    for system in others or [first]:
        after = _chrf(system.outputs, references)
        told = [
            Example(
                line=row + 1,
                source=sources[row] if sources is not None else None,
                references=tuple(lines[row] for lines in references),
                baseline=baseline.outputs[row] if baseline else None,
                output=system.outputs[row],
                baseline_chrf=before[row] if before else None,
                chrf=after[row],
            )
            for row in range(len(after))
        ]
        # Without another system, all that is not wholly wrong is a gain, and what is not wholly right a loss.
        gains, losses = (
            [of.chrf - (end if of.baseline_chrf is None else of.baseline_chrf) for of in told] for end in (0, 100)
        )
        # Of equal differences the first comes first, in both.
        best = sorted(judged, key=gains.__getitem__, reverse=True)[:count]
        worst = sorted(judged, key=losses.__getitem__)[:count]
        gained = tuple(told[row] for row in best if gains[row] > 0)
        lost = tuple(told[row] for row in worst if losses[row] < 0)
        comparisons.append(Comparison(system.name, baseline.name if baseline else None, gained, lost))
    return tuple(comparisons)


def _chrf(outputs: Lines, references: References) -> list[float]:
    """Of each sentence: BLEU is too coarse for one alone."""
    metric = sacrebleu.CHRF()
    return [
        metric.sentence_score(output, [of for of in of_sentence if of is not None]).score
        for output, of_sentence in zip(outputs, zip(*references, strict=True), strict=True)
    ]


def _check_names(names: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"each system must have a name of its own, but {names.count(name)} are called {name}")


def splits_text(tokenizer: Tokenizer) -> bool:
    """Not if it needs text split with "@@": outputs are whole words again, of which it would know few."""
    return not tokenizer.pretokenised or not any(
        tokenizer.piece(token).endswith("@@") for token in range(tokenizer.vocab_size)
    )


def check_vocabulary(tokenizer: Tokenizer) -> None:
    if not splits_text(tokenizer):
        raise UsageError("the language model's vocabulary must split text by itself, but needs text split with @@")


def check_settings(bounds: Sequence[int] | None = None, quantiles: int | None = None, examples: int = EXAMPLES) -> None:
    """Refuse, before any long work, what cannot be told."""
    if bounds is not None and quantiles is not None:
        raise UsageError("there must be either bounds of buckets or quantiles, but both are given")
    if bounds is not None and (not bounds or bounds[0] < 1 or list(bounds) != sorted(set(bounds))):
        raise UsageError(f"bounds of buckets must be above 0 and grow, but are {' '.join(map(str, bounds)) or 'none'}")
    if quantiles is not None and quantiles < 1:
        raise UsageError(f"quantiles must be at least 1, but are {quantiles}")
    if examples < 0:
        raise UsageError(f"examples must be at least 0, but are {examples}")
