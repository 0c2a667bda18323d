"""All metrics of a system's outputs, with confidence intervals and a paired test against a baseline's."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import sacrebleu

from nmla.errors import DataError
from nmla.text.lines import read_lines

SAMPLES = 1000  # of the bootstrap
SEED = 12345  # sacrebleu's own

DIGITS = {"brevity penalty": 3, "length ratio": 3, "entropy": 3, "METEOR": 5}

Lines = Sequence[str]
References = Sequence[Sequence[str | None]]  # None where a sentence has fewer references
Counts = npt.NDArray[np.float64]  # what a metric counts, a row for each sentence
Score = Callable[[Counts], Sequence[float]]  # of each row, which is a sum over sentences


@dataclass(frozen=True)
class Measured:
    """A metric's score, where asked for with its 95 % interval, and what it is beyond the baseline's."""

    name: str
    score: float
    signature: str
    interval: tuple[float, float] | None = None
    difference: float | None = None  # to the baseline's
    difference_interval: tuple[float, float] | None = None
    p_value: float | None = None  # that a difference this large is chance


def measure(
    hypotheses: Lines,
    references: References,
    *,
    baseline: Lines | None = None,
    samples: int = 0,
    tokenised: bool = False,
    only: Sequence[str] = ("BLEU", "chrF", "TER"),
) -> list[Measured]:
    """BLEU, chrF and TER by sacrebleu, then BLEU's brevity penalty and length ratio, which have no interval.

    Args:
        hypotheses: one output per sentence.
        references: one or more lists as long as `hypotheses`; None where a sentence has fewer references.
        baseline: another system's outputs.
        samples: how often the sentences are drawn anew for intervals and test; 0 for none.
        tokenised: the text is split into tokens already, and BLEU takes them as they are.
        only: which of the three.
    """
    _check_references(hypotheses, references)
    if baseline is not None:
        check_parallel(hypotheses, [("the baseline", baseline)])
    # By force: what it warns of, text that is split already, the command tells by its own options' names.
    bleu = sacrebleu.BLEU(tokenize="none", force=True) if tokenised else sacrebleu.BLEU(force=True)
    metrics: dict[str, Any] = {"BLEU": bleu, "chrF": sacrebleu.CHRF(), "TER": sacrebleu.TER()}
    measured = [_measure(name, metrics[name], hypotheses, references, baseline, samples) for name in only]
    own = bleu.corpus_score(hypotheses, references)  # type: ignore[arg-type]  # None is right, though it does not say so
    return [
        *measured,
        Measured("brevity penalty", own.bp, "of BLEU"),
        Measured("length ratio", own.sys_len / max(own.ref_len, 1), "of outputs to references, in BLEU's words"),
    ]


def _measure(
    name: str, metric: Any, hypotheses: Lines, references: References, baseline: Lines | None, samples: int
) -> Measured:
    systems = [hypotheses] if baseline is None else [hypotheses, baseline]
    counts = [_counts(metric, of, references) for of in systems]
    if samples and len(hypotheses) > 1:  # of one sentence there is no interval
        metric.n_bootstrap, metric.seed = samples, SEED  # for the signature
    return compare(name, str(metric.get_signature()), _score_each(metric), counts, samples)


def _counts(metric: Any, hypotheses: Lines, references: References) -> Counts:
    return np.array(metric._extract_corpus_statistics(hypotheses, references), np.float64)


def _score_each(metric: Any) -> Score:
    return lambda sums: [metric._compute_score_from_stats(of).score for of in sums]


def bleu_counts(hypotheses: Lines, references: References) -> Counts:
    """What BLEU counts in each sentence: enough to compare systems whose outputs are not at hand."""
    _check_references(hypotheses, references)
    return _counts(sacrebleu.BLEU(force=True), hypotheses, references)


def bleu_beyond(own: Counts, baseline: Counts, samples: int = SAMPLES) -> list[float]:
    """How far a system's BLEU is beyond a baseline's, then that difference's interval, as `measure` has them."""
    found = compare("BLEU", "", _score_each(sacrebleu.BLEU(force=True)), [own, baseline], samples)
    assert found.difference is not None
    return [found.difference, *(found.difference_interval or ())]


