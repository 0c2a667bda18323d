"""The only place where models meet losses."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from nmla.config import ModelConfig, TrainConfig
from nmla.data.batching import Batch
from nmla.errors import NmlaError
from nmla.losses import (
    axe_loss,
    bag_of_ngrams_loss,
    best_alignment,
    bipartite_loss,
    combined_ngram_loss,
    cross_entropy_loss_with_logits,
    ctc_loss_with_logits,
    ddrs_loss_with_logits,
    length_loss,
    ngram_matching_loss_with_logits,
    oaxe_loss,
)
from nmla.models.glancing import reveal
from nmla.models.transformer import Glance, Output
from nmla.text.tokenizer import BLANK, EOS

DIVERGED = "training has diverged: begin again with a lower learning_rate or more warmup_steps"
LENGTH_WEIGHT = 0.1  # of the loss of the length, where a model must know it
PER_SENTENCE = ("ngram", "combined", "bag")  # shares of what there is to match; all others grow with the target


@dataclass(frozen=True)
class Totals:
    """What the losses of one step, over all its batches and devices, are a mean of."""

    tokens: int
    sentences: int


def batch_loss(
    network: nn.Module, config: ModelConfig, batch: Batch, stage: TrainConfig, totals: Totals, progress: float
) -> Tensor:
    """This batch's part of the step's loss; with `progress` through the stage, 0 to 1, glancing falls and DDRS goes
    from all references to the likeliest."""
    ratio = stage.glance_from + progress * (stage.glance_to - stage.glance_from)
    glance = _glance(config, batch, ratio) if stage.glance_from or stage.glance_to else None
    output = _forward(network, config, batch, glance)
    # Sums over whole sentences need more digits than half precision has.
    logits = output.logits if output.logits.dtype == torch.float64 else output.logits.float()
    if not logits[:, :1].isfinite().all():  # weights that have run away spoil every position
        raise NmlaError(f"the model's outputs must be finite, but are not; {DIVERGED}")
    with torch.autocast(logits.device.type, enabled=False):
        losses_B = LOSSES[stage.loss](output._replace(logits=logits), batch, config, stage, progress)
        loss = losses_B.sum() / _share(config, stage, totals)
        if output.length_logits is not None:
            lengths_B = batch.target_lengths if batch.target_lengths.dim() == 1 else batch.target_lengths.amax(1)
            log_probs = output.length_logits.to(logits.dtype).log_softmax(-1)
            of_length = length_loss(log_probs, batch.source_lengths, lengths_B).sum() / totals.sentences
            loss = loss + LENGTH_WEIGHT * of_length
    return loss


def _share(config: ModelConfig, stage: TrainConfig, totals: Totals) -> int:
    """What the loss is a mean over."""
    if stage.loss in PER_SENTENCE:
        return totals.sentences
    return totals.tokens + (totals.sentences if config.family == "autoregressive" else 0)  # each end is a token


def _forward(network: nn.Module, config: ModelConfig, batch: Batch, glance: Glance | None) -> Output:
    if config.family == "autoregressive":
        return network(batch.source, batch.source_lengths, batch.target, batch.target_lengths)
    if config.family == "fixed_length":
        # The golden length; of several references the longest, which has room for each.
        lengths_B = batch.target_lengths if batch.target_lengths.dim() == 1 else batch.target_lengths.amax(1)
        return network(batch.source, batch.source_lengths, lengths_B, glance)
    return network(batch.source, batch.source_lengths, glance)


def _glance(config: ModelConfig, batch: Batch, ratio: float) -> Glance:
    """The oracle is the target itself, or its best alignment with what the first pass says."""

    def glance(logits_BTV: Tensor, lengths_B: Tensor) -> Tensor:
        oracle_BT = batch.target
        if config.family != "fixed_length":
            log_probs = logits_BTV.float().log_softmax(-1)
            arguments = (log_probs, batch.target, lengths_B, batch.target_lengths)
            oracle_BT, _ = best_alignment(*arguments, blank=BLANK, collapse=config.family)
        return reveal(oracle_BT, logits_BTV.argmax(-1), lengths_B, ratio)

    return cast(Glance, torch.compiler.disable(glance))  # a search of many small steps is nothing to compile


def _cross_entropy(output: Output, batch: Batch, config: ModelConfig, stage: TrainConfig, progress: float) -> Tensor:
    logits, targets, lengths = output.logits, batch.target, output.lengths
    if config.family == "autoregressive":  # the end is a token like others
        targets = torch.nn.functional.pad(targets, (0, 1)).scatter(1, batch.target_lengths[:, None], EOS)
    if output.revealed is not None:  # what the decoder was told, it need not find: the rest moves together
        order_BT = output.revealed.int().argsort(dim=1, stable=True)
        logits = logits.gather(1, order_BT[..., None].expand_as(logits))
        targets = targets.gather(1, order_BT)
        lengths = lengths - output.revealed.sum(1)
    return cross_entropy_loss_with_logits(logits, targets, lengths, lengths, label_smoothing=stage.label_smoothing)


def _ctc(output: Output, batch: Batch, config: ModelConfig, stage: TrainConfig, progress: float) -> Tensor:
    arguments = (output.logits, batch.target, output.lengths, batch.target_lengths)
    return ctc_loss_with_logits(*arguments, blank=BLANK, collapse=config.family)


def _ngram(output: Output, batch: Batch, config: ModelConfig, stage: TrainConfig, progress: float) -> Tensor:
    loss_B = ngram_matching_loss_with_logits(
        output.logits,
        batch.target,
        output.lengths,
        batch.target_lengths,
        blank=BLANK,
        n=stage.ngram,
        collapse=config.family,
        exact_total=stage.exact_total,
        recall_weight=stage.recall_weight,
    )
    if stage.ctc_weight:
        of_tokens_B = _ctc(output, batch, config, stage, progress)
        loss_B = loss_B + stage.ctc_weight * of_tokens_B / batch.target_lengths.clamp(min=1)
    return loss_B


def _combined(output: Output, batch: Batch, config: ModelConfig, stage: TrainConfig, progress: float) -> Tensor:
    return combined_ngram_loss(
        output.logits.log_softmax(-1),
        batch.target,
        output.lengths,
        batch.target_lengths,
        blank=BLANK,
        weights={n: weight for n, weight in enumerate(stage.combine, start=1) if weight > 0},
        mean=stage.combine_mean,
        collapse=config.family,
        exact_total=stage.exact_total,
    )


def _ddrs(output: Output, batch: Batch, config: ModelConfig, stage: TrainConfig, progress: float) -> Tensor:
    losses_B = ddrs_loss_with_logits(
        output.logits,
        batch.target,
        output.lengths,
        batch.target_lengths,
        blank=BLANK,
        progress=progress,
        collapse=config.family,
    )
    return losses_B * batch.target_lengths.sum(1)  # a mean over tokens, as CTC's


def _bag(output: Output, batch: Batch, config: ModelConfig, stage: TrainConfig, progress: float) -> Tensor:
    log_probs = output.logits.log_softmax(-1)
    return bag_of_ngrams_loss(log_probs, batch.target, output.lengths, batch.target_lengths, n=stage.ngram)


def _plain(loss: Callable[..., Tensor], **settings: Any) -> Callable[..., Tensor]:
    def of(output: Output, batch: Batch, config: ModelConfig, stage: TrainConfig, progress: float) -> Tensor:
        log_probs = output.logits.log_softmax(-1)
        return loss(log_probs, batch.target, output.lengths, batch.target_lengths, **settings)

    return of


LOSSES: dict[str, Callable[[Output, Batch, ModelConfig, TrainConfig, float], Tensor]] = {
    "cross_entropy": _cross_entropy,
    "ctc": _ctc,
    "sctc": _ctc,
    "bipartite": _plain(bipartite_loss, blank=BLANK),
    "ngram": _ngram,
    "combined": _combined,
    "bag": _bag,
    "ddrs": _ddrs,
    "oaxe": _plain(oaxe_loss),
    "axe": _plain(axe_loss, blank=BLANK),
}
