import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from nmla import losses
from nmla.config import LOSSES, ModelConfig, TrainConfig
from nmla.data.corpus import Corpus
from nmla.data.prepare import prepare
from nmla.models.pretrained import build_model
from nmla.text.tokenizer import BLANK, EOS
from nmla.training.feed import Examples
from nmla.training.objective import LENGTH_WEIGHT, Totals, batch_loss
from nmla.training.schedule import learning_rate

pytestmark = pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
EVERY = [(family, loss) for family, of_family in LOSSES.items() for loss in of_family]
CONFIG = ModelConfig(d_model=16, heads=2, feed_forward=32, encoder_layers=1, decoder_layers=1, upsample=2)


class Setting:
    def __init__(self, digits, family, **stage):
        self.corpus = Corpus.load(digits / "corpus")
        self.config = replace(CONFIG, family=family)
        if stage.get("loss") == "ddrs":
            stage["references"] = "together"
        self.stage = TrainConfig(steps=1, **stage)
        self.examples = Examples.of(self.corpus, self.config, self.stage)
        torch.manual_seed(0)
        self.model = build_model(self.config, self.corpus.tokenizer.vocab_size).double().eval()

    def loss(self, groups, progress=0.0):
        """The loss of a step over these groups of examples, each a batch."""
        indices = np.concatenate(groups)
        totals = Totals(int(self.examples.tokens[indices].sum()), len(indices))
        batches = (self.examples.batch(np.array(group)) for group in groups)
        return sum(batch_loss(self.model, self.config, b, self.stage, totals, progress) for b in batches)

    def gradient(self, groups):
        self.model.zero_grad()
        self.loss(groups).backward()
        return torch.cat([p.grad.flatten() for p in self.model.parameters() if p.grad is not None])


@pytest.mark.parametrize(("family", "loss"), EVERY)
def test_accumulated_batches_descend_as_one_batch(digits, family, loss):
    """A step's gradient depends on its sentences, not on how they were cut into batches or padded."""
    setting = Setting(digits, family, loss=loss)
    whole, parts = setting.gradient([[0, 1, 2, 3, 4]]), setting.gradient([[4, 0], [2], [1, 3]])
    assert whole.norm() > 0
    assert torch.allclose(whole, parts, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("family", "loss"), EVERY)
def test_every_loss_goes_down(digits, family, loss):
    setting = Setting(digits, family, loss=loss)
    optimizer = torch.optim.AdamW(setting.model.parameters(), 3e-3)
    values = []
    for _ in range(15):
        optimizer.zero_grad()
        value = setting.loss([[0, 1, 2, 3, 4, 5, 6, 7]])
        value.backward()
        optimizer.step()
        values.append(float(value.detach()))
    assert values[-1] < values[0] - 0.02 * abs(values[0])


@pytest.mark.parametrize(("family", "loss"), [("ctc", "ctc"), ("sctc", "sctc"), ("sctc", "bipartite")])
def test_losses_that_grow_with_the_target_are_a_mean_over_tokens(digits, family, loss):
    setting = Setting(digits, family, loss=loss)
    batch = setting.examples.batch(np.array([0, 1]))
    logits, lengths, *_ = setting.model(batch.source, batch.source_lengths)
    function = {"ctc": losses.ctc_loss, "sctc": losses.sctc_loss, "bipartite": losses.bipartite_loss}[loss]
    expected = function(logits.log_softmax(-1), batch.target, lengths, batch.target_lengths, blank=BLANK)
    assert float(setting.loss([[0, 1]])) == pytest.approx(float(expected.sum() / batch.target_lengths.sum()))


@pytest.mark.parametrize(("family", "progress"), [("ctc", 0), ("ctc", 0.5), ("sctc", 1)])
def test_one_reference_under_ddrs_is_ctc(digits, family, progress):
    """At any progress, so that a model pretrained by either can be compared."""
    chosen, plain = Setting(digits, family, loss="ddrs"), Setting(digits, family, loss=family)
    groups = [[0, 1], [2]]
    assert float(chosen.loss(groups, progress)) == pytest.approx(float(plain.loss(groups)))


@pytest.fixture(scope="module")
def several(digits, tmp_path_factory):
    """Sources with one, two and three references of different lengths."""
    directory = tmp_path_factory.mktemp("several")
    rows = ["1 2 3\t1 2 3\t3 2\t1", "4 5\t5 4", "6 7 8 9\t6 7 9\t9 8 7 6"]
    (directory / "train.tsv").write_text("".join(f"{row}\n" for row in rows))
    files = (directory / "train.tsv",)
    prepare(train=[files], valid=[files], output=directory / "corpus", tokenizer=digits / "corpus")
    return directory


