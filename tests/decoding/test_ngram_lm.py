"""Language models: against Kneser-Ney by dictionaries, sums, hand-written ARPA, KenLM where it is there."""

import gzip
import itertools
import math
import random
from collections import Counter, defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nmla.decoding import lm_counts
from nmla.decoding.arpa import convert_lm
from nmla.decoding.ctc_beam import BeamSearch
from nmla.decoding.lm_train import train_lm
from nmla.decoding.ngram_lm import MAGIC, NEVER, NgramLM
from nmla.errors import DataError, UsageError
from nmla.text.tokenizer import BLANK, BOS, EOS, PAD, UNK, Tokenizer

UNITS = "abcdefgh"
TOKENIZER = Tokenizer.of_units(dict.fromkeys(UNITS, 1), BLANK + 1 + len(UNITS))
A, B, C, D = (TOKENIZER.id(f"▁{unit}") for unit in "abcd")
FALLBACK = [0, 0.5, 1, 1.5]


def random_lines(seed, count, units="abcdef", longest=9):
    """Sentences in which some units like each other's company, so that counts of all sizes occur."""
    rng = random.Random(seed)
    lines = []
    for _ in range(count):
        line = [rng.choice(units)]
        while len(line) < rng.randint(0, longest):
            line.append(rng.choice(units) if rng.random() < 0.6 else units[(units.index(line[-1]) + 1) % len(units)])
        lines.append(" ".join(line))
    return lines


def estimate(lines, path, order):
    (path / "text").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    (path / "out.lm").unlink(missing_ok=True)
    return train_lm([path / "text"], TOKENIZER, path / "out.lm", order)


class KneserNey:
    """The definition, with dictionaries and without a thought for speed."""

    def __init__(self, sentences, order):
        self.raw = [Counter() for _ in range(order + 1)]
        for ids in sentences:
            padded = (BOS, *ids, EOS)
            for k in range(1, order + 1):
                for start in range(len(padded) - k + 1):
                    self.raw[k][padded[start : start + k]] += 1
        self.adjusted = [Counter() for _ in range(order + 1)]
        for k in range(1, order + 1):
            before = Counter(longer[1:] for longer in self.raw[k + 1]) if k < order else {}
            for ngram, count in self.raw[k].items():
                self.adjusted[k][ngram] = count if k == order or ngram[0] == BOS else before[ngram]
        del self.adjusted[1][(BOS,)]
        self.discounts = [None, *(self._discounts(self.adjusted[k]) for k in range(1, order + 1))]
        self.after = defaultdict(dict)
        for k in range(1, order + 1):
            for ngram, count in self.adjusted[k].items():
                self.after[ngram[:-1]][ngram[-1]] = count
        self.known = {token for (token,) in self.adjusted[1]} | {UNK, EOS}
        self.order = order

    @staticmethod
    def _discounts(adjusted):
        n = Counter(adjusted.values())
        if not (n[1] and n[2] and n[3]):
            return FALLBACK
        y = n[1] / (n[1] + 2 * n[2])
        found = [0, *(k - (k + 1) * y * n[k + 1] / n[k] for k in (1, 2, 3))]
        return found if all(0 <= d <= k for k, d in enumerate(found)) else FALLBACK

    def prob(self, token, context):
        """p(token | context), the context a tuple of any length."""
        context = context[-self.order + 1 :] if self.order > 1 else ()
        counts = self.after.get(context)
        if counts is None:
            return self.prob(token, context[1:])
        discounts, total = self.discounts[len(context) + 1], sum(counts.values())
        count = counts.get(token, 0)
        left = sum(discounts[min(other, 3)] for other in counts.values()) / total
        lower = self.prob(token, context[1:]) if context else 1 / len(self.known)
        return (count - discounts[min(count, 3)]) / total + left * lower


def state_after(lm, context):
    state = lm.start if context[:1] == (BOS,) else 0
    for token in context[1:] if context[:1] == (BOS,) else context:
        state = lm.step(state, token)[1]
    return state


def contexts_of(lm, seed=0):
    """All short contexts, and some long ones, seen and unseen."""
    tokens = [*range(BLANK + 1, lm.vocab_size), UNK]
    rng = random.Random(seed)
    short = [context for k in range(3) for context in itertools.product(tokens, repeat=k)]
    long = [tuple(rng.choices(tokens, k=rng.randint(3, 6))) for _ in range(50)]
    return [way for context in short + long for way in (context, (BOS, *context))]


