"""Word-by-word decoding by CTranslate2, the fastest there is for autoregressive models: ours, once their weights are
written in its format, and those that others have made for it."""

import json
import math
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import ctranslate2
import torch
from ctranslate2.specs import TransformerSpec
from torch import Tensor, nn

from nmla.models.autoregressive import AutoregressiveTransformer
from nmla.models.layers import Attention, Layer, sinusoidal_positions
from nmla.text.tokenizer import BOS, EOS, UNK, Tokenizer

POSITIONS = 4096  # of a table of sines and cosines: CTranslate2's own are other ones
LAYER_NORM_EPSILON = 1e-5  # torch's
BATCH_TOKENS = 2048  # of sources that are translated at once


def longest_output(source_tokens: int) -> int:
    """How many tokens a translation may have before it is stopped; alike for sources of like length."""
    return 2 * (-source_tokens // 8 * -8) + 20


@dataclass(frozen=True)
class Written:
    """A translation, and the logarithm of its probability: of its tokens, of a prefix before them, and of its end."""

    tokens: list[str]
    score: float
    ended: bool  # false: it was stopped where translations are never as long, or could not begin (its score is -inf)
    sources: tuple[int, ...] = ()  # the source token that each attended to most, if it was asked for


class CTranslator:
    """A CTranslate2 model, from tokens to tokens; it works on `workers` batches at a time, each on `threads` cores."""

    def __init__(
        self,
        directory: Path,
        *,
        compute_type: str = "float32",
        device: str = "cpu",
        workers: int = 1,
        threads: int = 1,
    ) -> None:
        self._model = ctranslate2.Translator(
            str(directory),
            device,
            compute_type=compute_type,
            inter_threads=workers,
            intra_threads=threads,
            max_queued_batches=-1,
        )
        self.config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        self._end = self.config.get("eos_token", "</s>")

    @classmethod
    def of(cls, model: AutoregressiveTransformer, tokenizer: Tokenizer, **options: Any) -> "CTranslator":
        """One of our models."""
        with tempfile.TemporaryDirectory(prefix="nmla-") as directory:
            export(model, tokenizer, Path(directory))
            return cls(Path(directory), **options)

    def write(
        self,
        sources: Sequence[list[str]],
        beam_size: int,
        prefix: Sequence[str] = (),
        max_positions: int = POSITIONS,
        num_hypotheses: int = 1,
        attention: bool = False,
        alone: bool = False,
        batch_tokens: int = BATCH_TOKENS,
        batch_size: int | None = None,
    ) -> list[list[Written]]:
        """The best translations of each of `sources`. Where one is stopped depends on its source alone; with `alone`
        each source is translated for itself, so that not even the last bits depend on others.

        So many tokens of sources go together; with `batch_size`, that many sources of like length, which are stopped
        where their longest is.
        """
        limits = [min(longest_output(len(source)), max_positions - 1) for source in sources]
        if batch_size is None:
            most, batch_type = (1, "examples") if alone else (batch_tokens, "tokens")
            alike: defaultdict[int, list[int]] = defaultdict(list)
            for row, limit in enumerate(limits):
                alike[limit].append(row)
            groups = [alike[limit] for limit in sorted(alike, reverse=True)]  # no core waits for the longest at the end
        else:
            most, batch_type = batch_size, "examples"
            order = sorted(range(len(sources)), key=lambda row: len(sources[row]))
            groups = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
        pending = [
            self._model.translate_batch(
                [sources[row] for row in rows],
                [list(prefix)] * len(rows) if prefix else None,
                max_batch_size=most,
                batch_type=batch_type,
                asynchronous=True,
                beam_size=beam_size,
                max_input_length=0,
                max_decoding_length=max(limits[row] for row in rows),
                min_decoding_length=0,
                num_hypotheses=num_hypotheses,
                return_scores=True,
                return_end_token=True,
                return_attention=attention,
            )
            for rows in groups
        ]
        done: dict[int, list[Written]] = {}
        for rows, results in zip(groups, pending, strict=True):
            for row, result in zip(rows, results, strict=True):
                try:
                    found = result.result()
                except RuntimeError as error:
                    if "position encodings" not in str(error):
                        raise
                    # It has fewer positions than was thought: who needs more is not translated, the others alone.
                    again = (beam_size, prefix, max_positions, num_hypotheses, attention, True)
                    unable = [Written([], -math.inf, ended=False)]
                    done[row] = unable if alone else self.write([sources[row]], *again)[0]
                    continue
                weights = found.attention or [[]] * len(found.hypotheses)
                best = zip(found.hypotheses, found.scores, weights, strict=True)
                done[row] = [self._written(*of, len(prefix)) for of in best]
        return [done[row] for row in range(len(sources))]

    def _written(self, tokens: list[str], mean: float, weights: list[list[float]], prefix: int) -> Written:
        ended = tokens[-1:] == [self._end]
        end = len(tokens) - ended
        sources = tuple(max(range(len(row)), key=row.__getitem__) for row in weights[prefix:end])
        return Written(tokens[prefix:end], mean * len(tokens), ended, sources)

    def score(
        self, sources: Sequence[list[str]], targets: Sequence[list[str]], given: int = 0, *, alone: bool = False
    ) -> list[float]:
        """The logarithm of the probability of each target given its source and its own first `given` tokens, its end
        included."""
        options: dict[str, Any] = {"max_batch_size": BATCH_TOKENS, "batch_type": "tokens"}
        if alone:
            options = {"max_batch_size": 1, "batch_type": "examples"}
        try:
            results = self._model.score_batch(list(sources), list(targets), max_input_length=0, **options)
        except RuntimeError as error:
            if "position encodings" not in str(error):
                raise
            if len(sources) == 1:
                return [-math.inf]  # it has fewer positions than was thought
            pairs = zip(sources, targets, strict=True)
            return [score for source, target in pairs for score in self.score([source], [target], given, alone=alone)]
        return [sum(result.log_probs[given:]) for result in results]


def export(model: AutoregressiveTransformer, tokenizer: Tokenizer, directory: Path) -> None:
    """Write a model in CTranslate2's format, in float32: it quantises when it loads."""
    config = model.config
    spec = TransformerSpec.from_config(
        (config.encoder_layers, config.decoder_layers), config.heads, pre_norm=config.norm == "pre"
    )
    spec.config.layer_norm_epsilon = LAYER_NORM_EPSILON
    spec.config.unk_token, spec.config.bos_token, spec.config.eos_token = map(tokenizer.piece, (UNK, BOS, EOS))
    spec.config.decoder_start_token = tokenizer.piece(BOS)
    pieces = [tokenizer.piece(token) for token in range(tokenizer.vocab_size)]
    spec.register_source_vocabulary(pieces)
    spec.register_target_vocabulary(pieces)
    matrix = _array(model.embedding.weight)
    spec.encoder.embeddings[0].weight = spec.decoder.embeddings.weight = spec.decoder.projection.weight = matrix
    for of_spec, layers, norm, table in (
        (spec.encoder, model.encoder, model.encoder_norm, model.encoder_positions),
        (spec.decoder, model.decoder, model.decoder_norm, model.decoder_positions),
    ):
        positions = sinusoidal_positions(POSITIONS, config.d_model, matrix) if table is None else table.weight
        of_spec.position_encodings.encodings = _array(positions)
        if isinstance(norm, nn.LayerNorm):
            _set_norm(of_spec.layer_norm, norm)
        for layer_spec, layer in zip(of_spec.layer, layers, strict=True):
            _set_layer(layer_spec, cast(Layer, layer))
    spec.validate()
    spec.optimize()
    spec.save(str(directory))


def _set_layer(spec: Any, layer: Layer) -> None:
    own = layer.self_attention
    spec.self_attention.linear[0].weight = torch.cat([_array(own.query.weight), _array(own.key_value.weight)])
    spec.self_attention.linear[0].bias = torch.cat([_array(own.query.bias), _array(own.key_value.bias)])
    _set_linear(spec.self_attention.linear[1], own.output)
    _set_norm(spec.self_attention.layer_norm, layer.self_norm)
    if isinstance(cross := layer.cross_attention, Attention):
        for part, linear in zip(spec.attention.linear, (cross.query, cross.key_value, cross.output), strict=True):
            _set_linear(part, linear)
        _set_norm(spec.attention.layer_norm, layer.cross_norm)
    _set_linear(spec.ffn.linear_0, layer.feed_forward[0])
    _set_linear(spec.ffn.linear_1, layer.feed_forward[2])
    _set_norm(spec.ffn.layer_norm, layer.feed_forward_norm)


def _set_linear(spec: Any, linear: Any) -> None:
    spec.weight, spec.bias = _array(linear.weight), _array(linear.bias)


def _set_norm(spec: Any, norm: Any) -> None:
    spec.gamma, spec.beta = _array(norm.weight), _array(norm.bias)


def _array(weights: Tensor) -> Tensor:
    return weights.detach().float().cpu()