def compare(name: str, signature: str, score_each: Score, counts: Sequence[Counts], samples: int) -> Measured:
    """A metric's score of a system from what it counts in each sentence, beside a baseline's if that comes second."""
    systems, sentences = len(counts), len(counts[0])
    sums = [of.sum(0) for of in counts]
    generator = np.random.default_rng(SEED)
    for _ in range(samples):  # one at a time: all together would not fit where there are many sentences
        drawn = np.bincount(generator.choice(sentences, size=sentences), minlength=sentences).astype(np.float64)
        sums += [drawn @ of for of in counts]  # the same sentences of both
    (score, *others), *draws = np.array(score_each(np.stack(sums))).reshape(-1, systems)
    difference = float(score - others[0]) if others else None
    measured = Measured(name, float(score), signature, difference=difference)
    if not samples or sentences == 1:  # of which all draws are the same
        return measured
    own, *of_others = np.array(draws).T
    measured = replace(measured, interval=_interval(own))
    if difference is None:
        return measured
    differences = own - of_others[0]
    # How often a difference strays from the mean one as far as the one that was found is from none.
    strays = int((np.abs(differences - differences.mean()) >= abs(difference)).sum())
    return replace(measured, difference_interval=_interval(differences), p_value=(strays + 1) / (samples + 1))


def _interval(values: npt.NDArray[np.float64]) -> tuple[float, float]:
    """The middle 95 %."""
    ordered = np.sort(values)
    left = len(ordered) // 40
    return float(ordered[left]), float(ordered[-1 - left])


def table(measured: Sequence[Measured], form: str) -> str:
    """One metric a line, or JSON with all digits."""
    if form == "json":
        return json.dumps([asdict(one) for one in measured], indent=2)
    lines = []
    for one in measured:
        digits = DIGITS.get(one.name, 2)
        columns = [one.name, f"{one.score:.{digits}f}"]
        if one.interval is not None:
            columns.append(f"95% {_range(one.interval, digits)}")
        if one.difference is not None:
            columns.append(f"{one.difference:+.{digits}f} to the baseline")
        if one.difference_interval is not None:
            columns.append(f"95% {_range(one.difference_interval, digits)}, p = {one.p_value:.4f}")
        lines.append("\t".join([*columns, one.signature]))
    return "\n".join(lines)


def _range(interval: tuple[float, float], digits: int) -> str:
    return f"[{interval[0]:.{digits}f}, {interval[1]:.{digits}f}]"


def read_references(paths: Sequence[Path]) -> list[list[str | None]]:
    """The references of files, one a line; a blank line says that there is none, if another file has one."""
    files = [read_lines(path) for path in paths]
    if files[0] and not any(line.strip() for lines in files for line in lines):
        raise DataError(f"{' and '.join(map(str, paths))}: must hold text, but all lines are blank")
    references = [[line if line.strip() else None for line in lines] for lines in files]
    for row, of_row in enumerate(zip(*references, strict=False)):  # who knows how many there must be counts them
        if not any(of_row):
            references[0][row] = ""
    return references


def first_references(references: References) -> list[str]:
    """Of each sentence the first there is."""
    return [next((of for of in of_one if of is not None), "") for of_one in zip(*references, strict=True)]


def _check_references(hypotheses: Lines, references: References) -> None:
    check_parallel(hypotheses, [(f"reference {number}", lines) for number, lines in enumerate(references, start=1)])


def check_parallel(
    hypotheses: Sequence[object], others: Sequence[tuple[str, Sequence[object]]], each: str = "output"
) -> None:
    """Refuse files, each given with its name, that do not have a line for `each` of what is to be scored."""
    if not hypotheses:
        raise DataError(f"there must be at least one {each} to score, but there is none")
    for name, lines in others:
        if len(lines) != len(hypotheses):
            raise DataError(f"{name} must have one line per {each}, but has {len(lines)} for {len(hypotheses)}")