@pytest.mark.parametrize("family", ["ctc", "sctc"])
def test_ddrs_begins_with_all_references(several, family):
    """At the first step it is CTC with each reference as an example of its own."""
    together, each = Setting(several, family, loss="ddrs"), Setting(several, family, loss=family)
    assert float(together.loss([[0, 1], [2]])) == pytest.approx(float(each.loss([[0, 1, 2, 3, 4, 5]])))


@pytest.mark.parametrize("family", ["ctc", "sctc"])
def test_ngram_loss_of_several_references_takes_their_mean_counts(several, family):
    setting = Setting(several, family, loss="ngram", references="together")
    expected = 0.0
    for i in range(3):
        batch = setting.examples.batch(np.array([i]))
        logits, lengths, *_ = setting.model(batch.source, batch.source_lengths)
        targets = [row[:n].tolist() for row, n in zip(batch.target[0], batch.target_lengths[0], strict=True) if n]
        wanted = Counter(pair for target in targets for pair in itertools.pairwise(target))
        log_probs, arguments = logits.log_softmax(-1), {"blank": BLANK, "collapse": family}
        counts = losses.expected_ngram_counts(log_probs, torch.tensor([[*wanted]]), lengths, **arguments)[0].tolist()
        matched = sum(min(count, n / len(targets)) for count, n in zip(counts, wanted.values(), strict=True))
        total = float(losses.expected_ngram_total(log_probs, lengths, n=2, **arguments))
        expected -= 2 * matched / (total + wanted.total() / len(targets))
    assert [len(setting.corpus.references), len(setting.examples.tokens)] == [4, 3]
    assert float(setting.loss([[0, 1, 2]])) == pytest.approx(expected / 3)


@pytest.mark.parametrize(("family", "n"), [("ctc", 2), ("sctc", 1), ("ctc", 3)])
def test_ngram_loss_is_a_mean_over_sentences(digits, family, n):
    setting = Setting(digits, family, loss="ngram", ngram=n)
    batch = setting.examples.batch(np.array([0, 1]))
    logits, lengths, *_ = setting.model(batch.source, batch.source_lengths)
    arguments = (logits.log_softmax(-1), batch.target, lengths, batch.target_lengths)
    expected = losses.ngram_matching_loss(*arguments, blank=BLANK, n=n, collapse=family)
    assert float(setting.loss([[0, 1]])) == pytest.approx(float(expected.mean()))


@pytest.mark.parametrize("family", ["ctc", "sctc"])
def test_ngram_loss_takes_recall_and_some_of_ctc(digits, family):
    setting = Setting(digits, family, loss="ngram", recall_weight=3.0, ctc_weight=0.2)
    batch = setting.examples.batch(np.array([0, 1]))
    logits, lengths, *_ = setting.model(batch.source, batch.source_lengths)
    arguments = (logits.log_softmax(-1), batch.target, lengths, batch.target_lengths)
    matching = losses.ngram_matching_loss(*arguments, blank=BLANK, collapse=family, recall_weight=3.0)
    alignment = {"ctc": losses.ctc_loss, "sctc": losses.sctc_loss}[family](*arguments, blank=BLANK)
    expected = matching + 0.2 * alignment / batch.target_lengths
    assert float(setting.loss([[0, 1]])) == pytest.approx(float(expected.mean()))


def test_autoregressive_loss_is_that_of_each_word_and_the_end(digits):
    setting = Setting(digits, "autoregressive", loss="cross_entropy")
    total, tokens = 0.0, 0
    for i in range(3):
        batch = setting.examples.batch(np.array([i]))
        logits = setting.model(batch.source, batch.source_lengths, batch.target, batch.target_lengths).logits[0]
        words = [*batch.target[0].tolist(), EOS]
        total += sum(-float(row.log_softmax(-1)[word].detach()) for row, word in zip(logits, words, strict=True))
        tokens += len(words)
    assert float(setting.loss([[0, 1, 2]])) == pytest.approx(total / tokens)


