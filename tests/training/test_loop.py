import json
import os
import shutil
import signal
import threading
from dataclasses import replace

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

import nmla.training.loop as loop
from conftest import copy_recipe, digits_corpus
from nmla.config import DataConfig, Decoding, MachineConfig, load_recipe
from nmla.decoding.translator import Translator, load_decoding, save_decoding
from nmla.errors import DataError, NmlaError, Stopped, UsageError
from nmla.files import locked
from nmla.text.lines import read_lines
from nmla.training.checkpoint import Progress, average
from nmla.training.loop import best_steps, given_up, train
from nmla.training.machine import has_bf16, start_fabric


def weights(directory):
    return load_file(directory / "model.safetensors")


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def records(stage):
    return [json.loads(line) for line in (stage / "log.jsonl").read_text().splitlines()]


def timeless(stage):
    return [{**record, "seconds": 0, "words_per_second": 0} for record in records(stage)]


@pytest.mark.parametrize("stage", ["train", "finetune"])
def test_tiny_model_learns_to_copy_digits(copy_run, digits, stage):
    lines = read_lines(digits / "valid.txt")
    outputs = Translator.load(copy_run / stage / "model").translate_batch(lines)
    assert sum(output.text == line for output, line in zip(outputs, lines, strict=True)) >= 98


def test_log_tells_loss_speed_and_validation(copy_run):
    log = records(copy_run / "finetune")
    trained = [record for record in log if record["event"] == "train"]
    assert [record["step"] for record in trained] == [10, 20]
    assert all(-1 <= record["loss"] <= 0 and record["words_per_second"] > 0 for record in trained)
    assert {"bleu", "chrf", "entropy", "length_ratio"} <= log[-1].keys()


def test_training_twice_with_one_seed_gives_identical_weights(digits, tmp_path):
    steps = ("train.steps=4", "finetune.steps=3", "train.dropout=0.1", "train.accumulate=2")
    one, two = (train(copy_recipe(digits, tmp_path / name, *steps)) for name in ("one", "two"))
    assert same(weights(one), weights(two))
    other = train(copy_recipe(digits, tmp_path / "three", *steps, "seed=2"))
    assert not same(weights(one), weights(other))


@pytest.mark.parametrize("glancing", [(), ("train.glance_from=0.5", "train.glance_to=0.3")])
def test_stopped_run_goes_on_to_the_same_weights(digits, tmp_path, monkeypatch, glancing):
    settings = ("train.steps=7", "train.dropout=0.1", "train.checkpoint_every=2", "finetune=null", *glancing)
    whole = train(copy_recipe(digits, tmp_path / "whole", *settings))

    class Broken(Exception):
        pass

    def stop(step, stage):
        if step == 6:
            raise Broken
        return rate(step, stage)

    rate = loop.learning_rate
    monkeypatch.setattr(loop, "learning_rate", stop)
    with pytest.raises(Broken):
        train(copy_recipe(digits, tmp_path / "stopped", *settings))
    monkeypatch.setattr(loop, "learning_rate", rate)
    assert not (tmp_path / "stopped" / "train" / "model").exists()
    resumed = train(copy_recipe(digits, tmp_path / "stopped", *settings))
    assert same(weights(whole), weights(resumed))
    assert timeless(whole.parent) == timeless(resumed.parent)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("at", [3, 4, 6])  # between checkpoints; where one and a validation are due; at the last step
@pytest.mark.parametrize("final", ["last", "best", "average"])
def test_signal_saves_and_stops_and_the_run_goes_on(digits, tmp_path, monkeypatch, number, at, final):
    settings = (
        "train.steps=6",
        "train.dropout=0.1",
        "train.checkpoint_every=2",
        "train.keep_last=2",
        "train.validate_every=4",
        f"train.final={final}",
        "finetune.steps=2",
    )
    whole = train(copy_recipe(digits, tmp_path / "whole", *settings))
    rate = loop.learning_rate

    def kill(step, stage):
        if step == at and threading.current_thread() is threading.main_thread() and not killed:
            killed.append(step)
            os.kill(os.getpid(), number)
        return rate(step, stage)

    killed = []
    monkeypatch.setattr(loop, "learning_rate", kill)
    before = signal.getsignal(number)
    with pytest.raises(Stopped, match=f"stopped and saved at step {at}; the same command goes on") as stopped:
        train(copy_recipe(digits, tmp_path / "stopped", *settings))
    assert stopped.value.exit_code == 128 + number
    assert signal.getsignal(number) is before
    assert not (tmp_path / "stopped" / "finetune").exists()
    monkeypatch.setattr(loop, "learning_rate", rate)
    resumed = train(copy_recipe(digits, tmp_path / "stopped", *settings))
    assert same(weights(whole), weights(resumed))
    for stage in ("train", "finetune"):
        one, other = (path.parent.parent / stage for path in (whole, resumed))
        assert [r for r in timeless(one) if r["event"] == "valid"] == [
            r for r in timeless(other) if r["event"] == "valid"
        ]
        assert same(weights(one / "model"), weights(other / "model"))


