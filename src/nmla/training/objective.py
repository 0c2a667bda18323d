"""The only place where models meet losses."""

from torch import Tensor

from nmla.config import TrainConfig
from nmla.data.batching import Batch
from nmla.errors import NmlaError
from nmla.losses import ctc_loss, ngram_matching_loss_with_logits
from nmla.models.ctc import CTCTransformer
from nmla.text.tokenizer import BLANK

DIVERGED = "training has diverged: begin again with a lower learning_rate or more warmup_steps"


def loss_sum(model: CTCTransformer, batch: Batch, stage: TrainConfig) -> Tensor:
    """The stage's loss, summed over the batch; a step descends the sum over its batches by their total `weight`."""
    logits_BTV, lengths_B = model(batch.source, batch.source_lengths)
    logits_BTV = logits_BTV.float()  # sums over whole sentences need more digits than half precision has
    if not logits_BTV[:, :1].isfinite().all():  # weights that have run away spoil every position
        raise NmlaError(f"the model's outputs must be finite, but are not; {DIVERGED}")
    if stage.loss == "ctc":
        losses_B = ctc_loss(logits_BTV.log_softmax(-1), batch.target, lengths_B, batch.target_lengths, blank=BLANK)
    else:
        losses_B = ngram_matching_loss_with_logits(
            logits_BTV, batch.target, lengths_B, batch.target_lengths, blank=BLANK, n=stage.ngram
        )
    return losses_B.sum()


def weight(batch: Batch, stage: TrainConfig) -> int:
    """What the loss is a mean over: -log p grows with the target's length, an F1 score does not."""
    return int(batch.target_lengths.sum()) if stage.loss == "ctc" else len(batch.target_lengths)
