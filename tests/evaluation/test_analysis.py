"""Every number against a slower way to it: sacrebleu on the subset, double loops, sums, probabilities."""

import gzip
import json
import math
import random
from dataclasses import replace
from itertools import combinations

import pytest
import sacrebleu

import nmla
from nmla.cli import main
from nmla.config import Decoding
from nmla.decoding.lm_train import train_lm
from nmla.decoding.ngram_lm import NgramLM
from nmla.decoding.pipe import translate_files
from nmla.decoding.translation import Translation
from nmla.errors import DataError, UsageError
from nmla.evaluation.analysis import analyse, match, word_order, words
from nmla.evaluation.analysis_table import FORMATS, render
from nmla.evaluation.systems import System
from nmla.text.lines import read_lines
from nmla.text.tokenizer import BLANK, Tokenizer

WORDS = "der die das alte neue Haus Baum Hund sieht geht läuft heute morgen und , .".split()
UNITS = Tokenizer.of_units(dict.fromkeys("abc", 1), BLANK + 4)
ARPA = """\\data\\
ngram 1=6

\\1-grams:
-2\t<unk>
0\t<s>
-1\t</s>
-0.5\t▁a
-0.25\t▁b
-1.5\t▁c

\\end\\
"""


@pytest.fixture(scope="module")
def texts():
    """Two references, and two systems that get words wrong, leave out and move some."""
    drawn = random.Random(1)
    first = [" ".join(drawn.choices(WORDS, k=drawn.randint(1, 30))) for _ in range(60)]

    def spoil(line, share):
        split = [drawn.choice(WORDS) if drawn.random() < share else word for word in line.split()]
        for _ in range(drawn.randint(0, 2)):
            split.insert(drawn.randrange(len(split)), split.pop())
        return " ".join(split[: drawn.randint(len(split) - 1, len(split))])

    return [first, [spoil(line, 0.1) for line in first]], [
        [spoil(line, share) for line in first] for share in (0.2, 0.4)
    ]


@pytest.fixture
def lm(tmp_path):
    (tmp_path / "hand.arpa").write_text(ARPA, encoding="utf-8")
    return NgramLM.load(tmp_path / "hand.arpa", UNITS)


def test_scores_and_precisions_are_sacrebleus(texts):
    references, (outputs, _) = texts
    [report] = analyse([System("a", outputs)], references).systems
    bleu = sacrebleu.corpus_bleu(outputs, references)
    assert report.scores.bleu == bleu.score
    assert report.scores.chrf == sacrebleu.corpus_chrf(outputs, references).score
    assert report.scores.precisions == tuple(bleu.precisions)
    assert report.scores.brevity_penalty == bleu.bp < 1
    assert report.scores.length_ratio == bleu.sys_len / bleu.ref_len


def test_buckets_are_by_the_first_references_words(texts):
    references, (outputs, _) = texts
    bounds = (2, 5, 14, 40)
    [report] = analyse([System("a", outputs)], references, bounds=bounds).systems
    assert [(of.shortest, of.longest) for of in report.buckets] == [(0, 2), (3, 5), (6, 14), (15, 40), (41, None)]
    for bucket in report.buckets[:-1]:
        rows = [i for i, line in enumerate(references[0]) if bucket.shortest <= len(line.split()) <= bucket.longest]
        bleu = sacrebleu.corpus_bleu([outputs[i] for i in rows], [[lines[i] for i in rows] for lines in references])
        told = bleu.score if bucket.longest > 3 else None  # where nothing has four words there is nothing to score
        assert (bucket.sentences, bucket.bleu, bucket.brevity_penalty) == (len(rows), told, bleu.bp)
    empty = report.buckets[-1]
    assert (empty.sentences, empty.bleu, empty.brevity_penalty) == (0, None, None)
    assert sum(bucket.sentences for bucket in report.buckets) == 60
    default = analyse([System("a", outputs)], references).systems[0].buckets
    assert [of.longest for of in default] == [20, 40, 60, None]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_quantiles_part_the_sentences_equally(texts, count):
    lines = [" ".join(["a"] * length) for length in random.Random(count).sample(range(1, 100), 60)]
    [report] = analyse([System("a", lines)], [lines], quantiles=count).systems
    sizes = [bucket.sentences for bucket in report.buckets]
    assert len(sizes) == count
    assert max(sizes) - min(sizes) <= 1
    assert sum(sizes) == 60


