"""From text to token ids and back. The special ids are named here and nowhere else."""

import io
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import sentencepiece

from nmla.errors import DataError, UsageError
from nmla.text.lines import require_file

PAD, UNK, BOS, EOS, BLANK = range(5)
_WORD_START = "▁"
_WORDS_LENGTH = 1 << 21  # how many letters of words are remembered, about; it takes some 50 MB
_FEW = 64  # words: for a list sentencepiece starts a thread, which takes longer, and on a busy machine much longer
MOST_TOKENS = 1 << 24
_JOINER = re.compile("@@( |$)")
_SPECIAL: dict[str, Any] = {
    "pad_id": PAD,
    "unk_id": UNK,
    "bos_id": BOS,
    "eos_id": EOS,
    "control_symbols": ["<blank>"],
    "character_coverage": 1.0,
    "max_sentence_length": 1 << 20,
    "num_threads": 1,  # the result must not depend on the machine
    "minloglevel": 2,
}


class Tokenizer:
    """A sentencepiece model whose first ids are PAD, UNK, BOS, EOS and BLANK.

    `pretokenised` tells its kind: either it splits raw text by byte-pair encoding, or the text comes split by spaces,
    with "@@" at the end of what the next unit continues, and each unit is a token.
    """

    def __init__(self, model: bytes) -> None:
        self.model = model
        self._pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
        # Byte-pair encoding has every letter also inside a word; units all follow a space.
        self.pretokenised = all(self.starts_word(token) for token in range(BLANK + 1, self.vocab_size))
        self._word_by_word = self._tokens_stay_in_words()
        self._words: dict[str, list[int]] = {}
        self._words_length = 0

    @classmethod
    def load(cls, path: Path) -> "Tokenizer":
        require_file(path)
        try:
            tokenizer = cls(path.read_bytes())
        except RuntimeError:
            raise DataError(f"{path}: must be a sentencepiece model, but cannot be read as one") from None
        if tokenizer._pieces.piece_to_id("<blank>") != BLANK:
            raise DataError(f"{path}: must have <blank> at id {BLANK}; make the corpus with `nmla prepare`")
        return tokenizer

    @classmethod
    def learn(cls, lines: Iterable[str], vocab_size: int) -> "Tokenizer":
        """Learn byte-pair encoding from `lines`, which hold both languages: one vocabulary serves source and target."""
        _check_size(vocab_size)
        model = io.BytesIO()
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(lines),
                model_writer=model,
                model_type="bpe",
                vocab_size=vocab_size,
                **_SPECIAL,
            )
        except (RuntimeError, ValueError) as error:
            raise _vocabulary_error(vocab_size, str(error)) from None
        return cls(model.getvalue())

    @classmethod
    def of_units(cls, counts: Mapping[str, int], vocab_size: int) -> "Tokenizer":
        """The most frequent units of text that is already split, each a token."""
        _check_size(vocab_size)
        model = io.BytesIO()
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=(f"{unit}\t{count}" for unit, count in sorted(counts.items())),
                input_format="tsv",
                model_writer=model,
                model_type="word",
                normalization_rule_name="identity",
                vocab_size=vocab_size,
                use_all_vocab=len(counts) + BLANK + 1 <= vocab_size,
                **_SPECIAL,
            )
        except (RuntimeError, ValueError) as error:
            raise _vocabulary_error(vocab_size, str(error)) from None
        return cls(model.getvalue())

    def save(self, path: Path) -> None:
        path.write_bytes(self.model)

    @property
    def vocab_size(self) -> int:
        return int(self._pieces.vocab_size())

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without special tokens."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Token ids of each of `texts`. Words come again and again, so sentencepiece is only asked for new ones."""
        if not self._word_by_word:
            return list(self._pieces.encode(texts, num_threads=1))
        if self._words_length > _WORDS_LENGTH:  # another dictionary: threads at work keep theirs
            self._words, self._words_length = {}, 0
        words = self._words
        split = [text.split(" ") for text in texts]
        new = [word for word in set[str]().union(*split) if word not in words]
        ids = map(self._pieces.encode, new) if len(new) < _FEW else self._pieces.encode(new, num_threads=1)
        words.update(zip(new, ids, strict=True))
        self._words_length += sum(map(len, new))
        return [[token for word in line for token in words[word]] for line in split]

    def _tokens_stay_in_words(self) -> bool:
        """Whether a sentence's tokens are those of its words, as they are unless a model was made in another way."""
        apart = self._pieces.piece_to_id(_WORD_START) != UNK or self.pretokenised
        inside = any(_WORD_START in self.piece(token)[1:] for token in range(self.vocab_size))
        same = self._pieces.encode(" a  a ") == [token for _ in range(2) for token in self._pieces.encode("a")]
        return apart and same and not inside

    def decode(self, ids: list[int], join: bool = True) -> str:
        """The text of `ids`; PAD, BOS, EOS and BLANK are silent, and "@@" joins, unless it is to stay."""
        text = str(self._pieces.decode(ids))
        return self.joined(text) if join else text

    def joined(self, text: str) -> str:
        """Text as :meth:`decode` gives it: what was split before it came here is whole again."""
        return _JOINER.sub("", text) if self.pretokenised else text

    def piece(self, token: int) -> str:
        """The token as people read it in tables: "▁" marks the start of a word."""
        return str(self._pieces.id_to_piece(int(token)))

    def id(self, piece: str) -> int:
        """The token that `piece` stands for; UNK if none."""
        return int(self._pieces.piece_to_id(piece))

    def starts_word(self, token: int) -> bool:
        return self.piece(token).startswith(_WORD_START)


def _check_size(vocab_size: int) -> None:
    if not BLANK + 2 <= vocab_size <= MOST_TOKENS:
        raise UsageError(f"vocab_size must be from {BLANK + 2} to {MOST_TOKENS}, but is {vocab_size}")


def _vocabulary_error(vocab_size: int, message: str) -> Exception:
    if most := re.search(r"<= (\d+)\.", message):
        return UsageError(f"vocab_size must be at most {most[1]} for this text, but is {vocab_size}")
    if least := re.search(r"required_chars\. \d+ vs (\d+)", message):
        return UsageError(f"vocab_size must be at least {least[1]} for this text, but is {vocab_size}")
    return DataError(f"sentencepiece could not learn a vocabulary of {vocab_size}: {message}")
