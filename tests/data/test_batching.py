import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from nmla.data.batching import collate, epoch_batches
from nmla.text.tokenizer import EOS, PAD


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), min_size=1, max_size=60),
    st.integers(1, 120),
    st.integers(0, 3),
)
def test_each_sentence_is_in_one_batch_within_the_budget(sizes, budget, epoch):
    costs, widths = np.array(sizes).T
    batches = epoch_batches(costs, widths, budget, seed=1, epoch=epoch)
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(costs)))
    assert all(costs[batch].max() * len(batch) <= budget or len(batch) == 1 for batch in batches)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=60), st.integers(9, 60))
def test_batches_are_as_full_as_they_can_be(costs, budget):
    """From the cheapest sentence on, each batch takes the next one as long as it fits."""
    expected = [[]]
    for cost in sorted(costs):
        if expected[-1] and cost * (len(expected[-1]) + 1) > budget:
            expected.append([])
        expected[-1].append(cost)
    costs = np.array(costs)
    batches = epoch_batches(costs, costs, budget, seed=1, epoch=0)
    assert sorted(sorted(costs[batch].tolist()) for batch in batches) == sorted(expected)


def test_batches_depend_on_seed_and_epoch_alone():
    costs = np.arange(1, 200)
    one, again, next_epoch, other_seed = (
        [batch.tolist() for batch in epoch_batches(costs, costs, 500, seed, epoch)]
        for seed, epoch in ((1, 0), (1, 0), (1, 1), (2, 0))
    )
    assert one == again
    assert one != next_epoch
    assert one != other_seed


def test_sentences_of_one_cost_meet_others_each_epoch():
    costs = np.full(100, 5)
    one, two = (epoch_batches(costs, costs, 50, 1, epoch) for epoch in (0, 1))
    assert {frozenset(batch.tolist()) for batch in one} != {frozenset(batch.tolist()) for batch in two}


def test_like_targets_stand_together_among_sources_of_one_length():
    rng = np.random.default_rng(1)
    costs, widths = np.full(1000, 30), rng.integers(10, 50, 1000)
    padded = sum(widths[batch].max() * len(batch) for batch in epoch_batches(costs, widths, 900, 1, 0))
    assert widths.sum() / padded > 0.97


def test_collate_pads_and_closes_the_source():
    batch = collate([[7, 8], [9]], [[[5, 6, 7]], [[8]]])
    assert batch.source.tolist() == [[7, 8, EOS], [9, EOS, PAD]]
    assert batch.source_lengths.tolist() == [3, 2]
    assert batch.target.tolist() == [[5, 6, 7], [8, PAD, PAD]]
    assert batch.target_lengths.tolist() == [3, 1]
    assert batch.source.dtype == batch.target.dtype == torch.long


def test_collate_keeps_several_references_apart():
    batch = collate([[7], [8], [9]], [[[5], [6, 6]], [[7, 8, 9]], [[5], [5], [5]]], several=True)
    assert batch.target.shape == (3, 3, 3)
    assert batch.target_lengths.tolist() == [[1, 2, 0], [3, 0, 0], [1, 1, 1]]
    assert batch.target[0].tolist() == [[5, PAD, PAD], [6, 6, PAD], [PAD, PAD, PAD]]
