from collections import Counter

import pytest

from nmla.data.synthetic import HEADLINE, ONE_MODE, THREE_ORDERS, WORDS, Grammar, generate, lexicon


@pytest.mark.parametrize("grammar", [HEADLINE, ONE_MODE, THREE_ORDERS])
def test_sampled_target_is_valid(grammar):
    for sentence in generate(grammar, 200, seed=1):
        valid = sentence.valid_targets()
        assert sentence.target in valid
        assert len(set(valid)) == len(valid)


def test_same_seed_same_sentences():
    assert generate(HEADLINE, 50, seed=1) == generate(HEADLINE, 50, seed=1)
    assert generate(HEADLINE, 50, seed=1) != generate(HEADLINE, 50, seed=2)


def test_sources_are_all_different():
    sources = [sentence.source for sentence in generate(HEADLINE, 500, seed=1)]
    assert len(set(sources)) == len(sources)


def test_valid_targets_are_all_choices_and_no_others():
    words = lexicon(HEADLINE)
    for sentence in generate(HEADLINE, 50, seed=3):
        *clause, time = sentence.source.split()
        orders = [[time, *clause], [*clause, time]]
        expected = set()
        for order in orders:
            targets = [""]
            for word in order:
                targets = [f"{target} {choice}".strip() for target in targets for choice in words[word]]
            expected |= set(targets)
        assert set(sentence.valid_targets()) == expected


def test_without_multi_modality_there_is_one_target():
    assert all(len(sentence.valid_targets()) == 1 for sentence in generate(ONE_MODE, 100, seed=1))


def test_inversion_puts_the_verb_second():
    words = lexicon(THREE_ORDERS)
    source = generate(THREE_ORDERS, 1, seed=1)[0]
    *_, time = source.source.split()
    openings = [target for target in source.valid_targets() if target.split()[0] in words[time]]
    verbs = {w for v in "carries sees finds buys hides paints sells wants".split() for w in words[v]}
    assert openings
    assert all(target.split()[1] in verbs for target in openings)


def test_lexicon_never_uses_a_word_twice():
    words = [word for choices in lexicon(Grammar(synonyms=1.0)).values() for word in choices]
    assert len(words) == 2 * len(WORDS) == len(set(words))


def test_probabilities_are_those_of_the_grammar():
    sentences = generate(HEADLINE, 4000, seed=1)
    words = lexicon(HEADLINE)
    opened = Counter(s.target.split()[0] in words[s.source.split()[-1]] for s in sentences)
    assert opened[True] / 4000 == pytest.approx(0.65, abs=0.03)
    second = Counter(
        word == words[source][1]
        for s in sentences
        for source in s.source.split()
        for word in s.target.split()
        if len(words[source]) == 2 and word in words[source]
    )
    assert second[True] / second.total() == pytest.approx(0.35, abs=0.02)
