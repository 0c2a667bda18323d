"""What holds for every model family, and what each promises."""

from dataclasses import replace

import pytest
import torch

from nmla.config import ModelConfig
from nmla.losses.cross_entropy import LENGTH_CLASSES as LENGTH_CLASSES_OF_THE_LOSS
from nmla.models.fixed_length import LENGTH_CLASSES
from nmla.models.glancing import reveal
from nmla.models.layers import set_dropout, sinusoidal_positions
from nmla.models.pretrained import FAMILIES, build_model
from nmla.models.transformer import NOT_TOLD, uniform_copy

VOCAB = 50
SMALL = ModelConfig(d_model=32, heads=4, feed_forward=64, encoder_layers=2, decoder_layers=2, upsample=3)
SHAPES = [(norm, positions) for norm in ("pre", "post") for positions in ("sinusoidal", "learned")]
LENGTHS = torch.tensor([7, 1, 4, 12])
TARGET_LENGTHS = torch.tensor([5, 2, 9, 1])


def build(family, norm="pre", positions="sinusoidal"):
    torch.manual_seed(0)
    return build_model(replace(SMALL, family=family, norm=norm, positions=positions), VOCAB).eval()


def garbage(rows, width, seed=1):
    """Token ids everywhere: what stands beyond a length is not PAD."""
    return torch.randint(5, VOCAB, (rows, width), generator=torch.Generator().manual_seed(seed))


def run(model, source, lengths, target, target_lengths):
    if model.config.family == "autoregressive":
        return model(source, lengths, target, target_lengths)
    if model.config.family == "fixed_length":
        return model(source, lengths, target_lengths)
    return model(source, lengths)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("norm", "positions"), SHAPES)
def test_padded_batch_gives_what_each_sentence_gives_alone(family, norm, positions):
    model = build(family, norm, positions)
    source, target = garbage(4, 15), garbage(4, 11, seed=2)
    output = run(model, source, LENGTHS, target, TARGET_LENGTHS)
    for i, (length, words) in enumerate(zip(LENGTHS.tolist(), TARGET_LENGTHS.tolist(), strict=True)):
        one = slice(i, i + 1)
        alone = run(model, source[one, :length], LENGTHS[one], target[one, :words], TARGET_LENGTHS[one])
        used = int(output.lengths[i])
        assert used == alone.logits.shape[1] == alone.lengths[0]
        assert torch.allclose(output.logits[i, :used].log_softmax(-1), alone.logits[0].log_softmax(-1), atol=1e-5)
        if output.length_logits is not None:
            assert torch.allclose(output.length_logits[i], alone.length_logits[0], atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_output_positions(family):
    lengths = run(build(family), garbage(4, 12), LENGTHS, garbage(4, 9), TARGET_LENGTHS).lengths.tolist()
    expected = {"autoregressive": [6, 3, 10, 2], "fixed_length": [5, 2, 9, 1]}
    assert lengths == expected.get(family, [21, 3, 12, 36])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("norm", "positions"), SHAPES)
def test_every_parameter_learns(family, norm, positions):
    model = build(family, norm, positions)
    output = run(model, garbage(2, 6), torch.tensor([6, 5]), garbage(2, 4), torch.tensor([4, 3]))
    loss = output.logits.log_softmax(-1).square().sum()
    if output.length_logits is not None:
        loss = loss + output.length_logits.square().sum()
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_gets_no_gradient_through(family):
    model = build(family)
    source, target = torch.tensor([[5, 6, 7, 8, 40, 41]]), torch.tensor([[9, 10, 42]])
    output = run(model, source, torch.tensor([4]), target, torch.tensor([2]))
    output.logits[0, : output.lengths[0]].sum().backward()
    # The output matrix is the embedding too, so compare with the gradient of a token that is nowhere.
    grad = model.embedding.weight.grad
    for token in (40, 41, 42):
        assert torch.allclose(grad[token], grad[45], atol=1e-5)


def test_autoregressive_word_sees_no_later_one():
    model = build("autoregressive")
    source, target = garbage(1, 6), garbage(1, 8)
    changed = target.clone()
    changed[0, 5] += 1
    one, other = (model(source, torch.tensor([6]), t, torch.tensor([8])).logits[0] for t in (target, changed))
    assert torch.equal(one[:6], other[:6])
    assert not torch.allclose(one[6:], other[6:])


