"""A small table, made for real: its stages run in processes of their own."""

import hashlib
import html
import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from nmla.cli import main
from nmla.config import Decoding, ModelConfig, TrainConfig, load_recipe
from nmla.errors import DataError, NmlaError, UsageError
from nmla.evaluation.tune import ALPHAS, BETAS, PENALTIES
from nmla.reproduce.record import Record, _packed, cost, gather, pairs
from nmla.reproduce.run import _Asked, reproduce
from nmla.reproduce.stages import VERSIONS, Stage, as_json, from_json, judging, run, stages, training
from nmla.reproduce.table import load_table

TABLE = """
title: Copying digits
about: What the rows are.
published: A paper's Table 1, on other digits.
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
- {{name: CTC, overrides: [finetune=null], seeds: [1, 2], published: {{argmax: 26.3}}, ways: [argmax]}}
- {{name: CTC continued, overrides: [finetune.loss=ctc], ways: [argmax]}}
- {{name: NMLA, overrides: [], control: CTC continued}}
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
    assert text.startswith("# Copying digits\n\nWhat the rows are.\n")
    assert f"    nmla reproduce {path}\n" in text
    assert (path.parent / "out" / "table.md").read_text() == text
    assert text.endswith("\n\n![Copying digits](table.svg)\n")
    assert "NMLA" in (path.parent / "out" / "table.svg").read_text()
    assert "± " in next(line for line in text.split("\n") if line.startswith("| CTC |"))  # two seeds
    told = json.loads((path.parent / "out" / "table.json").read_text())["measured"].values()
    for way in ("argmax", "tuned beam"):
        command = next(line for line in text.split("\n") if line.endswith(f"# NMLA, {way}, seed 1"))
        assert main(command.split("#")[0].split()[1:]) == 0
        printed = {line.split("\t")[0]: line.split("\t")[1] for line in capsys.readouterr().out.strip().split("\n")}
        (own,) = [of for of in told if (of["row"], of["way"]) == ("NMLA", way)]
        assert printed["BLEU"] == f"{own['BLEU']:.2f}"
        assert printed["entropy"] == f"{own['entropy']:.3f}"
        assert len(own["steps"]) == 2
    assert sum("# CTC, argmax, seed" in line for line in text.split("\n")) == 2
    page = (path.parent / "out" / "table.html").read_text()
    for heading in ("The table", "Trainings", "On the test set", "What each position wants to say", "How it was made"):
        assert f"<h2>{heading}</h2>" in page
    assert "perplexity" in page


def test_differences_are_what_their_command_prints(made, capsys):
    """In every way, against the baseline's first."""
    table = made[1].split("| BLEU beyond CTC, argmax |")[1].split("\n\n")[0].split("\n")
    assert table[0] == " argmax | tuned beam | beam |"
    cells = {line.split(" | ")[0].strip("| "): line.strip("| ").split(" | ")[1:] for line in table[2:]}
    assert [*cells] == ["teacher", "CTC continued", "NMLA"]
    command = next(line for line in made[1].split("\n") if line.endswith("# NMLA, tuned beam, seed 1"))
    assert main([*command.split("#")[0].split()[1:], "--format", "json"]) == 0
    (bleu,) = [of for of in json.loads(capsys.readouterr().out) if of["name"] == "BLEU"]
    low, high = bleu["difference_interval"]
    assert cells["NMLA"][1] == f"{bleu['difference']:+.1f} [{low:+.1f}, {high:+.1f}]"


def test_a_row_is_tested_against_its_control_in_the_same_way(made, capsys):
    table = next(of for of in made[1].split("\n\n") if "| BLEU, in the same way |" in of).split("\n")
    assert [line.split(" | ")[0] for line in table[2:]] == ["| NMLA beyond CTC continued"]
    assert table[0] == "| BLEU, in the same way | argmax |"  # the control is decoded in no other
    (cells,) = [line.strip("| ").split(" | ")[1:] for line in table[2:]]
    command = next(line for line in made[1].split("\n") if line.endswith("# NMLA beyond CTC continued, argmax, seed 1"))
    assert main([*command.split("#")[0].split()[1:], "--format", "json"]) == 0
    (bleu,) = [of for of in json.loads(capsys.readouterr().out) if of["name"] == "BLEU"]
    low, high = bleu["difference_interval"]
    assert cells[0] == f"{bleu['difference']:+.1f} [{low:+.1f}, {high:+.1f}]"


