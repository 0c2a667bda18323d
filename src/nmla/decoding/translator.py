"""The one way from strings to strings."""

import asyncio
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from inspect import signature
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelHubMixin, snapshot_download
from torch import Tensor

from nmla.config import Decoding
from nmla.data.batching import pad
from nmla.decoding.ngram_lm import NgramLM
from nmla.decoding.parallel import ParallelDecoder, output_positions
from nmla.decoding.sequential import SequentialDecoder
from nmla.decoding.teacher import Teacher
from nmla.decoding.translation import Token, Translation
from nmla.errors import DataError, UsageError
from nmla.files import new_file, write_text
from nmla.models.autoregressive import AutoregressiveTransformer
from nmla.models.pretrained import CARD, DECODING, FILES, LANGUAGE_MODEL, load_model, save_model
from nmla.models.transformer import ParallelTransformer, Transformer
from nmla.text.tokenizer import BLANK, EOS, Tokenizer

MAX_SOURCE_TOKENS = 512  # longer input is translated in pieces: attention's memory grows with the square
LINES_AT_ONCE = 1024  # of a stream: enough for full batches, few enough for flat memory
SENTENCE_ENDS, CLAUSE_ENDS = (".", "!", "?", "…"), (",", ";", ":", "–", "—")  # before a space
WIDE_SENTENCE_ENDS, WIDE_CLAUSE_ENDS = ("。", "！", "？"), ("，", "；", "：", "、")  # after which there need be none
CLOSING = "\"'”’»›)]}」』）▁"  # may follow the end of a sentence
ONE_STRING = "the texts must be a list of strings, but are one string; translate() takes one"


