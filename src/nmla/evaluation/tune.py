"""The decoding that scores best on a validation set, over a grid. The network runs once for many settings."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import pairwise, product
from pathlib import Path

from nmla.config import Decoding
from nmla.decoding.translator import Translator, save_decoding
from nmla.errors import DataError, UsageError
from nmla.evaluation.measure import read_references
from nmla.evaluation.report import surface
from nmla.evaluation.score import Scores, score
from nmla.files import new_file, write_text
from nmla.models.pretrained import LANGUAGE_MODEL
from nmla.progress import progress_bar
from nmla.text.lines import read_lines

LINES_AT_ONCE = 128
PENALTIES = (-1.0, 0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0)
ALPHAS = (0.0, 0.15, 0.3, 0.45, 0.6, 0.8, 1.0)
BETAS = (0.0, 1.0, 2.0, 3.0, 4.5, 6.0)  # and beyond, while the best is the last


@dataclass(frozen=True)
class Tried:
    """A setting and what it came to."""

    decoding: Decoding
    scores: Scores


def tune_model(
    model: Path, source: Path, reference: Sequence[Path], lm: Path | None, beam_size: int, image: Path | None = None
) -> list[Tried]:
    """Tune a model's decoding on files, and keep the best with it, and with that the language model if it helps."""
    sources = read_lines(source)
    references = read_references(reference)
    for path, lines in zip(reference, references, strict=True):
        if len(lines) != len(sources):
            raise DataError(f"{path} must have one line per source, but has {len(lines)} for {len(sources)}")
    if not sources:
        raise DataError(f"{source}: must hold at least one line, but is empty")
    translator = Translator.load(model, lm)
    translator.decoding = Decoding()
    tried = tune(translator, sources, references, beam_size=beam_size)
    if not tried[0].scores.bleu:
        raise DataError(f"{source}: some setting must score above 0 BLEU against {reference[0]}, but none does")
    if image is not None:  # first: if it cannot be written, the model stays as it is
        write_text(image, picture(tried))
    if tried[0].decoding.alpha and lm is not None and translator.lm is not None:
        with new_file(model / LANGUAGE_MODEL) as aside:
            translator.lm.save(aside, translator.tokenizer)
    save_decoding(tried[0].decoding, model)
    return tried


def tune(
    translator: Translator,
    sources: Sequence[str],
    references: Sequence[Sequence[str | None]],
    *,
    beam_size: int = 1,
    penalties: Sequence[float] = PENALTIES,
    alphas: Sequence[float] = ALPHAS,
    betas: Sequence[float] = BETAS,
) -> list[Tried]:
    """All settings that were tried, best first by BLEU; of equals the one nearest to none at all.

    Without a search (`beam_size` 1) only the blank penalty is there to tune. With one, its weights are tuned too: the
    blank penalty is tuned without search first, and of it only that best and none are tried with it. While the best has
    the last weight of the length, `betas` go on, by steps that double.
    """
    Decoding(beam_size=beam_size)  # refuses, before the long work, what cannot be
    if any(low >= high for low, high in pairwise(betas)):
        raise UsageError(f"betas must grow, but are {', '.join(map(str, betas))}")
    base = replace(translator.decoding, beam_size=1, num_hypotheses=1, alpha=0.0, beta=0.0, return_scores=False)
    fast, base = base.fast, replace(base, fast=True)  # its last bits do not matter here
    grid = [replace(base, blank_penalty=penalty) for penalty in penalties]
    tried = _try(translator, sources, references, grid)
    if beam_size > 1:
        best = _sorted(tried)[0].decoding.blank_penalty
        if translator.lm is None:
            alphas = (0.0,)
        searched: list[Tried] = []
        more = betas = list(betas)
        while more:
            grid = [
                replace(base, beam_size=beam_size, blank_penalty=penalty, alpha=alpha, beta=beta)
                for penalty, alpha, beta in product(dict.fromkeys((0.0, best)), alphas, more)
            ]
            searched = _sorted(searched + _try(translator, sources, references, grid))
            at_edge = len(betas) > 1 and searched[0].decoding.beta == betas[-1]
            more = [betas[-1] + 2 * (betas[-1] - betas[-2])] if at_edge else []
            betas = [*betas, *more]
        tried += searched
    return [replace(one, decoding=replace(one.decoding, fast=fast)) for one in _sorted(tried)]


def _try(
    translator: Translator,
    sources: Sequence[str],
    references: Sequence[Sequence[str | None]],
    grid: Sequence[Decoding],
) -> list[Tried]:
    outputs: list[list[str]] = [[] for _ in grid]
    with progress_bar() as bar:
        task = bar.add_task(f"{len(grid)} settings", total=len(sources))
        for start in range(0, len(sources), LINES_AT_ONCE):
            lines = sources[start : start + LINES_AT_ONCE]
            for texts, more in zip(outputs, translator.translate_each(lines, grid), strict=True):
                texts += more
            bar.advance(task, len(lines))
    return [Tried(decoding, score(texts, references)) for decoding, texts in zip(grid, outputs, strict=True)]


def _sorted(tried: list[Tried]) -> list[Tried]:
    def key(one: Tried) -> tuple[float, int, float]:
        settings = one.decoding
        return -one.scores.bleu, settings.beam_size, abs(settings.blank_penalty) + settings.alpha + abs(settings.beta)

    return sorted(tried, key=key)


def lines(tried: Sequence[Tried]) -> list[str]:
    """A table of all that was tried, as TSV."""
    told = ["beam_size\tblank_penalty\talpha\tbeta\tBLEU\tchrF\tlength ratio"]
    for one in tried:
        settings = one.decoding
        weights = f"{settings.beam_size}\t{settings.blank_penalty:g}\t{settings.alpha:g}\t{settings.beta:g}"
        told.append(f"{weights}\t{one.scores.bleu:.2f}\t{one.scores.chrf:.2f}\t{one.scores.length_ratio:.3f}")
    return told


def picture(tried: Sequence[Tried]) -> str:
    """An SVG of BLEU over alpha and beta, one map for each blank penalty; without a search, over the penalty alone."""
    searched = [one for one in tried if one.decoding.beam_size > 1]
    maps = []
    if searched:
        alphas = sorted({one.decoding.alpha for one in searched})
        betas = sorted({one.decoding.beta for one in searched})
        for penalty in sorted({one.decoding.blank_penalty for one in searched}):
            bleu = {
                (one.decoding.alpha, one.decoding.beta): one.scores.bleu
                for one in searched
                if one.decoding.blank_penalty == penalty
            }
            rows = [[bleu[alpha, beta] for beta in betas] for alpha in alphas]
            maps.append((f"BLEU, blank penalty {penalty:g}", "alpha", alphas, "beta", betas, rows))
    plain = sorted((one for one in tried if one.decoding.beam_size == 1), key=lambda one: one.decoding.blank_penalty)
    penalties = [one.decoding.blank_penalty for one in plain]
    maps.append(("BLEU, no search", "", [0.0], "blank penalty", penalties, [[one.scores.bleu for one in plain]]))
    return surface(escape("BLEU on the validation set"), maps)
