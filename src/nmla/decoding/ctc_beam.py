"""Prefix beam search for CTC and SCTC, with an n-gram language model: no network, compiled by numba, free of the GIL.

The output y that is sought has the highest

    log p(y|x) + alpha log p_LM(y) + beta log |y|

where p(y|x) sums over all paths that collapse to y, and the language model also scores the end. (The empty output has
no logarithm of its length: it counts as one token long.) Each of the best prefixes so far keeps the mass of its paths
that end in a blank and of those that end in its last token. A position is read once: prefixes stay as they are, or grow
by one of the likeliest tokens. Without pruning the search is exact.
"""

from collections.abc import Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from nmla.decoding.argmax import Hypothesis
from nmla.decoding.ngram_lm import NgramLM
from nmla.decoding.translation import log_total
from nmla.errors import DataError

_NONE = -np.inf
_MARGIN = 3.0  # so far below the last that is wanted, paths that were not followed do not bring an output back


@dataclass(frozen=True)
class BeamSearch:
    """Settings of a search, and the search itself."""

    beam_size: int = 20
    top_k: int = 20  # tokens that may follow at each position, beside the blank
    alpha: float = 0.0  # weight of the language model
    beta: float = 0.0  # weight of the logarithm of the length
    lm: NgramLM | None = None

    def __post_init__(self) -> None:
        for name in ("beam_size", "top_k"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, but is {getattr(self, name)}")
        if not 0 <= self.alpha < np.inf:
            raise ValueError(f"alpha must be at least 0, but is {self.alpha}")
        if self.alpha and self.lm is None:
            raise ValueError(f"alpha must be 0 without a language model, but is {self.alpha}")

    def __call__(
        self, logits: Tensor, lengths: Sequence[int], *, blank: int, collapse: str = "ctc", num_hypotheses: int = 1
    ) -> list[list[Hypothesis]]:
        """The best outputs of each sentence of ``(B, T, V)`` logits, best first, on all of torch's threads."""
        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            found = self.begin(logits.float(), lengths, threads, blank, collapse, num_hypotheses)
            totals = list(threads.map(log_total, (logits[b, :used] for b, used in enumerate(lengths))))
            return [
                [replace(one, score=one.score - total, log_prob=one.log_prob - total) for one in of.result()]
                for of, total in zip(found, totals, strict=True)
            ]

    def begin(
        self,
        logits: Tensor,
        lengths: Sequence[int],
        threads: Executor,
        blank: int,
        collapse: str,
        num_hypotheses: int,
    ) -> list[Future[list[Hypothesis]]]:
        """The same, one piece of work a sentence, while the caller does something else.

        All paths take the same positions, so which output is best does not depend on what its position's logits sum to:
        that is left out of the scores, and only who tells them need take it off (`log_total`).
        """
        array = logits.contiguous().numpy()
        merge = collapse == "ctc"

        def search(b: int) -> list[Hypothesis]:
            used = array[b, : lengths[b]]
            tops, outputs, *columns = _search(
                used,
                blank,
                merge,
                self.beam_size,
                min(self.top_k, array.shape[-1]),
                self.alpha,
                self.beta,
                min(num_hypotheses, self.beam_size),
                *_arrays(self.lm if self.alpha else None),
            )
            if not len(outputs):
                raise DataError("a model's outputs must be finite numbers, but some are not: its weights are damaged")
            hypotheses = []
            for output, length, score, log_prob, of_lm in zip(outputs, *(c.tolist() for c in columns), strict=True):
                tokens = output[:length]
                begins = align(used, tops, tokens, blank, merge)
                hypotheses.append(Hypothesis(tokens.tolist(), begins.tolist(), score, log_prob, of_lm))
            return hypotheses

        return [threads.submit(search, b) for b in range(len(array))]


def _arrays(lm: NgramLM | None) -> tuple[Any, ...]:
    """What the search reads of a language model; without one, arrays that are never read."""
    if lm is None:
        nothing = np.zeros(2, np.int64)
        return nothing.astype(np.uint32), nothing, *(nothing.astype(np.float32),) * 2, nothing, 0, 0
    return lm.tokens, lm.children, lm.log_probs, lm.backoffs, lm.suffixes, lm.start, lm.end


@numba.njit(nogil=True, cache=True)
def _lm_step(tokens, children, log_probs, backoffs, suffixes, state, token):  # type: ignore[no-untyped-def]
    """The log-probability of a token after a state, and the state after it.

    A file's numbers are not trusted: where they lead nowhere, or back, the search for a longer n-gram ends.
    """
    interior = len(children) - 1  # nodes that can have children: all but those of the highest order
    total = 0.0
    while 0 < state < interior:
        low, last = children[state], children[state + 1]
        if low < 0 or last > len(tokens):
            break
        high = last
        while low < high:
            middle = (low + high) // 2
            if tokens[middle] < token:
                low = middle + 1
            else:
                high = middle
        if low < last and tokens[low] == token:
            after = np.int64(low) if low < interior else np.int64(suffixes[low])
            return total + log_probs[low], after
        total += backoffs[state]
        shorter = np.int64(suffixes[state])
        state = shorter if shorter < state else 0
    node = 1 + token
    return total + log_probs[node], np.int64(node) if node < interior else np.int64(0)


@numba.njit(nogil=True, cache=True)
def _top(row, k, blank, tokens):  # type: ignore[no-untyped-def]
    """Fill `tokens` with the k tokens of the highest scores but the blank, best first; returns how many there are, or
    -1 if one is no number."""
    count = 0
    least = _NONE
    for v in range(len(row)):
        score = row[v]
        if (count == k and score <= least) or v == blank or score == _NONE:
            continue
        if not score < np.inf:  # nor for NaN
            return -1
        at = count if count < k else k - 1
        while at > 0 and row[tokens[at - 1]] < score:
            tokens[at] = tokens[at - 1]
            at -= 1
        tokens[at] = v
        if count < k:
            count += 1
        least = row[tokens[count - 1]]
    return count


@numba.njit(nogil=True, cache=True)
def _add(a, b):  # type: ignore[no-untyped-def]
    """log(e^a + e^b)"""
    if a < b:
        a, b = b, a
    return a if b == _NONE else a + np.log1p(np.exp(b - a))


@numba.njit(nogil=True, cache=True)
def _sift(heap, size, score):  # type: ignore[no-untyped-def]
    """Put a score into the heap of the best ones, smallest first, in place of the smallest if it is full."""
    if size < len(heap):
        at = size
        while at > 0 and heap[(at - 1) // 2] > score:
            heap[at] = heap[(at - 1) // 2]
            at = (at - 1) // 2
        heap[at] = score
        return size + 1
    if score <= heap[0]:
        return size
    at = 0
    while 2 * at + 1 < size:
        below = 2 * at + 1
        if below + 1 < size and heap[below + 1] < heap[below]:
            below += 1
        if heap[below] >= score:
            break
        heap[at] = heap[below]
        at = below
    heap[at] = score
    return size


@numba.njit(nogil=True, cache=True)
def _search(  # type: ignore[no-untyped-def]
    log_probs,
    blank,
    merge,
    beam_size,
    top_k,
    alpha,
    beta,
    wanted,
    lm_tokens,
    lm_children,
    lm_log_probs,
    lm_backoffs,
    lm_suffixes,
    lm_start,
    lm_end,
):
    positions = log_probs.shape[0]
    most = 1 + positions * beam_size  # prefixes that are ever kept
    # The tree of prefixes: node 0 is the empty one.
    parent, token, length = np.zeros(most, np.int64), np.full(most, -1, np.int64), np.zeros(most, np.int64)
    state, lm_score = np.zeros(most, np.int64), np.zeros(most, np.float64)
    eldest, sibling = np.full(most, -1, np.int64), np.full(most, -1, np.int64)  # the nodes that grew out of each
    where = np.full(most, -1, np.int64)  # in which place of the beam a node is
    state[0] = lm_start
    nodes = 1
    # The beam: nodes, with the mass of paths that end in a blank and in the last token.
    beam = np.zeros(beam_size, np.int64)
    in_blank, in_token = np.full(beam_size, _NONE), np.full(beam_size, _NONE)
    in_blank[0] = 0.0
    size = 1
    # What a position makes of it: a candidate is a node that there is, or (-1) one that grows out of another.
    room = beam_size * (1 + top_k)
    c_node, c_parent = np.zeros(room, np.int64), np.zeros(room, np.int64)
    c_token, c_state = np.zeros(room, np.int64), np.zeros(room, np.int64)
    c_blank, c_in_token, c_lm, c_score = np.zeros(room), np.zeros(room), np.zeros(room), np.zeros(room)
    heap = np.zeros(beam_size)
    chosen, postponed = np.zeros(beam_size, np.int64), np.zeros(room, np.int64)
    likely = np.zeros(top_k, np.int64)
    tops = np.zeros(positions)  # the highest of each position

    for t in range(positions):
        row = log_probs[t]
        count, filled = 0, 0
        found = _top(row, top_k, blank, likely)
        tops[t] = max(row[blank], row[likely[0]]) if found > 0 else row[blank]
        if found < 0 or not -np.inf < tops[t] < np.inf:
            size = 0
            break
        for i in range(size):
            where[beam[i]] = i
        # Those that stay: by a blank, by their last token again, or grown out of a shorter one that is in the beam too.
        for i in range(size):
            node = beam[i]
            both = _add(in_blank[i], in_token[i])
            c_node[count] = node
            c_blank[count] = both + row[blank]
            c_in_token[count] = _NONE
            if node != 0:
                again = row[token[node]]
                if merge:
                    c_in_token[count] = in_token[i] + again
                j = where[parent[node]]
                if j >= 0:
                    repeats = merge and beam[j] != 0 and token[beam[j]] == token[node]
                    c_in_token[count] = _add(
                        c_in_token[count], (in_blank[j] if repeats else _add(in_blank[j], in_token[j])) + again
                    )
            mass = _add(c_blank[count], c_in_token[count])
            c_score[count] = mass + alpha * lm_score[node] + beta * np.log(max(length[node], 1))
            if mass > _NONE:
                filled = _sift(heap, filled, c_score[count])
                count += 1
        # Those that grow. A language model only takes away, so what is below the beam without it is below it with it.
        for i in range(size):
            node = beam[i]
            both = _add(in_blank[i], in_token[i])
            base = alpha * lm_score[node] + beta * np.log(length[node] + 1.0)
            for k in range(found):
                v = likely[k]
                score = row[v]
                if filled == beam_size and both + score + base <= heap[0]:
                    break
                mass = (in_blank[i] if merge and node != 0 and token[node] == v else both) + score
                bound = mass + base
                if mass == _NONE or (filled == beam_size and bound <= heap[0]):
                    continue
                # A prefix that fell out of the beam and comes back is the same node, so that none is there twice.
                child = eldest[node]
                while child >= 0 and token[child] != v:
                    child = sibling[child]
                if child >= 0 and where[child] >= 0:  # it is in the beam, and was given this mass above
                    continue
                if child >= 0:
                    bound += alpha * (lm_score[child] - lm_score[node])
                elif alpha > 0:
                    of_token, after = _lm_step(
                        lm_tokens, lm_children, lm_log_probs, lm_backoffs, lm_suffixes, state[node], v
                    )
                    bound += alpha * of_token
                    c_lm[count], c_state[count] = lm_score[node] + of_token, after
                if filled == beam_size and bound <= heap[0]:
                    continue
                c_node[count], c_parent[count], c_token[count] = child, node, v
                c_blank[count], c_in_token[count], c_score[count] = _NONE, mass, bound
                filled = _sift(heap, filled, bound)
                count += 1
        for i in range(size):
            where[beam[i]] = -1
        # The best of both are the next beam. If not all can stay, then of those that the future treats alike, for they
        # end in the same token and the language model remembers no more of them, one: else the beam would fill with
        # variants of what is long past. But those that may be told stay.
        for c in range(count):
            if c_node[c] >= 0:
                c_token[c], c_state[c] = token[c_node[c]], state[c_node[c]]
        order = np.argsort(-c_score[:count], kind="mergesort")
        kept, later = 0, 0
        for place, c in enumerate(order):
            alike = False
            if count > beam_size and place >= wanted:
                for k in range(kept):
                    alike |= c_token[chosen[k]] == c_token[c] and c_state[chosen[k]] == c_state[c]
            if alike:
                postponed[later] = c
                later += 1
            else:
                chosen[kept] = c
                kept += 1
            if kept == beam_size:
                break
        for k in range(min(later, beam_size - kept)):
            chosen[kept + k] = postponed[k]
        kept = min(kept + later, beam_size)
        next_beam = np.zeros(beam_size, np.int64)
        next_blank, next_token = np.full(beam_size, _NONE), np.full(beam_size, _NONE)
        for place in range(kept):
            c = chosen[place]
            node = c_node[c]
            if node < 0:
                node, before = nodes, c_parent[c]
                nodes += 1
                parent[node], token[node], length[node] = before, c_token[c], length[before] + 1
                state[node], lm_score[node] = c_state[c], c_lm[c]
                sibling[node], eldest[before] = eldest[before], node
            next_beam[place], next_blank[place], next_token[place] = node, c_blank[c], c_in_token[c]
        beam, in_blank, in_token, size = next_beam, next_blank, next_token, kept

    # At the end the best are weighed again, by all their paths and not only those that were followed.
    scores, of_lm, followed = np.zeros(size), np.zeros(size), np.zeros(size)
    for i in range(size):
        node = beam[i]
        if alpha > 0:
            of_end, _ = _lm_step(lm_tokens, lm_children, lm_log_probs, lm_backoffs, lm_suffixes, state[node], lm_end)
            of_lm[i] = lm_score[node] + of_end
        followed[i] = _add(in_blank[i], in_token[i])
        scores[i] = followed[i] + alpha * of_lm[i] + beta * np.log(max(length[node], 1))
    order = np.argsort(-scores, kind="mergesort")
    count = min(wanted, size)
    while count < size and scores[order[count]] > scores[order[wanted - 1]] - _MARGIN:
        count += 1
    first = order[:count]
    longest = 0
    for i in first:
        longest = max(longest, length[beam[i]])
    outputs, lengths = np.zeros((len(first), longest), np.int64), np.zeros(len(first), np.int64)
    masses, weighed = np.zeros(len(first)), np.zeros(len(first))
    for c, i in enumerate(first):
        node = beam[i]
        lengths[c] = length[node]
        while node != 0:
            outputs[c, length[node] - 1] = token[node]
            node = parent[node]
        masses[c] = max(_log_prob(log_probs, tops, outputs[c, : lengths[c]], blank, merge), followed[i])
        weighed[c] = masses[c] + alpha * of_lm[i] + beta * np.log(max(lengths[c], 1))
    best = np.argsort(-weighed, kind="mergesort")[:wanted]
    return tops, outputs[best], lengths[best], weighed[best], masses[best], of_lm[first][best]


@numba.njit(nogil=True, cache=True)
def _lattice(log_probs, tops, tokens, blank, merge, moves):  # type: ignore[no-untyped-def]
    """What paths to these tokens have at the end, in each state (a blank, a token, a blank, ...): their mass, or, with
    ``(T, S)`` moves to fill, that of the best path, which they tell; and the logarithm of the scale it is told in.

    Probabilities and not their logarithms, scaled at each position: that needs few exponentials.
    """
    positions, states = log_probs.shape[0], 2 * len(tokens) + 1
    best = len(moves) > 0
    before, after = np.zeros(states), np.zeros(states)
    scale = 0.0
    for t in range(positions):
        # Only what can be reached from the beginning, and can still reach the end.
        low, high = max(states - 2 * (positions - t), 0), min(2 * (t + 1), states)
        for s in range(max(low - 2, 0), low):
            after[s] = 0.0
        of_blank = np.exp(log_probs[t, blank] - tops[t])
        top = 0.0
        for s in range(low, high):
            own = s % 2 == 1
            if t == 0:
                mass = 1.0
            else:
                mass = before[s] if merge or not own else 0.0
                for step in range(1, min(s, 2) + 1):
                    if step == 2 and (not own or (merge and tokens[s // 2] == tokens[s // 2 - 1])):
                        continue
                    if not best:
                        mass += before[s - step]
                    elif before[s - step] > mass:
                        mass, moves[t, s] = before[s - step], step
            after[s] = mass * (np.exp(log_probs[t, tokens[s // 2]] - tops[t]) if own else of_blank)
            top = max(top, after[s])
        scale += tops[t]
        if top > 0:
            after[low:high] /= top
            scale += np.log(top)
        before, after = after, before
    return before, scale


@numba.njit(nogil=True, cache=True)
def _log_prob(log_probs, tops, tokens, blank, merge):  # type: ignore[no-untyped-def]
    """The logarithm of the probability of all paths that collapse to these tokens."""
    if log_probs.shape[0] == 0:
        return 0.0 if len(tokens) == 0 else _NONE
    ends, scale = _lattice(log_probs, tops, tokens, blank, merge, np.zeros((0, 0), np.int8))
    mass = ends[0] if len(tokens) == 0 else ends[-1] + ends[-2]
    return np.log(mass) + scale if mass > 0 else _NONE


@numba.njit(nogil=True, cache=True)
def align(log_probs, tops, tokens, blank, merge):  # type: ignore[no-untyped-def]
    """Where each token begins on the most probable path of all that collapse to these tokens (Viterbi)."""
    positions, states = log_probs.shape[0], 2 * len(tokens) + 1
    begins = np.zeros(len(tokens), np.int64)
    if positions == 0 or len(tokens) == 0:
        return begins
    moves = np.zeros((positions, states), np.int8)
    ends, _ = _lattice(log_probs, tops, tokens, blank, merge, moves)
    s = states - 1 if ends[-1] > ends[-2] else states - 2
    for t in range(positions - 1, -1, -1):
        if s % 2 == 1:
            begins[s // 2] = t
        s -= moves[t, s]
    return begins