def test_each_seed_stands_beside_the_same_of_its_control(made, digits, tmp_path):
    """From numbers that a record tells: three seeds of one row, two of the other."""
    changes = [
        ("continued, overrides: [finetune.loss=ctc]", "continued, overrides: [finetune.loss=ctc], seeds: [1, 2, 3]")
    ]
    changes += [("control: CTC continued", "control: CTC continued, seeds: [1, 2], ways: [argmax]")]
    path = write_table(tmp_path, digits, *changes)
    record = json.loads((made[0].parent / "out" / "table.json").read_text())
    found = {"CTC continued": {1: 30, 2: 31, 3: 50}, "NMLA": {1: 32, 2: 34}}
    known = next(iter(record["measured"].values()))
    for (row, _, seed), stage in stages(*load_table(path)).items():
        bleu = found.get(row, {}).get(seed, 10)
        record["measured"][stage.directory(tmp_path).name] = {**known, "BLEU": bleu, "beyond": {}}
    (tmp_path / "told.json").write_text(json.dumps(record))
    text = reproduce(path, record=tmp_path / "told.json")
    assert "\n| BLEU, each seed beside the same | argmax |\n" in text
    assert "\n| NMLA beyond CTC continued | +2.5 ± 0.7 (+2.0, +3.0) |\n" in text
    assert "each seed beside the same" not in made[1]  # one seed has nothing to spread


def test_published_figures_stand_beside_those_that_were_found(made):
    page = made[1].split("\n\n")
    found = next(line for line in page[3].split("\n") if line.startswith("| CTC |")).split(" | ")[1]
    place = next(i for i, of in enumerate(page) if of.startswith("| system | BLEU, argmax | published |"))
    assert page[place].split("\n")[2:] == [f"| CTC | {found} | 26.30 |"]
    assert page[place + 1] == "Published: A paper's Table 1, on other digits."


def test_analysis_of_the_page_is_what_its_command_prints(made, capsys):
    path, _ = made
    page = html.unescape((path.parent / "out" / "table.html").read_text())
    command = re.search("nmla analyse .*?(?=</pre>)", page)[0]
    assert main([*shlex.split(command)[1:], "--format", "markdown"]) == 0
    printed = [line for line in capsys.readouterr().out.split("\n") if line.startswith("| ") and line.endswith(" |")]
    assert printed
    cells = [[*map(html.unescape, re.findall("<td>(.*?)</td>", row))] for row in page.split("<tr>")]
    for line in printed[2:]:
        assert line.strip("| ").replace("\\|", "|").split(" | ") in cells


def test_analysis_beside_the_scores_is_what_its_command_prints(made, capsys):
    """There a row is a measure, here a system."""
    table = next(of for of in made[1].split("\n\n") if "| perplexity |" in of).split("\n")
    names, *rows = [line.strip("| ").split(" | ") for line in (table[0], *table[2:])]
    names = [name.partition(" (")[0] for name in names]  # without the number of sentences
    assert [row[0] for row in rows] == [
        "CTC",
        "teacher",
        "CTC continued",
        "NMLA",
        "the reference",
    ]  # the baseline first
    command = next(line for line in made[1].split("\n") if line.startswith("    nmla analyse"))
    assert main(shlex.split(command)[1:]) == 0
    printed = capsys.readouterr().out.split("\n\n")[0].split("\n")
    for line in printed[1:]:
        name, *values = line.split("\t")[:-1]
        if name in names:
            assert [row[names.index(name)] for row in rows] == values
    assert {"repeats", "perplexity", "discordant pairs", "blanks"} < {*names}
    assert sum(name.startswith("BLEU, ") for name in names) > 1


