"""A generated language pair of which every valid translation is known.

A small grammar writes English-like sources, such as "the old farmer carries a basket tonight", and translates
them into an invented language. Real translation is multi-modal, one source having many good targets; here
exactly how much is a setting, so that one can count how often a model's output is one of the good ones, and see what it
does when the modes disagree.
"""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

DETERMINERS = "the a every".split()
ADJECTIVES = "old young happy quiet clever tired".split()
PEOPLE = "farmer teacher doctor child painter sailor baker judge".split()
VERBS = "carries sees finds buys hides paints sells wants".split()
THINGS = "basket letter lamp clock coat boat mirror bottle".split()
TIMES = "yesterday today tomorrow tonight often again soon finally".split()
WORDS = sorted({*DETERMINERS, *ADJECTIVES, *PEOPLE, *VERBS, *THINGS, *TIMES})
SYLLABLES = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]


@dataclass(frozen=True)
class Grammar:
    """How multi-modal the language is. Probabilities are those of training targets; valid is whatever is above 0."""

    first: float = 0.65  # probability that the time phrase opens the target
    middle: float = 0.0  # probability that it follows the verb; otherwise it closes the target
    inversion: bool = False  # an opening time phrase puts the verb before the subject
    synonyms: float = 0.5  # share of the words that have a second translation
    second: float = 0.35  # probability of the second translation


HEADLINE = Grammar()
ONE_MODE = Grammar(first=0.0, synonyms=0.0)
THREE_ORDERS = Grammar(first=0.45, middle=0.35, inversion=True)


@dataclass(frozen=True)
class Sentence:
    """A source with one sampled target and what is needed to write all valid ones."""

    source: str
    target: str
    orders: tuple[tuple[tuple[str, ...], ...], ...]  # for each word order, for each word, its translations

    def valid_targets(self) -> list[str]:
        """Every valid translation, each once."""
        orders = (itertools.product(*order) for order in self.orders)
        return list(dict.fromkeys(" ".join(words) for order in orders for words in order))


def lexicon(grammar: Grammar) -> dict[str, tuple[str, ...]]:
    """Each source word with its one or two translations: invented words of one to three syllables, all different."""
    rng = random.Random(7)  # the language itself never changes, only how much of it is used
    words: list[str] = []
    while len(words) < 2 * len(WORDS):
        word = "".join(rng.choices(SYLLABLES, k=rng.choice((1, 2, 2, 3))))
        if word not in words:
            words.append(word)
    pairs = list(zip(WORDS, words[: len(WORDS)], words[len(WORDS) :], strict=True))
    rng.shuffle(pairs)
    two = round(grammar.synonyms * len(pairs))
    return {word: (one, other) if i < two else (one,) for i, (word, one, other) in enumerate(pairs)}


def generate(grammar: Grammar, count: int, seed: int) -> list[Sentence]:
    """`count` sentences with different sources; the same ones for the same seed."""
    rng = random.Random(seed)
    words = lexicon(grammar)
    sources: set[str] = set()
    sentences: list[Sentence] = []
    while len(sentences) < count:
        sentence = _sentence(grammar, words, rng)
        if sentence.source not in sources:
            sources.add(sentence.source)
            sentences.append(sentence)
    return sentences


def _sentence(grammar: Grammar, words: dict[str, tuple[str, ...]], rng: random.Random) -> Sentence:
    subject = list(_noun_phrase(PEOPLE, rng))
    verb = [rng.choice(VERBS)]
    rest = list(_noun_phrase(THINGS, rng))
    time = [rng.choice(TIMES)]
    opening = time + verb + subject + rest if grammar.inversion else time + subject + verb + rest
    orders = {
        "first": (opening, grammar.first),
        "middle": (subject + verb + time + rest, grammar.middle),
        "last": (subject + verb + rest + time, 1 - grammar.first - grammar.middle),
    }
    chosen = rng.choices([order for order, _ in orders.values()], [weight for _, weight in orders.values()])[0]
    return Sentence(
        source=" ".join(subject + verb + rest + time),
        target=" ".join(_translate(word, words, grammar, rng) for word in chosen),
        orders=tuple(tuple(words[word] for word in order) for order, weight in orders.values() if weight > 0),
    )


def _noun_phrase(nouns: list[str], rng: random.Random) -> Iterator[str]:
    yield rng.choice(DETERMINERS)
    if rng.random() < 0.6:
        yield rng.choice(ADJECTIVES)
    yield rng.choice(nouns)


def _translate(word: str, words: dict[str, tuple[str, ...]], grammar: Grammar, rng: random.Random) -> str:
    one, *other = words[word]
    return other[0] if other and rng.random() < grammar.second else one
