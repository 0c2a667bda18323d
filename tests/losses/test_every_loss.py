"""What holds for all losses: gradients, padding, batching, precision, special cases and errors."""

from functools import partial

import pytest
import torch
from torch import Tensor

from cases import GARBAGE, Case, leaf, random_case
from nmla.losses import (
    axe_loss,
    bag_of_ngrams_loss,
    best_alignment,
    bipartite_loss,
    collapse_path,
    combined_ngram_loss,
    cross_entropy_loss,
    cross_entropy_loss_with_logits,
    ctc_loss,
    ctc_loss_with_logits,
    ddrs_loss,
    ddrs_loss_with_logits,
    expected_length,
    expected_ngram_counts,
    expected_ngram_total,
    fused_ngram_matching_loss,
    length_loss,
    ngram_matching_loss,
    ngram_matching_loss_with_logits,
    oaxe_loss,
    sctc_loss,
)

# The losses that take several references, and those that take one, by name: f(log_probs, *arguments, blank=...).
SEVERAL = (
    {
        f"{name} {collapse} n={n}": partial(loss, n=n, collapse=collapse)
        for name, loss in (("matching", ngram_matching_loss), ("with logits", ngram_matching_loss_with_logits))
        for collapse in ("ctc", "sctc")
        for n in (1, 2, 3, 4)
    }
    | {
        "paper's total": partial(ngram_matching_loss_with_logits, n=3, exact_total=False),
        "arithmetic": partial(combined_ngram_loss, weights={1: 0.25, 2: 0.75}),
        "geometric": partial(combined_ngram_loss, weights={1: 0.25, 2: 0.25, 3: 0.5}, mean="geometric"),
        "fused": lambda log_probs, *arguments, **options: fused_ngram_matching_loss(
            log_probs, torch.eye(log_probs.shape[-1], dtype=log_probs.dtype), None, *arguments, **options
        ),
        "bag": lambda *arguments, blank: bag_of_ngrams_loss(*arguments),
    }
    | {
        f"{name} {collapse} {progress:.1f}": partial(loss, progress=progress, collapse=collapse)
        for name, loss in (("ddrs", ddrs_loss), ("ddrs with logits", ddrs_loss_with_logits))
        for collapse in ("ctc", "sctc")
        for progress in (0, 0.3, 0.8, 1)
    }
)
ONE_REFERENCE = {
    "ctc": ctc_loss,
    "sctc": sctc_loss,
    "ctc with logits": ctc_loss_with_logits,
    "sctc with logits": partial(ctc_loss_with_logits, collapse="sctc"),
    "bipartite": bipartite_loss,
    "bipartite margin": partial(bipartite_loss, margin=0.1),
    "axe": partial(axe_loss, delta=0.7),
    "best alignment": lambda *arguments, blank: best_alignment(*arguments, blank=blank)[1],
}
FIXED_LENGTH = {
    "cross entropy": lambda *arguments, blank: cross_entropy_loss(*arguments),
    "smoothed": lambda *arguments, blank: cross_entropy_loss(*arguments, label_smoothing=0.2),
    "with logits": lambda *arguments, blank: cross_entropy_loss_with_logits(*arguments),
    "smoothed with logits": lambda *arguments, blank: cross_entropy_loss_with_logits(*arguments, label_smoothing=0.2),
    "oaxe": lambda *arguments, blank: oaxe_loss(*arguments),
}
EVERY = SEVERAL | ONE_REFERENCE | FIXED_LENGTH
WITH_GRADIENT = {name: loss for name, loss in EVERY.items() if name != "best alignment"}
every_loss = pytest.mark.parametrize("name", EVERY)
every_differentiable_loss = pytest.mark.parametrize("name", WITH_GRADIENT)


def case_for(name: str, seed: int = 5, **options: int) -> Case:
    """A case whose losses are mostly finite: targets shorter than half of the positions."""
    size = {"batch": 6, "positions": 12, "vocabulary": 7, "longest": 5} | options
    case = random_case(seed, references=3 if name in SEVERAL else None, **size)
    if name in FIXED_LENGTH:
        case.input_lengths.copy_(case.target_lengths)
    else:
        case.input_lengths.clamp_(min=2 * size["longest"])
    used = torch.arange(size["positions"]) < case.input_lengths[:, None]
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(*used.shape, size["vocabulary"], generator=generator, dtype=torch.float64)
    case.logits.copy_(torch.where(used[..., None], logits, torch.nan))
    return case