def test_meteor_is_measured_where_its_program_is(made, digits, tmp_path, monkeypatch, capsys):
    path = made[0].with_name("judged.yaml")
    path.write_text(made[0].read_text() + "meteor: de\n")
    monkeypatch.setenv("PATH", "/nowhere")
    assert numbers(reproduce(path)) == numbers(made[1])
    assert "METEOR is left out: METEOR needs " in capsys.readouterr().err
    (tmp_path / "pycocoevalcap" / "meteor").mkdir(parents=True)
    (tmp_path / "pycocoevalcap" / "meteor" / "meteor-1.5.jar").touch()  # the package has no __init__.py
    program = tmp_path / "java"
    program.write_text("#!/bin/sh\necho 'no memory'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.syspath_prepend(tmp_path)
    assert numbers(reproduce(path, jobs=2)) == numbers(made[1])  # what it cannot do does not withhold the rest
    assert "METEOR gave no score: no memory" in capsys.readouterr().err
    lines = len((digits / "valid.txt").read_text().splitlines())
    program.write_text(
        f"""#!{sys.executable}
import sys
print("1 2 3 4 5\\n" * {lines} if "-ssOut" in sys.argv else ".4326", end="")
"""
    )
    text = reproduce(path, jobs=2)
    table = next(of for of in text.split("\n\n") if "| METEOR |" in of).split("\n")
    column = table[0].split(" | ").index("METEOR")
    assert [line.split(" | ")[column] for line in table[2:]] == ["0.433"] * 4
    assert 'METEOR: `meteor-1.5|-l de -norm -m "exact stem"`' in text
    commands = [line for line in text.split("\n") if line.startswith("    nmla score")]
    assert commands
    assert all(" --meteor de " in command for command in commands)
    bad = path.with_name("bad.yaml")
    bad.write_text(made[0].read_text() + "meteor: xx\n")
    with pytest.raises(UsageError, match=r"meteor must be one of cz, da, .*, but is 'xx'"):
        reproduce(bad)
    for judged in (path.parent / "out" / "stages").glob("meteor-*"):
        shutil.rmtree(judged)


def test_what_the_model_was_tuned_to_since_changes_nothing(made, tmp_path):
    path, text = made
    shutil.copytree(path.parent / "out", tmp_path / "out")
    for model in tmp_path.glob("out/stages/ctc-ctc-*/model"):
        (model / "decoding.json").write_text('{"blank_penalty": -30.0}')
    for scored in tmp_path.glob("out/stages/scored-*"):
        shutil.rmtree(scored)
    path = Path(shutil.copy(path, tmp_path))
    shutil.copy(made[0].parent / "recipe.yaml", tmp_path)
    path.write_text(path.read_text().replace(str(made[0].parent / "out"), str(tmp_path / "out")))
    assert numbers(reproduce(path)) == numbers(text)


def numbers(text):
    return [line for line in text.split("\n") if line.startswith("|")]


def test_a_halt_costs_no_minutes():
    events = [
        ("train", 10, 20.0),
        ("valid", 10, 90.0),
        ("train", 20, 5000.0),
        ("train", 30, 5020.0),
        ("train", 35, 5030.0),
    ]
    log = [{"event": event, "step": step, "seconds": seconds} for event, step, seconds in events]
    assert cost(log) == (35, 70.0)


def test_what_is_done_so_far_can_be_shown(made, digits, tmp_path, capsys):
    path, text = made
    table = path.with_name("more.yaml")
    table.write_text(path.read_text() + "- {name: Later, overrides: [finetune.steps=77]}\n")
    assert main(["reproduce", str(table), "--so-far"]) == 0
    shown = capsys.readouterr().out
    assert numbers(shown) == numbers(text)
    assert "\nNot run yet: Later.\n" in shown
    with pytest.raises(UsageError, match="some of the table must be done to show it so far, but nothing is"):
        reproduce(write_table(tmp_path, digits), so_far=True)
    assert not (tmp_path / "out").exists()


def test_a_row_that_is_done_in_part_says_so(made, tmp_path):
    """A seed without a score leaves a mean of the others, and no difference to a first seed that is not there."""
    path, text = made
    shutil.copytree(path.parent / "out", tmp_path / "out")
    told = json.loads((tmp_path / "out" / "table.json").read_text())["measured"]
    (lost,) = [stage for stage, of in told.items() if (of["row"], of["way"], of["seed"]) == ("CTC", "argmax", 1)]
    shutil.rmtree(tmp_path / "out" / "stages" / lost)
    table = Path(shutil.copy(path, tmp_path / "my table.yaml"))
    shutil.copy(path.parent / "recipe.yaml", tmp_path)
    table.write_text(table.read_text().replace(str(path.parent / "out"), str(tmp_path / "out")))
    shown = reproduce(table, so_far=True)
    assert "(1 of 2 seeds)" in next(line for line in shown.split("\n") if line.startswith("| CTC |"))
    assert "\nNot run yet: CTC, argmax, seed 1.\n" in shown
    assert "| BLEU beyond CTC" in text
    assert "| BLEU beyond CTC" not in shown  # its first seed is what others would be compared with
    assert f"    nmla reproduce '{table}'\n" in shown


def elsewhere(made, tmp_path, *lost):
    """The table on a machine that has none of its stages, or not those whose names begin like these; its record."""
    path = made[0]
    shutil.copytree(path.parent / "out", tmp_path / "out")
    record = shutil.move(tmp_path / "out" / "table.json", tmp_path / "record.json")
    for stage in (tmp_path / "out" / "stages").iterdir():
        if not lost or stage.name.startswith(lost):
            shutil.rmtree(stage)
    for name in ("table.yaml", "recipe.yaml"):
        text = (path.parent / name).read_text().replace(str(path.parent / "out"), str(tmp_path / "out"))
        (tmp_path / name).write_text(text)
    return tmp_path / "table.yaml", record


def test_what_a_record_tells_is_not_made_again(made, tmp_path, capsys):
    path, record = elsewhere(made, tmp_path)
    assert main(["reproduce", str(path), "--record", str(record)]) == 0
    shown, said = capsys.readouterr()
    assert numbers(shown) == numbers(made[1])
    assert "record.json tells 6 of 6 measurements" in said
    assert not [*tmp_path.glob("out/stages/*/done.json")]
    again = json.loads((tmp_path / "out" / "table.json").read_text())
    assert again == json.loads(Path(record).read_text())  # what is known of it can go on to a third
    page = (tmp_path / "out" / "table.html").read_text()
    assert "<h2>Trainings</h2>" in page
    assert "NMLA" in (tmp_path / "out" / "table.svg").read_text()
    assert "<h2>What each position wants to say</h2>" not in page  # for which there must be models


def test_what_a_record_does_not_tell_is_made(made, tmp_path):
    """A row that is added is compared with those that are here, and needs none of the others."""
    path, record = elsewhere(made, tmp_path, "autoregressive", "scored-2", "tuned")
    path.write_text(path.read_text() + "- {name: Later, overrides: [finetune.steps=7], ways: [argmax]}\n")
    text = reproduce(path, record=Path(record))
    assert not [*tmp_path.glob("out/stages/autoregressive*")]
    later = [line for line in numbers(text) if line.startswith("| Later |")]
    assert [line for line in numbers(text) if line not in later] == numbers(made[1])
    assert re.search(r"\[[-+]", later[1])  # beyond the baseline
    path, record = elsewhere(made, tmp_path / "empty")
    path.write_text(path.read_text() + "- {name: Later, overrides: [finetune.steps=7], ways: [argmax]}\n")
    text = reproduce(path, so_far=True, record=Path(record))
    assert "\nNot run yet: Later.\n" in text
    text = reproduce(path, record=Path(record))
    assert [line for line in numbers(text) if line.startswith("| Later |")][:2] == later[:2]  # the same, from counts


def test_outputs_without_their_models_are_enough(made, tmp_path):
    """What was scored can be compared and analysed, and is not trained again."""
    path, record = elsewhere(made, tmp_path, "autoregressive", "ctc", "tuned")
    assert numbers(reproduce(path, record=Path(record))) == numbers(made[1])
    assert not [*tmp_path.glob("out/stages/ctc*")]
    assert numbers(reproduce(path, so_far=True, record=Path(record))) == numbers(made[1])


def test_perplexities_are_by_one_language_model(made, tmp_path):
    path, record = elsewhere(made, tmp_path)
    path.write_text(path.read_text().replace("order: 2", "order: 1"))
    text = reproduce(path, so_far=True, record=Path(record))
    assert "| perplexity |" in made[1]
    assert "| perplexity |" not in text
    assert [line.split(" | ")[:2] for line in numbers(text)] == [line.split(" | ")[:2] for line in numbers(made[1])]
    path.write_text(re.sub("lm: true, ", "", re.sub("lm: {.*}\n", "", path.read_text())))
    assert "perplexity |" not in reproduce(path, so_far=True, record=Path(record))


def test_a_record_keeps_what_is_not_shown(made, tmp_path):
    path, record = elsewhere(made, tmp_path)
    path.write_text(path.read_text().replace("- {name: CTC continued", "#").replace(", control: CTC continued", ""))
    reproduce(path, record=Path(record))
    assert json.loads((tmp_path / "out" / "table.json").read_text())["measured"].keys() == told(record).keys()


def test_meteor_of_a_record_is_of_the_same_language(made, tmp_path):
    path, record = elsewhere(made, tmp_path)
    judged = json.loads(Path(record).read_text())
    path.write_text(path.read_text() + "meteor: de\n")
    for (name, entry), stage in zip(judged["measured"].items(), stages(*load_table(path)).values(), strict=True):
        assert name == stage.directory(tmp_path).name
        entry["METEOR"], entry["signatures"]["METEOR"] = 0.4326, "meteor"
        entry["judged"] = judging(load_table(path)[0], stage).directory(tmp_path).name
    Path(record).write_text(json.dumps(judged))
    text = reproduce(path, record=Path(record))
    assert " | 0.433 | " in text
    assert "; METEOR: `meteor`" in text
    path.write_text(path.read_text().replace("meteor: de", "meteor: fr"))
    assert "METEOR" not in reproduce(path, so_far=True, record=Path(record))
    path.write_text(path.read_text().replace("meteor: fr\n", ""))
    assert numbers(reproduce(path, record=Path(record))) == numbers(made[1])


def told(record):
    return json.loads(Path(record).read_text())["measured"]


def broken(record):
    """The record, spoilt in one place each time."""
    whole = json.loads(Path(record).read_text())
    name, *_ = whole["measured"]
    for key, entry in whole["measured"][name].items():
        if key not in ("row", "way", "seed"):
            yield {**whole, "measured": {name: {**whole["measured"][name], key: None}}}
            if isinstance(entry, dict) and key == "beyond":
                yield {**whole, "measured": {name: {**whole["measured"][name], key: {"a": [1.0, 2.0]}}}}
    yield whole | {"reference": None}
    yield whole | {"reference": {"repeats": 0.1}}
    yield whole | {"trainings": {"a": []}}
    yield whole | {"trainings": {"a": [{"step": 1}]}}
    yield whole | {"trainings": {"a": [{"event": "valid", "step": 1, "seconds": 1.0, "bleu": "x"}]}}


def test_a_record_must_be_one(made, tmp_path):
    record = made[0].parent / "out" / "table.json"
    wrongs = ["", "[]", "{}x", '{"measured": {"a": {}}}', '{"odd": 1}', "[" * 10**5, *map(json.dumps, broken(record))]
    for wrong in wrongs:
        (tmp_path / "record.json").write_text(wrong)
        with pytest.raises(DataError, match=r"record\.json: must be the JSON that nmla reproduce writes of a table"):
            reproduce(made[0], record=tmp_path / "record.json")
    with pytest.raises(UsageError, match=r"none\.json"):
        reproduce(made[0], record=tmp_path / "none.json")
    (tmp_path / "record.json").write_text("{}")
    with pytest.raises(
        UsageError, match=r"record\.json: must tell of this table, but tells none of its 6 measurements"
    ):
        reproduce(made[0], record=tmp_path / "record.json")


def test_what_a_record_counts_is_of_this_test_set(made, tmp_path):
    path, record = elsewhere(made, tmp_path)
    whole = json.loads(Path(record).read_text())
    for counts in (np.zeros((0, 10)), np.zeros((3, 10))):
        for entry in whole["measured"].values():
            if "counts" in entry:
                entry["counts"] = _packed(counts)
        Path(record).write_text(json.dumps(whole))
        with pytest.raises(DataError, match=rf"must count in \d+ sentences, but does in {len(counts)}"):
            reproduce(path, record=Path(record))


def test_what_was_made_anew_is_compared_anew(made, tmp_path):
    """Of a record whose numbers are another machine's, nothing is taken that belongs to these."""
    path, record = elsewhere(made, tmp_path, "lm")
    whole = json.loads(Path(record).read_text())
    for entry in whole["measured"].values():
        entry["BLEU"] += 1
        entry["counts"] = _packed(np.zeros((3, 10)))
        entry["beyond"] = {name: [-9.0, -10.0, -8.0] for name in entry["beyond"]}
    Path(record).write_text(json.dumps(whole))
    assert numbers(reproduce(path, record=Path(record))) == numbers(made[1])


def test_a_training_that_gave_up_early_has_steps():
    events = [{"event": "valid", "step": 5, "seconds": 2.0}, {"event": "valid", "step": 6, "seconds": 3.0}]
    assert cost(events) == (6, 3.0)
    events = [{"event": "train", "step": 10, "seconds": 5.0}, {"event": "valid", "step": 15, "seconds": 9.0}]
    assert cost(events) == (15, 7.5)


def test_a_stage_that_cannot_begin_is_told(digits, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(NmlaError, match="this stage must succeed, but ended with exit code 1"):
        reproduce(write_table(tmp_path, digits))


def test_what_is_ignored_does_not_stop_it():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with _Asked() as asked:
            signal.raise_signal(signal.SIGHUP)
            assert asked.count == 0
            signal.raise_signal(signal.SIGTERM)
            assert asked.count == 1
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


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
    shutil.copytree(digits / "corpus", tmp_path / "moved")
    manifest = tmp_path / "moved" / "manifest.json"
    manifest.write_text(manifest.read_text().replace(str(digits), "/elsewhere"))
    moved = [f"data.corpus={tmp_path / 'moved'}", "output=x", "machine.compile=true", "train.keep_last=9"]
    assert training(load_recipe(tmp_path / "recipe.yaml", moved), 1)[0].key == own.key
    keys = {own.key, training(recipe, 2)[0].key}
    for override in ("train.steps=7", "finetune.ngram=3", "model.d_model=64", "machine.devices=2"):
        keys.add(training(load_recipe(tmp_path / "recipe.yaml", [override]), 1)[0].key)
    assert len(keys) == 6
    assert from_json(json.loads(json.dumps(as_json(own)))).key == own.key


def test_devices_become_accumulation(digits, tmp_path):
    write_table(tmp_path, digits)
    many = load_recipe(tmp_path / "recipe.yaml", ["machine.devices=4", "machine.nodes=2", "train.accumulate=3"])
    first = training(many, 1)[0].inputs["start"].paths["recipe"]
    assert (first["train"]["accumulate"], first["machine"]["devices"], first["machine"]["nodes"]) == (24, 1, 1)


def test_teachers_are_stages_of_their_own(digits, tmp_path):
    write_table(tmp_path, digits)
    teacher = "teacher={model: {family: autoregressive, d_model: 32, heads: 2}, train: {loss: cross_entropy, steps: 5},"
    one, many = (
        training(load_recipe(tmp_path / "recipe.yaml", [f"{teacher} seeds: {of}}}"]), 1) for of in ("[3]", "[3, 4]")
    )
    assert one[1].key == many[1].key  # the first teacher is the same, whoever else there is
    assert one[0].key != many[0].key
    kinds = {stage.key: stage.kind for stage in one[0].needed(tmp_path)}
    assert [*kinds.values()] == ["train", "distill", "train", "train"]


def test_a_teachers_student_is_made_and_scored(digits, tmp_path, capsys):
    """Teacher, its translations, a model of them whose lengths the teacher chooses among."""
    path = write_table(tmp_path, digits, ("families: [autoregressive]", "teacher: true, families: [fixed_length]"))
    small = "d_model: 32, heads: 2, feed_forward: 64, encoder_layers: 1, decoder_layers: 1"
    teacher = f"teacher={{model: {{family: autoregressive, {small}}}, train: {{loss: cross_entropy, steps: 5}}}}"
    student = ["model.family=fixed_length", "train.loss=cross_entropy", "finetune=null", teacher]
    head, _, _ = path.read_text().replace("baseline: CTC\n", "").partition("- {name: teacher")
    path.write_text(f"{head}- {{name: student, overrides: {json.dumps(student)}}}\n")
    text = reproduce(path)
    kinds = sorted(file.parent.name.rsplit("-", 1)[0] for file in tmp_path.glob("out/stages/*/done.json"))
    assert kinds == ["autoregressive-cross_entropy", "distilled-1", "fixed_length-cross_entropy", "lm-2", "scored-2"]
    command = next(line for line in text.split("\n") if line.endswith("# student, beam, seed 1"))
    assert "--teacher" in command
    assert main(command.split("#")[0].split()[1:]) == 0
    printed = capsys.readouterr().out.split("\n")[0].split("\t")
    assert "| system | BLEU, beam | BP |" in text  # no way in which nothing is decoded
    assert f"| student | {float(printed[1]):.1f} | " in text


def test_a_kill_after_the_language_model_costs_nothing(made, tmp_path):
    path, text = made
    (lm,) = (path.parent / "out" / "stages").glob("lm-*")
    (lm / "done.json").unlink()  # written last
    assert numbers(reproduce(path)) == numbers(text)


def test_what_a_finished_stage_was_made_of_may_go(made, tmp_path, capsys):
    path, record = elsewhere(made, tmp_path, "autoregressive", "ctc", "tuned")
    shutil.move(record, tmp_path / "out" / "table.json")
    assert numbers(reproduce(path)) == numbers(made[1])
    assert not [*tmp_path.glob("out/stages/ctc*/done.json")]


def test_numbers_of_stages_that_are_gone_stay_in_the_json(made, tmp_path):
    path, record = elsewhere(made, tmp_path, "scored-2", "lm")
    shutil.copy(record, tmp_path / "out" / "table.json")
    assert "| teacher |" not in reproduce(path, so_far=True)
    assert told(tmp_path / "out" / "table.json").keys() == told(record).keys()


def test_test_set_that_changes_meanwhile_is_told(made, digits, tmp_path):
    path, _ = elsewhere(made, tmp_path)
    shutil.copytree(made[0].parent / "out" / "stages", tmp_path / "out" / "stages", dirs_exist_ok=True)
    changed = tmp_path / "valid.txt"
    shutil.copy(digits / "valid.txt", changed)
    path.write_text(path.read_text().replace(f"references: [{digits}", f"references: [{tmp_path}"))
    wanted, lm = stages(*load_table(path)), None
    changed.write_text("\n".join(reversed(changed.read_text().split("\n"))))
    with pytest.raises(DataError, match=r"valid\.txt: must stay as it was when the table was begun, but has changed"):
        gather(load_table(path)[0], wanted, lm, tmp_path / "out" / "stages", Record())


def test_a_row_stands_beside_the_same_seed_of_its_control(digits, tmp_path):
    changes = [
        ("continued, overrides: [finetune.loss=ctc]", "continued, overrides: [finetune.loss=ctc], seeds: [2, 1]"),
        ("control: CTC continued", "control: CTC continued, seeds: [1, 2]"),
    ]
    table, recipes = load_table(write_table(tmp_path, digits, *changes))
    _, _, beside = pairs(table, stages(table, recipes))
    assert beside["NMLA", "argmax", 1] == ("CTC continued", "argmax", 1)


def test_a_failure_tells_what_was_said_this_time(digits, tmp_path, monkeypatch):
    path = write_table(tmp_path, digits)
    for stage in stages(*load_table(path)).values():
        for of in stage.needed(tmp_path / "out" / "stages"):
            (directory := of.directory(tmp_path / "out" / "stages")).mkdir(parents=True, exist_ok=True)
            (directory / "stage.log").write_text("the disk was full last week\n")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(NmlaError, match="and last said: nothing"):
        reproduce(path)


def test_files_must_stay_as_they_were(digits, tmp_path):
    changed = tmp_path / "test.txt"
    shutil.copy(digits / "valid.txt", changed)
    path = write_table(tmp_path, digits, (f"source: {digits}/valid.txt", f"source: {changed}"))
    scored = next(iter(stages(*load_table(path)).values()))
    changed.write_text("1 2\n")
    with pytest.raises(DataError, match=r"test\.txt: must stay as it was when the table was begun, but has changed"):
        run(scored, tmp_path / "out")


def test_versions_are_raised_with_the_defaults():
    """Keys leave out what is as by default: if one changes, raise its kind's version. A new setting needs none."""
    assert VERSIONS == {"train": 1, "distill": 1, "lm": 1, "tune": 3, "score": 3, "meteor": 2}
    defaults = [(of.name, of.default) for config in (ModelConfig, TrainConfig) for of in fields(config)]
    simple = [(name, value) for name, value in defaults if isinstance(value, (str, float, int))]
    assert hashlib.sha256(repr(simple).encode()).hexdigest()[:8] == "1ae03a4b"
    assert TrainConfig(steps=1).combine == [0.5, 0.5]
    assert PENALTIES == (-1.0, 0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0)
    assert (ALPHAS, BETAS) == ((0.0, 0.15, 0.3, 0.45, 0.6, 0.8, 1.0), (0.0, 1.0, 2.0, 3.0, 4.5, 6.0))
    assert Decoding().top_k == 20


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGKILL])
def test_stopped_table_goes_on(digits, tmp_path, made, number):
    """However it is stopped, nothing is left running, and called again it ends with the same weights."""
    path = write_table(tmp_path, digits, ("baseline: CTC\n", ""), ("title: Copying digits", "title: Stopped"))
    path.write_text(path.read_text().split("- {name: CTC,")[0])
    command = [sys.executable, "-m", "nmla.cli", "reproduce", str(path)]
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # whatever started the tests
    )
    for _ in range(600):
        if any(log.stat().st_size for log in tmp_path.glob("out/stages/*/log.jsonl")):
            break
        time.sleep(0.1)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == (128 + number if number != signal.SIGKILL else -number)
    assert out == ""
    if number != signal.SIGKILL:
        assert err.strip().split("\n")[-1].endswith("the same command goes on from there")
    assert reproduce(path).startswith("# Stopped\n")  # it waits for what the kill may have left running
    stage = next(iter(stages(*load_table(path)).values())).inputs["model"]
    own, whole = (
        stage.directory(directory / "out" / "stages") / "model" / "model.safetensors"
        for directory in (tmp_path, made[0].parent)
    )
    assert own.read_bytes() == whole.read_bytes()
    assert not (own.parent.parent / "checkpoints").exists()


