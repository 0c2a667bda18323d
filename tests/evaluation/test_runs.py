import shutil

import pytest

from nmla.errors import UsageError
from nmla.evaluation.document import Code, Figures, Picture, to_html, to_markdown
from nmla.evaluation.runs import find_runs, report
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
    lines = [read_lines(digits / "valid.txt")] * 2
    source = digits / "valid.txt"
    sections = report(find_runs([copy_run]), source, [source], lines=lines)
    headings = [heading for heading, _ in sections]
    assert headings[:3] == ["Trainings", "On the test set", "What each position wants to say"]
    assert headings[-1] == "How it was made"
    (trainings, picture), (figures,) = sections[0][1], sections[1][1]
    assert [row[:4] for row in trainings.rows][1][1:] == ["ctc", "ngram", f"{copy_run.name}/train"]
    assert picture.svg.startswith("<svg")
    assert figures.rows[0][0] == "BLEU"
    page = to_html("Copying", sections)
    assert page.startswith("<!doctype html>")
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")  # it holds everything it shows
    assert f"nmla score --model {copy_run / 'train' / 'model'}" in to_markdown("Copying", sections)


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
