"""Scores of translations, each with the signature that says how it was computed."""

from collections.abc import Sequence
from dataclasses import dataclass

import sacrebleu

from nmla.decoding.translation import Translation


@dataclass(frozen=True)
class Scores:
    bleu: float
    chrf: float
    length_ratio: float  # output words to reference words, as BLEU counts them
    brevity_penalty: float  # BLEU's
    precisions: tuple[float, ...]  # in percent, of n-grams of orders 1 to 4, as they are: BLEU smooths them
    bleu_signature: str
    chrf_signature: str


def score(hypotheses: Sequence[str], references: Sequence[Sequence[str | None]]) -> Scores:
    """Corpus BLEU and chrF by sacrebleu.

    Args:
        hypotheses: one output per sentence.
        references: one or more lists as long as `hypotheses`; None where a sentence has fewer references.
    """
    bleu, chrf = sacrebleu.BLEU(force=True), sacrebleu.CHRF()
    # sacrebleu takes None for an absent reference, though its types do not say so
    bleu_score = bleu.corpus_score(hypotheses, references)  # type: ignore[arg-type]
    chrf_score = chrf.corpus_score(hypotheses, references)  # type: ignore[arg-type]
    return Scores(
        bleu=bleu_score.score,
        chrf=chrf_score.score,
        length_ratio=bleu_score.sys_len / max(bleu_score.ref_len, 1),
        brevity_penalty=bleu_score.bp,
        precisions=tuple(
            100 * correct / max(total, 1) for correct, total in zip(bleu_score.counts, bleu_score.totals, strict=True)
        ),
        bleu_signature=str(bleu.get_signature()),
        chrf_signature=str(chrf.get_signature()),
    )


def mean_entropy(translations: Sequence[Translation]) -> float:
    """The model's uncertainty: entropy of its prediction, in nats, mean over all output positions."""
    return sum(t.entropy for t in translations) / max(sum(t.positions for t in translations), 1)


def aligned(targets: Sequence[Sequence[str]]) -> list[list[str | None]]:
    """References as scores want them, a list for the first of each sentence and so on, from all of each sentence."""
    most = max(map(len, targets), default=0)
    return [[of_line[r] if r < len(of_line) else None for of_line in targets] for r in range(most)]
