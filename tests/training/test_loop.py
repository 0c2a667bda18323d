import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

import nmla.training.loop as loop
from conftest import copy_recipe
from nmla.config import DataConfig
from nmla.data.prepare import prepare
from nmla.decoding.translator import Translator
from nmla.errors import DataError, NmlaError, UsageError
from nmla.text.lines import read_lines
from nmla.training.loop import train


def weights(directory):
    return load_file(directory / "model.safetensors")


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("stage", ["train", "finetune"])
def test_tiny_model_learns_to_copy_digits(copy_run, digits, stage):
    lines = read_lines(digits / "valid.txt")
    outputs = Translator.load(copy_run / stage / "model").translate_batch(lines)
    assert sum(output.text == line for output, line in zip(outputs, lines, strict=True)) >= 98


def test_log_tells_loss_and_validation(copy_run):
    records = [json.loads(line) for line in (copy_run / "finetune" / "log.jsonl").read_text().splitlines()]
    trained = [record for record in records if record["event"] == "train"]
    assert [record["step"] for record in trained] == [10, 20]
    assert all(-1 <= record["loss"] <= 0 for record in trained)
    assert {"bleu", "chrf", "entropy", "length_ratio"} <= records[-1].keys()


def test_training_twice_with_one_seed_gives_identical_weights(digits, tmp_path):
    steps = ("train.steps=4", "finetune.steps=3", "train.dropout=0.1", "train.accumulate=2")
    one, two = (train(copy_recipe(digits, tmp_path / name, *steps)) for name in ("one", "two"))
    assert same(weights(one), weights(two))
    other = train(copy_recipe(digits, tmp_path / "three", *steps, "seed=2"))
    assert not same(weights(one), weights(other))


def test_stopped_run_goes_on_to_the_same_weights(digits, tmp_path, monkeypatch):
    settings = ("train.steps=7", "train.dropout=0.1", "train.checkpoint_every=2", "finetune=null")
    whole = train(copy_recipe(digits, tmp_path / "whole", *settings))

    class Stopped(Exception):
        pass

    def stop(step, stage):
        if step == 6:
            raise Stopped
        return rate(step, stage)

    rate = loop.learning_rate
    monkeypatch.setattr(loop, "learning_rate", stop)
    with pytest.raises(Stopped):
        train(copy_recipe(digits, tmp_path / "stopped", *settings))
    monkeypatch.setattr(loop, "learning_rate", rate)
    assert not (tmp_path / "stopped" / "train" / "model").exists()
    resumed = train(copy_recipe(digits, tmp_path / "stopped", *settings))
    assert same(weights(whole), weights(resumed))
    logs = [(tmp_path / name / "train" / "log.jsonl").read_text().splitlines() for name in ("whole", "stopped")]
    without_time = [[{**json.loads(line), "seconds": 0} for line in log] for log in logs]
    assert without_time[0] == without_time[1]


def test_finished_run_keeps_its_settings(digits, tmp_path):
    train(copy_recipe(digits, tmp_path, "train.steps=2", "finetune=null"))
    train(copy_recipe(digits, tmp_path, "train.steps=3", "finetune=null"))  # more steps are no other run
    with pytest.raises(UsageError, match=r"must keep its settings, but train\.learning_rate 0\.003 -> 0\.1;"):
        train(copy_recipe(digits, tmp_path, "train.steps=3", "finetune=null", "train.learning_rate=0.1"))


def test_fewer_steps_than_were_done_are_refused(digits, tmp_path):
    train(copy_recipe(digits, tmp_path, "train.steps=3", "finetune=null"))
    with pytest.raises(UsageError, match="steps must be at least 3, which it has done, but is 2"):
        train(copy_recipe(digits, tmp_path, "train.steps=2", "finetune=null"))


def test_finetuning_is_never_of_older_weights(digits, tmp_path):
    train(copy_recipe(digits, tmp_path, "train.steps=2", "finetune.steps=2"))
    with pytest.raises(UsageError, match="began from other weights than there are now; remove it"):
        train(copy_recipe(digits, tmp_path, "train.steps=3", "finetune.steps=2"))


@pytest.fixture
def short(digits, tmp_path):
    """A recipe of six steps with checkpoints at 2, 4 and 6, of which two are kept, and its weights when undisturbed."""
    settings = ("train.steps=6", "train.checkpoint_every=2", "train.dropout=0.1", "finetune=null")
    return copy_recipe(digits, tmp_path / "run", *settings), weights(
        train(copy_recipe(digits, tmp_path / "whole", *settings))
    )


def test_damaged_checkpoint_is_told_and_the_one_before_it_used(short, capsys):
    recipe, undisturbed = short
    stage = train(recipe).parent
    newest = stage / "checkpoints" / "000000006" / "optimizer.safetensors"
    newest.write_bytes(newest.read_bytes()[:50])
    assert same(weights(train(recipe)), undisturbed)
    assert "the checkpoint is damaged" in capsys.readouterr().err


def test_what_a_kill_left_is_removed_and_does_no_harm(short):
    recipe, undisturbed = short
    stage = train(recipe).parent
    (stage / "checkpoints" / ".000000008.abc").mkdir()
    with (stage / "log.jsonl").open("a") as log:
        log.write('{"event": "tr')
    assert same(weights(train(recipe)), undisturbed)
    assert sorted(path.name for path in (stage / "checkpoints").iterdir()) == ["000000004", "000000006"]
    assert all(json.loads(line) for line in (stage / "log.jsonl").read_text().splitlines())


def test_checkpoint_of_another_model_is_refused(digits, short, tmp_path):
    recipe, _ = short
    train(recipe)
    text = digits / "valid.txt"
    prepare(train=[(text, text)], valid=[(text, text)], output=tmp_path / "other" / "corpus", vocab_size=17)
    moved = replace(recipe, data=DataConfig(str(tmp_path / "other" / "corpus")))
    recorded = tmp_path / "run" / "train" / "recipe.yaml"
    recorded.write_text(recorded.read_text().replace(recipe.data.corpus, moved.data.corpus))
    with pytest.raises(UsageError, match="must fit the model"):
        train(moved)


def test_diverged_training_stops_with_what_to_do(digits, tmp_path):
    with pytest.raises(NmlaError, match="training has diverged: begin again with a lower learning_rate"):
        train(copy_recipe(digits, tmp_path, "train.learning_rate=1e30", "train.warmup_steps=1"))


def test_pair_larger_than_a_batch_is_skipped_and_counted(tmp_path, capsys):
    text = tmp_path / "text"
    text.write_text("1 2 3\n" * 5 + "1 2 3 " * 500 + "\n")
    prepare(train=[(text, text)], valid=[(text, text)], output=tmp_path / "corpus", vocab_size=9, max_tokens=4096)
    train(copy_recipe(tmp_path, tmp_path / "run", "train.steps=1", "finetune=null"))
    assert "1 of 6 pairs are skipped: 0 targets need more positions, 1 outputs are longer" in capsys.readouterr().err


def test_targets_that_fit_nowhere_are_refused(tmp_path, digits):
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_text("1\n" * 5)
    target.write_text("1 2 3 4 5 6 7 8 9\n" * 5)
    prepare(train=[(source, target)], valid=[(source, target)], output=tmp_path / "digits" / "corpus", vocab_size=16)
    with pytest.raises(DataError, match="at least one target must fit"):
        train(copy_recipe(tmp_path / "digits", tmp_path / "run", "train.steps=1"))
    assert not (tmp_path / "run").exists()
