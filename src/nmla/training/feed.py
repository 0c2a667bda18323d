"""What a training reads: which pairs can be used, and an endless stream of batches that any device can join anywhere.

All batches of an epoch have one order, the same on every device. A step takes the next `accumulate` x devices of them,
of which each device takes every so many-th: none is lost, none is seen twice, and one device with twice the
accumulation sees what two see. When an epoch ends within a step, the step goes on with the next.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from nmla.config import ModelConfig, TrainConfig
from nmla.data.batching import Batch, collate, epoch_batches
from nmla.data.corpus import Corpus, IntArray, shortest_paths
from nmla.errors import DataError
from nmla.training.objective import Totals


@dataclass(frozen=True)
class Examples:
    """What can be trained on: a source and those of its references that fit, one or all of them."""

    corpus: Corpus
    source: IntArray  # (N,) which source
    first: IntArray  # (N,) where its references begin in `target`
    count: IntArray  # (N,) how many there are
    target: IntArray  # which references, one example's after the other's
    costs: IntArray  # (N,) positions that the model fills
    widths: IntArray  # (N,) what else should be alike in a batch: the longest reference, if the decoder is as long
    tokens: IntArray  # (N,) of all references
    together: bool  # several references in one example
    skipped: int
    why: str  # what was skipped, in words; empty if nothing was

    @classmethod
    def of(cls, corpus: Corpus, config: ModelConfig, stage: TrainConfig) -> "Examples":
        reference_counts = np.diff(corpus.references)
        source = np.repeat(np.arange(len(reference_counts)), reference_counts)  # of each reference
        lengths = corpus.train_target.lengths
        source_lengths = corpus.train_source.lengths + 1  # EOS
        needed = shortest_paths(corpus.train_target) if config.family == "ctc" else lengths
        if config.family in ("ctc", "sctc"):
            positions = source_lengths[source] * config.upsample
            too_short = needed > positions
        else:  # encoder and decoder are about equally long, and both need room
            positions = np.maximum(source_lengths[source], lengths + 1)
            too_short = np.zeros(len(source), dtype=bool)
        longest = min(stage.max_tokens, config.max_positions if config.positions == "learned" else stage.max_tokens)
        too_long = positions > longest
        fits = np.flatnonzero(~too_short & ~too_long & (lengths > 0))
        if not len(fits):
            raise DataError(
                f"at least one target must fit into the model's output and into {longest} positions, but none does"
            )
        skipped = len(source) - len(fits)
        why = (
            f"{skipped} of {len(source)} pairs are skipped: {too_short.sum()} targets need more positions, "
            f"{too_long.sum()} outputs are longer than {longest}"
        )
        # What a decoder fills is to be of one length. A CTC model's is its source's: were its targets sorted too, one
        # batch would hold the long translations of some words, the next the short, and each undo the other.
        widths = np.zeros_like(lengths) if config.family in ("ctc", "sctc") else lengths
        together = stage.references == "together"
        if together:
            which, first, count = np.unique(source[fits], return_index=True, return_counts=True)
        else:
            which, first, count = source[fits], np.arange(len(fits)), np.ones(len(fits), dtype=np.int64)
        return cls(
            corpus,
            which,
            first,
            count,
            fits,
            np.maximum.reduceat(positions[fits], first),
            np.maximum.reduceat(widths[fits], first),
            np.add.reduceat(lengths[fits], first),
            together,
            skipped,
            why if skipped else "",
        )

    def batch(self, indices: IntArray) -> Batch:
        sources = self.corpus.train_source.take(self.source[indices])
        chosen = zip(self.first[indices].tolist(), self.count[indices].tolist(), strict=True)
        references = [self.corpus.train_target.take(self.target[first : first + count]) for first, count in chosen]
        return collate(sources, references, self.together)


@dataclass(frozen=True)
class Place:
    """Where a run stands in its data: the next batch."""

    epoch: int = 0
    batch: int = 0

    def seed(self, of_run: int) -> int:
        """Where the random numbers of this batch begin."""
        return int(np.random.SeedSequence((of_run, self.epoch, self.batch)).generate_state(1, np.uint64)[0])


@dataclass(frozen=True)
class StepData:
    """What one device does in one step."""

    batches: list[tuple[Place, Batch]]  # with the place of each, from which its random numbers are drawn
    totals: Totals  # over all devices
    after: Place


def step_data(
    examples: Examples, stage: TrainConfig, seed: int, place: Place, rank: int = 0, world_size: int = 1
) -> Iterator[StepData]:
    """The data of every step from `place` on, without end."""
    stream = _stream(examples, stage, seed, place)
    while True:
        taken = list(itertools.islice(stream, stage.accumulate * world_size))
        indices = np.concatenate([batch for _, batch, _ in taken])
        totals = Totals(int(examples.tokens[indices].sum()), len(indices))
        own = [(where, examples.batch(batch)) for where, batch, _ in taken[rank::world_size]]
        yield StepData(own, totals, taken[-1][2])


def _stream(examples: Examples, stage: TrainConfig, seed: int, place: Place) -> Iterator[tuple[Place, IntArray, Place]]:
    """Batches of indices, each with its place and the place after it."""
    for epoch in itertools.count(place.epoch):
        order = epoch_batches(examples.costs, examples.widths, stage.max_tokens, seed, epoch)
        for i in range(place.batch if epoch == place.epoch else 0, len(order)):
            yield Place(epoch, i), order[i], Place(epoch, i + 1)