def test_quantiles_of_equal_lengths_leave_no_bucket_empty():
    lines = ["a b", "b a", "a a", "b b b", ""]
    for count in (2, 3, 5, 9):
        [report] = analyse([System("a", lines)], [lines], quantiles=count).systems
        assert all(bucket.sentences for bucket in report.buckets)
    [report] = analyse([System("a", ["a b"] * 3)], [["b a"] * 3], quantiles=4).systems
    assert [(of.shortest, of.longest, of.sentences) for of in report.buckets] == [(0, None, 3)]


def test_words_are_bleus():
    assert words(["Ein Haus, ein Haus.", "", " 3.5 %"]) == [["Ein", "Haus", ",", "ein", "Haus", "."], [], ["3.5", "%"]]


def test_repeats_are_counted_beside_the_references():
    analysis = analyse([System("a", ["a a a b b", "c", ""])], [["a a b", "", "c c. c"], ["x", "y", "z"]])
    assert (analysis.systems[0].fluency.words, analysis.systems[0].fluency.repeats) == (6, 3 / 6)
    assert (analysis.reference.words, analysis.reference.repeats) == (7, 2 / 7)
    assert analyse([System("a", [""])], [["b"]]).systems[0].fluency.repeats == 0


def test_a_words_occurrences_are_matched_in_turn():
    assert match("b a a c a".split(), "a x a b".split()) == [(0, 3), (1, 0), (2, 2)]
    assert match([], ["a"]) == match(["a"], []) == match(["a"], ["b"]) == []


def test_order_against_a_double_loop(texts):
    references, (outputs, _) = texts
    discordant = pairs = matched = 0
    displacement = 0.0
    for output, reference in zip(outputs, references[0], strict=True):
        output, reference = output.split(), reference.split()
        matches = []
        for i, word in enumerate(output):
            there = [j for j, other in enumerate(reference) if other == word]
            k = output[:i].count(word)
            if k < len(there):
                matches.append((i, there[k]))
        pairs += len(matches) * (len(matches) - 1) // 2
        discordant += sum((i - k) * (j - m) < 0 for (i, j), (k, m) in combinations(matches, 2))
        displacement += sum(abs(i / len(output) - j / len(reference)) for i, j in matches)
        matched += len(matches)
    order = analyse([System("a", outputs)], references).systems[0].order
    assert order.discordant == discordant / pairs > 0
    assert order.displacement == pytest.approx(displacement / matched, rel=1e-12)


def test_order_at_its_ends():
    same, reverse = [list("abcd")], [list("dcba")]
    assert (word_order(same, same).discordant, word_order(same, same).displacement) == (0, 0)
    assert (word_order(reverse, same).discordant, word_order(reverse, same).displacement) == (1, (3 + 1 + 1 + 3) / 16)
    assert (word_order([["x"]], same).discordant, word_order([["x"]], same).displacement) == (None, None)
    assert word_order([["b"]], same).discordant is None


def test_perplexity_by_hand(lm):
    analysis = analyse([System("a", ["a b", "", "z"])], [["b", "c c", "b"]], lm=lm, tokenizer=UNITS)
    outputs, reference = (0.5 + 0.25 + 1 + 1 + 2 + 1) / 6, (0.25 + 1 + 2 * 1.5 + 1 + 0.25 + 1) / 7
    assert analysis.systems[0].fluency.perplexity == pytest.approx(10**outputs, rel=1e-6)
    assert analysis.reference.perplexity == pytest.approx(10**reference, rel=1e-6)
    assert analyse([System("a", ["a"])], [["a"]]).reference.perplexity is None


def test_language_model_needs_a_vocabulary_that_splits_words(lm):
    split = Tokenizer.of_units({"a@@": 1, "b": 1, "c": 1}, BLANK + 4)
    with pytest.raises(UsageError, match="vocabulary must split text by itself, but needs text split with @@"):
        analyse([System("a", ["a"])], [["a"]], lm=lm, tokenizer=split)


