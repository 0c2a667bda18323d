import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from nmla.data.synthetic import HEADLINE, generate
from nmla.demo import _recipe, demo, study
from nmla.demo_report import mark_invalid
from nmla.errors import UsageError


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """A demo that has hardly trained: all of it runs, nothing of it is good."""
    output = tmp_path_factory.mktemp("runs") / "demo"
    command = [sys.executable, "-m", "nmla.cli", "demo", "train.steps=6", "finetune.steps=4", "--output", output]
    return output, [subprocess.run(command, capture_output=True, text=True) for _ in range(2)]


def test_same_seed_same_numbers(quick):
    _, runs = quick
    assert [run.returncode for run in runs] == [0, 0], runs[0].stderr

    def without_times(stdout):
        return [line.rsplit("│", 2)[0] for line in stdout.splitlines()]

    assert without_times(runs[0].stdout) == without_times(runs[1].stdout)


def test_results_hold_each_system(quick):
    systems = json.loads((quick[0] / "results.json").read_text())["systems"]
    assert [system["system"] for system in systems] == ["ctc", "ctc_continued", "nmla"]
    for system in systems:
        assert system.keys() == {"system", "bleu", "bleu_all", "valid", "entropy", "length_ratio", "seconds"}
        assert 0 <= system["valid"] <= 1
        assert system["bleu_all"] >= system["bleu"]


def test_report_is_one_file_that_stands_alone(quick):
    report = (quick[0] / "report.html").read_text()
    assert f"Report: {quick[0] / 'report.html'}" in quick[1][0].stdout
    assert "src=" not in report
    assert "<script" not in report
    assert "<link" not in report
    assert report.count("<svg") == 3
    for picture in report.split("<svg")[1:]:
        ET.fromstring("<svg" + picture.split("</svg>")[0] + "</svg>")


def test_both_arms_start_alike_and_run_equally_long(quick):
    logs = [
        [json.loads(line) for line in (quick[0] / arm / "log.jsonl").read_text().splitlines()]
        for arm in ("ctc_continued", "nmla")
    ]
    assert logs[0][-1]["step"] == logs[1][-1]["step"] == 4
    recipes = [(quick[0] / arm / "recipe.yaml").read_text().splitlines() for arm in ("ctc_continued", "nmla")]
    assert [(a, b) for a, b in zip(*recipes, strict=True) if a != b] == [("  loss: ctc", "  loss: ngram")]


def test_invalid_words_are_marked():
    sentence = generate(HEADLINE, 1, seed=1)[0]
    words = sentence.target.split()
    assert mark_invalid(sentence.target, sentence) == [(word, False) for word in words]
    assert mark_invalid(" ".join([words[0], "xyzzy", *words[1:]]), sentence)[1] == ("xyzzy", True)
    assert ("…", True) in mark_invalid(" ".join(words[:-1]), sentence)
    assert all(wrong for _, wrong in mark_invalid("", sentence))


def test_other_files_are_left_alone(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "thesis.txt").write_text("years of work")
    with pytest.raises(UsageError, match="must be empty or an earlier demo"):
        demo(tmp_path)
    assert (tmp_path / "text" / "thesis.txt").exists()


@pytest.mark.parametrize("override", ["output=runs/other", "data.corpus=corpus", "teacher.beam_size=2"])
def test_overrides_that_would_do_nothing_are_refused(tmp_path, override):
    with pytest.raises(UsageError, match="must be of its model or training, but is"):
        demo(tmp_path / "demo", [override])
    assert not (tmp_path / "demo").exists()


def test_control_is_without_what_only_ngrams_have():
    recipe, control = _recipe(Path("demo"), ["finetune.recall_weight=2", "model.family=sctc", "train.loss=sctc"])
    assert (recipe.finetune.loss, recipe.finetune.recall_weight) == ("ngram", 2)
    assert (control.loss, control.recall_weight, control.steps) == ("sctc", 1, recipe.finetune.steps)


def test_what_a_killed_demo_left_does_not_stop_the_next(quick):
    output, _ = quick
    (output / ".corpus.abc").mkdir()
    with pytest.raises(UsageError, match=r"finetune\.loss must be ngram"):
        demo(output, ["finetune.loss=ctc"])  # refused before anything is removed
    assert (output / "report.html").exists()


def test_study_runs_both_controls(tmp_path):
    study(tmp_path, ["train.steps=2", "finetune.steps=2"])
    for control in ("one-mode", "three-orders"):
        systems = json.loads((tmp_path / control / "results.json").read_text())["systems"]
        assert [system["system"] for system in systems] == ["ctc", "ctc_continued", "nmla"]
    text = (tmp_path / "one-mode" / "text" / "test.target").read_text()
    assert text != (tmp_path / "three-orders" / "text" / "test.target").read_text()
