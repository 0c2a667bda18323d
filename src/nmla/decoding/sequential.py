"""Translations by models that write word by word."""

import threading
from collections.abc import Iterator
from dataclasses import replace

import torch

from nmla.config import Decoding
from nmla.data.batching import pad
from nmla.decoding.ctranslate import BATCH_TOKENS, POSITIONS, CTranslator, Written
from nmla.decoding.translation import Token, Translation, batches, entropy
from nmla.models.autoregressive import AutoregressiveTransformer
from nmla.text.tokenizer import Tokenizer


class SequentialDecoder:
    """Writes by CTranslate2, with the weights that the model has when it is first asked; torch tells the opinions."""

    def __init__(self, model: AutoregressiveTransformer, tokenizer: Tokenizer) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self._writer: CTranslator | None = None
        self._lock = threading.Lock()

    def translations(self, sentences: list[list[int]], settings: Decoding) -> list[Translation]:
        with self._lock:
            if self._writer is None:
                device = "cuda" if self._device.type == "cuda" else "cpu"
                workers = torch.get_num_threads()
                self._writer = CTranslator.of(self.model, self.tokenizer, device=device, workers=workers)
        learned, by_tokens = self.model.decoder_positions is not None, settings.batch_type == "tokens"
        written = self._writer.write(
            [[self.tokenizer.piece(token) for token in sentence] for sentence in sentences],
            settings.beam_size,
            max_positions=self.model.config.max_positions if learned else POSITIONS,
            num_hypotheses=settings.num_hypotheses,
            attention=settings.return_scores,
            alone=not settings.fast,
            batch_tokens=settings.max_batch_size if by_tokens else BATCH_TOKENS,
            batch_size=settings.max_batch_size if settings.fast and not by_tokens else None,
        )
        translations = [
            [Translation(self._text(of), score=of.score, positions=len(of.tokens) + 1) for of in of_one]
            for of_one in written
        ]
        if settings.return_scores:
            # Of all hypotheses: a teacher may choose any of them.
            places = [(row, place) for row, of_one in enumerate(written) for place in range(len(of_one))]
            lengths = [len(sentences[row]) for row, _ in places]
            alone = ([i] for i in range(len(places)))
            for some in batches(lengths, settings, lambda length: length) if settings.fast else alone:
                among = [places[i] for i in some]
                told = self._opinions([sentences[row] for row, _ in among], [written[row][of] for row, of in among])
                for (row, of), (uncertainty, tokens) in zip(among, told, strict=True):
                    translations[row][of] = replace(translations[row][of], entropy=uncertainty, tokens=tokens)
        return [replace(best, alternatives=tuple(others)) for best, *others in translations]

    def _text(self, of: Written) -> str:
        return self.tokenizer.decode([self.tokenizer.id(piece) for piece in of.tokens], join=False)

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
            yield entropy(probs_TV), tuple(map(Token, of.tokens, confidences, of.sources))

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device
