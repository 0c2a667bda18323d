import io
import json
import random
import sys

import numpy as np
import pytest
import sacrebleu
from sacrebleu.significance import PairedTest

from conftest import CORPORA
from nmla.cli import main
from nmla.errors import DataError
from nmla.evaluation.measure import bleu_beyond, bleu_counts, measure, read_references, table
from nmla.text.lines import read_lines

WORDS = "der die das alte neue Haus Baum Hund sieht geht läuft heute morgen und , .".split()


@pytest.fixture(scope="module")
def systems():
    """References, and two systems that get some words wrong."""
    drawn = random.Random(1)
    references = [" ".join(drawn.choices(WORDS, k=drawn.randint(3, 15))) for _ in range(60)]

    def spoil(line, share):
        return " ".join(drawn.choice(WORDS) if drawn.random() < share else word for word in line.split())

    return references, [spoil(line, 0.2) for line in references], [spoil(line, 0.3) for line in references]


def test_scores_tests_and_intervals_are_sacrebleus(systems):
    references, better, worse = systems
    measured = {one.name: one for one in measure(better, [references], baseline=worse, samples=400)}
    metrics = {"BLEU": sacrebleu.BLEU(), "chrF": sacrebleu.CHRF(), "TER": sacrebleu.TER()}
    _, theirs = PairedTest([("worse", worse), ("better", better)], metrics, [references], "bs", n_samples=400)()
    for name, metric in metrics.items():
        one, (baseline, system) = measured[name], theirs[{"chrF": "chrF2"}.get(name, name)]
        assert one.score == metric.corpus_score(better, [references]).score == system.score
        assert one.difference == system.score - baseline.score
        assert (one.interval[1] - one.interval[0]) / 2 == pytest.approx(system.ci, rel=1e-4)
        low, high = one.difference_interval
        assert low < one.difference < high
        theirs_too = str(metric.get_signature()).split("|")
        assert one.signature == "|".join([theirs_too[0], "bs:400", "seed:12345", *theirs_too[1:]])


def test_p_value_is_two_sided(systems):
    references, better, worse = systems
    drawn = np.random.default_rng(12345).choice(60, size=(200, 60), replace=True)
    for one, other in ((better, worse), (worse, better), (better[:30] + worse[30:], better)):
        (measured,) = measure(one, [references], baseline=other, samples=200, only=["BLEU"])[:1]
        found = []
        for rows in drawn:
            scores = [
                sacrebleu.corpus_bleu([of[i] for i in rows], [[references[i] for i in rows]]).score
                for of in (one, other)
            ]
            found.append(scores[0] - scores[1])
        mean = sum(found) / len(found)
        count = sum(abs(of - mean) >= abs(measured.difference) for of in found)
        assert measured.p_value == (count + 1) / 201


def test_a_system_does_not_differ_from_itself(systems):
    references, better, _ = systems
    for one in measure(better, [references], baseline=better, samples=50)[:3]:
        assert (one.difference, one.difference_interval, one.p_value) == (0, (0, 0), 1)


def test_brevity_is_told(systems):
    references, *_ = systems
    short = [line.rsplit(" ", 1)[0] for line in references]
    measured = {one.name: one.score for one in measure(short, [references])}
    own = sacrebleu.BLEU().corpus_score(short, [references])
    assert measured["brevity penalty"] == own.bp < 1
    assert measured["length ratio"] == own.sys_len / own.ref_len


def test_tokenised_text_is_taken_as_it_is():
    outputs, references = ["a well-known man , he said"], ["a well @-@ known man, he said"]
    (own, *_) = measure(outputs, [references], tokenised=True)
    assert own.score == sacrebleu.corpus_bleu(outputs, [references], tokenize="none", force=True).score
    assert "tok:none" in own.signature


def test_table_has_a_line_a_metric_or_all_digits(systems):
    references, better, worse = systems
    measured = measure(better, [references], baseline=worse, samples=50)
    lines = table(measured, "tsv").split("\n")
    assert [line.split("\t")[0] for line in lines] == ["BLEU", "chrF", "TER", "brevity penalty", "length ratio"]
    assert " to the baseline\t95% [" in lines[0]
    assert json.loads(table(measured, "json"))[0]["score"] == measured[0].score


