import shutil
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

import nmla
from nmla.cli import main
from nmla.config import parse_recipe
from nmla.errors import DataError, UsageError
from nmla.evaluation.analysis import analyse
from nmla.evaluation.document import Code, Figures, Picture, to_html, to_markdown, write_document
from nmla.evaluation.report import curves, heat_map
from nmla.evaluation.runs import Outcome, _start, find_runs, report
from nmla.evaluation.systems import System
from nmla.text.lines import read_lines


def test_runs_are_found_with_what_they_began_from(copy_run):
    first, second = find_runs([copy_run])
    assert [run.name for run in (first, second)] == [f"{copy_run.name}/train", f"{copy_run.name}/finetune"]
    assert first.parent is None
    assert second.parent == first
    assert (second.first, second.steps) == (200, 20)
    assert second.line("valid", "bleu")[-1][0] == 220
    assert [run.name for run in find_runs([copy_run / "finetune", copy_run / "train"])] == ["train", "finetune"]


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


def test_report_has_a_recipe_that_makes_each_model_anew(copy_run, tmp_path):
    shutil.copytree(copy_run, tmp_path / "run")
    runs = find_runs([tmp_path / "run"])
    (_, (_, *codes)) = report(runs)[-1]
    first, second = (parse_recipe(code.text) for code in codes)
    assert (first.train, first.finetune) == (runs[0].recipe.train, None)
    assert (second.train, second.finetune) == (runs[0].recipe.train, runs[1].recipe.train)
    assert first.output != second.output

    recipe, start = (tmp_path / "run" / "finetune" / name for name in ("recipe.yaml", "start.json"))
    start.write_text(start.read_text().replace('"batches a step": 1', '"batches a step": 8'))  # by eight processes
    (_, (_, *codes)) = report(find_runs([tmp_path / "run"]))[-1]
    assert parse_recipe(codes[1].text).finetune.accumulate == 8
    recipe.write_text(recipe.read_text().replace("seed: 1", "seed: 2"))  # which no one recipe has beside the first
    (_, (_, *codes)) = report(find_runs([tmp_path / "run"]))[-1]
    assert codes[1].folded.endswith("this stage alone: it began from run/train")
    assert parse_recipe(codes[1].text).finetune is None

    shutil.rmtree(tmp_path / "run" / "train")
    (_, (_, code)) = report(find_runs([tmp_path / "run"]))[-1]
    assert "weights that are not here" in code.folded
    assert parse_recipe(code.text).finetune is None


def test_runs_of_one_name_are_told_apart(copy_run, tmp_path):
    for name in ("a", "b"):
        shutil.copytree(copy_run / "train", tmp_path / name / "train")
    names = [run.name for run in find_runs([tmp_path / "a" / "train", tmp_path / "b" / "train"])]
    assert names == [str(tmp_path / "a" / "train"), str(tmp_path / "b" / "train")]


def test_a_run_is_found_once_and_beside_what_it_began_from(copy_run, tmp_path, monkeypatch):
    for name in ("a", "b"):
        shutil.copytree(copy_run, tmp_path / name)
    runs = find_runs([tmp_path / "a", tmp_path / "b", tmp_path])
    assert [run.name for run in runs] == ["a/train", "a/finetune", "b/train", "b/finetune"]
    assert [run.parent.name for run in runs if run.parent] == ["a/train", "b/train"]
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert find_runs([Path("../a")])[0].name == "a/train"
    for name in ("lr=1", "lr-1"):
        shutil.copytree(copy_run / "train", tmp_path / "c" / name)
    with pytest.raises(UsageError, match=r"trainings must have names of their own, but two are called .*lr-1"):
        find_runs([tmp_path / "c"])


