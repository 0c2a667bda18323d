import gzip
import io
import lzma
import tracemalloc

import pytest
import sentencepiece
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from nmla.errors import DataError, UsageError
from nmla.text.lines import BYTE_ORDER_MARK, MAX_LINE_BYTES, bounded_line, open_text, read_lines
from nmla.text.tokenizer import _SPECIAL, BLANK, EOS, PAD, UNK, Tokenizer

TEXT = ["the cat sat on the mat today", "a dog barks loudly at night"] * 20


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.learn(TEXT, vocab_size=60)


def test_lines_end_at_newline_alone(tmp_path):
    path = tmp_path / "text"
    path.write_bytes("one\u2028still one\u0085\x0bone\ntwo\r\n\nfour without end".encode())
    assert read_lines(path) == ["one\u2028still one\u0085\x0bone", "two", "", "four without end"]


def test_byte_order_mark_is_not_text(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"\xef\xbb\xbfone\n")
    assert read_lines(path) == ["one"]


def test_bytes_that_are_not_utf8_are_named(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"fine\nna\xefve\n")
    with pytest.raises(DataError, match=r"text:2: text must be UTF-8, but byte 3 of the line is 0xef"):
        read_lines(path)


@pytest.mark.parametrize(
    ("name", "compress"),
    [("a.gz", gzip.compress), ("a.xz", lzma.compress), ("a.zst", zstandard.compress), ("a", bytes)],
)
def test_name_tells_the_compression(tmp_path, name, compress):
    text = "one\ntwo\u2028\n" * 100_000
    (tmp_path / name).write_bytes(compress(text.encode()))
    assert read_lines(tmp_path / name) == text.split("\n")[:-1]


@pytest.mark.parametrize(("name", "compress"), [("a.xz", lzma.compress), ("a.zst", zstandard.compress), ("a", bytes)])
def test_line_without_end_takes_little_memory(tmp_path, name, compress):
    (tmp_path / name).write_bytes(compress(b"one\n" + b"x" * 50_000_000 + b"\ntwo"))
    tracemalloc.start()
    with open_text(tmp_path / name) as file:
        lines = list(iter(lambda: bounded_line(file), b""))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [lines[0], len(lines[1]), lines[2]] == [b"one\n", MAX_LINE_BYTES + 1, b"two"]
    assert peak < 45_000_000


@pytest.mark.parametrize("size", [-1, 0, 1])
def test_line_of_the_greatest_length_is_whole(tmp_path, size):
    (tmp_path / "a").write_bytes(b"x" * (MAX_LINE_BYTES + size) + b"\ny\n")
    with open_text(tmp_path / "a") as file:
        line = bounded_line(file)
        assert len(line.removesuffix(b"\n")) == MAX_LINE_BYTES + size
        assert bounded_line(file) == b"y\n"


@pytest.mark.parametrize("start", [b"", BYTE_ORDER_MARK])
@pytest.mark.parametrize("end", [b"", b"\n"])
def test_line_that_is_too_long_is_refused(tmp_path, start, end):
    room = MAX_LINE_BYTES - len(start)
    (tmp_path / "a").write_bytes(start + b"x" * room + end)
    assert read_lines(tmp_path / "a") == ["x" * room]
    (tmp_path / "a").write_bytes(start + b"x" * (room - 1) + "ü".encode() + end)
    with pytest.raises(DataError, match="a:1: must have at most 1048576 bytes, but has more"):
        read_lines(tmp_path / "a")


def test_missing_file_and_directory_are_usage_errors(tmp_path):
    with pytest.raises(UsageError, match="does not exist"):
        read_lines(tmp_path / "none")
    with pytest.raises(UsageError, match="is a directory"):
        read_lines(tmp_path)


def test_tokenizer_gives_the_text_back(tokenizer):
    for line in TEXT[:2]:
        assert tokenizer.decode(tokenizer.encode(line)) == line


def test_special_ids_are_what_the_model_says(tokenizer):
    names = [tokenizer.piece(token) for token in (PAD, UNK, EOS, BLANK)]
    assert names == ["<pad>", "<unk>", "</s>", "<blank>"]


