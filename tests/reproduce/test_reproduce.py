"""A small table, made for real: its stages run in processes of their own."""

import json
import re
import signal
import subprocess
import sys
import time

import pytest

from nmla.cli import main
from nmla.config import load_recipe
from nmla.errors import NmlaError, UsageError
from nmla.reproduce.run import reproduce
from nmla.reproduce.stages import as_json, from_json, run, stages, training
from nmla.reproduce.table import load_table

TABLE = """
title: Copying digits
about: What the rows are.
output: {output}
test: {{source: {digits}/valid.txt, references: [{digits}/valid.txt]}}
recipe: recipe.yaml
lm: {{text: {digits}/valid.txt, order: 2}}
ways:
  argmax: {{families: [ctc]}}
  tuned beam: {{beam_size: 2, tune: true, lm: true, families: [ctc]}}
  beam: {{beam_size: 2, families: [autoregressive]}}
baseline: CTC
rows:
- {{name: teacher, overrides: [model.family=autoregressive, train.loss=cross_entropy, finetune=null]}}
- {{name: CTC, overrides: [finetune=null], seeds: [1, 2], ways: [argmax]}}
- {{name: CTC continued, overrides: [finetune.loss=ctc], ways: [argmax]}}
- {{name: NMLA, overrides: []}}
"""


RECIPE = """
output: unused
model: {d_model: 32, heads: 2, feed_forward: 64, encoder_layers: 1, decoder_layers: 1, upsample: 3}
train: {steps: 40, learning_rate: 3.0e-3, warmup_steps: 5, max_tokens: 1024, validate_every: 40, checkpoint_every: 10}
finetune: {loss: ngram, steps: 10, max_tokens: 1024, validate_every: 10}
"""


def write_table(directory, digits, *changes):
    (directory / "recipe.yaml").write_text(f"data: {{corpus: {digits / 'corpus'}}}\n{RECIPE}")
    text = TABLE.format(digits=digits, output=directory / "out")
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    (directory / "table.yaml").write_text(text)
    return directory / "table.yaml"


@pytest.fixture(scope="module")
def made(digits, tmp_path_factory):
    path = write_table(tmp_path_factory.mktemp("table"), digits)
    return path, reproduce(path, jobs=2)


def test_table_has_every_row_with_its_command(made, digits, capsys):
    path, text = made
    assert text.startswith("## Copying digits\n\nWhat the rows are.\n")
    assert f"    nmla reproduce {path}\n" in text
    assert (path.parent / "out" / "table.md").read_text() == text
    assert "± " in next(line for line in text.split("\n") if line.startswith("| CTC |"))  # two seeds
    command = next(line for line in text.split("\n") if line.endswith("# NMLA"))
    assert main(command.split("#")[0].split()[1:]) == 0
    printed = {line.split("\t")[0]: line.split("\t")[1] for line in capsys.readouterr().out.strip().split("\n")}
    told = json.loads((path.parent / "out" / "table.json").read_text())
    (own,) = [of for of in told if (of["row"], of["way"]) == ("NMLA", "argmax")]
    assert printed["BLEU"] == f"{own['BLEU']:.2f}"
    assert printed["entropy"] == f"{own['entropy']:.3f}"
    assert len(own["steps"]) == 2
    page = (path.parent / "out" / "table.html").read_text()
    for heading in ("The table", "Trainings", "On the test set", "What each position wants to say", "How it was made"):
        assert f"<h2>{heading}</h2>" in page
    assert "perplexity" in page


def test_rows_share_stages_and_nothing_is_done_twice(made):
    path, text = made
    root = path.parent / "out" / "stages"
    kinds = [directory.name.rsplit("-", 1)[0] for directory in root.iterdir()]
    # One pretraining a seed serves all its rows.
    assert sorted(kinds) == sorted(
        ["autoregressive-cross_entropy", *["ctc-ctc"] * 3, "ctc-ngram2", "lm-2", "tuned-2"]
        + ["scored-1"] * 4
        + ["scored-2"] * 2
    )
    before = {file: file.stat().st_mtime_ns for file in root.rglob("*")}
    assert reproduce(path) == text
    assert {file: file.stat().st_mtime_ns for file in root.rglob("*")} == before