def test_entropy_and_blanks_are_means_over_positions():
    told = [
        Translation("a", entropy=6.0, positions=3, blanks=2),
        Translation("b", positions=5, blanks=4),
        Translation(""),
    ]
    outputs = [one.text for one in told]
    [report] = analyse([System("a", outputs, told)], [outputs]).systems
    assert (report.entropy, report.blanks) == (6 / 8, 6 / 8)
    without = [replace(one, blanks=0) for one in told]
    [report] = analyse([System("a", outputs, without)], [outputs]).systems
    assert (report.entropy, report.blanks) == (6 / 8, None)  # a model that knows none
    [report] = analyse([System("a", outputs)], [outputs]).systems
    assert (report.entropy, report.blanks) == (None, None)


def test_what_translate_writes_as_json_tells_as_much_as_the_model(copy_run, digits, tmp_path):
    lines = read_lines(digits / "valid.txt")
    translator = nmla.load(copy_run / "finetune" / "model")
    path = tmp_path / "out.jsonl"
    translate_files(translator, [digits / "valid.txt"], path, "jsonl")
    own, read = System.of_model("a", translator, lines), System.of_file("a", path)
    assert analyse([read], [lines]) == analyse([own], [lines])
    for bad in (
        "[]",
        '"text"',
        "{",
        '{"text": "a"}',
        "1",
        '{"text": "a", "entropy": "b", "positions": 1, "blanks": 0}',
        '{"text": null, "entropy": 1, "positions": 1, "blanks": 0}',
        '{"text": "a", "entropy": NaN, "positions": 1, "blanks": 0}',
        '{"text": "a", "entropy": 1, "positions": Infinity, "blanks": 0}',
        '{"text": "a", "entropy": 1, "positions": 1, "blanks": 2}',
        "[" * 100000,
    ):
        path.write_text(f"{path.read_text()}{bad}\n")
        with pytest.raises(DataError, match=f"out.jsonl:{len(lines) + 1}: must be a translation as nmla translate"):
            System.of_file("a", path)
        path.write_text("".join(f"{line}\n" for line in path.read_text().splitlines()[:-1]))


def test_json_may_be_compressed(tmp_path):
    line = '{"text": "a", "entropy": 1, "positions": 4, "blanks": 2}\n'
    (tmp_path / "out.jsonl.gz").write_bytes(gzip.compress(line.encode()))
    [one] = System.of_file("a", tmp_path / "out.jsonl.gz").translations
    assert (one.text, one.entropy, one.positions, one.blanks) == ("a", 1, 4, 2)


@pytest.mark.parametrize("told", ['"text": "\\ud800", "entropy": 1', f'"text": "a", "entropy": 1{"0" * 400}'])
def test_json_that_no_translation_is(tmp_path, told):
    (tmp_path / "out.jsonl").write_text(f'{{{told}, "positions": 4, "blanks": 2}}\n')
    with pytest.raises(DataError, match="jsonl:1: must be a translation"):
        System.of_file("a", tmp_path / "out.jsonl")


def test_precisions_are_not_smoothed():
    [report] = analyse([System("a", ["a x b y c z d"] * 3)], [["a b c d e f g"] * 3]).systems
    assert report.scores.precisions == (100 * 12 / 21, 0, 0, 0)


def test_a_sentence_may_have_fewer_references():
    outputs, references = ["a b c d", "e f g h"], [["a b c d", "x y"], [None, "e f g h"]]
    analysis = analyse([System("a", outputs), System("b", ["a", "b"])], references)
    assert analysis.systems[0].scores.bleu == pytest.approx(100)
    assert {of.references for of in analysis.comparisons[0].lost} == {("a b c d", None), ("x y", "e f g h")}
    lines = [line.split("\t") for line in render(analysis, "tsv").split("\n\n")[1].split("\n")]
    assert lines[0][4:] == ["reference", "reference 2", "a", "b"]
    assert sorted(line[4:] for line in lines[1:]) == [
        ["a b c d", "", "a b c d", "a"],
        ["x y", "e f g h", "e f g h", "b"],
    ]


def test_the_first_reference_of_a_sentence_may_be_in_another_file():
    gaps, full = [[None, "a b"], ["c d e", None]], [["c d e", "a b"]]
    system = System("a", ["d c", "a"])
    one, other = (analyse([system], references, bounds=(2,)) for references in (gaps, full))
    assert one.reference == other.reference
    assert one.systems == other.systems


