"""The one way from strings to strings."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelHubMixin, snapshot_download
from torch import Tensor

from nmla.config import ModelConfig
from nmla.data.batching import pad
from nmla.decoding.argmax import argmax_decode
from nmla.decoding.ctranslate import POSITIONS, CTranslator
from nmla.errors import UsageError
from nmla.models.autoregressive import AutoregressiveTransformer
from nmla.models.pretrained import FILES, load_model, save_model
from nmla.models.transformer import Transformer
from nmla.text.tokenizer import BLANK, EOS, Tokenizer

MAX_SOURCE_TOKENS = 512  # longer input is translated in pieces: attention's memory grows with the square


@dataclass(frozen=True)
class Translation:
    """One translated line and what the model thought of it."""

    text: str
    entropy: float = 0.0  # of the model's prediction, in nats, summed over positions, if it was asked for
    positions: int = 0  # output positions, blanks included
    parts: int = 1  # into how many pieces a long line was split


class Translator(ModelHubMixin):
    """Translates text with a trained model of any family.

    >>> translator = Translator.load(directory)  # doctest: +SKIP
    >>> translator.translate("the old farmer sees a boat tonight")  # doctest: +SKIP
    >>> translator.push_to_hub("me/my-model")  # doctest: +SKIP
    >>> translator = Translator.from_pretrained("me/my-model")  # doctest: +SKIP
    """

    def __init__(self, model: Transformer, tokenizer: Tokenizer) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self._written_by: CTranslator | None = None  # an autoregressive model's weights as they are now

    @classmethod
    def load(cls, directory: str | Path) -> "Translator":
        model, tokenizer = load_model(Path(directory))
        return cls(model.eval(), tokenizer)

    def _save_pretrained(self, save_directory: Path) -> None:
        save_model(self.model, self.tokenizer, save_directory)

    @classmethod
    def _from_pretrained(cls, *, model_id: str, **download: Any) -> "Translator":
        if not Path(model_id).is_dir():
            model_id = snapshot_download(model_id, allow_patterns=[*FILES], **download)
        return cls.load(model_id)

    def translate(self, text: str) -> str:
        return self.translate_batch([text])[0].text

    def translate_batch(
        self, texts: Sequence[str], max_tokens: int = 2048, *, beam_size: int = 1, entropy: bool = False
    ) -> list[Translation]:
        """Translate `texts`, at most `max_tokens` output positions at a time; results stand in the order of `texts`.

        A blank line comes back as it is. A line longer than the model can take is split between words, never cut. An
        autoregressive model searches with `beam_size`. `entropy` also tells how sure the model was.
        """
        if beam_size < 1:
            raise UsageError(f"beam_size must be at least 1, but is {beam_size}")
        if beam_size > 1 and self.model.config.family != "autoregressive":
            raise UsageError(f"beam_size of a {self.model.config.family} model must be 1, but is {beam_size}")
        parts = [self._parts(text) for text in texts]
        flat = [part for of_text in parts for part in of_text]
        outputs = self._write(flat, beam_size) if self.model.config.family == "autoregressive" else [[]] * len(flat)
        done: dict[int, Translation] = {}
        for rows in self._batches([len(part) for part in flat], max_tokens):
            translations = self._translate([flat[row] for row in rows], [outputs[row] for row in rows], entropy)
            done.update(zip(rows, translations, strict=True))
        in_order = (done[row] for row in range(len(flat)))
        return [_join([next(in_order) for _ in of_text], text) for of_text, text in zip(parts, texts, strict=True)]

    @torch.inference_mode()
    def probabilities(self, text: str) -> Tensor:
        """``(T, V)``: what the model would say at each output position; for pictures and inspection."""
        source, lengths = pad([[*self.tokenizer.encode(text), EOS]])
        return self.model(source, lengths).logits[0].softmax(-1)

    @property
    def max_source_tokens(self) -> int:
        """The longest input that is translated in one piece."""
        config = self.model.config
        if config.positions == "sinusoidal":
            return MAX_SOURCE_TOKENS
        return min(MAX_SOURCE_TOKENS, config.max_positions // output_positions(config, 1) - 1)  # and EOS

    def _parts(self, text: str) -> list[list[int]]:
        """Token ids in parts that the model can take, each closed by EOS; none for a blank line."""
        tokens = self.tokenizer.encode(text)
        parts = []
        most = self.max_source_tokens
        while len(tokens) > most:
            words = (i for i in range(most, 0, -1) if self.tokenizer.starts_word(tokens[i]))
            end = next(words, most)  # a single word that long is split where it must be
            parts.append([*tokens[:end], EOS])
            tokens = tokens[end:]
        return [*parts, [*tokens, EOS]] if tokens else parts

    def _batches(self, lengths: list[int], max_tokens: int) -> Iterator[list[int]]:
        """Rows of like length together, so that little is padding."""
        batch: list[int] = []
        for row in sorted(range(len(lengths)), key=lengths.__getitem__):
            if batch and output_positions(self.model.config, lengths[row]) * (len(batch) + 1) > max_tokens:
                yield batch
                batch = []
            batch.append(row)
        if batch:
            yield batch

    def _write(self, sentences: list[list[int]], beam_size: int) -> list[list[int]]:
        """What an autoregressive model writes."""
        assert isinstance(self.model, AutoregressiveTransformer)
        if self._written_by is None:
            device = "cuda" if self._device.type == "cuda" else "cpu"
            workers = torch.get_num_threads()
            self._written_by = CTranslator.of(self.model, self.tokenizer, device=device, workers=workers)
        tokenizer, learned = self.tokenizer, self.model.decoder_positions is not None
        sources = [[tokenizer.piece(token) for token in sentence] for sentence in sentences]
        most = self.model.config.max_positions if learned else POSITIONS
        return [
            [tokenizer.id(p) for p in of.tokens]
            for of in self._written_by.write(sources, beam_size, max_positions=most)
        ]

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    @torch.inference_mode()
    def _translate(self, sentences: list[list[int]], outputs: list[list[int]], entropy: bool) -> list[Translation]:
        """Translations of the sentences; of an autoregressive model they are written already."""
        source, source_lengths = (tensor.to(self._device) for tensor in pad(sentences))
        if self.model.config.family == "autoregressive":
            if not entropy:
                return [Translation(self.tokenizer.decode(ids), 0.0, len(ids) + 1) for ids in outputs]
            logits, lengths, *_ = self.model(
                source, source_lengths, *(tensor.to(self._device) for tensor in pad(outputs))
            )
        else:
            logits, lengths, *_ = self.model(source, source_lengths)
            # One token a position: what collapses is a blank, should the model have learned to write it.
            collapse = "ctc" if self.model.config.family == "ctc" else "sctc"
            outputs = argmax_decode(logits, lengths, blank=BLANK, collapse=collapse)
        return [
            # Sentence by sentence: probabilities of the whole batch would double its memory.
            Translation(self.tokenizer.decode(ids), _entropy(row[:used]) if entropy else 0.0, used)
            for ids, row, used in zip(outputs, logits, lengths.tolist(), strict=True)
        ]


def _entropy(logits_TV: Tensor) -> float:
    return float(torch.special.entr(logits_TV.float().softmax(-1)).sum())


def output_positions(config: ModelConfig, source_tokens: int) -> int:
    """Positions that the decoder fills for a source; where it decides by itself, about as many as the source has."""
    return source_tokens * (config.upsample if config.family in ("ctc", "sctc") else 1)


def _join(parts: list[Translation], text: str) -> Translation:
    if not parts:
        return Translation(text)
    return Translation(
        " ".join(part.text for part in parts),
        sum(part.entropy for part in parts),
        sum(part.positions for part in parts),
        len(parts),
    )
