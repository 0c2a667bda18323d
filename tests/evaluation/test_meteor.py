import io
import os
import sys
from pathlib import Path

import pytest

from conftest import CORPORA
from nmla.cli import main
from nmla.errors import NmlaError, UsageError
from nmla.evaluation.meteor import find_meteor, meteor
from nmla.text.lines import read_lines

SYSTEMS = CORPORA / "wmt17-en-de-systems"
# English-German systems of WMT 2017, as published.
PUBLISHED = {"uedin-nmt": 0.48526, "FBK": 0.45973, "online-A": 0.43450, "PROMT-Rule-based": 0.39014}


def fake_java(directory: Path, monkeypatch, counts: str = "", complaint: str = "") -> Path:
    """A java on the path that keeps what it is given, has counted `counts` in any text, and finds each score to be
    the third of five counts by the first."""
    program = directory / "java"
    program.write_text(
        f"""#!{sys.executable}
import shutil, sys
open("{directory}/arguments", "a").write(chr(10).join(sys.argv[1:] + [""]))
sys.stderr.write({complaint!r})
first = sys.argv.index("-jar") + 2
if sys.argv[first] == "-":
    for line in sys.stdin:
        words, _, runs, *_ = map(float, line.removeprefix("SING ||| ").split())
        print(runs / words)
else:
    shutil.copy(sys.argv[first], "{directory}/outputs")
    shutil.copy(sys.argv[first + 1], "{directory}/references")
    print({counts!r}, end="")
"""
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}{os.pathsep}{os.environ['PATH']}")
    (directory / "meteor.jar").touch()
    return directory / "meteor.jar"


def test_program_is_given_lines_and_options(tmp_path, monkeypatch):
    jar = fake_java(tmp_path, monkeypatch, "4.0 4.0 1.0 1.0 1.0\n4.0 4.0 2.0 3.0 3.0\n")
    measured = meteor(["a", "b\u2028c"], [["d", "e"], ["f", "g"]], "de", jar)
    assert (measured.name, measured.score, measured.interval) == ("METEOR", 0.375, None)
    assert measured.signature == 'meteor-1.5|-l de -norm -m "exact stem"'
    assert (tmp_path / "outputs").read_text() == "a\nb c\n"  # Java would end a line at U+2028
    assert (tmp_path / "references").read_text() == "d\nf\ne\ng\n"
    assert "-r\n2\n" in (tmp_path / "arguments").read_text()
    meteor(["a", "b"], [[None, "e"], ["f", None]], "de", jar)
    assert (tmp_path / "references").read_text() == "f\nf\ne\ne\n"


def test_words_of_other_languages_are_split_for_the_program(tmp_path, monkeypatch):
    jar = fake_java(tmp_path, monkeypatch, "2.0 2.0 1.0 1.0 1.0\n")
    measured = meteor(["Un om, doi."], [["Doi."]], "ro", jar)
    assert measured.signature == 'meteor-1.5|tok:13a|-l ro -lower -m "exact stem"'
    assert (tmp_path / "outputs").read_text() == "Un om , doi .\n"
    assert "-norm" not in (tmp_path / "arguments").read_text()


def test_what_is_wrong_is_told(tmp_path, monkeypatch):
    jar = fake_java(tmp_path, monkeypatch, "no memory\n")
    with pytest.raises(NmlaError, match="METEOR gave no score: no memory"):
        meteor(["a"], [["b"]], "de", jar)
    with pytest.raises(UsageError, match=r"METEOR's language must be one of cz, da, .*, but is 'xx'"):
        meteor(["a"], [["b"]], "xx", jar)
    with pytest.raises(UsageError, match=r"none.jar: must be a file, but does not exist"):
        meteor(["a"], [["b"]], "de", tmp_path / "none.jar")
    fake_java(tmp_path, monkeypatch, "2.0 2.0 1.0 1.0 1.0\n", "Picked up OPTIONS\n\nno stemmer\n at line 5\n")
    with pytest.raises(NmlaError, match=r"METEOR gave no score: no stemmer$"):  # for a line has no counts
        meteor(["a", "b"], [["c", "d"]], "de", jar)


def test_a_score_near_nothing_is_near_nothing(tmp_path, monkeypatch):
    jar = fake_java(tmp_path, monkeypatch, "2.0E5 2.0 1.0 1.0 1.0\n")
    assert meteor(["a"], [["b"]], "cz", jar).score == 5e-6
    assert "-m\nexact\n" in (tmp_path / "arguments").read_text()  # there is no stemmer for Czech


def test_where_a_reference_is_missing_the_first_stands_again(tmp_path, monkeypatch):
    jar = fake_java(tmp_path, monkeypatch, "2.0 2.0 1.0 1.0 1.0\n" * 2)
    meteor(["a", "b"], [["c", "d"], [None, "e"]], "de", jar)
    assert (tmp_path / "references").read_text() == "c\nc\nd\ne\n"


def test_a_sentence_that_is_its_reference_has_no_chunk(tmp_path, monkeypatch):
    jar = fake_java(tmp_path, monkeypatch, "4.0 4.0 1.0 4.0 4.0\n4.0 5.0 1.0 4.0 4.0\n")
    assert meteor(["a", "b"], [["a", "c"]], "de", jar).score == 1 / 8


def test_sentences_are_drawn_anew(tmp_path, monkeypatch):
    jar = fake_java(tmp_path, monkeypatch, "4.0 4.0 1.0 1.0 1.0\n4.0 4.0 3.0 3.0 3.0\n")
    measured = meteor(["a", "b"], [["c", "d"]], "de", jar, baseline=["e", "f"], samples=200)
    assert measured.interval == (0.25, 0.75)
    assert measured.signature.endswith("|bs:200|seed:12345")
    assert (measured.difference, measured.difference_interval, measured.p_value) == (0, (0, 0), 1)
    assert (tmp_path / "arguments").read_text().count("-stdio") == 1  # all draws at once


def test_score_tells_intervals_and_the_test_against_a_baseline(tmp_path, monkeypatch, capsys):
    jar = fake_java(tmp_path, monkeypatch, "4.0 4.0 1.0 1.0 1.0\n4.0 4.0 3.0 3.0 3.0\n")
    text = tmp_path / "text"
    text.write_text("a\nb\n")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.read_bytes())))
    options = ["--reference", str(text), "--baseline", str(text), "--meteor", "de", "--meteor-jar", str(jar)]
    assert main(["score", *options]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("METEOR"))
    assert "[0.25000, 0.75000]" in line
    assert "p = 1.0" in line


@pytest.mark.skipif(not SYSTEMS.is_dir(), reason="needs the outputs of WMT17 below NMLA_CORPORA")
@pytest.mark.parametrize("system", PUBLISHED)
def test_published_scores(system, monkeypatch):
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", "-Duser.language=de -Duser.country=DE")  # where one half is 0,5
    try:
        find_meteor("de")
    except UsageError as error:
        pytest.skip(str(error))
    outputs, references = (read_lines(SYSTEMS / f"{name}.de.xz") for name in (system, "ref"))
    assert meteor(outputs, [references], "de").score == pytest.approx(PUBLISHED[system], abs=1e-4)
