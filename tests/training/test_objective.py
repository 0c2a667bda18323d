import numpy as np
import pytest
import torch

from nmla.config import ModelConfig, TrainConfig
from nmla.data.batching import collate
from nmla.data.corpus import Corpus
from nmla.models.ctc import CTCTransformer
from nmla.training.objective import loss_sum, weight
from nmla.training.schedule import learning_rate


@pytest.mark.parametrize("loss", ["ctc", "ngram"])
def test_accumulated_batches_descend_as_one_batch(digits, loss):
    """A step's gradient depends on its sentences, not on how they were cut into batches or padded."""
    corpus, stage = Corpus.load(digits / "corpus"), TrainConfig(steps=1, loss=loss)
    torch.manual_seed(0)
    model = CTCTransformer(ModelConfig(16, 2, 32, 1, 1, 2), corpus.tokenizer.vocab_size).double().eval()

    def gradients(groups):
        batches = [collate(corpus.train_source, corpus.train_target, np.array(group)) for group in groups]
        total = sum(weight(batch, stage) for batch in batches)
        model.zero_grad()
        for batch in batches:
            (loss_sum(model, batch, stage) / total).backward()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    whole, parts = gradients([[0, 1, 2, 3, 4]]), gradients([[4, 0], [2], [1, 3]])
    assert whole.norm() > 0
    assert torch.allclose(whole, parts, rtol=1e-4, atol=1e-6 * float(whole.norm()))


def test_learning_rate_rises_then_falls_with_the_inverse_square_root():
    stage = TrainConfig(steps=1000, learning_rate=1e-3, warmup_steps=100)
    rates = [learning_rate(step, stage) for step in (1, 50, 100, 400)]
    assert rates == pytest.approx([1e-5, 5e-4, 1e-3, 5e-4])
