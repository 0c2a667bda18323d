"""The one way from strings to strings."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nmla.data.batching import pad
from nmla.data.corpus import TOKENIZER
from nmla.decoding.argmax import argmax_decode
from nmla.models.ctc import CTCTransformer
from nmla.models.pretrained import load_model
from nmla.text.tokenizer import BLANK, EOS, Tokenizer

MAX_SOURCE_TOKENS = 512  # longer input is translated in pieces: attention's memory grows with the square


@dataclass(frozen=True)
class Translation:
    """One translated line and what the model thought of it."""

    text: str
    entropy: float = 0.0  # of the model's prediction, in nats, summed over positions
    positions: int = 0  # output positions, blanks included
    parts: int = 1  # into how many pieces a long line was split


class Translator:
    """Translates text with a trained model.

    >>> translator = Translator.load(directory)  # doctest: +SKIP
    >>> translator.translate("the old farmer sees a boat tonight")  # doctest: +SKIP
    """

    def __init__(self, model: CTCTransformer, tokenizer: Tokenizer) -> None:
        self.model = model
        self.tokenizer = tokenizer

    @classmethod
    def load(cls, directory: str | Path) -> "Translator":
        model = load_model(Path(directory))
        return cls(model.eval(), Tokenizer.load(Path(directory) / TOKENIZER))

    def translate(self, text: str) -> str:
        return self.translate_batch([text])[0].text

    def translate_batch(self, texts: Sequence[str], max_tokens: int = 2048) -> list[Translation]:
        """Translate `texts`, at most `max_tokens` output positions at a time; results stand in the order of `texts`.

        A blank line comes back as it is. A line longer than the model can take is split between words, never cut.
        """
        parts = [self._parts(text) for text in texts]
        flat = [part for of_text in parts for part in of_text]
        done: dict[int, Translation] = {}
        for rows in self._batches([len(part) for part in flat], max_tokens):
            done.update(zip(rows, self._translate([flat[row] for row in rows]), strict=True))
        in_order = (done[row] for row in range(len(flat)))
        return [_join([next(in_order) for _ in of_text], text) for of_text, text in zip(parts, texts, strict=True)]

    @torch.inference_mode()
    def probabilities(self, text: str) -> Tensor:
        """``(T, V)``: what the model would say at each output position; for pictures and inspection."""
        source, lengths = pad([[*self.tokenizer.encode(text), EOS]])
        return self.model(source, lengths)[0][0].softmax(-1)

    def _parts(self, text: str) -> list[list[int]]:
        """Token ids in parts that the model can take, each closed by EOS; none for a blank line."""
        tokens = self.tokenizer.encode(text)
        parts = []
        while len(tokens) > MAX_SOURCE_TOKENS:
            words = (i for i in range(MAX_SOURCE_TOKENS, 0, -1) if self.tokenizer.starts_word(tokens[i]))
            end = next(words, MAX_SOURCE_TOKENS)  # a single word that long is split where it must be
            parts.append([*tokens[:end], EOS])
            tokens = tokens[end:]
        return [*parts, [*tokens, EOS]] if tokens else parts

    def _batches(self, lengths: list[int], max_tokens: int) -> Iterator[list[int]]:
        """Rows of like length together, so that little is padding."""
        batch: list[int] = []
        for row in sorted(range(len(lengths)), key=lengths.__getitem__):
            if batch and lengths[row] * self.model.config.upsample * (len(batch) + 1) > max_tokens:
                yield batch
                batch = []
            batch.append(row)
        if batch:
            yield batch

    @torch.inference_mode()
    def _translate(self, sentences: list[list[int]]) -> list[Translation]:
        device = next(self.model.parameters()).device
        source, source_lengths = (tensor.to(device) for tensor in pad(sentences))
        logits, lengths = self.model(source, source_lengths)
        outputs = argmax_decode(logits, lengths, blank=BLANK)
        return [
            # Sentence by sentence: probabilities of the whole batch would double its memory.
            Translation(self.tokenizer.decode(ids), float(torch.special.entr(row[:used].softmax(-1)).sum()), used)
            for ids, row, used in zip(outputs, logits.float(), lengths.tolist(), strict=True)
        ]


def _join(parts: list[Translation], text: str) -> Translation:
    if not parts:
        return Translation(text)
    return Translation(
        " ".join(part.text for part in parts),
        sum(part.entropy for part in parts),
        sum(part.positions for part in parts),
        len(parts),
    )
