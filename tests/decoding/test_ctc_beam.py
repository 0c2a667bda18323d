"""Prefix beam search against the enumeration of all paths."""

import itertools
import math

import numpy as np
import pytest
import torch

import oracle
from nmla.decoding.ctc_beam import BeamSearch
from nmla.errors import DataError
from nmla.losses import ctc_loss, sctc_loss


class Bigrams:
    """A language model that knows some pairs of tokens, as the search reads it; and in plain words, to compare."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.vocab_size, self.end = vocab_size, vocab_size - 1
        self.unigram = np.log(rng.dirichlet(np.ones(vocab_size)))
        self.backoff = rng.uniform(-1, 0, vocab_size)
        self.bigram = {
            (a, b): math.log(rng.uniform(0.1, 0.9))
            for a, b in itertools.product(range(vocab_size), repeat=2)
            if rng.random() < 0.5
        }
        pairs = sorted(self.bigram)
        self.order = 2
        self.tokens = np.array([0, *range(vocab_size), *(b for _, b in pairs)], np.uint32)
        starts = [1 + vocab_size + sum(a < node for a, _ in pairs) for node in range(vocab_size + 1)]
        self.children = np.array([1, *starts], np.int64)
        self.log_probs = np.array([0, *self.unigram, *(self.bigram[pair] for pair in pairs)], np.float32)
        self.backoffs = np.array([0, *self.backoff, *(0 for _ in pairs)], np.float32)
        self.suffixes = np.array([0, *(0 for _ in range(vocab_size)), *(1 + b for _, b in pairs)], np.int64)
        self.begin = 0  # the token that stands before the first
        self.start = 1 + self.begin

    def score(self, ids: list[int]) -> float:
        total = 0.0
        for before, token in itertools.pairwise([self.begin, *ids, self.end]):
            known = self.bigram.get((before, token))
            total += self.backoff[before] + self.unigram[token] if known is None else known
        return total


def everything(log_probs, blank, collapse, lm, alpha, beta):
    """The objective of every output, from all its paths."""
    paths, scores = oracle.paths_of(log_probs, blank, collapse)
    outputs: dict[tuple[int, ...], list[torch.Tensor]] = {}
    for row, length, score in zip(paths.sentences_PT.tolist(), paths.lengths_P.tolist(), scores, strict=True):
        outputs.setdefault(tuple(row[:length]), []).append(score)
    result = {}
    for output, of_output in outputs.items():
        log_prob = torch.stack(of_output).logsumexp(0).item()
        of_lm = lm.score(list(output)) if alpha else 0.0
        result[output] = log_prob + alpha * of_lm + beta * math.log(max(len(output), 1))
    return result


@pytest.mark.parametrize("collapse", ["ctc", "sctc"])
@pytest.mark.parametrize(("alpha", "beta"), [(0, 0), (0.7, 0), (0, 1.5), (0.4, -0.8), (1.3, 2.0)])
@pytest.mark.parametrize("seed", range(4))
def test_full_width_search_is_enumeration(collapse, alpha, beta, seed):
    generator = torch.Generator().manual_seed(seed)
    positions, vocabulary = [(4, 4), (6, 3), (3, 5), (5, 3)][seed]
    logits = 2 * torch.randn(1, positions, vocabulary, generator=generator)
    lm = Bigrams(vocabulary, seed)
    blank = seed % vocabulary
    log_probs = logits[0].double().log_softmax(-1)
    expected = everything(log_probs, blank, collapse, lm, alpha, beta)
    best = sorted(expected, key=expected.__getitem__, reverse=True)
    search = BeamSearch(beam_size=2000, top_k=vocabulary, alpha=alpha, beta=beta, lm=lm)
    [found] = search(logits, [positions], blank=blank, collapse=collapse, num_hypotheses=5)
    assert [tuple(of.tokens) for of in found] == best[:5]
    for of in found:
        assert of.score == pytest.approx(expected[tuple(of.tokens)], abs=1e-4)
        loss = (ctc_loss if collapse == "ctc" else sctc_loss)(
            log_probs[None],
            torch.tensor([of.tokens], dtype=torch.long).view(1, -1),
            torch.tensor([positions]),
            torch.tensor([len(of.tokens)]),
            blank=blank,
        )
        assert of.log_prob == pytest.approx(-loss.item(), abs=1e-4)
        assert of.lm_log_prob == pytest.approx(lm.score(of.tokens) if alpha else 0, abs=1e-4)
        assert of.positions == sorted(set(of.positions))


@pytest.mark.parametrize("collapse", ["ctc", "sctc"])
def test_narrow_search_scores_honestly(collapse):
    """What is found is as good as told, and a wider search does not find less."""
    generator = torch.Generator().manual_seed(1)
    logits, lengths = 3 * torch.randn(5, 30, 40, generator=generator), [30, 12, 1, 0, 25]
    lm = Bigrams(40, 1)
    means = []
    for beam_size in (1, 4, 16, 64):
        found = BeamSearch(beam_size, 10, 0.5, 0.5, lm)(logits, lengths, blank=7, collapse=collapse)
        means.append(sum(of.score for [of] in found))
        for b, [of] in enumerate(found):
            assert 7 not in of.tokens
            assert all(position < lengths[b] for position in of.positions)
            loss = (ctc_loss if collapse == "ctc" else sctc_loss)(
                logits[b : b + 1].log_softmax(-1),
                torch.tensor([of.tokens], dtype=torch.long).view(1, -1),
                torch.tensor([lengths[b]]),
                torch.tensor([len(of.tokens)]),
                blank=7,
            )
            assert of.log_prob == pytest.approx(-loss.item(), abs=1e-3)
            again = of.log_prob + 0.5 * lm.score(of.tokens) + 0.5 * math.log(max(len(of.tokens), 1))
            assert of.score == pytest.approx(again, abs=1e-3)
    assert means == sorted(means)


def test_a_sure_model_is_believed():
    path = [0, 3, 3, 0, 3, 2, 2, 0]
    logits = 20 * torch.nn.functional.one_hot(torch.tensor([path]), 5).float()
    [[ctc]] = BeamSearch()(logits, [8], blank=0)
    assert (ctc.tokens, ctc.positions) == ([3, 3, 2], [1, 4, 5])
    [[sctc]] = BeamSearch()(logits, [8], blank=0, collapse="sctc")
    assert (sctc.tokens, sctc.positions) == ([3, 3, 3, 2, 2], [1, 2, 4, 5, 6])


def test_tokens_that_cannot_be_are_not_found():
    logits = torch.zeros(1, 3, 4)
    logits[..., 2] = -torch.inf
    [found] = BeamSearch(100, 4)(logits, [3], blank=0, num_hypotheses=100)
    assert all(2 not in of.tokens for of in found)
    assert sum(math.exp(of.log_prob) for of in found) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"beam_size": 0}, "beam_size must be at least 1, but is 0"),
        ({"top_k": 0}, "top_k must be at least 1, but is 0"),
        ({"alpha": -1.0}, "alpha must be at least 0, but is -1.0"),
        ({"alpha": 1.0}, "alpha must be 0 without a language model, but is 1.0"),
    ],
)
def test_settings_that_cannot_be(settings, match):
    with pytest.raises(ValueError, match=match):
        BeamSearch(**settings)


def test_outputs_that_are_no_numbers_are_refused():
    logits = torch.randn(1, 60, 50)
    logits[0, 5:, 3] = math.nan
    with pytest.raises(DataError, match="a model's outputs must be finite numbers, but some are not"):
        BeamSearch(20, 20)(logits, [60], blank=0)
    assert BeamSearch(20, 20)(logits, [5], blank=0)[0][0].tokens  # beyond the sentence anything may stand


@pytest.mark.parametrize("damage", ["log_probs", "suffixes", "children"])
def test_damaged_language_model_ends_no_process(damage):
    lm = Bigrams(20, seed=1)
    lm.suffixes[:] = 1
    if damage == "log_probs":
        lm.log_probs[5:] = math.nan
    elif damage == "suffixes":
        lm.suffixes[:] = np.arange(len(lm.suffixes)) + (1 << 40)
    else:
        lm.children[1:] = 1 << 45
    assert len(BeamSearch(8, 8, 0.5, 1.0, lm)(torch.randn(2, 30, 20), [30, 30], blank=0)) == 2