def value_and_gradient(name: str, log_probs: Tensor, case: Case) -> tuple[Tensor, Tensor]:
    log_probs = leaf(log_probs)
    losses = EVERY[name](log_probs, *case.arguments, blank=case.blank)
    if losses.requires_grad:
        losses.sum().backward()
    return losses.detach(), torch.zeros_like(log_probs) if log_probs.grad is None else log_probs.grad


@every_differentiable_loss
def test_gradcheck(name):
    case = case_for(name, batch=2, positions=8, longest=4, vocabulary=4)
    log_probs = leaf(case.log_probs.nan_to_num(-1.0))
    arguments = (case.targets, case.input_lengths, case.target_lengths)
    assert EVERY[name](log_probs, *arguments, blank=case.blank).isfinite().all()
    assert torch.autograd.gradcheck(lambda x: EVERY[name](x, *arguments, blank=case.blank), log_probs)


FROM_LOGITS = {
    "cross entropy": (cross_entropy_loss, cross_entropy_loss_with_logits, {}),
    "smoothed": (cross_entropy_loss, cross_entropy_loss_with_logits, {"label_smoothing": 0.2}),
    **{
        f"ddrs {progress:.1f}": (ddrs_loss, ddrs_loss_with_logits, {"progress": progress, "blank": None})
        for progress in (0, 0.3, 0.8, 1)
    },
}


@pytest.mark.parametrize("name", FROM_LOGITS)
@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_from_logits_is_the_same_as_from_their_log_probabilities(name, offset):
    of_log_probs, of_logits, options = FROM_LOGITS[name]
    for seed in range(10):
        case = case_for(name if name in FIXED_LENGTH else "ddrs ctc 0.0", seed)
        if "blank" in options:
            options = options | {"blank": case.blank}
        expected, found = leaf(case.logits), leaf(case.logits + offset)
        losses = of_log_probs(case.log_probs_of(expected), *case.arguments, **options)
        weights = torch.rand(len(losses), dtype=losses.dtype)
        (weights * losses).sum().backward()
        again = of_logits(found, *case.arguments, **options)
        torch.testing.assert_close(again, losses)
        (weights * again).sum().backward(retain_graph=True)
        torch.testing.assert_close(found.grad, expected.grad.nan_to_num(0.0))
        found.grad = None
        (weights * again).sum().backward()  # the probabilities were written over: they are made again
        torch.testing.assert_close(found.grad, expected.grad.nan_to_num(0.0))


def test_cross_entropy_keeps_its_digits_where_logits_are_large():
    logits = torch.tensor([[[60.0, 48.0, 0.0]]]) + 2.0**17
    loss = cross_entropy_loss_with_logits(logits, torch.tensor([[0]]), torch.tensor([1]), torch.tensor([1]))
    torch.testing.assert_close(loss, -logits.double().log_softmax(-1)[0, 0, :1].float(), rtol=0.05, atol=0.0)


def test_gradcheck_of_expectations():
    case = case_for("ctc", batch=2, positions=5, vocabulary=3)
    log_probs, lengths = leaf(case.log_probs.nan_to_num(-1.0)), case.input_lengths.clamp(max=5)
    words = torch.tensor([v for v in range(3) if v != case.blank])
    for collapse in ("ctc", "sctc"):
        options = {"blank": case.blank, "collapse": collapse}
        assert torch.autograd.gradcheck(partial(expected_length, **options), (log_probs, lengths))
        for n in (1, 2, 3, 4):
            ngrams = words[torch.randint(2, (2, 5, n))]
            assert torch.autograd.gradcheck(partial(expected_ngram_counts, **options), (log_probs, ngrams, lengths))
            assert torch.autograd.gradcheck(partial(expected_ngram_total, **options), (log_probs, lengths, n))


def test_gradcheck_of_length():
    log_probs = leaf(torch.randn(3, 256, dtype=torch.float64).log_softmax(-1))
    lengths = torch.tensor([3, 0, 400]), torch.tensor([5, 7, 1])
    assert torch.autograd.gradcheck(lambda x: length_loss(x, *lengths), log_probs)