class Translator(ModelHubMixin):
    """Translates text with a trained model of any family; many threads may use one.

    >>> translator = Translator.load(directory)  # doctest: +SKIP
    >>> translator.translate("the old farmer sees a boat tonight")  # doctest: +SKIP
    >>> translator.push_to_hub("me/my-model")  # doctest: +SKIP
    >>> translator = Translator.from_pretrained("me/my-model")  # doctest: +SKIP
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        decoding: Decoding | None = None,
        lm: NgramLM | None = None,
        teacher: Teacher | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.decoding = decoding or Decoding()  # what is done unless a call says otherwise
        self.lm = lm  # for beam search
        self.teacher = teacher  # chooses among the `beam_size` translations that are found
        self.card: str | None = None  # what the model's own directory says of it
        if teacher is not None and teacher.pretokenised and not tokenizer.pretokenised:
            raise UsageError("the teacher of a model for raw text must take raw text, but wants it split already")
        if isinstance(model, AutoregressiveTransformer):
            self._sequential = SequentialDecoder(model, tokenizer)
        else:
            assert isinstance(model, ParallelTransformer)
            self._parallel = ParallelDecoder(model, tokenizer, self.max_source_tokens + 1)

    @classmethod
    def load(
        cls, directory: str | Path, lm: str | Path | None = None, teacher: str | Path | None = None
    ) -> "Translator":
        """The translator of a model directory, with the decoding and language model that were tuned for it, if any.

        `lm` is another language model, in one of the forms that `nmla lm train` writes; `teacher` an autoregressive
        model, of ours or of CTranslate2, that chooses among the translations that a search found.
        """
        directory = Path(directory)
        model, tokenizer = load_model(directory)
        path = Path(lm) if lm is not None else directory / LANGUAGE_MODEL
        language_model = NgramLM.load(path, tokenizer) if lm is not None or path.exists() else None
        rescorer = None
        if teacher is not None:
            rescorer = Teacher(Path(teacher), workers=torch.get_num_threads())
        translator = cls(model.eval(), tokenizer, load_decoding(directory), language_model, rescorer)
        if (directory / CARD).is_file():
            translator.card = (directory / CARD).read_text(encoding="utf-8", errors="replace")
        return translator

    def _save_pretrained(self, save_directory: Path) -> None:
        save_model(self.model, self.tokenizer, save_directory)
        if self.card is not None:
            write_text(save_directory / CARD, self.card)
        (save_directory / DECODING).unlink(missing_ok=True)
        if self.decoding != Decoding():
            save_decoding(self.decoding, save_directory)
        if self.lm is None:
            (save_directory / LANGUAGE_MODEL).unlink(missing_ok=True)
        else:
            with new_file(save_directory / LANGUAGE_MODEL) as aside:  # the one that is there may be this very one
                self.lm.save(aside, self.tokenizer)

    @classmethod
    def _from_pretrained(
        cls, *, model_id: str, lm: str | Path | None = None, teacher: str | Path | None = None, **download: Any
    ) -> "Translator":
        if unknown := download.keys() - signature(snapshot_download).parameters.keys():
            raise UsageError(f"from_pretrained takes lm, teacher and how to download, but not {min(unknown)}")
        if not Path(model_id).is_dir():
            model_id = snapshot_download(model_id, allow_patterns=[*FILES, DECODING, LANGUAGE_MODEL], **download)
        return cls.load(model_id, lm, teacher)

    def translate(self, text: str, **options: Any) -> str:
        return self.translate_batch([text], **options)[0].text

    def translate_batch(self, texts: Sequence[str], **options: Any) -> list[Translation]:
        """Translate `texts`; results stand in their order. `options` are those of :class:`nmla.config.Decoding`.

        A blank line comes back as it is. A line longer than the model can take is split at the end of a sentence, of a
        clause or of a word, in this order, and never cut. Unless `fast` is asked for, a line's translation does not
        depend on the others, to the last bit.
        """
        settings = self.settings(**options)
        return self._translate(texts, [settings])[0]

    def translate_each(self, texts: Sequence[str], tried: Sequence[Decoding]) -> list[list[str]]:
        """The texts' translations under each of several settings, with one pass of the network for all of them."""
        if self.model.config.family not in ("ctc", "sctc"):
            raise UsageError(f"decoding is tuned for ctc and sctc models, but this is {self.model.config.family}")
        translated = self._translate(texts, [self._checked(one) for one in tried])
        return [[translation.text for translation in of] for of in translated]

    def _translate(self, texts: Sequence[str], tried: list[Decoding]) -> list[list[Translation]]:
        texts = _checked_texts(texts)
        parts = [self._parts(text) for text in texts]
        flat = [part for of_text in parts for part in of_text]
        # A teacher chooses among all that were found, not among those that are told.
        found = [replace(one, num_hypotheses=one.beam_size) for one in tried] if self.teacher else tried
        if self.model.config.family == "autoregressive":
            done = [self._sequential.translations(flat, settings) for settings in found]
        else:
            done = self._parallel.translations(flat, found, self.lm)
        if self.teacher:
            of_parts = [
                text if len(of_text) == 1 else self.tokenizer.decode(part[:-1], join=False)
                for of_text, text in zip(parts, texts, strict=True)
                for part in of_text
            ]
            done = [self._rescored(of_parts, of, settings) for of, settings in zip(done, tried, strict=True)]
        return [self._whole_lines(of, parts, texts) for of in done]

    def _whole_lines(
        self, done: list[Translation], parts: list[list[list[int]]], texts: Sequence[str]
    ) -> list[Translation]:
        rest = map(self._joined, done)
        return [
            self._join([next(rest) for _ in of_text], of_text, text) for of_text, text in zip(parts, texts, strict=True)
        ]

    def _rescored(self, sources: list[str], done: list[Translation], settings: Decoding) -> list[Translation]:
        """The translations that the teacher finds best, by the logarithm of their probability per token."""
        assert self.teacher is not None
        found = [[one, *one.alternatives] for one in done]
        texts = [[one.text for one in of] for of in found]
        if not self.teacher.pretokenised:
            sources = list(map(self.tokenizer.joined, sources))
            texts = [list(map(self.tokenizer.joined, of)) for of in texts]
        scores = self.teacher.score(sources, texts, alone=not settings.fast)
        best = []
        for of, of_scores in zip(found, scores, strict=True):
            scored = [replace(one, score=score, alternatives=()) for one, score in zip(of, of_scores, strict=True)]
            first, *others = sorted(scored, key=lambda one: -one.score)
            best.append(replace(first, alternatives=tuple(others[: settings.num_hypotheses - 1])))
        return best

    def translate_iterable(self, texts: Iterable[str], **options: Any) -> Iterator[Translation]:
        """Translations of a stream of any length, in order, some lines at a time."""
        if isinstance(texts, str):
            raise UsageError(ONE_STRING)
        stream = iter(texts)
        while lines := list(islice(stream, LINES_AT_ONCE)):
            yield from self.translate_batch(lines, **options)

    async def translate_async(self, texts: Sequence[str], **options: Any) -> list[Translation]:
        """:meth:`translate_batch` for programs that do other things meanwhile."""
        return await asyncio.to_thread(self.translate_batch, texts, **options)

    @torch.inference_mode()
    def probabilities(self, text: str) -> Tensor:
        """``(T, V)``: what the model would say at each output position, under its blank penalty; for pictures."""
        source, lengths = pad([[*self.tokenizer.encode(text), EOS]])
        logits_TV = self.model(source, lengths).logits[0]
        logits_TV[:, BLANK] -= self.decoding.blank_penalty  # 0 of models that know no blank
        return logits_TV.softmax(-1)

    def settings(self, **options: Any) -> Decoding:
        """This translator's decoding with these changes; refuses what it cannot do."""
        settings = self._checked(replace(self.decoding, **options))
        for name in ("alpha", "beta"):
            if options.get(name) and settings.beam_size == 1:
                raise UsageError(f"{name} is a weight of a search, so beam_size must be above 1, but is 1")
        return settings

    def _checked(self, settings: Decoding) -> Decoding:
        family = self.model.config.family
        for name in ("blank_penalty", "alpha", "beta"):
            if getattr(settings, name) and family not in ("ctc", "sctc"):
                raise UsageError(f"{name} of {family} models must be 0, but is {getattr(settings, name)}")
        if settings.beam_size == 1 and self.teacher is not None:
            raise UsageError("beam_size must be above 1, so that a teacher has something to choose from, but is 1")
        if settings.alpha and self.lm is None:
            raise UsageError(f"alpha must be 0 without a language model, but is {settings.alpha}")
        return settings

    @property
    def max_source_tokens(self) -> int:
        """The longest input that is translated in one piece."""
        config = self.model.config
        if config.positions == "sinusoidal":
            return MAX_SOURCE_TOKENS
        if config.family == "autoregressive":  # a translation may be longer than its source
            return max(min(MAX_SOURCE_TOKENS, config.max_positions // 2 - 20), 1)
        return min(MAX_SOURCE_TOKENS, config.max_positions // output_positions(config, 1) - 1)  # and EOS

    def _parts(self, text: str) -> list[list[int]]:
        """Token ids in parts that the model can take, each closed by EOS; none for a blank line."""
        tokens = self.tokenizer.encode(text)
        parts = []
        while len(tokens) > self.max_source_tokens:
            end = self._cut(tokens, self.max_source_tokens)
            parts.append([*tokens[:end], EOS])
            tokens = tokens[end:]
        return [*parts, [*tokens, EOS]] if tokens else parts

    def _cut(self, tokens: list[int], most: int) -> int:
        """Where to end a part: where a sentence does, or a clause, if that is not too early; else before a word."""
        pieces = [self.tokenizer.piece(token) for token in tokens[: most + 1]]
        inside = "@@" if self.tokenizer.pretokenised else None  # ends what the next unit continues
        words = {
            i
            for i in range(1, most + 1)
            if self.tokenizer.starts_word(tokens[i]) and not (inside and pieces[i - 1].endswith(inside))
        }
        for spaced, unspaced in ((SENTENCE_ENDS, WIDE_SENTENCE_ENDS), (CLAUSE_ENDS, WIDE_CLAUSE_ENDS)):
            for i in range(most, most // 2, -1):
                before = "".join(pieces[max(i - 3, 0) : i]).rstrip(CLOSING)
                if before.endswith(unspaced) or (i in words and before.endswith(spaced)):
                    return i
        return max(words, default=most)  # a single word that long is split where it must be

    def _joined(self, of: Translation) -> Translation:
        """With its units, if there are such, joined to words."""
        if not self.tokenizer.pretokenised:
            return of
        others = tuple(map(self._joined, of.alternatives))
        return replace(of, text=self.tokenizer.joined(of.text), alternatives=others)

    def _join(self, parts: list[Translation], sources: list[list[int]], text: str) -> Translation:
        """The translation of a whole line from those of its parts; alternatives only where there is one."""
        if not parts:
            return Translation(text)
        if len(parts) == 1:
            return parts[0]
        joined = ""
        tokens: list[Token] = []
        start = 0
        for part, source in zip(parts, sources, strict=True):
            joined += (" " if joined and self.tokenizer.starts_word(source[0]) else "") + part.text
            last = len(source) - 2  # the end of a part is not in the line
            tokens += [replace(token, source=min(token.source, last) + start) for token in part.tokens]
            start += last + 1
        score = sum(part.score for part in parts)
        if self.teacher is not None:  # which tells means per token
            sizes = [len(self.tokenizer.encode(part.text)) + 1 for part in parts]
            score = sum(size * part.score for size, part in zip(sizes, parts, strict=True)) / sum(sizes)
        return Translation(
            joined,
            score,
            tuple(tokens),
            entropy=sum(part.entropy for part in parts),
            positions=sum(part.positions for part in parts),
            blanks=sum(part.blanks for part in parts),
            parts=len(parts),
        )


def _checked_texts(texts: Iterable[str]) -> list[str]:
    if isinstance(texts, str):
        raise UsageError(ONE_STRING)
    texts = list(texts)
    for number, text in enumerate(texts, start=1):
        try:
            text.encode("utf-8")
        except (AttributeError, UnicodeEncodeError):
            raise UsageError(f"text {number} must be a string of Unicode characters, but is {text!r:.80}") from None
    return texts


def save_decoding(decoding: Decoding, directory: Path) -> None:
    """Keep settings beside a model, so that it is decoded like that from now on."""
    changed = {name: value for name, value in asdict(decoding).items() if value != getattr(Decoding(), name)}
    write_text(directory / DECODING, json.dumps(changed, indent=2) + "\n")


def load_decoding(directory: Path) -> Decoding:
    if not (directory / DECODING).is_file():
        return Decoding()
    try:
        return Decoding(**json.loads((directory / DECODING).read_text(encoding="utf-8")))
    except (TypeError, ValueError, UsageError) as error:
        raise DataError(f"{directory / DECODING}: must hold settings of decoding, but: {error}") from None