@pytest.mark.parametrize("penalty", [0.0, 4.0, -4.0])
@pytest.mark.parametrize("beam_size", [1, 3])
def test_blanks_are_those_of_the_probabilities(copy_run, penalty, beam_size):
    translator = nmla.load(copy_run / "train" / "model")
    translator.decoding = Decoding(blank_penalty=penalty, beam_size=beam_size)
    lines = ["1 2 3", "", "4 4 4 4 5"]
    blanks = positions = 0
    for line in filter(None, lines):
        probs = translator.probabilities(line)
        blanks += int((probs.argmax(-1) == BLANK).sum())
        positions += len(probs)
    system = System.of_model("a", translator, lines)
    [report] = analyse([system], [lines]).systems
    assert report.blanks == blanks / positions
    assert 0 < report.blanks < 1
    assert translator.translate_batch(lines)[0].blanks == 0


def test_blanks_of_a_long_line_are_those_of_its_parts(copy_run):
    translator = nmla.load(copy_run / "train" / "model")
    line = "1 2 3 4 5 6 7 " * 90
    parts = translator._parallel.translations(translator._parts(line), [Decoding(return_scores=True)], None)[0]
    [whole] = translator.translate_batch([line], return_scores=True)
    assert whole.parts == len(parts) > 1
    assert whole.blanks == sum(part.blanks for part in parts) > 0


def test_examples_are_the_largest_differences_of_chrf(texts):
    references, (one, other) = texts
    sources = [f"source {number}" for number in range(60)]
    systems = [System("one", one), System("other", other), System("same", one)]
    comparison, same = analyse(systems, references, sources=sources, examples=4).comparisons
    assert (comparison.baseline, comparison.name) == ("one", "other")
    before, after = (
        [sacrebleu.sentence_chrf(line, refs).score for line, *refs in zip(lines, *references, strict=True)]
        for lines in (one, other)
    )
    rows = sorted(range(60), key=lambda row: (before[row] - after[row], row))
    assert [example.line - 1 for example in comparison.gained] == rows[:4]
    assert [example.line - 1 for example in comparison.lost] == rows[:-5:-1]
    for example in comparison.gained + comparison.lost:
        row = example.line - 1
        assert (example.baseline_chrf, example.chrf) == (before[row], after[row])
        assert (example.baseline, example.output, example.source) == (one[row], other[row], sources[row])
        assert example.references == (references[0][row], references[1][row])
    assert (same.gained, same.lost) == ((), ())
    [alone] = analyse(systems[:1], references, examples=4).comparisons
    assert alone.baseline is None
    ranked = sorted(range(len(before)), key=before.__getitem__)
    assert [of.chrf for of in alone.lost] == [before[row] for row in ranked[:4]]
    assert [of.chrf for of in alone.gained] == [before[row] for row in ranked[:-5:-1]]
    assert (alone.lost[0].baseline, alone.lost[0].baseline_chrf) == (None, None)
    assert analyse(systems, references, examples=0).comparisons[0].gained == ()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"systems": []}, UsageError, "there must be at least one system to analyse, but there is none"),
        ({"references": []}, UsageError, "there must be at least one reference, but there is none"),
        ({"systems": [System("a", [])], "references": [[]]}, DataError, "at least one line of reference 1 to score"),
        ({"references": [["b"]]}, DataError, "system a must have one line per line of reference 1, but has 2 for 1"),
        ({"sources": ["b"]}, DataError, "the source must have one line per line of reference 1, but has 1 for 2"),
        ({"systems": [System("a", ["b", "c"])] * 2}, UsageError, "must have a name of its own, but 2 are called a"),
        ({"bounds": (20, 10)}, UsageError, "must be above 0 and grow, but are 20 10"),
        ({"bounds": (0, 10)}, UsageError, "must be above 0 and grow, but are 0 10"),
        ({"bounds": ()}, UsageError, "must be above 0 and grow, but are none"),
        ({"quantiles": 0}, UsageError, "quantiles must be at least 1, but are 0"),
        ({"quantiles": 2, "bounds": (20,)}, UsageError, "either bounds of buckets or quantiles, but both are given"),
        ({"examples": -1}, UsageError, "examples must be at least 0, but are -1"),
        ({"tokenizer": UNITS}, UsageError, "language model and its tokenizer must be given together"),
    ],
)
def test_what_cannot_be_analysed(change, error, message):
    arguments = {"systems": [System("a", ["b", "c"])], "references": [["b", "c"]], **change}
    with pytest.raises(error, match=message):
        analyse(**arguments)