def test_fixed_length_model_learns_its_length_too(digits):
    setting = Setting(digits, "fixed_length", loss="cross_entropy")
    batch = setting.examples.batch(np.array([0, 1]))
    output = setting.model(batch.source, batch.source_lengths, batch.target_lengths)
    arguments = (batch.target, batch.target_lengths, batch.target_lengths)
    words = losses.cross_entropy_loss(output.logits.log_softmax(-1), *arguments).sum() / batch.target_lengths.sum()
    of_length = losses.length_loss(
        output.length_logits.log_softmax(-1), batch.source_lengths, batch.target_lengths
    ).mean()
    assert float(setting.loss([[0, 1]])) == pytest.approx(float(words + LENGTH_WEIGHT * of_length))


@pytest.mark.parametrize(("family", "loss"), [("ctc", "ctc"), ("sctc", "sctc"), ("fixed_length", "cross_entropy")])
def test_glancing_tells_less_and_less(digits, family, loss):
    """An untrained model misses nearly all: at the ratio 1 it is told all of it, at 0 nothing."""
    setting = Setting(digits, family, loss=loss, glance_from=1.0, glance_to=0.0)
    told = []
    embed = setting.model.embed
    setting.model.embed = lambda tokens: (told.append(tokens), embed(tokens))[1]
    plain = Setting(digits, family, loss=loss)
    at_end = setting.loss([[0, 1]], progress=1.0)
    assert float(at_end) == pytest.approx(float(plain.loss([[0, 1]])))
    assert (told[-1] == 0).all()  # clamped from NOT_TOLD
    counts = []
    for progress in (0.0, 0.5):
        torch.manual_seed(1)
        setting.loss([[0, 1]], progress=progress)
        counts.append(int((told[-1] != 0).sum()))
    assert counts[0] > counts[1] > 0


def test_glanced_tokens_are_not_learned_by_a_fixed_length_model(digits):
    setting = Setting(digits, "fixed_length", loss="cross_entropy", glance_from=1.0, glance_to=1.0)
    batch = setting.examples.batch(np.array([0]))
    gold, length = batch.target[0], int(batch.target_lengths[0])
    told = {}

    forward = setting.model.fill

    def fill(memory, lengths, width, glance):
        logits, revealed = forward(memory, lengths, width, glance)
        told["revealed"], told["logits"] = revealed[0, :length], logits[0, :length]
        return logits, revealed

    setting.model.fill = fill
    torch.manual_seed(2)
    loss = setting.loss([[0]])
    hidden = ~told["revealed"]
    log_p = told["logits"].log_softmax(-1)[torch.arange(length), gold[:length]]
    of_length = losses.length_loss(
        setting.model(
            batch.source, batch.source_lengths, batch.target_lengths, lambda *_: torch.full((1, length), -1)
        ).length_logits.log_softmax(-1),
        batch.source_lengths,
        batch.target_lengths,
    )
    assert float(loss) == pytest.approx(float(-log_p[hidden].sum() / length + LENGTH_WEIGHT * of_length.sum()))


def test_combined_weights_are_those_of_1_2_and_so_on(digits):
    combined = Setting(digits, "ctc", loss="combined", combine=[0.25, 0.75]).loss([[0, 1, 2]])
    one, two = (Setting(digits, "ctc", loss="ngram", ngram=n).loss([[0, 1, 2]]) for n in (1, 2))
    assert float(combined) == pytest.approx(float(0.25 * one + 0.75 * two))
    only_two = Setting(digits, "ctc", loss="combined", combine=[0.0, 1.0]).loss([[0, 1, 2]])
    assert float(only_two) == pytest.approx(float(two))


def test_half_precision_outputs_meet_losses_in_full(digits):
    setting = Setting(digits, "ctc", loss="ctc")
    setting.model.float()
    with torch.autocast("cpu", torch.bfloat16):
        loss = setting.loss([[0, 1, 2]])
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(float(setting.loss([[0, 1, 2]])), rel=0.02)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("inverse_sqrt", [1e-5, 5e-4, 1e-3, 5e-4, 1e-3 / 10**0.5]),
        ("constant", [1e-5, 5e-4, 1e-3, 1e-3, 1e-3]),
        ("linear", [1e-5, 5e-4, 1e-3, 2e-3 / 3, 0.0]),
        ("cosine", [1e-5, 5e-4, 1e-3, 7.5e-4, 0.0]),
    ],
)
def test_learning_rate_rises_then_falls(schedule, expected):
    stage = TrainConfig(steps=1000, learning_rate=1e-3, warmup_steps=100, schedule=schedule)
    rates = [learning_rate(step, stage) for step in (1, 50, 100, 400, 1000)]
    assert rates == pytest.approx(expected, abs=1e-12)
    rising = [learning_rate(step, stage) for step in range(1, 101)]
    assert all(b > a for a, b in itertools.pairwise(rising))