def test_killed_table_ends_its_stages(tmp_path):
    """A stage at work ends when its standard input does."""
    stage = Stage("lm", "lm", {}, paths={"text": "x"})
    slowly = "import nmla.reproduce.stages as s, sys, time\ns.RUN['lm'] = lambda *_: time.sleep(60)\ns.main()"
    process = subprocess.Popen([sys.executable, "-c", slowly, str(tmp_path)], stdin=subprocess.PIPE)
    process.stdin.write(json.dumps(as_json(stage)).encode() + b"\n")
    process.stdin.flush()
    time.sleep(0.2)
    process.stdin.close()
    assert process.wait(timeout=30) == 128 + signal.SIGTERM


def test_stage_that_fails_stops_only_what_needs_it(digits, tmp_path):
    """The first row's loss cannot be finite; the others are made all the same."""
    bad = ("train.loss=cross_entropy,", "train.loss=cross_entropy, train.learning_rate=1.0e+30,")
    path = write_table(tmp_path, digits, bad, ("baseline: CTC\n", ""), (", seeds: [1, 2]", ""))
    path.write_text(path.read_text().split("- {name: CTC continued")[0])
    with pytest.raises(NmlaError, match=r"1 of the stages failed.*cross_entropy-\w+/stage.log: this stage must"):
        reproduce(path)
    done = {file.parent.name.rsplit("-", 1)[0] for file in (tmp_path / "out" / "stages").glob("*/done.json")}
    assert done == {"ctc-ctc", "scored-1", "lm-2"}


