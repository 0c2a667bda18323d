"""A teacher: an autoregressive model from text to text, whose translations another learns from.

It is one of ours, or any CTranslate2 model directory that holds the sentencepiece models it was trained with.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sentencepiece

from nmla.config import COMPUTE_TYPES
from nmla.data.corpus import TOKENIZER
from nmla.decoding.ctranslate import POSITIONS, CTranslator, Written
from nmla.errors import DataError, UsageError
from nmla.files import sha256
from nmla.models.autoregressive import AutoregressiveTransformer
from nmla.models.pretrained import CONFIG, WEIGHTS, load_model, read_config
from nmla.text.tokenizer import EOS, Tokenizer

MODEL = "model.bin"  # of CTranslate2
SEPARATE = ("source.spm", "target.spm")  # one sentencepiece model for each language, as OPUS-MT has them
JOINT = ("sentencepiece.bpe.model", "sentencepiece.model", "spiece.model", "spm.model", "tokenizer.model")
VOCABULARIES = tuple(f"{side}_vocabulary.{kind}" for side in ("source", "target", "shared") for kind in ("json", "txt"))
SPARE = 20  # positions that a translation may take beyond those of its source
FOREIGN_POSITIONS = 512  # that models of others have, most of them; who needs more is not translated


@dataclass(frozen=True)
class Format:
    """What a model of others wants around a sentence: languages, for those that know several."""

    source_prefix: Sequence[str] = ()
    source_suffix: Sequence[str] | None = None  # by default its end, unless the model adds that itself
    target_prefix: Sequence[str] = ()


class Teacher:
    """Translates texts, and tells how likely it finds translations of others."""

    def __init__(
        self,
        directory: Path,
        *,
        compute_type: str = "float32",
        workers: int = 1,
        threads: int = 1,
        form: Format | None = None,
    ) -> None:
        if compute_type not in COMPUTE_TYPES:
            raise UsageError(f"compute_type must be one of {', '.join(COMPUTE_TYPES)}, but is {compute_type!r}")
        self.tokenizer: Tokenizer | None = None
        self.max_positions = POSITIONS
        self._prefix: list[str] = []
        self._suffix: list[str] = []
        self._target_prefix: list[str] = []
        check_teacher(directory, form)
        if is_ours(directory):
            self._load_ours(directory, compute_type=compute_type, workers=workers, threads=threads)
        else:
            self._load_theirs(directory, form or Format(), compute_type=compute_type, workers=workers, threads=threads)

    def _load_ours(self, directory: Path, **options: Any) -> None:
        model, tokenizer = load_model(directory)
        assert isinstance(model, AutoregressiveTransformer)
        self.tokenizer = tokenizer
        self._suffix = [tokenizer.piece(EOS)]
        if model.config.positions == "learned":
            self.max_positions = model.config.max_positions
        self.max_source_tokens = self.max_positions // 2 - SPARE  # as many again, and some, can be written
        self._translator = CTranslator.of(model, tokenizer, **options)

    def _load_theirs(self, directory: Path, form: Format, **options: Any) -> None:
        self._source_pieces, self._target_pieces = _sentencepieces(directory)
        try:
            self._translator = CTranslator(directory, **options)
        except (RuntimeError, OSError, ValueError) as error:
            raise DataError(f"{directory}: the CTranslate2 model cannot be loaded: {error}") from None
        config = self._translator.config
        end = [] if config.get("add_source_eos") else [config.get("eos_token", "</s>")]
        self._prefix = list(form.source_prefix)
        self._suffix = end if form.source_suffix is None else list(form.source_suffix)
        self._target_prefix = list(form.target_prefix)
        self.max_positions = FOREIGN_POSITIONS
        self.max_source_tokens = FOREIGN_POSITIONS - len(self._prefix) - len(self._suffix)

    @property
    def pretokenised(self) -> bool:
        """Whether it wants text that is split already, with "@@" inside words."""
        return self.tokenizer is not None and self.tokenizer.pretokenised

    def source_tokens(self, text: str) -> list[str]:
        """What the model is given of a text, without what it wants around it."""
        if self.tokenizer is not None:
            return [self.tokenizer.piece(token) for token in self.tokenizer.encode(text)]
        return list(self._source_pieces.encode(text, out_type=str))

    def target_tokens(self, text: str) -> list[str]:
        if self.tokenizer is not None:
            return self.source_tokens(text)
        return list(self._target_pieces.encode(text, out_type=str))

    def text(self, tokens: list[str]) -> str:
        """What the model wrote, as text."""
        if self.tokenizer is not None:
            return self.tokenizer.decode([self.tokenizer.id(token) for token in tokens])
        return str(self._target_pieces.decode(tokens))

    def write(self, sources: Sequence[list[str]], beam_size: int = 5, batch_size: int | None = None) -> list[Written]:
        """Translations of sources of at most `max_source_tokens` tokens each, `batch_size` of them at once if given."""
        around = [[*self._prefix, *source, *self._suffix] for source in sources]
        written = self._translator.write(
            around, beam_size, self._target_prefix, self.max_positions, batch_size=batch_size
        )
        return [best for best, *_ in written]

    def translate(self, texts: Sequence[str], beam_size: int = 5, batch_size: int | None = None) -> list[str]:
        sources = [self.source_tokens(text) for text in texts]
        return [self.text(of.tokens) for of in self.write(sources, beam_size, batch_size)]

    def score(
        self, texts: Sequence[str], candidates: Sequence[Sequence[str]], *, alone: bool = False
    ) -> list[list[float]]:
        """How good the teacher finds each of the candidates for each text: its log-probability per token.

        All are scored in one call, so that few, or long ones, do not wait for each other; with `alone` the last bits
        do not depend on the others. What is too long for the teacher is minus infinity. With a teacher's scores the
        best of several lengths of a fixed-length model is found, for instance.
        """
        sources, targets = [], []
        for text, of_text in zip(texts, candidates, strict=True):
            source = [*self._prefix, *self.source_tokens(text), *self._suffix]
            sources += [source] * len(of_text)
            targets += [[*self._target_prefix, *self.target_tokens(candidate)] for candidate in of_text]
        given = len(self._target_prefix)  # which no candidate chose
        pairs = list(zip(sources, targets, strict=True))
        fit = [max(len(source), len(target) + 1) <= self.max_positions for source, target in pairs]
        short = [pair for pair, fits in zip(pairs, fit, strict=True) if fits]
        own_sources, own_targets = [source for source, _ in short], [target for _, target in short]
        totals = iter(self._translator.score(own_sources, own_targets, given, alone=alone) if short else [])
        means = iter(
            [
                next(totals) / (len(target) - given + 1) if fits else -math.inf
                for target, fits in zip(targets, fit, strict=True)
            ]
        )
        return [[next(means) for _ in of_text] for of_text in candidates]


def is_ours(directory: Path) -> bool:
    """Whether it is a model of ours; refuse what is no model at all."""
    if not directory.is_dir():
        raise UsageError(f"{directory}: a teacher must be a model directory, but there is none here")
    ours = (directory / CONFIG).is_file() and (directory / WEIGHTS).is_file()
    if not ours and not (directory / MODEL).is_file():
        raise UsageError(
            f"{directory}: a teacher must be a model of ours or of CTranslate2, but holds neither {WEIGHTS} nor {MODEL}"
        )
    return ours


def check_teacher(directory: Path, form: Format | None) -> None:
    """Refuse, before any long work, what cannot teach."""
    if not is_ours(directory):
        _sentencepieces(directory)
        _refuse_unknown(directory, form or Format())
        return
    if form is not None and form != Format():
        raise UsageError(f"{directory}: a model of ours must have no prefix or suffix, but one is given")
    config = read_config(directory)
    if config["model_type"] != "autoregressive":
        raise UsageError(f"{directory}: a teacher must be an autoregressive model, but is {config['model_type']}")
    if config["positions"] == "learned" and config["max_positions"] < (least := 2 * SPARE + 2):
        raise UsageError(
            f"{directory}: a teacher must have at least {least} positions, but has {config['max_positions']}"
        )


def speaks(directory: Path, tokenizer: Tokenizer) -> bool:
    """Whether a teacher is one of ours with this vocabulary."""
    return (
        is_ours(directory)
        and (directory / TOKENIZER).is_file()
        and ((directory / TOKENIZER).read_bytes() == tokenizer.model)
    )


def wants_split_text(directory: Path) -> bool:
    """Whether a teacher is one of ours that takes words split by "@@"."""
    return (
        is_ours(directory) and (directory / TOKENIZER).is_file() and Tokenizer.load(directory / TOKENIZER).pretokenised
    )


def _refuse_unknown(directory: Path, form: Format) -> None:
    """A mistyped language would be an unknown word, and all translations wrong."""
    source = [*form.source_prefix, *(form.source_suffix or ())]
    for side, tokens in (("source", source), ("target", form.target_prefix)):
        known = _vocabulary(directory, side)
        for token in tokens:
            if known and token not in known:
                raise UsageError(f"{directory}: {token!r} must be in the model's {side} vocabulary, but is not")


def _vocabulary(directory: Path, side: str) -> set[str]:
    """The words that a CTranslate2 model knows on one side; none if it does not say."""
    for name in (f"{side}_vocabulary", "shared_vocabulary"):
        if (path := directory / f"{name}.json").is_file():
            try:
                return set(json.loads(path.read_text(encoding="utf-8")))
            except (ValueError, TypeError) as error:
                raise DataError(f"{path}: must be a list of words, but: {error}") from None
        if (path := directory / f"{name}.txt").is_file():
            return set(path.read_text(encoding="utf-8").split("\n"))
    return set()


def identity(directory: Path) -> dict[str, str]:
    """What a teacher is known by, whatever its directory is called: the hash of all it writes with."""
    names = (WEIGHTS, CONFIG, *JOINT) if is_ours(directory) else (MODEL, CONFIG, *SEPARATE, *JOINT, *VOCABULARIES)
    return {name: sha256(directory / name) for name in names if (directory / name).is_file()}


def _sentencepieces(
    directory: Path,
) -> tuple[sentencepiece.SentencePieceProcessor, sentencepiece.SentencePieceProcessor]:
    found = [name for name in JOINT if (directory / name).is_file()]
    names = SEPARATE if all((directory / name).is_file() for name in SEPARATE) else tuple(found[:1] * 2)
    if not names:
        raise UsageError(
            f"{directory}: a CTranslate2 model must have its sentencepiece models beside it, {' and '.join(SEPARATE)} "
            f"or one of {', '.join(JOINT)}, but has none"
        )
    try:
        source, target = (sentencepiece.SentencePieceProcessor(model_file=str(directory / name)) for name in names)
    except (RuntimeError, OSError) as error:
        raise DataError(f"{directory}: the sentencepiece model cannot be read: {error}") from None
    return source, target