def test_text_never_becomes_a_silent_token(tokenizer):
    silent = {PAD, EOS, BLANK}
    assert not silent & set(tokenizer.encode("the <blank> cat </s> <pad> sat"))


def test_learning_twice_gives_the_same_model(tokenizer):
    assert Tokenizer.learn(TEXT, vocab_size=60).model == tokenizer.model


def test_saved_tokenizer_loads(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "tokenizer.model")
    assert Tokenizer.load(tmp_path / "tokenizer.model").encode(TEXT[0]) == tokenizer.encode(TEXT[0])


@pytest.mark.parametrize(("size", "must"), [(8, "at least 24"), (9000, r"at most \d+")])
def test_impossible_vocabulary_size_names_the_possible(size, must):
    with pytest.raises(UsageError, match=f"vocab_size must be {must} for this text, but is {size}"):
        Tokenizer.learn(TEXT, vocab_size=size)


ODD = st.text(
    st.sampled_from("acdt  \u0301\u0308\u00a8\u00a0\u3000\u200b\u2028\u2581\u2585\ufb01\u00e4\t\n猫"), max_size=12
)


@given(st.lists(ODD, max_size=4))
def test_word_by_word_is_as_at_one_go(tokenizer, texts):
    """Sentencepiece itself is asked for whole sentences, with all that its normalisation does to spaces."""
    assert tokenizer._word_by_word
    assert tokenizer.encode_batch(texts) == tokenizer._pieces.encode(texts)


def test_model_with_tokens_across_words_is_not_asked_word_by_word(tmp_path):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT),
        model_writer=model,
        model_type="bpe",
        vocab_size=60,
        split_by_whitespace=False,
        **_SPECIAL,
    )
    tokenizer = Tokenizer(model.getvalue())
    assert not tokenizer._word_by_word
    assert tokenizer.encode(TEXT[0]) == tokenizer._pieces.encode(TEXT[0])


def test_memory_of_words_is_bounded(tokenizer, monkeypatch):
    monkeypatch.setattr("nmla.text.tokenizer._WORDS_LENGTH", 10)
    for word in ("catcat", "matmat", "satsat", "dogdog"):
        assert tokenizer.encode(word) == tokenizer._pieces.encode(word)
    assert len(tokenizer._words) <= 3


def test_batch_is_encoded_as_one_by_one(tokenizer):
    texts = [*TEXT[:2], "", "a cat"]
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]
    assert tokenizer.encode_batch([]) == []


@pytest.fixture(scope="module")
def units():
    return Tokenizer.of_units({"Haupt@@": 5, "stadt": 5, "ist": 9, "@-@": 4, "rare": 1, "a@@b": 2, "B@@": 3}, 11)


def test_units_are_tokens_by_frequency(units):
    assert [units.piece(token) for token in range(5, 11)] == ["▁ist", "▁Haupt@@", "▁stadt", "▁@-@", "▁B@@", "▁a@@b"]
    assert units.encode("Haupt@@ stadt  rare ist") == [6, 7, UNK, 5]


def test_kind_is_known_from_the_model(units, tokenizer, tmp_path):
    units.save(tmp_path / "tokenizer.model")
    assert Tokenizer.load(tmp_path / "tokenizer.model").pretokenised
    assert not tokenizer.pretokenised


@pytest.mark.parametrize(
    ("text", "joined"),
    [("Haupt@@ stadt ist", "Hauptstadt ist"), ("ist B@@", "ist B"), ("a@@b @-@ ist", "a@@b @-@ ist"), ("", "")],
)
def test_units_come_back_joined(units, text, joined):
    assert units.decode(units.encode(text)) == joined


def test_units_are_not_normalised():
    tokenizer = Tokenizer.of_units({"ﬁn": 2, "x\u00a0y": 1, "Ａ": 1}, 32000)
    assert tokenizer.vocab_size == 8
    assert tokenizer.decode(tokenizer.encode("ﬁn x\u00a0y Ａ")) == "ﬁn x\u00a0y Ａ"


def test_other_file_is_not_a_tokenizer(tmp_path):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(b"something else")
    with pytest.raises(DataError, match="must be a sentencepiece model"):
        Tokenizer.load(path)