@every_loss
def test_garbage_in_the_padding_changes_nothing(name):
    case = case_for(name)
    padding = torch.arange(12) >= case.input_lengths[:, None]
    token_padding = case.targets == GARBAGE
    assert padding.any()
    assert token_padding.any()
    for dtype in (torch.float64, torch.float32):
        log_probs = case.log_probs.to(dtype)
        case.targets[token_padding] = 1
        clean = value_and_gradient(name, log_probs.masked_fill(padding[..., None], -1.0), case)
        for garbage, token in [(torch.nan, GARBAGE), (torch.inf, 10**9), (-torch.inf, case.blank), (1e30, -1)]:
            case.targets[token_padding] = token
            dirty = value_and_gradient(name, log_probs.masked_fill(padding[..., None], garbage), case)
            assert torch.equal(dirty[0], clean[0])
            assert torch.equal(dirty[1], clean[1])
            assert not dirty[1][padding].any()


@every_loss
def test_a_batch_equals_its_sentences(name):
    case = case_for(name)
    losses, grads = value_and_gradient(name, case.log_probs, case)
    assert losses.isfinite().all()
    for b, length in enumerate(case.input_lengths.tolist()):
        longest = int(case.target_lengths[b].max())
        alone = Case(
            case.logits[b : b + 1, :length],
            case.targets[b : b + 1, ..., :longest],
            case.input_lengths[b : b + 1],
            case.target_lengths[b : b + 1],
            case.blank,
        )
        loss, grad = value_and_gradient(name, alone.log_probs, alone)
        torch.testing.assert_close(loss[0], losses[b], rtol=0, atol=1e-12)
        torch.testing.assert_close(grad[0], grads[b, :length], rtol=0, atol=1e-12)


@every_loss
def test_integers_of_any_width(name):
    case = case_for(name)
    expected = EVERY[name](case.log_probs, *case.arguments, blank=case.blank)
    narrow = [tensor.to(torch.int32) for tensor in case.arguments]
    assert torch.equal(EVERY[name](case.log_probs, *narrow, blank=case.blank), expected)