@pytest.mark.parametrize("at", [4, 6])  # in the middle, and at the last step
def test_signal_ends_a_validation_that_comes_again(digits, tmp_path, monkeypatch, at):
    settings = ("train.steps=6", "train.checkpoint_every=6", "train.validate_every=2", "finetune=null")
    whole = train(copy_recipe(digits, tmp_path / "whole", *settings))
    validate = loop.validate

    def kill(translator, corpus, stop):
        if len(validated) == at // 2 - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        validated.append(validate(translator, corpus, stop))
        return validated[-1]

    validated = []
    monkeypatch.setattr(loop, "validate", kill)
    with pytest.raises(Stopped, match=f"stopped and saved at step {at}; the same command goes on"):
        train(copy_recipe(digits, tmp_path / "stopped", *settings))
    assert validated[-1] is None
    resumed = train(copy_recipe(digits, tmp_path / "stopped", *settings))
    assert same(weights(whole), weights(resumed))
    assert [r for r in timeless(whole.parent) if r["event"] == "valid"] == [
        r for r in timeless(resumed.parent) if r["event"] == "valid"
    ]


def test_finished_run_keeps_what_was_tuned(digits, tmp_path):
    recipe = copy_recipe(digits, tmp_path, "train.steps=2", "finetune=null")
    model = train(recipe)
    save_decoding(Decoding(blank_penalty=1.5), model)
    assert load_decoding(train(recipe)).blank_penalty == 1.5
    train(copy_recipe(digits, tmp_path, "train.steps=3", "finetune=null"))  # another model, for which nothing is tuned
    assert load_decoding(model) == Decoding()


def test_finished_run_keeps_its_settings(digits, tmp_path):
    train(copy_recipe(digits, tmp_path, "train.steps=2", "finetune=null"))
    train(copy_recipe(digits, tmp_path, "train.steps=3", "finetune=null"))  # more steps are no other run
    with pytest.raises(UsageError, match=r"must keep its settings, but train\.learning_rate 0\.003 -> 0\.1;"):
        train(copy_recipe(digits, tmp_path, "train.steps=3", "finetune=null", "train.learning_rate=0.1"))


def test_steps_are_fixed_where_the_learning_rate_falls_towards_the_last(digits, tmp_path):
    train(copy_recipe(digits, tmp_path, "train.steps=2", "finetune=null", "train.schedule=cosine"))
    with pytest.raises(UsageError, match=r"must keep its settings, but train\.steps 2 -> 3;"):
        train(copy_recipe(digits, tmp_path, "train.steps=3", "finetune=null", "train.schedule=cosine"))


def test_fewer_steps_than_were_done_are_refused(digits, tmp_path):
    train(copy_recipe(digits, tmp_path, "train.steps=3", "finetune=null"))
    with pytest.raises(UsageError, match="steps must be at least 3, which it has done, but is 2"):
        train(copy_recipe(digits, tmp_path, "train.steps=2", "finetune=null"))
    assert load_recipe(tmp_path / "train" / "recipe.yaml").train.steps == 3


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("train.steps=3", "steps 2 -> 3"),
        ("train.patience=2", "patience 0 -> 2"),
        ("train.final=best", "final last -> best"),
    ],
)
def test_first_stage_stays_as_finetuning_began_from_it(digits, tmp_path, change, told):
    settings = ("train.steps=2", "finetune.steps=2")
    train(copy_recipe(digits, tmp_path, *settings))
    before = weights(tmp_path / "train" / "model")
    with pytest.raises(UsageError, match=f"finetune: began from .*, which must keep its settings, but {told}; remove"):
        train(copy_recipe(digits, tmp_path, *settings, change))
    assert same(weights(tmp_path / "train" / "model"), before)
    train(copy_recipe(digits, tmp_path, *settings))


