"""All metrics of a system's outputs, with confidence intervals and a paired test against a baseline's."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import sacrebleu

from nmla.errors import DataError

SAMPLES = 1000  # of the bootstrap
SEED = 12345  # sacrebleu's own

DIGITS = {"brevity penalty": 3, "length ratio": 3, "entropy": 3, "METEOR": 5}

Lines = Sequence[str]
References = Sequence[Sequence[str | None]]  # None where a sentence has fewer references


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
) -> list[Measured]:
    """BLEU, chrF and TER by sacrebleu, then BLEU's brevity penalty and length ratio, which have no interval.

    Args:
        hypotheses: one output per sentence.
        references: one or more lists as long as `hypotheses`; None where a sentence has fewer references.
        baseline: another system's outputs.
        samples: how often the sentences are drawn anew for intervals and test; 0 for none.
        tokenised: the text is split into tokens already, and BLEU takes them as they are.
    """
    bleu = sacrebleu.BLEU(tokenize="none", force=True) if tokenised else sacrebleu.BLEU()
    metrics: list[Any] = [bleu, sacrebleu.CHRF(), sacrebleu.TER()]
    drawn = _draws(len(hypotheses), samples) if samples else None
    measured = [_measure(metric, hypotheses, references, baseline, drawn) for metric in metrics]
    own = bleu.corpus_score(hypotheses, references)  # type: ignore[arg-type]  # None is right, though it does not say so
    return [
        *measured,
        Measured("brevity penalty", own.bp, "of BLEU"),
        Measured("length ratio", own.sys_len / max(own.ref_len, 1), "of outputs to references, in BLEU's words"),
    ]


def _draws(sentences: int, samples: int) -> npt.NDArray[np.float64]:
    """``(samples, sentences)``: how often each sentence is drawn."""
    drawn = np.random.default_rng(SEED).choice(sentences, size=(samples, sentences), replace=True)
    return np.stack([np.bincount(row, minlength=sentences) for row in drawn]).astype(np.float64)


def _measure(
    metric: Any,
    hypotheses: Lines,
    references: References,
    baseline: Lines | None,
    drawn: npt.NDArray[np.float64] | None,
) -> Measured:
    counts = _counts(metric, hypotheses, references)
    score = metric._aggregate_and_compute(counts)
    name, signature = score.name.removesuffix("2"), str(metric.get_signature())  # chrF2 is what all call chrF
    difference, of_baseline = None, None
    if baseline is not None:
        of_baseline = _counts(metric, baseline, references)
        difference = score.score - metric._aggregate_and_compute(of_baseline).score
    if drawn is None:
        return Measured(name, score.score, signature, difference=difference)
    own = _resampled(metric, counts, drawn)
    signature += f"|bs:{len(drawn)}|seed:{SEED}"
    if of_baseline is None or difference is None:
        return Measured(name, score.score, signature, _interval(own))
    differences = own - _resampled(metric, of_baseline, drawn)
    # As sacrebleu tests: how often a difference strays from the mean one by more than the one that was found.
    apart = np.abs(differences)
    p_value = (int((apart - apart.mean() > abs(difference)).sum()) + 1) / (len(drawn) + 1)
    return Measured(name, score.score, signature, _interval(own), difference, _interval(differences), p_value)


def _counts(metric: Any, hypotheses: Lines, references: References) -> Any:
    """What sacrebleu counts in each sentence; all scores are made from sums of it."""
    return metric._extract_corpus_statistics(hypotheses, references)


def _resampled(metric: Any, counts: Any, drawn: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The metric's score of each draw."""
    return np.array([metric._compute_score_from_stats(sums).score for sums in drawn @ np.array(counts, np.float64)])


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


def check_parallel(hypotheses: Lines, others: Sequence[tuple[str, Sequence[str | None]]]) -> None:
    """Refuse files, each given with its name, that do not have a line for each output."""
    for name, lines in others:
        if len(lines) != len(hypotheses):
            raise DataError(f"{name} must have one line per output, but has {len(lines)} for {len(hypotheses)}")
    if not hypotheses:
        raise DataError("there must be at least one line to score, but there is none")