@pytest.mark.parametrize("order", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(("seed", "count"), [(1, 400), (2, 40), (3, 5)])
def test_equals_kneser_ney_by_dictionaries(tmp_path, order, seed, count):
    lines = random_lines(seed, count)
    lm = estimate(lines, tmp_path, order)
    oracle = KneserNey(TOKENIZER.encode_batch(lines), order)
    rng = random.Random(seed)
    for context in rng.sample(contexts_of(lm), 100):
        state = state_after(lm, context)
        for token in oracle.known:
            assert lm.step(state, token)[0] == pytest.approx(math.log(oracle.prob(token, context)), rel=1e-6, abs=1e-6)


def test_discounts_are_estimated_where_there_is_text_for_it(tmp_path, capfd):
    """Else the comparison above would be of the fallback alone."""
    estimate(random_lines(1, 400), tmp_path, 4)
    told = capfd.readouterr().err
    assert "4-grams" not in told
    assert "3-grams" not in told
    estimate(["a b"], tmp_path, 2)
    assert "to estimate the discounts of 2-grams: taking (0.5, 1.0, 1.5)" in capfd.readouterr().err


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_probabilities_sum_to_one(tmp_path, order):
    lm = estimate(random_lines(4, 60, "abcd"), tmp_path, order)
    known = [UNK, EOS, A, B, C, D]
    for context in contexts_of(lm):
        state = state_after(lm, context)
        assert sum(math.exp(lm.step(state, token)[0]) for token in known) == pytest.approx(1, abs=1e-5)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.sampled_from("abcd"), max_size=6).map(" ".join), min_size=1, max_size=8), st.integers(1, 4))
def test_any_small_text(tmp_path_factory, lines, order):
    """Nothing is too small or too regular; whole sentences score as by dictionaries."""
    path = tmp_path_factory.mktemp("lm")
    sentences = [ids for ids in TOKENIZER.encode_batch(lines) if ids]
    if not sentences:
        with pytest.raises(DataError, match="at least one sentence"):
            estimate(lines, path, order)
        return
    lm = estimate(lines, path, order)
    oracle = KneserNey(sentences, order)
    for ids in sentences:
        padded = (BOS, *ids, EOS)
        expected = sum(math.log(oracle.prob(padded[i], padded[:i])) for i in range(1, len(padded)))
        assert lm.score(ids) == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_trie_is_as_documented(tmp_path):
    lm = estimate(random_lines(5, 50), tmp_path, 4)
    ngrams = [()]
    for node in range(len(lm.children) - 1):
        tokens = lm.tokens[lm.children[node] : lm.children[node + 1]].tolist()
        assert len(ngrams) == lm.children[node]
        ngrams += [(*ngrams[node], token) for token in tokens]
    assert lm.children[-1] == len(ngrams) == len(lm.tokens) == len(lm.log_probs) == len(lm.backoffs)
    assert ngrams == sorted(ngrams, key=lambda ngram: (len(ngram), ngram))
    assert ngrams[1 : 1 + lm.vocab_size] == [(token,) for token in range(lm.vocab_size)]
    assert all(ngrams[lm.suffixes[node]] == ngram[1:] for node, ngram in enumerate(ngrams))
    assert not lm.backoffs[lm.first(4) :].any()
    assert ngrams[lm.start] == (BOS,)
    assert [ngrams[lm.first(order)] for order in (2, 3)] == [min(g for g in ngrams if len(g) == k) for k in (2, 3)]
    assert (lm.tokens.dtype, lm.children.dtype, lm.suffixes.dtype) == (np.uint32, np.int64, np.uint32)


def test_tokens_that_never_occur_are_like_unk(tmp_path):
    lm = estimate(["a b c"] * 3, tmp_path, 3)
    unknown = lm.step(lm.start, UNK)[0]
    assert all(lm.step(lm.start, token) == (unknown, 0) for token in (PAD, BLANK, D))
    assert lm.log_probs[1 + BOS] == np.float32(NEVER)


def test_unknown_units_in_the_text_are_tokens_too(tmp_path):
    lm = estimate(["a zz b", "a yy b", "a b"], tmp_path, 3)
    assert lm.step(state_after(lm, (BOS, A)), UNK)[0] > lm.step(state_after(lm, (BOS, A)), C)[0]
    convert_lm(tmp_path / "out.lm", tmp_path / "out.arpa", TOKENIZER)
    again = NgramLM.load(tmp_path / "out.arpa", TOKENIZER)
    assert all(np.array_equal(mine, its) for mine, its in zip(lm.arrays, again.arrays, strict=True))


