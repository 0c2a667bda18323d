import itertools
from dataclasses import replace

import numpy as np
import pytest

from nmla.config import ModelConfig, TrainConfig
from nmla.data.corpus import Corpus, TokenStore
from nmla.errors import DataError
from nmla.training.feed import Examples, Place, step_data

CONFIG = ModelConfig(d_model=16, heads=2, feed_forward=32, encoder_layers=1, decoder_layers=1, upsample=2)


def corpus_of(pairs):
    """A corpus of (source, [references])."""
    store = TokenStore.of((source for source, _ in pairs), 100)
    targets = TokenStore.of((target for _, targets in pairs for target in targets), 100)
    references = np.cumsum([0, *(len(targets) for _, targets in pairs)])
    return Corpus(None, store, targets, references, [], [])


PAIRS = [
    ([5, 6], [[5, 6], [6, 5, 7], [5] * 4]),  # six positions: the last needs seven, with blanks between
    ([5], [[6]]),
    ([7] * 30, [[8] * 3]),  # more positions than a batch has
    ([6, 7, 8], [[9], [9, 10]]),
    ([6], [[5] * 9]),
]


@pytest.fixture
def stage():
    return TrainConfig(steps=1, max_tokens=20)


def test_each_reference_is_an_example_of_its_own(stage):
    examples = Examples.of(corpus_of(PAIRS), CONFIG, stage)
    assert examples.source.tolist() == [0, 0, 1, 3, 3]
    assert examples.costs.tolist() == [6, 6, 4, 8, 8]
    assert examples.skipped == 3
    assert "3 of 8 pairs are skipped: 2 targets need more positions, 1 outputs are longer than 20" in examples.why
    batch = examples.batch(np.array([1, 4]))
    assert batch.target.tolist() == [[6, 5, 7], [9, 10, 0]]


def test_references_together_are_one_example_without_those_that_do_not_fit(stage):
    examples = Examples.of(corpus_of(PAIRS), CONFIG, replace(stage, loss="ngram", references="together"))
    assert examples.source.tolist() == [0, 1, 3]
    assert examples.tokens.tolist() == [5, 1, 3]
    batch = examples.batch(np.array([0, 1, 2]))
    assert batch.target_lengths.tolist() == [[2, 3], [1, 0], [1, 2]]
    assert batch.target[2].tolist() == [[9, 0, 0], [9, 10, 0]]


def test_other_families_need_no_room_for_blanks(stage):
    autoregressive = replace(CONFIG, family="autoregressive")
    examples = Examples.of(corpus_of(PAIRS), autoregressive, replace(stage, loss="cross_entropy"))
    assert examples.skipped == 1  # the one that is longer than a batch
    assert examples.costs.tolist() == [3, 4, 5, 2, 4, 4, 10]  # the longer of source and target, each with its end
    learned = replace(CONFIG, positions="learned", max_positions=7)
    assert Examples.of(corpus_of(PAIRS), learned, stage).source.tolist() == [0, 0, 1]


def test_targets_are_alike_in_a_batch_only_where_the_decoder_is_as_long(stage):
    assert not Examples.of(corpus_of(PAIRS), CONFIG, stage).widths.any()
    fixed = Examples.of(corpus_of(PAIRS), replace(CONFIG, family="fixed_length"), replace(stage, loss="cross_entropy"))
    assert fixed.widths.tolist() == [2, 3, 4, 1, 1, 2, 9]


def test_sctc_needs_no_blank_between_equal_neighbours(stage):
    examples = Examples.of(corpus_of(PAIRS), replace(CONFIG, family="sctc"), replace(stage, loss="sctc"))
    assert examples.source.tolist() == [0, 0, 0, 1, 3, 3]


def test_nothing_that_fits_is_refused(stage):
    with pytest.raises(DataError, match="at least one target must fit"):
        Examples.of(corpus_of(PAIRS[-1:]), CONFIG, stage)


@pytest.fixture
def many(digits):
    stage = TrainConfig(steps=1, max_tokens=300)
    return Examples.of(Corpus.load(digits / "corpus"), CONFIG, stage), stage


def sentences(data):
    """All (place, source, target) of a StepData."""
    return [
        (place, tuple(row[:length]))
        for place, batch in data.batches
        for row, length in zip(batch.source.tolist(), batch.source_lengths.tolist(), strict=True)
    ]


@pytest.mark.parametrize(("world_size", "accumulate"), [(2, 1), (3, 2), (4, 3)])
def test_devices_share_what_one_device_sees(many, world_size, accumulate):
    """Over more than an epoch, nothing is lost and nothing repeated."""
    examples, stage = many
    per_epoch = sum(
        1 for _ in itertools.takewhile(lambda d: d.after.epoch == 0, step_data(examples, stage, 1, Place()))
    )
    steps = 2 * per_epoch // (world_size * accumulate) + 2
    one = replace(stage, accumulate=accumulate * world_size)
    each = replace(stage, accumulate=accumulate)
    alone = itertools.islice(step_data(examples, one, 1, Place()), steps)
    shared = zip(*(step_data(examples, each, 1, Place(), rank, world_size) for rank in range(world_size)), strict=True)
    for single, parts in zip(alone, shared, strict=False):
        assert sorted(sentences(single), key=str) == sorted((s for p in parts for s in sentences(p)), key=str)
        assert all(part.totals == single.totals and part.after == single.after for part in parts)


def test_stream_goes_on_from_any_place(many):
    examples, stage = many
    stage = replace(stage, accumulate=3)
    whole = list(itertools.islice(step_data(examples, stage, 1, Place()), 60))
    assert whole[-1].after.epoch > 0
    for start in (1, 17, 42, 59):
        resumed = next(step_data(examples, stage, 1, whole[start - 1].after))
        assert sentences(resumed) == sentences(whole[start])
        assert resumed.after == whole[start].after


def test_every_batch_draws_other_random_numbers():
    places = [Place(epoch, batch) for epoch in range(20) for batch in range(50)]
    assert len({place.seed(run) for place in places for run in (1, 2)}) == 2000
