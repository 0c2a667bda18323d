"""Translations by models that write all words at once."""

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from nmla.config import Decoding, ModelConfig
from nmla.data.batching import pad
from nmla.decoding.argmax import Hypothesis, argmax_decode
from nmla.decoding.ngram_lm import NgramLM
from nmla.decoding.translation import Token, Translation, batches, entropy, log_total
from nmla.models.fixed_length import FixedLengthTransformer
from nmla.models.transformer import ParallelTransformer, copied_state
from nmla.text.tokenizer import BLANK, PAD, Tokenizer

Found = Callable[[], list[Translation]]  # waits for a search, if there is one
ROUND_TO = 8  # source lengths are padded to a multiple of this
WIDEST = 2048  # output positions that a processor works on at once, when sentences were counted: its caches are small
FULL = 96  # output positions that keep a processor busy: as many sentences go together, whatever there is


class ParallelDecoder:
    """One pass of the network, then argmax, a search, or the best of several lengths."""

    def __init__(self, model: ParallelTransformer, tokenizer: Tokenizer, widest: int) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.widest = widest  # the most source tokens that come, their end included

    @torch.inference_mode()
    def translations(
        self, sentences: list[list[int]], tried: list[Decoding], lm: NgramLM | None
    ) -> list[list[Translation]]:
        """All sentences' translations, under each of the settings, which agree on batches.

        Searches go on in other threads while the network is at the next sentences, unless torch has only one.
        """
        done: list[dict[int, Translation]] = [{} for _ in tried]
        searching: deque[tuple[dict[int, Translation], list[int], Found]] = deque()

        def finish() -> None:
            of, rows, found = searching.popleft()
            of.update(zip(rows, found(), strict=True))

        count = torch.get_num_threads()
        ahead = 2 * count if count > 1 else 0  # searches under way, each of which holds its logits
        with ThreadPoolExecutor(count) as threads:
            for rows, size, width in self._groups([len(sentence) for sentence in sentences], tried[0]):
                # Sentences that are not there are stood in for, so that the shape is always the same.
                group = [sentences[row] for row in rows] + [sentences[rows[-1]]] * (size - len(rows))
                source, source_lengths = pad(group)
                source = F.pad(source, (0, width - source.shape[1]), value=PAD)
                if isinstance(self.model, FixedLengthTransformer):
                    for of, settings in zip(done, tried, strict=True):
                        of.update(zip(rows, self._of_several_lengths(source, source_lengths, settings), strict=True))
                    continue
                logits, lengths = self._logits(source, source_lengths, len(rows))
                for of, settings in zip(done, tried, strict=True):
                    own = logits.clone() if len(tried) > 1 else logits
                    searching.append((of, rows, self._decode(own, lengths, source_lengths, settings, lm, threads)))
                    if len(searching) > ahead:
                        finish()
            while searching:
                finish()
        return [[of[row] for row in range(len(sentences))] for of in done]

    def _groups(self, lengths: list[int], settings: Decoding) -> Iterator[tuple[list[int], int, int]]:
        """Rows that are translated together, as how many, and padded to which length.

        The last bits of a sum depend on the shape of the product it is part of. So by default the shape depends on the
        sentence's own length alone; the others fill what room there is.
        """
        config = self.model.config
        if settings.fast:
            several = settings.beam_size if config.family == "fixed_length" else 1
            widest = WIDEST if self._device.type == "cpu" else math.inf
            for rows in batches(lengths, settings, lambda length: several * output_positions(config, length), widest):
                yield rows, len(rows), max(lengths[row] for row in rows)
            return
        alike: defaultdict[int, list[int]] = defaultdict(list)
        for row, length in enumerate(lengths):
            alike[min(-(-length // ROUND_TO) * ROUND_TO, self.widest)].append(row)
        for width, rows in sorted(alike.items()):
            # A fixed-length model's positions are as many as it decides: each sentence is alone.
            size = 1 if config.family == "fixed_length" else max(1, -(-FULL // output_positions(config, width)))
            for start in range(0, len(rows), size):
                yield rows[start : start + size], size, width

    def _logits(self, source_BS: Tensor, source_lengths_B: Tensor, real: int) -> tuple[Tensor, Tensor]:
        logits, lengths, *_ = self.model(source_BS.to(self._device), source_lengths_B.to(self._device))
        return logits[:real].float(), lengths[:real].cpu()

    def _decode(
        self,
        logits: Tensor,
        lengths: Tensor,
        source_lengths: Tensor,
        settings: Decoding,
        lm: NgramLM | None,
        threads: Executor,
    ) -> Found:
        """Begin to decode; what is returned waits for the end of it. The logits are not as they were then."""
        collapse, used = self.model.config.family, lengths.tolist()
        places = list(zip(used, source_lengths.tolist()[: len(used)], strict=True))
        logits[..., BLANK] -= settings.blank_penalty
        if settings.beam_size == 1:
            found = argmax_decode(logits, lengths, blank=BLANK, collapse=collapse)
            rows = zip(found, logits, places, strict=True)
            told = [self._told([of], row[:used], source, settings) for of, row, (used, source) in rows]
            return lambda: told
        from nmla.decoding.ctc_beam import BeamSearch  # numba takes its time to load

        search = BeamSearch(settings.beam_size, settings.top_k, settings.alpha, settings.beta, lm)
        logits = logits.cpu()
        begun = search.begin(logits, used, threads, BLANK, collapse, settings.num_hypotheses)
        return lambda: [
            self._told(of.result(), row[:used], source, settings)
            for of, row, (used, source) in zip(begun, logits, places, strict=True)
        ]

    def _of_several_lengths(self, source_BS: Tensor, source_lengths_B: Tensor, settings: Decoding) -> list[Translation]:
        """A fixed-length model's translations of the `beam_size` likeliest lengths, the surest per token first."""
        assert isinstance(self.model, FixedLengthTransformer)
        device, count = self._device, settings.beam_size
        logits, lengths = self.model.of_several_lengths(source_BS.to(device), source_lengths_B.to(device), count)
        # One token a position: what collapses is a blank, should the model have learned to write it.
        found = argmax_decode(logits, lengths, blank=BLANK, collapse="sctc")
        used = lengths.tolist()
        sure = [float(logits[i, :n].float().log_softmax(-1).amax(-1).mean()) for i, n in enumerate(used)]
        each = replace(settings, beam_size=1, num_hypotheses=1)
        count = len(used) // len(source_BS)
        best = []
        for b, source in enumerate(source_lengths_B.tolist()):
            rows = sorted(range(b * count, (b + 1) * count), key=lambda i: -sure[i])[: settings.num_hypotheses]
            first, *others = (self._told([found[i]], logits[i, : used[i]].float(), source, each) for i in rows)
            best.append(replace(first, alternatives=tuple(others)))
        return best

    def _told(self, found: list[Hypothesis], logits_TV: Tensor, source_tokens: int, settings: Decoding) -> Translation:
        """The translation of a sentence, and if wanted what the model thought of it: sentence by sentence, for
        probabilities of a whole batch would double its memory."""
        used = len(logits_TV)
        texts = [self.tokenizer.decode(of.tokens, join=False) for of in found]
        if not settings.return_scores:
            return Translation(texts[0], alternatives=tuple(map(Translation, texts[1:])), positions=used)
        probs_TV = logits_TV.softmax(-1)
        path = float(probs_TV.amax(-1).log().sum())
        total = log_total(logits_TV) if settings.beam_size > 1 else 0.0  # which a search leaves in
        blanks = int((logits_TV.argmax(-1) == BLANK).sum())
        translations = [
            Translation(
                text,
                of.score - total if settings.beam_size > 1 else path,
                self._tokens(of, probs_TV, source_tokens),
                entropy=entropy(probs_TV),
                positions=used,
                blanks=blanks,
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

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device


def output_positions(config: ModelConfig, source_tokens: int) -> int:
    """Positions that the decoder fills for a source; where it decides by itself, about as many as the source has."""
    return source_tokens * (config.upsample if config.family in ("ctc", "sctc") else 1)