def test_empty_lines_are_no_sentences(tmp_path):
    with_empty = estimate(["", "a b c", " ", "", "b", ""], tmp_path, 3)
    arrays = [array.copy() for array in with_empty.arrays]
    assert all(map(np.array_equal, arrays, estimate(["a b c", "b"], tmp_path, 3).arrays))


def test_no_ngram_of_the_highest_order(tmp_path):
    lm = estimate(["a"], tmp_path, 6)
    assert lm.sizes[1:] == (2, 1, 0, 0, 0)
    convert_lm(tmp_path / "out.lm", tmp_path / "out.arpa", TOKENIZER)
    assert NgramLM.load(tmp_path / "out.arpa", TOKENIZER).score([A]) == lm.score([A])


def test_pieces_of_the_text_make_no_difference(tmp_path, monkeypatch):
    """Counting in many chunks, merged in many buckets, spread over files: the same bytes."""
    lines = random_lines(6, 30)
    estimate(lines, tmp_path, 4)
    whole = (tmp_path / "out.lm").read_bytes()
    for chunk, bucket, at_once in ((50, 20, 3), (1, 30, 1), (10000, 5, 1024)):
        monkeypatch.setattr(lm_counts, "CHUNK_TOKENS", chunk)
        monkeypatch.setattr(lm_counts, "BUCKET_ROWS", bucket)
        monkeypatch.setattr(lm_counts, "LINES_AT_ONCE", at_once)
        (tmp_path / "one").write_text("".join(f"{line}\n" for line in lines[:20]))
        (tmp_path / "two.gz").write_bytes(gzip.compress("".join(f"{line}\n" for line in lines[20:]).encode()))
        train_lm([tmp_path / "one", tmp_path / "two.gz"], TOKENIZER, tmp_path / f"{chunk}.lm", 4)
        assert (tmp_path / f"{chunk}.lm").read_bytes() == whole
    assert not list(tmp_path.glob(".*"))


def test_all_forms_are_the_same_model(tmp_path):
    lm = estimate(random_lines(7, 100), tmp_path, 4)
    path = tmp_path / "out.lm"
    for name in ("two.arpa", "three.arpa.gz", "four.lm", "five.lm"):
        convert_lm(path, tmp_path / name, TOKENIZER)
        again = NgramLM.load(tmp_path / name, TOKENIZER)
        assert all(map(np.array_equal, lm.arrays, again.arrays))
        path = tmp_path / name
    assert gzip.decompress((tmp_path / "three.arpa.gz").read_bytes()) == (tmp_path / "two.arpa").read_bytes()
    assert (tmp_path / "five.lm").read_bytes() == (tmp_path / "out.lm").read_bytes()
    trained = train_lm([tmp_path / "text"], TOKENIZER, tmp_path / "six.arpa", 4)
    assert all(map(np.array_equal, lm.arrays, trained.arrays))
    assert (tmp_path / "six.arpa").read_bytes() == (tmp_path / "two.arpa").read_bytes()


# Pruned: of "a b c" there is neither the suffix "b c" nor, of "c d a", the context "c d".
ARPA = """some words before

\\data\\
ngram 1=7
ngram 2=3
ngram 3=2

\\1-grams:
-2\t<unk>
0\t<s>\t-0.5
-1.5 </s>
-1\t▁a\t-0.25
-0.75\t▁b\t-0.125
-0.5\t▁c\t-0.0625
-4\tforeign\t-1

\\2-grams:
-0.3\t<s> ▁a\t-0.01
-0.2\t▁a ▁b\t-0.02
-9\t▁a foreign\t-3

\\3-grams:
-0.1\t▁a ▁b ▁c
-0.7\t▁c ▁d ▁a

\\end\\
"""


def arpa(tmp_path, text=ARPA):
    (tmp_path / "hand.arpa").write_text(text, encoding="utf-8")
    return NgramLM.load(tmp_path / "hand.arpa", TOKENIZER)


