import shutil

import pytest

import nmla
from nmla.errors import DataError, UsageError
from nmla.evaluation.analysis import analyse
from nmla.evaluation.document import Code, Figures, Picture, to_html, to_markdown, write_document
from nmla.evaluation.runs import Outcome, find_runs, report
from nmla.evaluation.systems import System
from nmla.text.lines import read_lines


def test_runs_are_found_with_what_they_began_from(copy_run):
    first, second = find_runs([copy_run])
    assert [run.name for run in (first, second)] == [f"{copy_run.name}/train", f"{copy_run.name}/finetune"]
    assert first.parent is None
    assert second.parent == first
    assert (second.first, second.steps) == (200, 20)
    assert second.line("valid", "bleu")[-1][0] == 220
    named = find_runs([copy_run / "finetune", copy_run / "train"], {copy_run / "train": "CTC"})
    assert [run.name for run in named] == ["CTC", "finetune"]


def test_report_tells_of_trainings_and_test_set(copy_run, digits):
    lines = read_lines(digits / "valid.txt")
    runs = find_runs([copy_run])
    systems = [System.of_model(run.name, nmla.load(run.directory / "model"), lines) for run in runs]
    test = Outcome(lines, [lines], systems, analyse(systems, [lines], sources=lines))
    sections = report(runs, test, ["nmla score"])
    headings = [heading for heading, _ in sections]
    assert headings[:3] == ["Trainings", "On the test set", "What each position wants to say"]
    assert headings[-1] == "How it was made"
    (trainings, picture), (figures,) = sections[0][1], sections[1][1]
    assert trainings.rows[1][1:4] == ["ctc", "ngram", f"{copy_run.name}/train"]
    assert picture.svg.startswith("<svg")
    assert figures.rows[0][0] == "BLEU"
    page = to_html("Copying", sections)
    assert page.startswith("<!doctype html>")
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")  # it holds everything it shows
    assert "    nmla score" in to_markdown("Copying", sections)


def test_runs_of_one_name_are_told_apart(copy_run, tmp_path):
    for name in ("a", "b"):
        shutil.copytree(copy_run / "train", tmp_path / name / "train")
    names = [run.name for run in find_runs([tmp_path / "a" / "train", tmp_path / "b" / "train"])]
    assert names == [str(tmp_path / "a" / "train"), str(tmp_path / "b" / "train")]


def test_log_that_a_kill_cut_is_read_as_far_as_it_goes(copy_run, tmp_path):
    shutil.copytree(copy_run / "train", tmp_path / "train")
    log = tmp_path / "train" / "log.jsonl"
    log.write_text(log.read_text() + '{"event": "tra')
    assert find_runs([tmp_path])[0].steps == 200
    log.write_text("")
    with pytest.raises(DataError, match="must tell of a training, but tells nothing"):
        find_runs([tmp_path])


def test_report_without_a_test_set(copy_run):
    assert [heading for heading, _ in report(find_runs([copy_run]))] == ["Trainings", "How it was made"]


def test_directory_without_trainings_is_refused(tmp_path, copy_run):
    shutil.copytree(copy_run / "train" / "checkpoints", tmp_path / "x")
    with pytest.raises(UsageError, match="must hold a finished training, but holds none"):
        find_runs([tmp_path])


def test_document_as_page_and_as_markdown():
    blocks = ["a < b", Figures(["x", "y"], [["1 | 2", "<"]]), Picture("<svg/>"), Code("1 < 2", folded="more"), ""]
    page = to_html("T & U", [("One", blocks)])
    for part in ("<title>T &amp; U</title>", "<p>a &lt; b</p>", "<td>&lt;</td>", "<svg/>", "<summary>more</summary>"):
        assert part in page
    text = "## T & U\n\n### One\n\na < b\n\n| x | y |\n| --- | --: |\n| 1 \\| 2 | < |\n\nmore:\n\n    1 < 2\n"
    assert to_markdown("T & U", [("One", blocks)]) == text


def test_pictures_of_markdown_are_files(tmp_path):
    write_document(
        tmp_path / "a.md", "", [("One", ["text", Picture("<svg>1</svg>")]), ("Two", [Picture("<svg>2</svg>")])]
    )
    text = "### One\n\ntext\n\n![One](a-1.svg)\n\n### Two\n\n![Two](a-2.svg)\n"
    assert (tmp_path / "a.md").read_text() == text
    assert (tmp_path / "a-2.svg").read_text() == "<svg>2</svg>"
