import pytest
import torch

from nmla.config import ModelConfig
from nmla.errors import DataError, UsageError
from nmla.models.ctc import CTCTransformer, uniform_copy
from nmla.models.layers import set_dropout, sinusoidal_positions
from nmla.models.pretrained import load_model, save_model

CONFIG = ModelConfig(d_model=32, heads=4, feed_forward=64, encoder_layers=2, decoder_layers=2, upsample=3)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return CTCTransformer(CONFIG, vocab_size=50).eval()


def test_padded_batch_gives_what_each_sentence_gives_alone(model):
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor([7, 1, 4, 12])
    source = torch.randint(5, 50, (4, 15), generator=generator)  # what stands beyond a length is garbage, not PAD
    logits, output_lengths = model(source, lengths)
    assert output_lengths.tolist() == [21, 3, 12, 36]
    for i, length in enumerate(lengths.tolist()):
        alone, _ = model(source[i : i + 1, :length], lengths[i : i + 1])
        assert torch.allclose(logits[i, : 3 * length].log_softmax(-1), alone[0].log_softmax(-1), atol=1e-5)


def test_padding_gets_no_gradient_through(model):
    source = torch.randint(5, 50, (1, 6))
    logits, lengths = model(source, torch.tensor([4]))
    logits[0, : lengths[0]].sum().backward()
    padding_only = sorted(set(source[0, 4:].tolist()) - set(source[0, :4].tolist()))
    # The output matrix is the embedding too, so compare with the gradient that the outputs alone give.
    reference = model.embedding.weight.grad[[i for i in range(50) if i not in source[0].tolist()]][0]
    for token in padding_only:
        assert torch.allclose(model.embedding.weight.grad[token], reference, atol=1e-5)


@pytest.mark.parametrize("upsample", [1, 2, 3])
def test_uniform_copy_rounds_as_the_paper_says(upsample):
    for n in range(1, 9):
        states = torch.arange(n, dtype=torch.float64)[None, :, None]
        copied, lengths = uniform_copy(states, torch.tensor([n]), upsample)
        m = int(lengths)
        exact = [j * (n - 1) / (m - 1) if m > 1 else 0.0 for j in range(m)]
        assert m == upsample * n
        assert all(abs(state - where) <= 0.5 for state, where in zip(copied[0, :, 0].tolist(), exact, strict=True))


def test_uniform_copy_is_the_same_whatever_the_padding():
    states = torch.randn(2, 9, 4)
    copied, lengths = uniform_copy(states, torch.tensor([3, 9]), 3)
    alone, _ = uniform_copy(states[:1, :3], torch.tensor([3]), 3)
    assert torch.equal(copied[:1, : lengths[0]], alone)


def test_every_parameter_learns(model):
    logits, _ = model(torch.randint(5, 50, (2, 6)), torch.tensor([6, 5]))
    logits.log_softmax(-1).square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_dropout_belongs_to_the_stage(model):
    source, lengths = torch.randint(5, 50, (1, 6)), torch.tensor([6])
    model.train()
    assert torch.equal(model(source, lengths)[0], model(source, lengths)[0])  # none by default
    set_dropout(model, 0.5)
    assert not torch.equal(model(source, lengths)[0], model(source, lengths)[0])


def test_positions_differ_and_do_not_depend_on_the_longest():
    positions = sinusoidal_positions(500, 32, like=torch.zeros(1))
    assert torch.equal(sinusoidal_positions(20, 32, like=torch.zeros(1)), positions[:20])
    assert len(positions.unique(dim=0)) == 500


def test_saved_model_loads_as_it_was(model, tmp_path):
    save_model(model, tmp_path)
    source, lengths = torch.randint(5, 50, (2, 6)), torch.tensor([6, 5])
    assert torch.equal(load_model(tmp_path).eval()(source, lengths)[0], model(source, lengths)[0])


def test_no_model_and_damaged_model_are_told_apart(model, tmp_path):
    with pytest.raises(UsageError, match=r"must be a model directory, but holds no config\.json"):
        load_model(tmp_path)
    save_model(model, tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(DataError, match="damaged"):
        load_model(tmp_path)
