"""The one way from strings to strings."""

import asyncio
import json
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelHubMixin, snapshot_download
from torch import Tensor
from torch.nn import functional as F

from nmla.config import Decoding, ModelConfig
from nmla.data.batching import pad
from nmla.decoding.argmax import Hypothesis, argmax_decode
from nmla.decoding.ctranslate import POSITIONS, CTranslator, Written
from nmla.decoding.ngram_lm import NgramLM
from nmla.errors import DataError, UsageError
from nmla.files import write_text
from nmla.models.autoregressive import AutoregressiveTransformer
from nmla.models.pretrained import DECODING, FILES, LANGUAGE_MODEL, load_model, save_model
from nmla.models.transformer import Transformer, copied_state
from nmla.text.tokenizer import BLANK, EOS, PAD, Tokenizer

MAX_SOURCE_TOKENS = 512  # longer input is translated in pieces: attention's memory grows with the square
LINES_AT_ONCE = 1024  # of a stream: enough for full batches, few enough for flat memory
ROUND_TO = 8  # source lengths are padded to a multiple of this
FULL = 96  # output positions that keep a processor busy: as many sentences go together, whatever there is
SENTENCE_ENDS, CLAUSE_ENDS = (".", "!", "?", "…", "。", "！", "？"), (",", ";", ":", "–", "—", "，", "；", "：")


@dataclass(frozen=True)
class Token:
    """A token of a translation."""

    piece: str
    confidence: float  # its probability, where the model was surest of it
    source: int  # the source token it came from, as far as the model tells


@dataclass(frozen=True)
class Translation:
    """One translated line. What the model thought of it is there if `return_scores` asked for it."""

    text: str
    score: float = 0.0  # the logarithm of the path's probability, or of the output's, or what a search maximised
    tokens: tuple[Token, ...] = ()
    alternatives: tuple["Translation", ...] = ()  # the next best, if `num_hypotheses` asked for more than one
    entropy: float = 0.0  # of the model's prediction, in nats, summed over positions
    positions: int = 0  # output positions, blanks included
    parts: int = 1  # into how many pieces a long line was split