def test_tables_have_all_systems_side_by_side(texts, lm):
    references, (one, other) = texts
    one = ["a | b\tc \u2028 d", *one[1:]]
    told = [Translation(line, entropy=1.0, positions=2, blanks=1) for line in one]
    systems = [System("one", one, told), System("an|other", other)]
    analysis = analyse(systems, references, lm=lm, tokenizer=UNITS, bounds=(20, 99), examples=2)
    numbers, examples = render(analysis, "tsv").split("\n\n")
    table = [line.split("\t") for line in numbers.split("\n")]
    assert table[0] == ["measure", "one", "an|other", "reference", "note"]
    assert {len(row) for row in table} == {5}
    cells = {row[0]: row[1:] for row in table}
    assert cells["BLEU"][0] == f"{analysis.systems[0].scores.bleu:.2f}"
    assert "tok:13a" in cells["BLEU"][-1]
    assert cells["blanks"][:3] == ["0.5000", "-", "-"]
    assert cells["perplexity"][2] == f"{analysis.reference.perplexity:.2f}"
    assert "BLEU, over 99 words" not in cells  # there are none
    assert "BLEU, up to 20 words" in cells
    assert "BLEU, 21 to 99 words" in cells
    rows = [line.split("\t") for line in examples.split("\n")]
    assert rows[0] == [
        "change",
        "line",
        "chrF of one",
        "chrF of an|other",
        "reference",
        "reference 2",
        "one",
        "an|other",
    ]
    assert [row[0] for row in rows[1:]] == ["gained", "gained", "lost", "lost"]
    assert {len(row) for row in rows} == {8}

    shown = render(analysis, "markdown").split("\n")
    assert shown[0] == "| measure | one | an\\|other | reference | note |"
    assert shown[1] == "| --- | --: | --: | --: | --- |"
    assert "## Where an|other lost most against one" in shown
    assert f"    one          {analysis.comparisons[0].lost[0].baseline}" in shown

    told = json.loads(render(analysis, "json"))
    assert told["systems"][1]["scores"]["bleu"] == analysis.systems[1].scores.bleu
    assert told["systems"][1]["buckets"][2]["bleu"] is None
    assert told["comparisons"][0]["gained"][0]["output"] == analysis.comparisons[0].gained[0].output


def test_what_has_no_reference_is_not_the_worst():
    analysis = analyse([System("a", ["b c", "x", ""])], [["b c", "e", ""]])
    (one,) = analysis.comparisons
    assert [of.line for of in one.lost] == [2]


def test_the_longest_reference_decides_whether_there_is_bleu():
    said = "Ja, das ist gut so."
    analysis = analyse([System("a", [said])], [["Ja."], [said]])
    assert analysis.systems[0].buckets[0].bleu == pytest.approx(100)


def test_one_system_shows_its_best_and_its_worst():
    analysis = analyse([System("a", ["b c", "d", "f"])], [["b c", "e", "f"]], sources=["B C", "E", "F"], examples=2)
    table = [line.split("\t") for line in render(analysis, "tsv").split("\n\n")[1].split("\n")]
    assert table[0] == ["change", "line", "chrF of a", "source", "reference", "a"]
    assert table[1:] == [
        ["best", "1", "100.00", "B C", "b c", "b c"],
        ["best", "3", "100.00", "F", "f", "f"],
        ["worst", "2", "0.00", "E", "e", "d"],
    ]
    shown = render(analysis, "markdown")
    assert "## Worst of a\n\nLine 2, chrF 0.0:\n\n    source     E\n    reference  e\n    a          d" in shown