def test_pictures_of_others_are_not_replaced(copy_run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("a-1.svg").write_text("mine")
    assert main(["report", str(copy_run), "--output", "a.md"]) == 2
    assert "a-1.svg: must not be there before a.md, whose pictures would replace it" in capsys.readouterr().err
    assert Path("a-1.svg").read_text() == "mine"
    Path("a-1.svg").unlink()
    assert [main(["report", str(copy_run), "--output", "a.md"]) for _ in range(2)] == [0, 0]  # its own are


def test_log_that_a_kill_cut_is_read_as_far_as_it_goes(copy_run, tmp_path):
    shutil.copytree(copy_run / "train", tmp_path / "train")
    log = tmp_path / "train" / "log.jsonl"
    log.write_text(log.read_text() + '{"event": "tra')
    assert find_runs([tmp_path])[0].steps == 200
    whole = log.read_bytes()
    for wrong in (b'{"step": 1}', b'{"event": "train", "step": "x", "seconds": 1}', b"\xff\xfe"):
        log.write_bytes(whole + b"\n" + wrong + b"\n")
        assert find_runs([tmp_path])[0].steps == 200
    log.write_text("")
    with pytest.raises(DataError, match="must tell of a training, but tells nothing"):
        find_runs([tmp_path])


def test_what_a_training_began_from_is_told_even_if_it_is_not_here(copy_run, tmp_path):
    shutil.copytree(copy_run / "finetune", tmp_path / "lr=0.1")
    (run,) = find_runs([tmp_path / "lr=0.1"])
    assert run.name == "lr-0.1"  # as commands can name it
    trainings, _ = report([run])[0][1]
    assert trainings.rows[0][3] == "weights that are not here"
    (tmp_path / "lr=0.1" / "start.json").write_text("{}")
    with pytest.raises(DataError, match=r"start.json: must tell what a training began from, but does not"):
        find_runs([tmp_path])


def test_a_curve_goes_on_from_the_weights_that_were_kept(copy_run):
    first, second = find_runs([copy_run])
    events = [{"event": "valid", "step": step, "seconds": 1.0, "bleu": bleu} for step, bleu in ((100, 9.0), (200, 5.0))]
    for final, bleu in (("last", 5.0), ("best", 9.0)):
        stage = replace(first.recipe.train, final=final)
        parent = replace(first, log=events, recipe=replace(first.recipe, train=stage))
        run = replace(second, parent=parent)
        assert _start(run, parent, "bleu") == [(200, bleu)]


def test_report_without_a_test_set(copy_run):
    assert [heading for heading, _ in report(find_runs([copy_run]))] == ["Trainings", "How it was made"]


def test_directory_without_trainings_is_refused(tmp_path, copy_run):
    shutil.copytree(copy_run / "train" / "checkpoints", tmp_path / "x")
    with pytest.raises(UsageError, match="must hold a finished training, but holds none"):
        find_runs([tmp_path])


def test_document_as_page_and_as_markdown():
    assert "<p>x: <code>a|&lt;b</code>.</p>" in to_html("", [("", ["x: `a|<b`."])])
    blocks = ["a < b", Figures(["x", "y"], [["1 | 2", "<"]]), Picture("<svg/>"), Code("1 < 2", folded="more"), ""]
    page = to_html("T & U", [("One", blocks)])
    for part in ("<title>T &amp; U</title>", "<p>a &lt; b</p>", "<td>&lt;</td>", "<svg/>", "<summary>more</summary>"):
        assert part in page
    text = "# T & U\n\n## One\n\na < b\n\n| x | y |\n| --- | --: |\n| 1 \\| 2 | < |\n\nmore:\n\n    1 < 2\n"
    assert to_markdown("T & U", [("One", blocks)]) == text


def test_text_is_shown_as_it_is():
    table = Figures(["source"], [["a <!-- *b* `c` _d_ [e] |\u2028f &lt; ~~g~~"]], text=True)
    assert "| a \\<!-- \\*b\\* \\`c\\` \\_d\\_ \\[e] \\| f \\&lt; \\~\\~g\\~\\~ |" in to_markdown("", [("", [table])])
    numbers = Figures(["system", "BLEU"], [["a_b", "1"]])
    assert "| a_b | 1 |" in to_markdown("", [("", [numbers])])
    page = to_html("", [("", [numbers, Figures(["measure", "note"], [["a", "b"]])])])
    assert '<table class="numbers"><thead><tr><th>system' in page
    assert '<table class="numbers noted"><thead><tr><th>measure' in page


def test_names_of_a_heat_map_have_room():
    long = "a" * 40
    svg = ElementTree.fromstring(heat_map(long * 3, [long], [[0.5, 1.0]]))
    title, label = svg.findall("{*}text")
    assert float(label.get("x")) > 40 * 6.5
    assert float(svg.get("width")) > 120 * 7.5
    assert title.text == long * 3


def test_equal_values_have_an_axis_around_them():
    svg = ElementTree.fromstring(curves({"BLEU": {"a": [(1, 100.0), (2, 100.0)]}}, "steps"))
    ticks = {float(text.text) for text in svg.findall("{*}text") if text.get("x") == "39"}
    assert min(ticks) < 100 < max(ticks)
    svg = ElementTree.fromstring(curves({"BLEU": {"a": [(1, 0.0), (2, 0.0)]}}, "steps"))
    assert "1" in {text.text for text in svg.findall("{*}text") if text.get("x") == "39"}


def test_pictures_of_markdown_are_files(tmp_path):
    write_document(
        tmp_path / "a.md", "", [("One", ["text", Picture("<svg>1</svg>")]), ("Two", [Picture("<svg>2</svg>")])]
    )
    text = "## One\n\ntext\n\n![One](a-1.svg)\n\n## Two\n\n![Two](a-2.svg)\n"
    assert (tmp_path / "a.md").read_text() == text
    assert (tmp_path / "a-2.svg").read_text() == "<svg>2</svg>"
    write_document(tmp_path / "my page.md", "", [("One", [Picture("<svg/>")])])
    assert (tmp_path / "my page.md").read_text() == "## One\n\n![One](my%20page-1.svg)\n"