def test_fixed_length_model_chooses_its_length():
    model = build("fixed_length")
    output = model(garbage(4, 12), LENGTHS)
    possible = [
        [(logit, n - 128 + own) for n, logit in enumerate(row.tolist()) if n - 128 + own >= 1]
        for row, own in zip(output.length_logits, LENGTHS.tolist(), strict=True)
    ]
    assert output.lengths.tolist() == [max(of)[1] for of in possible]
    assert LENGTH_CLASSES == LENGTH_CLASSES_OF_THE_LOSS


@pytest.mark.parametrize("upsample", [1, 2, 3])
def test_uniform_copy_rounds_as_the_paper_says(upsample):
    for n in range(1, 9):
        m = upsample * n
        states = torch.arange(n, dtype=torch.float64)[None, :, None]
        copied = uniform_copy(states, torch.tensor([n]), torch.tensor([m]), m)
        exact = [j * (n - 1) / (m - 1) if m > 1 else 0.0 for j in range(m)]
        assert all(abs(state - where) <= 0.5 for state, where in zip(copied[0, :, 0].tolist(), exact, strict=True))


def test_uniform_copy_shrinks_too_and_does_not_see_padding():
    states = torch.randn(2, 9, 4)
    lengths, output_lengths = torch.tensor([6, 9]), torch.tensor([3, 20])
    copied = uniform_copy(states, lengths, output_lengths, int(output_lengths.max()))
    alone = uniform_copy(states[:1, :6], lengths[:1], output_lengths[:1], int(output_lengths[0]))
    assert torch.equal(copied[:1, :3], alone)
    assert torch.equal(alone[0, 0], states[0, 0])
    assert torch.equal(alone[0, -1], states[0, 5])


def test_dropout_belongs_to_the_stage():
    model, source, lengths = build("ctc").train(), garbage(1, 6), torch.tensor([6])
    assert torch.equal(model(source, lengths).logits, model(source, lengths).logits)  # none by default
    set_dropout(model, 0.5)
    assert not torch.equal(model(source, lengths).logits, model(source, lengths).logits)


def test_positions_differ_and_do_not_depend_on_the_longest():
    positions = sinusoidal_positions(500, 32, like=torch.zeros(1))
    assert torch.equal(sinusoidal_positions(20, 32, like=torch.zeros(1)), positions[:20])
    assert len(positions.unique(dim=0)) == 500


@pytest.mark.parametrize("family", ["fixed_length", "ctc"])
def test_glancing_tells_the_decoder_tokens_and_both_passes_drop_the_same_units(family):
    model = build(family).train()
    set_dropout(model, 0.3)
    source, lengths, target_lengths = garbage(2, 6), torch.tensor([6, 4]), torch.tensor([5, 7])
    arguments = (source, lengths, target_lengths) if family == "fixed_length" else (source, lengths)
    passes = []

    def nothing(logits, lengths):
        passes.append(logits)
        assert not logits.requires_grad
        return torch.full(logits.shape[:2], NOT_TOLD)

    def everything(logits, lengths):
        return torch.full(logits.shape[:2], 7)

    torch.manual_seed(3)
    untold = model(*arguments, glance=nothing)
    assert torch.equal(untold.logits, passes[0])
    assert not untold.revealed.any()
    torch.manual_seed(3)
    told = model(*arguments, glance=everything)
    assert told.revealed.all()
    assert not torch.allclose(told.logits, untold.logits)


def test_reveals_as_many_as_the_ratio_says_within_the_sentence():
    oracle, predicted = torch.arange(40).reshape(2, 20), torch.zeros(2, 20, dtype=torch.long)
    lengths = torch.tensor([11, 20])
    predicted[1, :10] = oracle[1, :10]
    seen = torch.zeros(2, 20)
    for seed in range(200):
        torch.manual_seed(seed)
        told = reveal(oracle, predicted, lengths, 0.5)
        shown = told != NOT_TOLD
        assert shown.sum(1).tolist() == [5, 5]  # half of 10 wrong (token 0 is right by chance), half of 10
        assert not shown[0, 11:].any()
        assert torch.equal(told[shown], oracle[shown])
        seen += shown
    assert (seen[0, :11] > 50).all()  # any position may be told, right or wrong
    assert (seen[1] > 20).all()
    assert (reveal(oracle, predicted, lengths, 0.0) == NOT_TOLD).all()