class Translator(ModelHubMixin):
    """Translates text with a trained model of any family; many threads may use one.

    >>> translator = Translator.load(directory)  # doctest: +SKIP
    >>> translator.translate("the old farmer sees a boat tonight")  # doctest: +SKIP
    >>> translator.push_to_hub("me/my-model")  # doctest: +SKIP
    >>> translator = Translator.from_pretrained("me/my-model")  # doctest: +SKIP
    """

    def __init__(
        self, model: Transformer, tokenizer: Tokenizer, decoding: Decoding | None = None, lm: NgramLM | None = None
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.decoding = decoding or Decoding()  # what is done unless a call says otherwise
        self.lm = lm  # for beam search
        self._writer: CTranslator | None = None  # an autoregressive model's weights as they are now
        self._lock = threading.Lock()

    @classmethod
    def load(cls, directory: str | Path, lm: str | Path | None = None) -> "Translator":
        """The translator of a model directory, with the decoding and language model that were tuned for it, if any.

        `lm` is another language model, in one of the forms that `nmla lm train` writes.
        """
        directory = Path(directory)
        model, tokenizer = load_model(directory)
        path = Path(lm) if lm is not None else directory / LANGUAGE_MODEL
        language_model = NgramLM.load(path, tokenizer) if lm is not None or path.exists() else None
        return cls(model.eval(), tokenizer, _load_decoding(directory), language_model)

    def _save_pretrained(self, save_directory: Path) -> None:
        save_model(self.model, self.tokenizer, save_directory)
        if self.decoding != Decoding():
            save_decoding(self.decoding, save_directory)
        if self.lm is not None:
            self.lm.save(save_directory / LANGUAGE_MODEL, self.tokenizer)

    @classmethod
    def _from_pretrained(cls, *, model_id: str, **download: Any) -> "Translator":
        if not Path(model_id).is_dir():
            model_id = snapshot_download(model_id, allow_patterns=[*FILES, DECODING, LANGUAGE_MODEL], **download)
        return cls.load(model_id)

    def translate(self, text: str, **options: Any) -> str:
        return self.translate_batch([text], **options)[0].text

    def translate_batch(self, texts: Sequence[str], **options: Any) -> list[Translation]:
        """Translate `texts`; results stand in their order. `options` are those of :class:`nmla.config.Decoding`.

        A blank line comes back as it is. A line longer than the model can take is split at the end of a sentence, of a
        clause or of a word, in this order, and never cut. Unless `fast` is asked for, a line's translation does not
        depend on the others, to the last bit.
        """
        settings = self.settings(**options)
        parts = [self._parts(text) for text in texts]
        flat = [part for of_text in parts for part in of_text]
        if self.model.config.family == "autoregressive":
            done = iter(self._write(flat, settings))
        else:
            done = iter(self._fill_each(flat, [settings])[0])
        return [
            self._join([next(done) for _ in of_text], of_text, text) for of_text, text in zip(parts, texts, strict=True)
        ]

    def translate_each(self, texts: Sequence[str], tried: Sequence[Decoding]) -> list[list[str]]:
        """The texts' translations under each of several settings, with one pass of the network for all of them."""
        if self.model.config.family not in ("ctc", "sctc"):
            raise UsageError(f"decoding is tuned for ctc and sctc models, but this is {self.model.config.family}")
        settings = [self._checked(one) for one in tried]
        parts = [self._parts(text) for text in texts]
        flat = [part for of_text in parts for part in of_text]
        done = [iter(one) for one in self._fill_each(flat, settings)]
        return [
            [self._join([next(of) for _ in part], part, text).text for part, text in zip(parts, texts, strict=True)]
            for of in done
        ]

    def translate_iterable(self, texts: Iterable[str], **options: Any) -> Iterator[Translation]:
        """Translations of a stream of any length, in order, some lines at a time."""
        stream = iter(texts)
        while lines := list(islice(stream, LINES_AT_ONCE)):
            yield from self.translate_batch(lines, **options)

    async def translate_async(self, texts: Sequence[str], **options: Any) -> list[Translation]:
        """:meth:`translate_batch` for programs that do other things meanwhile."""
        return await asyncio.to_thread(self.translate_batch, texts, **options)

    @torch.inference_mode()
    def probabilities(self, text: str) -> Tensor:
        """``(T, V)``: what the model would say at each output position; for pictures and inspection."""
        source, lengths = pad([[*self.tokenizer.encode(text), EOS]])
        return self.model(source, lengths).logits[0].softmax(-1)

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
                raise UsageError(f"{name} of a {family} model must be 0, but is {getattr(settings, name)}")
        if settings.beam_size > 1 and family == "fixed_length":
            raise UsageError(f"beam_size of a {family} model must be 1, but is {settings.beam_size}")
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
        words = [i for i in range(most, 0, -1) if self.tokenizer.starts_word(tokens[i])]
        for ends in (SENTENCE_ENDS, CLAUSE_ENDS):
            for i in words:
                if i > most // 2 and self.tokenizer.piece(tokens[i - 1]).endswith(ends):
                    return i
        return words[0] if words else most  # a single word that long is split where it must be

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

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
            tokens += [replace(token, source=token.source + start) for token in part.tokens]
            start += len(source) - 1  # the end of a part is not in the line
        return Translation(
            joined,
            sum(part.score for part in parts),
            tuple(tokens),
            entropy=sum(part.entropy for part in parts),
            positions=sum(part.positions for part in parts),
            parts=len(parts),
        )

    # Models that write all words at once.

    def _fill_each(self, sentences: list[list[int]], tried: list[Decoding]) -> list[list[Translation]]:
        """All sentences' translations, under each of the settings, which agree on batches."""
        done: list[dict[int, Translation]] = [{} for _ in tried]
        for rows, size, width in self._groups([len(sentence) for sentence in sentences], tried[0]):
            # Sentences that are not there are stood in for, so that the shape is always the same.
            group = [sentences[row] for row in rows] + [sentences[rows[-1]]] * (size - len(rows))
            logits, lengths = self._logits(group, len(rows), width)
            for of, settings in zip(done, tried, strict=True):
                of.update(zip(rows, self._decode(logits, lengths, group, settings), strict=True))
        return [[of[row] for row in range(len(sentences))] for of in done]

    def _groups(self, lengths: list[int], settings: Decoding) -> Iterator[tuple[list[int], int, int]]:
        """Rows that are translated together, as how many, and padded to which length.

        The last bits of a sum depend on the shape of the product it is part of. So by default the shape depends on the
        sentence's own length alone; the others fill what room there is.
        """
        config = self.model.config
        if settings.fast:
            for rows in _batches(lengths, settings, lambda length: output_positions(config, length)):
                yield rows, len(rows), max(lengths[row] for row in rows)
            return
        widest = self.max_source_tokens + 1
        alike: defaultdict[int, list[int]] = defaultdict(list)
        for row, length in enumerate(lengths):
            alike[min(-(-length // ROUND_TO) * ROUND_TO, widest)].append(row)
        for width, rows in sorted(alike.items()):
            # A fixed-length model's positions are as many as it decides: each sentence is alone.
            size = 1 if config.family == "fixed_length" else max(1, -(-FULL // output_positions(config, width)))
            for start in range(0, len(rows), size):
                yield rows[start : start + size], size, width

    @torch.inference_mode()
    def _logits(self, group: list[list[int]], real: int, width: int) -> tuple[Tensor, Tensor]:
        source, source_lengths = pad(group)
        source = F.pad(source, (0, width - source.shape[1]), value=PAD).to(self._device)
        logits, lengths, *_ = self.model(source, source_lengths.to(self._device))
        return logits[:real].float(), lengths[:real].cpu()

    @torch.inference_mode()
    def _decode(self, logits: Tensor, lengths: Tensor, group: list[list[int]], settings: Decoding) -> list[Translation]:
        # One token a position: what collapses is a blank, should a fixed-length model have learned to write it.
        collapse = "ctc" if self.model.config.family == "ctc" else "sctc"
        blank = logits[..., BLANK].clone()
        logits[..., BLANK] -= settings.blank_penalty
        if settings.beam_size > 1:
            from nmla.decoding.ctc_beam import BeamSearch  # numba takes its time to load

            search = BeamSearch(settings.beam_size, settings.top_k, settings.alpha, settings.beta, self.lm)
            found = search(
                logits.cpu(), lengths.tolist(), blank=BLANK, collapse=collapse, num_hypotheses=settings.num_hypotheses
            )
        else:
            found = [[one] for one in argmax_decode(logits, lengths, blank=BLANK, collapse=collapse)]
        told = [
            self._told(of, row[:used], sentence, settings)
            for of, row, used, sentence in zip(found, logits, lengths.tolist(), group, strict=False)
        ]
        logits[..., BLANK] = blank  # for who decodes them again
        return told

    def _told(self, found: list[Hypothesis], logits_TV: Tensor, sentence: list[int], settings: Decoding) -> Translation:
        """The translation of a sentence, and if wanted what the model thought of it: sentence by sentence, for
        probabilities of a whole batch would double its memory."""
        used = len(logits_TV)
        texts = [self.tokenizer.decode(of.tokens) for of in found]
        if not settings.return_scores:
            return Translation(texts[0], alternatives=tuple(map(Translation, texts[1:])), positions=used)
        probs_TV = logits_TV.softmax(-1)
        path = float(probs_TV.amax(-1).log().sum())
        translations = [
            Translation(
                text,
                of.score if settings.beam_size > 1 else path,
                self._tokens(of, probs_TV, len(sentence)),
                entropy=_entropy(probs_TV),
                positions=used,
            )
            for text, of in zip(texts, found, strict=True)
        ]
        return replace(translations[0], alternatives=tuple(translations[1:]))

    def _tokens(self, of: Hypothesis, probs_TV: Tensor, source_tokens: int) -> tuple[Token, ...]:
        ends = [*of.positions, len(probs_TV)][1:]
        confidences = [
            float(probs_TV[begin:end, token].max())
            for token, begin, end in zip(of.tokens, of.positions, ends, strict=True)
        ]
        places = torch.tensor(of.positions, dtype=torch.long)
        sources = copied_state(places, torch.tensor(source_tokens), torch.tensor(len(probs_TV))).tolist()
        pieces = map(self.tokenizer.piece, of.tokens)
        return tuple(map(Token, pieces, confidences, sources))

    # Models that write word by word.

    def _write(self, sentences: list[list[int]], settings: Decoding) -> list[Translation]:
        assert isinstance(self.model, AutoregressiveTransformer)
        with self._lock:
            if self._writer is None:
                device = "cuda" if self._device.type == "cuda" else "cpu"
                workers = torch.get_num_threads()
                self._writer = CTranslator.of(self.model, self.tokenizer, device=device, workers=workers)
        learned = self.model.decoder_positions is not None
        written = self._writer.write(
            [[self.tokenizer.piece(token) for token in sentence] for sentence in sentences],
            settings.beam_size,
            max_positions=self.model.config.max_positions if learned else POSITIONS,
            num_hypotheses=settings.num_hypotheses,
            attention=settings.return_scores,
            alone=not settings.fast,
        )
        translations = [
            [Translation(self._text(of), score=of.score, positions=len(of.tokens) + 1) for of in of_one]
            for of_one in written
        ]
        if settings.return_scores:
            lengths = [len(sentence) for sentence in sentences]
            alone = ([row] for row in range(len(sentences)))
            for rows in _batches(lengths, settings, lambda length: length) if settings.fast else alone:
                told = self._opinions([sentences[row] for row in rows], [written[row][0] for row in rows])
                for row, (entropy, tokens) in zip(rows, told, strict=True):
                    translations[row][0] = replace(translations[row][0], entropy=entropy, tokens=tokens)
        return [replace(best, alternatives=tuple(others)) for best, *others in translations]

    def _text(self, of: Written) -> str:
        return self.tokenizer.decode([self.tokenizer.id(piece) for piece in of.tokens])

    @torch.inference_mode()
    def _opinions(
        self, sentences: list[list[int]], written: list[Written]
    ) -> Iterator[tuple[float, tuple[Token, ...]]]:
        """The entropy of an autoregressive model's predictions, and what it thought of each token it wrote."""
        outputs = [[self.tokenizer.id(piece) for piece in of.tokens] for of in written]
        tensors = (tensor.to(self._device) for pair in (sentences, outputs) for tensor in pad(pair))
        for of, ids, logits_TV in zip(written, outputs, self.model(*tensors).logits, strict=True):
            probs_TV = logits_TV[: len(ids) + 1].float().softmax(-1)
            confidences = [float(probs_TV[t, token]) for t, token in enumerate(ids)]
            yield _entropy(probs_TV), tuple(map(Token, of.tokens, confidences, of.sources))


def _entropy(probs_TV: Tensor) -> float:
    return float(torch.special.entr(probs_TV).sum())


def output_positions(config: ModelConfig, source_tokens: int) -> int:
    """Positions that the decoder fills for a source; where it decides by itself, about as many as the source has."""
    return source_tokens * (config.upsample if config.family in ("ctc", "sctc") else 1)


def _batches(lengths: list[int], settings: Decoding, cost: Any) -> Iterator[list[int]]:
    """Rows of like length together, so that little is padding."""
    batch: list[int] = []
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        rows = len(batch) + 1
        size = rows if settings.batch_type == "examples" else cost(lengths[row]) * rows
        if batch and size > settings.max_batch_size:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def save_decoding(decoding: Decoding, directory: Path) -> None:
    """Keep settings beside a model, so that it is decoded like that from now on."""
    changed = {name: value for name, value in asdict(decoding).items() if value != getattr(Decoding(), name)}
    write_text(directory / DECODING, json.dumps(changed, indent=2) + "\n")


def _load_decoding(directory: Path) -> Decoding:
    if not (directory / DECODING).is_file():
        return Decoding()
    try:
        return Decoding(**json.loads((directory / DECODING).read_text(encoding="utf-8")))
    except (TypeError, ValueError, UsageError) as error:
        raise DataError(f"{directory / DECODING}: must hold settings of decoding, but: {error}") from None