def extreme_log_probs(kind: str) -> Tensor:
    """(3, 600, 20) in float32 with probabilities down to 1e-30."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 600, 20, generator=generator)
    if kind == "sharp":
        logits *= 15
    elif kind == "sure":  # almost all mass on the blank, 0
        logits[..., 0] += 12
    elif kind == "runs":  # almost all mass on one token for many positions
        logits += 12 * torch.nn.functional.one_hot(torch.arange(600) // 40 % 20, 20)
    log_probs = logits.double().log_softmax(-1).clamp(min=-69).log_softmax(-1).float()
    assert log_probs.min() > -69.1
    return log_probs


@every_loss
@pytest.mark.parametrize("kind", ["flat", "sharp", "sure", "runs"])
def test_float32_at_600_positions(name, kind):
    log_probs = extreme_log_probs(kind)
    longest = 600 if name in FIXED_LENGTH else 40
    targets = torch.randint(1, 20, (3, longest), generator=torch.Generator().manual_seed(1))
    lengths = torch.tensor([600, 600, 600])
    case = Case(log_probs, targets, lengths, lengths.clamp(max=longest), 0)
    value32, grad32 = value_and_gradient(name, log_probs, case)
    value64, grad64 = value_and_gradient(name, log_probs.double(), case)
    assert value32.dtype == torch.float32
    torch.testing.assert_close(value32.double(), value64, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grad32.double(), grad64, rtol=1e-5, atol=1e-5)


@every_loss
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_autocast(name, dtype):
    case = case_for(name)
    log_probs = case.log_probs.to(dtype)
    value, grad = value_and_gradient(name, log_probs.float(), case)
    if name == "fused":  # its matrix product is made in half precision: exact for the identity
        value, grad = value_and_gradient("with logits ctc n=2", log_probs.float(), case)
    with torch.autocast("cpu", dtype):
        half_value, half_grad = value_and_gradient(name, log_probs, case)
        again, _ = value_and_gradient(name, log_probs.float(), case)
    assert half_value.dtype == torch.float32
    assert half_grad.dtype == dtype
    torch.testing.assert_close(half_value, value, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(again, value, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(half_grad.float(), grad, rtol=1e-2, atol=1e-3)


# A matrix product makes no infinite logits.
@pytest.mark.parametrize("name", [name for name in WITH_GRADIENT if name != "fused"])
@pytest.mark.parametrize("sure_of", ["blank", "word", "anything", "anything but blank"])
def test_finite_where_probabilities_are_0_or_1(name, sure_of):
    for seed in range(10):
        case = case_for(name, seed)
        shape = case.logits.shape
        blanks = torch.full(shape[:2], case.blank)
        words = torch.full(shape[:2], (case.blank + 1) % shape[2])
        anything = torch.randint(shape[2], shape[:2], generator=torch.Generator().manual_seed(seed))
        if sure_of == "anything but blank":
            log_probs = case.log_probs.clone()
            log_probs[..., case.blank] = -torch.inf
            log_probs = log_probs.log_softmax(-1)
        else:
            path = {"blank": blanks, "word": words, "anything": anything}[sure_of]
            log_probs = torch.nn.functional.one_hot(path, shape[2]).double().log()
        losses, grads = value_and_gradient(name, log_probs, case)
        assert not losses.isnan().any()
        assert grads.isfinite().all()
        if name not in FIXED_LENGTH or name == "oaxe":  # cross entropy always asks for more of its token
            assert not grads[losses.isinf()].any()


@pytest.mark.parametrize(
    ("name", "none_of"),
    [(name, size) for name in EVERY for size in ("sentences", "positions", "tokens", "positions and tokens")]
    + [(name, "references") for name in SEVERAL],
)
def test_sizes_of_zero(name, none_of):
    batch = 0 if none_of == "sentences" else 2
    positions = 0 if "positions" in none_of else 4
    longest = 0 if "tokens" in none_of else 3
    shape = (batch, 0) if none_of == "references" else (batch,)
    input_lengths, target_lengths = torch.full((batch,), positions), torch.full(shape, longest)
    if name in FIXED_LENGTH:
        input_lengths, target_lengths = (torch.full((batch,), min(positions, longest)) for _ in range(2))
    logits = torch.randn(batch, positions, 5, dtype=torch.float64)
    case = Case(logits, torch.ones(*shape, longest, dtype=torch.long), input_lengths, target_lengths, 0)
    losses, grads = value_and_gradient(name, case.log_probs, case)
    assert losses.shape == (batch,)
    assert not losses.isnan().any()
    assert grads.isfinite().all()
    if name in SEVERAL and none_of in ("tokens", "references"):
        assert not losses.any()
        assert not grads.any()


def one_hot_log_probs(*paths: list[int], vocabulary: int = 6) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor(paths), vocabulary).double().log()


@pytest.mark.parametrize("loss", [ngram_matching_loss, ngram_matching_loss_with_logits])
def test_special_cases_of_the_matching_loss(loss):
    log_probs = one_hot_log_probs([3, 3, 0, 3, 4])  # "3 3 4" under CTC

    def value(target, lengths=None, length=5, **options):
        targets = torch.tensor([target], dtype=torch.long)
        lengths = torch.tensor([len(target)] if lengths is None else [lengths])
        return loss(log_probs, targets, torch.tensor([length]), lengths, blank=0, **options).item()

    assert value([3, 3, 4], n=2) == pytest.approx(-1)
    assert value([3, 3, 4], n=3) == pytest.approx(-1)
    assert value([3, 3, 4], n=4) == 0  # T < n
    assert value([], 0) == 0  # an empty target
    assert value([[3, 4], [5, 5]], [0, 0]) == 0  # no reference present
    assert value([3], length=0, n=1) == 0  # no position in use
    assert value([3, 5], length=1, n=1) == pytest.approx(-2 / 3)  # one position, fewer than the target's tokens
    assert value([3, 4], n=2) == pytest.approx(-2 * 1 / (1 + 2))
    assert value([3, 3, 3], n=1) == pytest.approx(-2 * 2 / (3 + 3))  # repeated tokens, matched twice of three times
    assert value([3, 3, 4], n=1, collapse="sctc") == pytest.approx(-2 * 3 / (3 + 4))
    # Of two references present one has the 2-gram (3, 3), both have (3, 4); the third is absent.
    assert value([[3, 3, 4], [5, 3, 4], [4, 4, 4]], [3, 3, 0]) == pytest.approx(-2 * 1.5 / (2 + 2))


def test_what_the_exact_total_changes():
    log_probs = torch.tensor([[[0.9, 0.1], [0.9, 0.1]]], dtype=torch.float64).log()  # "" with probability 0.81
    arguments = torch.tensor([[1, 1]]), torch.tensor([2]), torch.tensor([2])
    for exact, total in ((True, 0.0), (False, 0.19 - 1)):
        own = expected_ngram_total(log_probs, torch.tensor([2]), 2, blank=0, exact=exact)
        torch.testing.assert_close(own, torch.tensor([total], dtype=torch.float64))
        assert ngram_matching_loss(log_probs, *arguments, blank=0, exact_total=exact).item() == 0


def test_geometric_mean_leaves_out_what_the_references_lack():
    log_probs = one_hot_log_probs([3, 4, 5], [3, 4, 5])
    arguments = torch.tensor([[3, 5, 1], [3, 5, 1]]), torch.tensor([3, 3]), torch.tensor([2, 1])
    losses = combined_ngram_loss(log_probs, *arguments, blank=0, weights={1: 0.5, 2: 0.25, 3: 0.25}, mean="geometric")
    assert losses[0] == 0  # the target's 2-gram is not matched
    assert losses[1].item() == pytest.approx(-2 * 1 / (1 + 3))  # the target has one token: its F1 for n = 1 alone


LOG_PROBS = torch.zeros(2, 4, 5).log_softmax(-1)


def shifted(sentence: int, position: int, by: float) -> Tensor:
    log_probs = LOG_PROBS.clone()
    log_probs[sentence, position] += by
    return log_probs


TARGETS, INPUT_LENGTHS, TARGET_LENGTHS = torch.ones(2, 3, dtype=torch.long), torch.tensor([4, 4]), torch.tensor([2, 3])
GOOD = {
    "log_probs": LOG_PROBS,
    "targets": TARGETS,
    "input_lengths": INPUT_LENGTHS,
    "target_lengths": TARGET_LENGTHS,
    "blank": 0,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"log_probs": LOG_PROBS[0]}, r"log_probs must be floating point \(B, T, V\), but is torch.float32 \(4, 5\)"),
        ({"log_probs": torch.zeros(2, 4, 5)}, r"must be normalised .* sentence 0, position 0 sum to 5"),
        ({"log_probs": torch.full((2, 4, 5), torch.nan)}, r"must be normalised"),
        ({"log_probs": shifted(1, 1, 2.0)}, r"must be normalised .* sentence 1, position 1 sum to 7.38906"),
        ({"log_probs": shifted(1, 3, 2.0)}, r"must be normalised .* sentence 1, position 3 sum to 7.38906"),
        ({"log_probs": shifted(0, 3, torch.nan)}, r"must be normalised .* sentence 0, position 3 sum to nan"),
        ({"targets": TARGETS[0]}, r"targets must be .*, but is torch.int64 \(3,\)"),
        ({"targets": TARGETS.float()}, r"targets must be integers .*, but is torch.float32"),
        ({"targets": TARGETS.cfloat()}, r"targets must be integers .*, but is torch.complex64"),
        ({"targets": TARGETS.bool()}, r"targets must be integers .*, but is torch.bool"),
        ({"targets": TARGETS + 4}, r"targets must be in 0..4, but is 0..5"),
        ({"targets": TARGETS - 2}, r"targets must be in 0..4, but is -1..0"),
        ({"targets": TARGETS - 1}, r"targets must not hold the blank, but 0 is among them"),
        ({"input_lengths": torch.tensor([4, 5])}, r"input_lengths must be in 0..4, but is 4..5"),
        ({"input_lengths": torch.tensor([4])}, r"input_lengths must be integers \(2,\), but is torch.int64 \(1,\)"),
        ({"input_lengths": INPUT_LENGTHS.bool()}, r"input_lengths must be integers \(2,\), but is torch.bool \(2,\)"),
        ({"input_lengths": INPUT_LENGTHS.cfloat()}, r"input_lengths must be integers .*, but is torch.complex64"),
        ({"target_lengths": TARGET_LENGTHS.bool()}, r"target_lengths must be integers .*, but is torch.bool"),
        ({"target_lengths": torch.tensor([4, 1])}, r"target_lengths must be in 0..3, but is 1..4"),
        ({"target_lengths": torch.tensor([-1, 1])}, r"target_lengths must be in 0..3, but is -1..1"),
        ({"target_lengths": torch.tensor([1.0, 1.0])}, r"target_lengths must be integers"),
        ({"blank": 5}, r"blank must be in 0..4, but is 5"),
        ({"n": 0}, r"n must be at least 1, but is 0"),
        ({"collapse": "rnnt"}, r'collapse must be "ctc" or "sctc", but is \'rnnt\''),
        ({"weights": {1: 0.7}}, r"weights must be positive and sum to 1"),
        ({"weights": {1: torch.nan}}, r"weights must be positive and sum to 1"),
        ({"weights": {1: 0.5, 2: torch.nan}}, r"weights must be positive and sum to 1"),
        ({"weights": {}}, r"weights must be positive and sum to 1"),
        ({"mean": "harmonic"}, r'mean must be "arithmetic" or "geometric"'),
        ({"margin": 2.0}, r"margin must be a probability"),
        ({"margin": torch.nan}, r"margin must be a probability"),
        ({"delta": 0.0}, r"delta must be positive"),
        ({"delta": torch.nan}, r"delta must be positive"),
        ({"delta": torch.inf}, r"delta must be positive and finite"),
    ],
)
def test_errors_say_what_must_hold(change, message):
    option = next(iter(change))
    losses = {
        "n": [ngram_matching_loss],
        "collapse": [ngram_matching_loss, best_alignment],
        "weights": [combined_ngram_loss],
        "mean": [combined_ngram_loss],
        "margin": [bipartite_loss],
        "delta": [axe_loss],
    }.get(option, [ngram_matching_loss, ctc_loss, sctc_loss, best_alignment, bipartite_loss, axe_loss])
    for loss in losses:
        with pytest.raises(ValueError, match=message):
            loss(**(GOOD | change))
    if option in ("targets", "input_lengths", "target_lengths", "blank", "n", "collapse"):
        logits, *rest = (GOOD | change).values()
        options = dict(zip(list(GOOD | change)[4:], rest[3:], strict=True))
        with pytest.raises(ValueError, match=message):
            ngram_matching_loss_with_logits(logits, *rest[:3], **options)
        if option != "n":
            with pytest.raises(ValueError, match=message):
                ctc_loss_with_logits(logits, *rest[:3], **options)
        with pytest.raises(ValueError, match=message):
            fused_ngram_matching_loss(logits, torch.eye(5), None, *rest[:3], **options)


def test_rounded_log_probs_are_normalised_enough():
    """Through bfloat16 and back those of a large vocabulary sum to 1.0125."""
    log_probs = torch.zeros(2, 4, 50257, dtype=torch.bfloat16).log_softmax(-1).float()
    assert log_probs[0, 0].double().exp().sum() > 1.01
    assert sctc_loss(log_probs, TARGETS, INPUT_LENGTHS, TARGET_LENGTHS, blank=0).isfinite().all()


def test_errors_of_the_others():
    with pytest.raises(ValueError, match=r"path must be \(T,\), one path at a time, but is \(2, 3\)"):
        collapse_path(TARGETS, blank=0)
    with pytest.raises(ValueError, match=r"ngrams must be integers \(2, G, n\), but is torch.bool \(2, 3, 1\)"):
        expected_ngram_counts(LOG_PROBS, TARGETS[..., None].bool(), INPUT_LENGTHS, blank=0)
    for expectation in (expected_length, partial(expected_ngram_total, n=2)):
        with pytest.raises(ValueError, match=r"must be normalised .* sentence 1, position 3"):
            expectation(shifted(1, 3, 2.0), INPUT_LENGTHS, blank=0)
    with pytest.raises(ValueError, match=r"targets must be integers \(2, L\), but is torch.int64 \(2, 1, 3\)"):
        ctc_loss(LOG_PROBS, TARGETS[:, None], INPUT_LENGTHS, TARGET_LENGTHS[:, None], blank=0)
    with pytest.raises(ValueError, match="sentence 0 has 4 positions and 2 tokens"):
        cross_entropy_loss(LOG_PROBS, TARGETS, INPUT_LENGTHS, TARGET_LENGTHS)
    with pytest.raises(ValueError, match=r"ngrams must be integers \(2, G, n\), but is torch.int64 \(2, 3\)"):
        expected_ngram_counts(LOG_PROBS, TARGETS, INPUT_LENGTHS, blank=0)
    with pytest.raises(ValueError, match="ngrams must not hold the blank"):
        expected_ngram_counts(LOG_PROBS, TARGETS[..., None], INPUT_LENGTHS, blank=1)
    with pytest.raises(ValueError, match=r"weight must be \(V, 5\), but is \(5, 4\)"):
        fused_ngram_matching_loss(LOG_PROBS, torch.zeros(5, 4), None, TARGETS, INPUT_LENGTHS, TARGET_LENGTHS, blank=0)
    with pytest.raises(ValueError, match=r"bias must be \(5,\) or None, but is \(4,\)"):
        fused_ngram_matching_loss(
            LOG_PROBS, torch.eye(5), torch.zeros(4), TARGETS, INPUT_LENGTHS, TARGET_LENGTHS, blank=0
        )
    with pytest.raises(ValueError, match=r"log_probs must be \(B, 256\), but is \(2, 5\)"):
        length_loss(LOG_PROBS[:, 0], TARGET_LENGTHS, TARGET_LENGTHS)