def test_test_set_is_looked_at_first(digits, tmp_path):
    (tmp_path / "short.txt").write_text("1 2\n")
    short = (f"references: [{digits}/valid.txt]", f"references: [{tmp_path}/short.txt]")
    with pytest.raises(DataError, match=r"short\.txt must have one line per line of .*valid\.txt, but has 1 for 100"):
        reproduce(write_table(tmp_path, digits, short))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("control: CTC continued", "control: x"), "control of 'NMLA' must be another row, but is 'x'"),
        (("control: CTC continued", "control: NMLA"), "control of 'NMLA' must be another row, but is 'NMLA'"),
        (
            ("name: NMLA", "name: n=2"),
            "names of rows must be one line without =, which ends them in commands, but one is 'n=2'",
        ),
        (("baseline: CTC", "baseline: x"), "baseline must be one of teacher, CTC, CTC continued, NMLA, but is 'x'"),
        (("name: NMLA", 'name: "N\\nM"'), "names of rows must be one line without ="),
        (("name: NMLA", "name: CTC"), "rows must have different names, but two are called 'CTC'"),
        (("ways: [argmax]", "ways: [best]"), "ways of 'CTC' must be among argmax, tuned beam, beam, but one is 'best'"),
        (
            ("published: {argmax", "published: {best"),
            "published of 'CTC' must be among argmax, tuned beam, beam, but one",
        ),
        (
            ("published: A paper's Table 1, on other digits.\n", ""),
            "published must tell where the figure of 'CTC' stands",
        ),
        (("lm: {", "lmm: {"), "there is no setting lmm; did you mean lm?"),
        (("{name: teacher,", "{nam: teacher,"), "there is no setting rows.0.nam; did you mean rows.0.name?"),
        (("recipe: recipe.yaml", ""), "a row must name a recipe, or the table one for all, but 'teacher' has none"),
        (("families: [autoregressive]", "teacher: true"), "'beam' needs a teacher"),
        (("lm: true, families: [ctc]", "lm: true"), "must fit a autoregressive model, but 'tuned beam' is tuned"),
        (("families: [autoregressive]", "families: [sctc]"), "ways must decode every row, but none is for 'teacher'"),
        (("beam_size: 2, tune: true, lm", "beam_size: 2, lm"), "tune of a way with a language model must be true"),
        (("beam_size: 2, tune", "beam_size: 0, tune"), "beam_size of a way must be from 1 to 10000, but is 0"),
        (("seeds: [1, 2]", "seeds: [1, 1]"), "seeds of 'CTC' must be different numbers from 0 to"),
        (("seeds: [1, 2]", "seeds: [2]"), "seeds of 'CTC' must have that of its recipe, 1, but are [2]"),
        (("seeds: [1, 2]", "seeds: 3"), "rows.1.seeds must be a list such as [1, 2], but is 3"),
        (("finetune.loss=ctc]", "seed=3]"), "overrides of 'CTC continued' must"),
        (("order: 2", "order: 0"), "lm.order must be from 1 to 100, but is 0"),
        (("- {name: NMLA", "- abc\n- {name: NMLA"), "rows.3 must be a section with settings, but is 'abc'"),
    ],
)
def test_wrong_table_is_refused(digits, tmp_path, change, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        load_table(write_table(tmp_path, digits, change))


def test_ways_are_those_that_are_given(digits, tmp_path):
    path = write_table(tmp_path, digits)
    text = path.read_text().replace("published: {argmax: 26.3}, ", "")
    assert [*load_table(path)[0].ways] == ["argmax", "tuned beam", "beam"]
    path.write_text(re.sub(r"ways:\n(  .*\n)+", "", text).replace(", ways: [argmax]", ""))
    assert [*load_table(path)[0].ways] == ["argmax"]
    path.write_text(re.sub(r"  argmax: .*\n", "", text).replace(", ways: [argmax]", ""))
    assert [*load_table(path)[0].ways] == ["tuned beam", "beam"]


def test_the_tables_overrides_come_before_a_rows(digits, tmp_path):
    every = "recipe: recipe.yaml\noverrides: [machine.precision=bf16, finetune.steps=7, finetune.loss=ctc]"
    path = write_table(
        tmp_path, digits, ("recipe: recipe.yaml", every), ("overrides: []", "overrides: [train.steps=9]")
    )
    _, recipes = load_table(path)
    assert {recipe.machine.precision for recipe in recipes.values()} == {"bf16"}
    assert recipes["CTC"].finetune is None
    assert (recipes["NMLA"].train.steps, recipes["NMLA"].finetune.steps, recipes["NMLA"].finetune.loss) == (9, 7, "ctc")
    for wrong, message in (
        ("finetune.steps: 7", "overrides of the table must be like finetune.ngram=3, but one is {'finetune.steps': 7}"),
        ("finetune.stepz=7", "table.yaml: the row 'CTC continued': "),
    ):
        wrong_table = ("recipe: recipe.yaml", f"recipe: recipe.yaml\noverrides: [{wrong}]")
        with pytest.raises(UsageError, match=re.escape(message)):
            load_table(write_table(tmp_path, digits, wrong_table))
    with pytest.raises(
        UsageError, match="overrides of the table must not set output, which the table does, but one does"
    ):
        load_table(write_table(tmp_path, digits, ("recipe: recipe.yaml", "recipe: recipe.yaml\noverrides: [output=x]")))