def test_files_of_outputs_have_no_rows_of_models():
    told = render(analyse([System("a", ["b c"])], [["b c"]], examples=0), "tsv")
    assert not any(name in told for name in ("entropy", "blanks", "perplexity", "\n\n"))
    assert render(analyse([System("a", ["b"])], [["b"]], quantiles=1), "tsv").count("any length\t") == 2


@pytest.fixture
def desk(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in (("source", "1 2\n3 4\n"), ("one", "1 2\n4 3\n"), ("short", "1 2\n"), ("empty", "")):
        (tmp_path / name).write_text(text)
    (tmp_path / "hollow").mkdir()
    return tmp_path


ONE = ("--system", "a=one", "--reference", "one")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--system", "one", "--reference", "one"), 2, "--system must be NAME=PATH, but is 'one'"),
        (("--system", "=one", "--reference", "one"), 2, "--system must be NAME=PATH, but is '=one'"),
        (("--system", "a=", "--reference", "one"), 2, "--system must be NAME=PATH, but is 'a='"),
        ((*ONE, "--system", "a=source"), 2, "systems must have names of their own, but two are called 'a'"),
        ((*ONE, "--system", "b=nowhere"), 2, "nowhere: must be a file, but does not exist"),
        ((*ONE, "--system", "b=hollow"), 2, "hollow: must be a file of outputs or a model directory, but holds no"),
        ((*ONE, "--system", "b=MODEL"), 2, "--source must be given for b to translate, but is not"),
        ((*ONE, "--system", "b=short"), 3, "short must have one line per line of one, but has 1 for 2"),
        ((*ONE, "--reference", "short"), 3, "short must have one line per line of one, but has 1 for 2"),
        ((*ONE, "--source", "short"), 3, "short must have one line per line of one, but has 1 for 2"),
        (("--system", "a=empty", "--reference", "empty"), 3, "at least one line of empty to score, but there is none"),
        ((*ONE, "--lm", "one"), 2, "--tokenizer must tell the vocabulary of --lm where no system is a model"),
        ((*ONE, "--tokenizer", "MODEL"), 2, "--lm must be given too, but is not"),
        ((*ONE, "--tokenizer", "MODEL", "--lm", "nowhere"), 2, "nowhere: must be a file, but does not exist"),
        ((*ONE, "--buckets", "9", "--quantiles", "2"), 2, "either bounds of buckets or quantiles, but both are given"),
    ],
)
def test_mistake_is_one_line(desk, copy_run, capsys, arguments, code, message):
    model = str(copy_run / "train" / "model")
    assert main(["analyse", *(argument.replace("MODEL", model) for argument in arguments)]) == code
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    assert message in told.err


def test_systems_must_be_given(desk, capsys):
    with pytest.raises(SystemExit):
        main(["analyse", "--reference", "one"])
    assert "the following arguments are required: --system" in capsys.readouterr().err


@pytest.mark.parametrize("form", FORMATS)
def test_command_takes_models_and_files(desk, copy_run, digits, capsys, form):
    model = copy_run / "train" / "model"
    tokenizer = nmla.load(model).tokenizer
    lm = train_lm([digits / "train.txt"], tokenizer, desk / "digits.lm", order=2)
    capsys.readouterr()
    command = ["analyse", "--source", "source", "--reference", "source", "--reference", "one", "--system", "file=one"]
    command += ["--system", f"model={model}", "--lm", "digits.lm", "--format", form]
    assert main(command) == 0
    told = capsys.readouterr()
    assert told.err == ""
    if form != "json":
        assert "model" in told.out.split("\n")[0]
        return
    analysis = json.loads(told.out)
    file, of_model = analysis["systems"]
    assert (file["entropy"], file["blanks"]) == (None, None)
    assert of_model["entropy"] >= 0
    assert 0 < of_model["blanks"] < 1
    for report, lines in ((file, ["1 2", "4 3"]), (of_model, ["1 2", "3 4"])):
        encoded = [tokenizer.encode(line) for line in lines]
        mean = sum(map(lm.score, encoded)) / sum(len(ids) + 1 for ids in encoded)
        assert report["fluency"]["perplexity"] == pytest.approx(math.exp(-mean))
    assert file["order"]["discordant"] == 0.5
    assert of_model["order"]["discordant"] == 0
    assert analysis["comparisons"][0]["name"] == "model"