@pytest.mark.parametrize(
    ("context", "token", "log10"),
    [
        ((BOS,), A, -0.3),
        ((BOS,), B, -0.5 - 0.75),
        ((BOS, A), B, -0.01 - 0.2),
        ((BOS, A), C, -0.01 - 0.25 - 0.5),
        ((A, B), C, -0.1),
        ((A, B), A, -0.02 - 0.125 - 1),
        ((A, B, C), EOS, -0.0625 - 1.5),
        ((B,), C, -0.125 - 0.5),
        ((C,), D, -0.0625 - 2),  # "c d" is only there as a context; d is <unk>
        ((C, D), A, -0.7),
        ((C, D), B, -0.75),
        ((D,), A, -1),
        ((A,), PAD, -0.25 - 2),
        ((PAD,), A, -1),
        ((), EOS, -1.5),
    ],
)
def test_hand_written_arpa(tmp_path, context, token, log10):
    lm = arpa(tmp_path)
    assert lm.step(state_after(lm, context), token)[0] == pytest.approx(log10 * math.log(10), rel=1e-6)


def test_score_is_of_the_whole_sentence(tmp_path):
    expected = -0.3 + (-0.01 - 0.2) + -0.1 + (-0.0625 - 1.5)
    assert arpa(tmp_path).score([A, B, C]) == pytest.approx(expected * math.log(10), rel=1e-6)
    assert arpa(tmp_path).score([]) == pytest.approx((-0.5 - 1.5) * math.log(10), rel=1e-6)


@pytest.mark.parametrize("order", [2, 4])
def test_search_scores_as_the_model_does(tmp_path, order):
    lm = estimate(random_lines(3, 200), tmp_path, order)
    torch.manual_seed(order)
    for of_one in BeamSearch(20, 5, 0.7, 1.0, lm)(torch.randn(6, 12, TOKENIZER.vocab_size), [12] * 6, blank=BLANK):
        for found in of_one:
            assert found.lm_log_prob == pytest.approx(lm.score(found.tokens), abs=1e-5)


def test_words_of_another_vocabulary_are_told(tmp_path, capfd):
    arpa(tmp_path)
    told = capfd.readouterr().err
    assert "hand.arpa: left out 2 n-grams, as 1 words are not in the vocabulary (such as foreign)" in told


def test_arpa_over_words_is_refused(tmp_path):
    text = "\\data\\\nngram 1=3\n\n\\1-grams:\n-0.5\tHaus\n-1\t</s>\n-99\t<s>\n\n\\end\\\n"
    with pytest.raises(
        DataError, match="must be over the model's tokens, but has none of them, only others such as Haus"
    ):
        arpa(tmp_path, text)


def test_arpa_without_unk_or_backoffs(tmp_path):
    text = "\\data\\\nngram 1=2\n\n\\1-grams:\n-0.5\t▁a\n-1\t</s>\n\n\\end\\\n"
    lm = arpa(tmp_path, text)
    assert (lm.order, lm.start) == (1, 0)
    assert lm.score([A]) == pytest.approx(-1.5 * math.log(10), rel=1e-6)
    assert lm.step(0, B) == (np.float32(NEVER), 0)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("\\data\\", "data", r"must be a whole ARPA file, but ends where \\data\\ must come"),
        ("ngram 2=3", "ngram 3=3", r"hand.arpa:5: must be a line 'ngram 2=COUNT'"),
        ("ngram 2=3", "ngram 2=x", r"hand.arpa:5: must be a line"),
        ("ngram 2=3", "ngram 2=4", r"hand.arpa:22: must be after 4 2-grams as \\data\\ says, but is 'after 3'"),
        ("-0.3\t<s> ▁a\t-0.01", "-0.3\t<s>", r"hand.arpa:18: must be log10 p <= 0, 2 words and log10 of the back-off"),
        ("-0.3\t<s> ▁a\t-0.01", "-0.3\t<s> ▁a ▁b\t-1", r"hand.arpa:18: .*, but is '-0.3\\t<s> ▁a ▁b\\t-1'"),
        ("-0.3\t<s> ▁a\t-0.01", "0.3\t<s> ▁a\t-0.01", "hand.arpa:18: must be log10 p <= 0"),
        ("-0.3\t<s> ▁a\t-0.01", "nan\t<s> ▁a\t-0.01", "hand.arpa:18: must be log10 p <= 0"),
        ("-0.3\t<s> ▁a\t-0.01", "-0.3\t<s> ▁a\tx", "hand.arpa:18: must be log10 p <= 0"),
        ("\\3-grams:", "\\4-grams:", r"hand.arpa:22: must be .* or \\3-grams:, but is '\\\\4-grams:'"),
        ("▁a foreign", "▁a ▁b", "must have each n-gram once, but has some of order 2 twice"),
        ("\\end\\", "", r"ends where \\end\\ must come"),
        ("ngram 1=7\nngram 2=3\nngram 3=2\n", "", "must be after the number of n-grams"),
    ],
)
def test_malformed_arpa(tmp_path, old, new, message):
    assert old in ARPA
    with pytest.raises(DataError, match=message):
        arpa(tmp_path, ARPA.replace(old, new))


