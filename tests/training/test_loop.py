import json

import pytest
import torch
from safetensors.torch import load_file

import nmla.training.loop as loop
from conftest import copy_recipe
from nmla.decoding.translator import Translator
from nmla.errors import DataError, UsageError
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


def test_targets_that_fit_nowhere_are_refused(tmp_path, digits):
    from nmla.data.prepare import prepare

    source, target = tmp_path / "source", tmp_path / "target"
    source.write_text("1\n" * 5)
    target.write_text("1 2 3 4 5 6 7 8 9\n" * 5)
    prepare(train=(source, target), valid=(source, target), output=tmp_path / "digits" / "corpus", vocab_size=16)
    with pytest.raises(DataError, match="at least one target must fit"):
        train(copy_recipe(tmp_path / "digits", tmp_path / "run", "train.steps=1"))