# BLEU (13a) of English-German systems of WMT 2017, as published.
PUBLISHED = {"uedin-nmt": 28.30, "FBK": 26.33, "online-A": 20.80, "PROMT-Rule-based": 16.61}


@pytest.mark.skipif(not (CORPORA / "wmt17-en-de-systems").is_dir(), reason="needs the outputs of WMT17 in NMLA_CORPORA")
@pytest.mark.parametrize("system", PUBLISHED)
def test_published_scores(system):
    outputs, references = (read_lines(CORPORA / "wmt17-en-de-systems" / f"{name}.de.xz") for name in (system, "ref"))
    (bleu, *_) = measure(outputs, [references], only=["BLEU"])
    assert round(bleu.score, 2) == PUBLISHED[system]


def test_json_is_not_scored_as_text(tmp_path, monkeypatch, capsys):
    told = {"text": "ein guter Satz ist das", "entropy": 0.0, "positions": 2, "blanks": 0}
    (tmp_path / "ref").write_text(f"{told['text']}\n")
    (tmp_path / "other.jsonl").write_text(json.dumps(told) + "\n")
    monkeypatch.chdir(tmp_path)
    for text, baseline, code in ((json.dumps(told), "ref", 3), (told["text"], "other.jsonl", 0)):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(f"{text}\n".encode())))
        assert main(["score", "--reference", "ref", "--baseline", baseline]) == code
        said = capsys.readouterr()
        assert ("+0.00 to the baseline" in said.out) == (code == 0)
        assert ("stdin: must be text, but is JSON" in said.err) == (code != 0)


def test_a_blank_line_is_no_reference_where_there_is_another(tmp_path):
    (tmp_path / "one").write_text("a b c d\n\n\nu\n")
    (tmp_path / "more").write_text("\na b c d e\n \nv\n")
    paths = [tmp_path / "one", tmp_path / "more"]
    references = read_references(paths)
    assert references == [["a b c d", None, "", "u"], [None, "a b c d e", None, "v"]]
    assert read_references(paths[:1]) == [["a b c d", "", "", "u"]]
    outputs = ["a b c d", "a b c", "", "v"]
    one, other = (measure(outputs, read_references(of)) for of in (paths, paths[::-1]))
    assert one == other
    assert one[0].score < 100  # an empty reference would make the short output long enough
    assert "nrefs:var" in one[0].signature


def test_references_must_hold_text(tmp_path):
    (tmp_path / "one").write_text("\n \n")
    with pytest.raises(DataError, match="one: must hold text, but all lines are blank"):
        read_references([tmp_path / "one"])


def test_a_single_sentence_has_no_interval():
    bleu, *_ = measure(["a b c d e"], [["a b c d e f"]], baseline=["a b"], samples=10)
    assert bleu.difference > 0
    assert (bleu.interval, bleu.difference_interval, bleu.p_value) == (None, None, None)
    assert "95%" not in table([bleu], "tsv")
    assert "bs:" not in bleu.signature


def test_lists_must_be_equally_long(systems):
    references, better, worse = systems
    with pytest.raises(DataError, match="reference 1 must have one line per output, but has 59 for 60"):
        measure(better, [references[:-1]])
    with pytest.raises(DataError, match="the baseline must have one line per output, but has 59 for 60"):
        measure(better, [references], baseline=worse[:-1])
    with pytest.raises(DataError, match="at least one output to score, but there is none"):
        measure([], [references])


def test_bleu_is_compared_from_counts_alone():
    own, other = ["a b c d e", "f g h i j", "k l"], ["a b c e d", "f g h i", "k l m"]
    references = [["a b c d e f", "f g h i j", None], ["a b", None, "k l m"]]
    expected = measure(own, references, baseline=other, samples=100, only=["BLEU"])[0]
    found = bleu_beyond(bleu_counts(own, references), bleu_counts(other, references), samples=100)
    assert found == [expected.difference, *expected.difference_interval]