def test_finetuning_is_never_of_older_weights(digits, tmp_path):
    train(copy_recipe(digits, tmp_path, "train.steps=2", "finetune.steps=2"))
    train(copy_recipe(digits, tmp_path, "train.steps=3", "finetune=null"))
    with pytest.raises(UsageError, match="began from other weights than there are now; remove it"):
        train(copy_recipe(digits, tmp_path, "train.steps=3", "finetune.steps=2"))


@pytest.fixture
def short(digits, tmp_path):
    """A recipe of six steps with checkpoints at 2, 4 and 6, of which two are kept, and its weights when undisturbed."""
    settings = ("train.steps=6", "train.checkpoint_every=2", "train.keep_last=2", "train.dropout=0.1", "finetune=null")
    return copy_recipe(digits, tmp_path / "run", *settings), weights(
        train(copy_recipe(digits, tmp_path / "whole", *settings))
    )


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "progress.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["cut", "flip", "remove"])
def test_damaged_checkpoint_is_told_and_the_one_before_it_used(short, capsys, name, damage):
    recipe, undisturbed = short
    stage = train(recipe).parent
    newest = stage / "checkpoints" / "000000006" / name
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.unlink()
    if damage != "remove":
        newest.write_bytes(content if damage == "flip" else content[: len(content) // 2])
    assert same(weights(train(recipe)), undisturbed)
    assert "000000006: the checkpoint is damaged" in capsys.readouterr().err


def test_what_a_kill_left_is_removed_and_does_no_harm(short):
    recipe, undisturbed = short
    stage = train(recipe).parent
    (stage / "checkpoints" / ".000000008.abcd1234").mkdir()
    (stage / "best" / ".000000008.abcd1234.old").mkdir()
    (stage / ".model.abcd1234").mkdir()
    (stage / ".recipe.yaml.abcd1234").write_text("half")
    (stage / ".git").mkdir()  # nobody's business
    (stage / "best" / "notes.txt").write_text("nor this")
    with (stage / "log.jsonl").open("a") as log:
        log.write('{"event": "tr')
    assert same(weights(train(recipe)), undisturbed)
    assert sorted(path.name for path in (stage / "checkpoints").iterdir()) == ["000000004", "000000006"]
    assert [path.name for path in stage.rglob("*") if path.name.startswith(".")] == [".git"]
    assert (stage / "best" / "notes.txt").exists()
    assert records(stage)


def test_run_and_corpus_may_be_moved(digits, short, tmp_path):
    recipe, undisturbed = short
    train(recipe)
    shutil.copytree(digits / "corpus", tmp_path / "moved corpus")
    shutil.move(tmp_path / "run", tmp_path / "moved run")
    moved = replace(recipe, data=DataConfig(str(tmp_path / "moved corpus")), output=str(tmp_path / "moved run"))
    assert same(weights(train(moved)), undisturbed)


def test_diverged_training_stops_with_what_to_do(digits, tmp_path):
    with pytest.raises(NmlaError, match="training has diverged: begin again with a lower learning_rate"):
        train(copy_recipe(digits, tmp_path, "train.learning_rate=1e30", "train.warmup_steps=1"))


def test_full_disk_is_told_and_loses_nothing(digits, tmp_path, monkeypatch):
    settings = ("train.steps=6", "train.checkpoint_every=2", "train.dropout=0.1", "finetune=null")
    whole = train(copy_recipe(digits, tmp_path / "whole", *settings))
    write = loop.save_checkpoint

    def full(directory, model, optimizer, progress, keep, every):
        if progress.step == 4:
            raise OSError(28, "No space left on device")
        write(directory, model, optimizer, progress, keep, every)

    monkeypatch.setattr(loop, "save_checkpoint", full)
    with pytest.raises(NmlaError, match=r"must be saved, but: .*No space left.* goes on from step 2"):
        train(copy_recipe(digits, tmp_path / "full", *settings))
    monkeypatch.setattr(loop, "save_checkpoint", write)
    assert same(weights(whole), weights(train(copy_recipe(digits, tmp_path / "full", *settings))))


@pytest.mark.parametrize("kind", ["best", "model"])
def test_full_disk_is_told_wherever_it_is_met(digits, tmp_path, monkeypatch, kind):
    """Weights that cannot be written are an error of safetensors, which is no OSError."""
    settings = ("train.steps=4", "train.checkpoint_every=2", "train.validate_every=4", "finetune=null")
    write = loop.save_model

    def full(model, tokenizer, directory, about):
        if directory.parent.name == kind or directory.name.startswith(f".{kind}."):
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        write(model, tokenizer, directory, about)

    monkeypatch.setattr(loop, "save_model", full)
    step = 2 if kind == "best" else 4
    with pytest.raises(NmlaError, match=rf"must be saved, but: .*No space left.* goes on from step {step}"):
        train(copy_recipe(digits, tmp_path, *settings))
    monkeypatch.setattr(loop, "save_model", write)
    train(copy_recipe(digits, tmp_path, *settings))


def test_float64_run_goes_on_to_the_same_weights(digits, tmp_path, monkeypatch):
    """The optimizer's state must get the weights' type, as it must get their device on a GPU."""
    settings = ("train.steps=5", "train.checkpoint_every=2", "finetune.steps=2", "machine.precision=float64")
    whole = train(copy_recipe(digits, tmp_path / "whole", *settings))
    assert weights(whole)["embedding.weight"].dtype == torch.float64
    train(copy_recipe(digits, tmp_path / "parts", *settings, "train.steps=3", "finetune=null"))
    resumed = train(copy_recipe(digits, tmp_path / "parts", *settings))
    assert same(weights(whole), weights(resumed))


def test_two_trainings_cannot_write_into_one_run(digits, tmp_path):
    with locked(tmp_path / "train" / "lock", tmp_path), pytest.raises(UsageError, match="one process at a time"):
        train(copy_recipe(digits, tmp_path, "train.steps=1", "finetune=null"))


def test_corpus_that_was_made_anew_is_refused(digits, tmp_path):
    digits_corpus(digits / "train.txt", digits / "valid.txt", tmp_path / "corpus")
    train(copy_recipe(tmp_path, tmp_path / "run", "train.steps=1", "finetune=null"))
    shutil.rmtree(tmp_path / "corpus")
    digits_corpus(digits / "valid.txt", digits / "valid.txt", tmp_path / "corpus")
    with pytest.raises(UsageError, match="began with another corpus than there is now"):
        train(copy_recipe(tmp_path, tmp_path / "run", "train.steps=2", "finetune=null"))


def test_batches_of_a_step_stay_as_many(digits, tmp_path):
    train(copy_recipe(digits, tmp_path, "train.steps=1", "finetune=null", "train.accumulate=2"))
    with pytest.raises(UsageError, match="accumulate x devices must stay 2, but is 1"):
        train(copy_recipe(digits, tmp_path, "train.steps=2", "finetune=null"))


def test_run_without_a_sound_checkpoint_does_not_begin_anew_by_itself(short):
    recipe, _ = short
    stage = train(recipe).parent
    for path in (stage / "checkpoints").iterdir():
        (path / "manifest.json").unlink()
    with pytest.raises(DataError, match="one checkpoint must be sound, but none is; remove the run to begin anew"):
        train(recipe)


def test_best_models_are_kept_and_the_best_is_the_final_one(digits, tmp_path):
    settings = ("train.steps=30", "train.validate_every=5", "train.keep_best=2", "train.final=best", "finetune=null")
    model = train(copy_recipe(digits, tmp_path, *settings))
    scores = [(r["bleu"], -r["step"]) for r in records(model.parent) if r["event"] == "valid"]
    assert len(scores) == 6
    expected = sorted(-step for _, step in sorted(scores)[-2:])
    assert [int(path.name) for path in sorted((model.parent / "best").iterdir())] == expected
    assert same(weights(model), weights(model.parent / "best" / f"{-max(scores)[1]:09d}"))


def test_final_average_is_the_mean_of_the_last_checkpoints(digits, tmp_path):
    settings = ("train.steps=8", "train.checkpoint_every=2", "train.keep_last=3", "train.final=average")
    model = train(copy_recipe(digits, tmp_path, *settings, "finetune=null"))
    kept = sorted((model.parent / "checkpoints").iterdir())
    assert [path.name for path in kept] == ["000000004", "000000006", "000000008"]
    assert same(weights(model), average(kept))
    name = "encoder.0.feed_forward.0.weight"
    mean = sum(weights(path)[name].double() for path in kept) / 3
    assert torch.allclose(weights(model)[name].double(), mean, atol=1e-7)


def test_patience_ends_a_run_that_no_longer_gains(digits, tmp_path, monkeypatch, capsys):
    bleu = iter([1.0, 3.0, 2.0, 3.0, 9.0])
    monkeypatch.setattr(
        loop, "validate", lambda *_: {"bleu": next(bleu), "chrf": 0.0, "length_ratio": 1.0, "entropy": 0.0}
    )
    settings = ("train.steps=50", "train.validate_every=2", "train.patience=2", "finetune=null", "train.final=best")
    recipe = copy_recipe(digits, tmp_path, *settings)
    stage = train(recipe).parent
    assert records(stage)[-1]["step"] == 8
    assert "2 validations brought no higher BLEU" in capsys.readouterr().err
    assert [path.name for path in (stage / "best").iterdir()] == ["000000004"]
    train(recipe)  # finished is finished
    assert records(stage)[-1]["step"] == 8


def test_patience_counts_validations_since_the_best(digits, tmp_path):
    stage = copy_recipe(digits, tmp_path, "train.patience=2").train
    for scores, expected in (((), False), ((1, 2, 3), False), ((3, 2, 1), True), ((3, 2, 4, 4), False)):
        progress = Progress(scores=tuple(enumerate(map(float, scores))))
        assert given_up(progress, stage) is expected
    assert best_steps(Progress(scores=((5, 1.0), (10, 2.0), (15, 2.0)))) == [10, 15, 5]


@pytest.mark.parametrize("precision", ["bf16", "float64"])
def test_other_precisions_train(digits, tmp_path, precision):
    settings = ("train.steps=6", "finetune.steps=2", f"machine.precision={precision}")
    train(copy_recipe(digits, tmp_path, *settings))
    log = [r for r in records(tmp_path / "train") if r["event"] == "train"]
    whole = train(copy_recipe(digits, tmp_path / "float32", "train.steps=6", "finetune=null")).parent
    reference = [r for r in records(whole) if r["event"] == "train"]
    assert log[-1]["loss"] == pytest.approx(reference[-1]["loss"], rel=0.02 if precision == "bf16" else 1e-5)


def test_bf16_says_so_where_a_cpu_is_no_faster_with_it(monkeypatch, capsys):
    for supported in (True, False):
        monkeypatch.setattr("nmla.training.machine.has_bf16", lambda supported=supported: supported)
        start_fabric(MachineConfig(accelerator="cpu", precision="bf16"))
        assert ("float32 would be faster" in capsys.readouterr().err) is not supported


@pytest.mark.parametrize(
    ("machine", "bf16", "amx", "has"),
    [
        ("x86_64", True, False, True),
        ("x86_64", False, True, True),
        ("x86_64", False, False, False),
        ("arm64", False, False, True),
        ("x86_64", None, False, True),  # a torch that cannot tell
    ],
)
def test_which_cpus_lack_bf16(monkeypatch, machine, bf16, amx, has):
    monkeypatch.setattr("platform.machine", lambda: machine)
    for name, found in (("_is_avx512_bf16_supported", bf16), ("_is_amx_tile_supported", amx)):
        monkeypatch.setattr(torch.cpu, name, None if found is None else lambda found=found: found, raising=False)
    assert has_bf16() is has


def test_compiled_model_trains_to_the_same_weights(digits, tmp_path, monkeypatch):
    """Traced as it is for a compiler, but run by torch itself: there may be no compiler here."""
    compiled, real = [], torch.compile

    def traced(model, **_):
        compiled.append(model)
        return real(model, backend="eager")

    monkeypatch.setattr(torch, "compile", traced)
    settings = ("train.steps=2", "finetune=null")
    one = train(copy_recipe(digits, tmp_path / "one", *settings, "machine.compile=true"))
    assert compiled
    assert same(weights(one), weights(train(copy_recipe(digits, tmp_path / "two", *settings))))


def test_tensorboard_shows_what_the_log_has(digits, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(copy_recipe(digits, tmp_path, "train.steps=10", "finetune=null", "machine.tensorboard=true"))
    board = EventAccumulator(str(tmp_path / "train" / "tensorboard"))
    board.Reload()
    (loss,) = board.Scalars("train/loss")
    assert loss.step == 10
    assert loss.value == pytest.approx(records(tmp_path / "train")[0]["loss"])
    assert board.Scalars("valid/bleu")


def test_machine_that_is_not_there_is_refused(digits, tmp_path):
    with pytest.raises(UsageError, match="machine: must suit this machine, but"):
        train(copy_recipe(digits, tmp_path, "machine.accelerator=tpu"))
    with pytest.raises(UsageError, match="fp16 must run on a GPU, but there is none"):
        train(copy_recipe(digits, tmp_path, "machine.accelerator=cpu", "machine.precision=fp16"))
