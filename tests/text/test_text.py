import pytest

from nmla.errors import DataError, UsageError
from nmla.text.lines import read_lines
from nmla.text.tokenizer import BLANK, EOS, PAD, UNK, Tokenizer

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


def test_other_file_is_not_a_tokenizer(tmp_path):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(b"something else")
    with pytest.raises(DataError, match="must be a sentencepiece model"):
        Tokenizer.load(path)
