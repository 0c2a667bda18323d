"""All metrics of a system's outputs, with confidence intervals and a paired test against a baseline's."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
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
    lists = [(f"reference {number}", lines) for number, lines in enumerate(references, start=1)]
    check_parallel(hypotheses, [*lists, ("the baseline", baseline)] if baseline is not None else lists)
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
    # What sacrebleu counts in each sentence; all scores are made from sums of it.
    counts = metric._extract_corpus_statistics(hypotheses, references)
    score, signature = metric._aggregate_and_compute(counts).score, str(metric.get_signature())
    both = [counts]
    difference = None
    if baseline is not None:
        both.append(metric._extract_corpus_statistics(baseline, references))
        difference = score - metric._aggregate_and_compute(both[1]).score
    if not samples:
        return Measured(name, score, signature, difference=difference)
    metric.n_bootstrap, metric.seed = samples, SEED  # for the signature
    signature = str(metric.get_signature())
    own, *others = _resampled(metric, both, samples)
    if difference is None:
        return Measured(name, score, signature, _interval(own))
    differences = own - others[0]
    # How often a difference strays from the mean one as far as the one that was found is from none.
    strays = int((np.abs(differences - differences.mean()) >= abs(difference)).sum())
    return Measured(
        name,
        score,
        signature,
        _interval(own),
        difference,
        _interval(differences),
        (strays + 1) / (samples + 1),
    )


def _resampled(metric: Any, systems: Sequence[Any], samples: int) -> npt.NDArray[np.float64]:
    """``(systems, samples)``: the scores of the same draws of sentences."""
    counts = [np.array(of, np.float64) for of in systems]
    sentences = len(counts[0])
    generator = np.random.default_rng(SEED)
    scores: list[list[float]] = [[] for _ in systems]
    for _ in range(samples):  # one at a time: all together would not fit where there are many sentences
        drawn = np.bincount(generator.choice(sentences, size=sentences), minlength=sentences).astype(np.float64)
        for of, own in zip(scores, counts, strict=True):
            of.append(metric._compute_score_from_stats(drawn @ own).score)
    return np.array(scores)


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
    """The references of files, one a line; a blank line of any but the first says that there is none."""
    first, *others = map(read_lines, paths)
    return [[*first], *([line if line.strip() else None for line in lines] for lines in others)]


def check_parallel(hypotheses: Lines, others: Sequence[tuple[str, Sequence[str | None]]], each: str = "output") -> None:
    """Refuse files, each given with its name, that do not have a line for `each` of what is to be scored."""
    if not hypotheses:
        raise DataError(f"there must be at least one {each} to score, but there is none")
    for name, lines in others:
        if len(lines) != len(hypotheses):
            raise DataError(f"{name} must have one line per {each}, but has {len(lines)} for {len(hypotheses)}")