def test_damaged_compact_file(tmp_path):
    estimate(["a b", "b c"], tmp_path, 2)
    whole = (tmp_path / "out.lm").read_bytes()
    for data, message in (
        (whole[:-1], "must have .* bytes, but has"),
        (whole + b"x", "must have .* bytes, but has"),
        (whole[:20], "ends in its header"),
        (whole[:50], "ends in its header"),
        (b"x" + whole[1:], "must be a compact language model, but does not begin as one"),
        (whole.replace(MAGIC + b"\1", MAGIC + b"\2"), "must be of version 1, but is of 2"),
        (b"", "must be a compact language model"),
    ):
        (tmp_path / "bad.lm").write_bytes(data)
        with pytest.raises(DataError, match=message):
            NgramLM.load(tmp_path / "bad.lm", TOKENIZER)


def test_compact_file_of_another_vocabulary(tmp_path):
    estimate(["a b", "b c"], tmp_path, 2)
    other = Tokenizer.of_units(dict.fromkeys("abcdefgz", 1), TOKENIZER.vocab_size)
    with pytest.raises(DataError, match="must be of the same vocabulary as the tokenizer"):
        NgramLM.load(tmp_path / "out.lm", other)


def test_mistakes_are_told_and_leave_nothing(tmp_path):
    (tmp_path / "text").write_text("a b\n")
    (tmp_path / "taken.lm").write_text("")
    (tmp_path / "binary").write_bytes(b"a b\n\xff\n")
    (tmp_path / "empty").write_text("\n \n")
    before = {path.name for path in tmp_path.iterdir()}
    for text, output, order, error, message in (
        ("text", "new.txt", 4, UsageError, "must end in .lm, .arpa, .arpa.gz, but does not"),
        ("text", "taken.lm", 4, UsageError, "must not exist yet"),
        ("text", "new.lm", 0, UsageError, "order must be from 1 to 100, but is 0"),
        ("nowhere", "new.lm", 4, UsageError, "nowhere: must be a file, but does not exist"),
        ("binary", "new.lm", 4, DataError, "binary:2: text must be UTF-8"),
        ("empty", "new.lm", 4, DataError, "empty: there must be at least one sentence to learn from"),
    ):
        with pytest.raises(error, match=message):
            train_lm([tmp_path / text], TOKENIZER, tmp_path / output, order)
        assert {path.name for path in tmp_path.iterdir()} == before


def test_arpa_cannot_hold_words_with_spaces(tmp_path):
    tokenizer = Tokenizer.of_units({"a": 1, "b\fc": 1}, BLANK + 3)
    (tmp_path / "text").write_text("a\n")
    with pytest.raises(DataError, match="must not hold white space"):
        train_lm([tmp_path / "text"], tokenizer, tmp_path / "new.arpa", 2)
    assert {path.name for path in tmp_path.iterdir()} == {"text"}


def test_scores_as_kenlm_does(tmp_path):
    pytest.importorskip("flashlight.lib.text")
    from flashlight.lib.text.decoder.kenlm import KenLM
    from flashlight.lib.text.dictionary import Dictionary

    lm = estimate(random_lines(8, 200), tmp_path, 4)
    convert_lm(tmp_path / "out.lm", tmp_path / "out.arpa", TOKENIZER)
    words = Dictionary([TOKENIZER.piece(token) for token in range(lm.vocab_size)])
    kenlm = KenLM(str(tmp_path / "out.arpa"), words)
    for line in random_lines(9, 200, UNITS):
        state, total = kenlm.start(False), 0.0
        for token in TOKENIZER.encode(line):
            state, log10 = kenlm.score(state, token)
            total += log10
        total += kenlm.finish(state)[1]
        assert lm.score(TOKENIZER.encode(line)) == pytest.approx(total * math.log(10), rel=1e-4)