def test_key_depends_on_what_is_done_and_not_on_where(digits, tmp_path):
    path = write_table(tmp_path, digits)
    recipe = load_table(path)[1]["NMLA"]
    own, _ = training(recipe, 1)
    elsewhere = tmp_path / "moved"
    elsewhere.symlink_to(digits / "corpus")
    moved = load_recipe(tmp_path / "recipe.yaml", [f"data.corpus={elsewhere}", "output=x", "machine.devices=2"])
    assert training(moved, 1)[0].key == own.key
    keys = {own.key, training(recipe, 2)[0].key}
    for override in ("train.steps=7", "finetune.ngram=3", "model.d_model=64"):
        keys.add(training(load_recipe(tmp_path / "recipe.yaml", [override]), 1)[0].key)
    assert len(keys) == 5
    assert from_json(json.loads(json.dumps(as_json(own)))).key == own.key


def test_teachers_are_stages_of_their_own(digits, tmp_path):
    write_table(tmp_path, digits)
    teacher = "teacher={model: {family: autoregressive, d_model: 32, heads: 2}, train: {loss: cross_entropy, steps: 5},"
    one, many = (
        training(load_recipe(tmp_path / "recipe.yaml", [f"{teacher} seeds: {of}}}"]), 1) for of in ("[3]", "[3, 4]")
    )
    assert one[1].key == many[1].key  # the first teacher is the same, whoever else there is
    assert one[0].key != many[0].key
    kinds = {stage.key: stage.kind for stage in one[0].needed()}
    assert [*kinds.values()] == ["train", "distill", "train", "train"]


def test_stopped_table_goes_on(digits, tmp_path, made):
    """It ends with the numbers of the one that was not stopped; only the first stage is run, the rest takes long."""
    path = write_table(tmp_path, digits)
    command = [sys.executable, "-m", "nmla.cli", "reproduce", str(path)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    for _ in range(600):
        if any(tmp_path.glob("out/stages/*/log.jsonl")):
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert out == ""
    assert err.strip().split("\n")[-1].endswith("the same command goes on from there")
    stage = next(iter(stages(*load_table(path)).values())).inputs["model"]
    run(stage, tmp_path / "out" / "stages")
    own, whole = (
        stage.directory(directory / "out" / "stages") / "model" / "model.safetensors"
        for directory in (tmp_path, made[0].parent)
    )
    assert own.read_bytes() == whole.read_bytes()


def test_stage_that_fails_is_named_with_its_reason(digits, tmp_path):
    (tmp_path / "short.txt").write_text("1 2\n")
    short = (f"source: {digits}/valid.txt", f"source: {tmp_path}/short.txt")
    path = write_table(tmp_path, digits, short, ("baseline: CTC\n", ""))
    path.write_text(path.read_text().split("- {name: CTC,")[0])
    with pytest.raises(NmlaError, match=r"scored-2-\w+: this stage must succeed, but: .*must have one line per output"):
        reproduce(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("baseline: CTC", "baseline: x"), "baseline must be one of teacher, CTC, CTC continued, NMLA, but is 'x'"),
        (("name: NMLA", "name: CTC"), "rows must have different names, but two are called 'CTC'"),
        (("ways: [argmax]", "ways: [best]"), "ways of 'CTC' must be among argmax, tuned beam, beam, but one is 'best'"),
        (("lm: {", "lmm: {"), "there is no setting lmm; did you mean lm?"),
        (("{name: teacher,", "{nam: teacher,"), "there is no setting rows.0.nam; did you mean rows.0.name?"),
        (("recipe: recipe.yaml", ""), "a row must name a recipe, or the table one for all, but 'teacher' has none"),
        (("families: [autoregressive]", "teacher: true"), "'beam' needs a teacher"),
        (("lm: true, families: [ctc]", "lm: true"), "must fit a autoregressive model, but 'tuned beam' is tuned"),
    ],
)
def test_wrong_table_is_refused(digits, tmp_path, change, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        load_table(write_table(tmp_path, digits, change))
