"""Kill trainings with SIGKILL at many moments, let each go on, and compare its weights with an undisturbed run's.

Run by test_kill.py in a process of its own: its children are forked after torch is loaded, which only a process that
has never used a second thread can do.
"""

import hashlib
import itertools
import json
import os
import random
import signal
import sys
from pathlib import Path

import torch

import nmla.files
import nmla.training.loop as loop
from nmla.config import Recipe, parse_recipe

RECIPE = """
model: {d_model: 16, heads: 2, feed_forward: 32, encoder_layers: 1, decoder_layers: 1, upsample: 2}
train: {steps: 6, max_tokens: 200, validate_every: 3, checkpoint_every: 2, keep_last: 2, final: average}
finetune: {loss: ngram, steps: 3, warmup_steps: 2, max_tokens: 200, validate_every: 1, checkpoint_every: 1, final: best}
"""
INSIDE, ANYWHERE = 14, 18


def in_child(recipe: Recipe, kill_at_write: int | None = None, kill_at_event: int | None = None) -> bool:
    """Train in a child; whether it was killed: at the n-th step of writing checkpoints, or at the n-th call of all."""
    child = os.fork()
    if child == 0:
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            if kill_at_write is not None:
                kill_within_checkpoints(kill_at_write)
            if kill_at_event is not None:
                kill_at_call(kill_at_event, Path(recipe.output).with_suffix(".events"))
            loop.train(recipe)
        except BaseException as error:
            print(f"child failed: {error!r}", flush=True)
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "a child failed"
    return os.WIFSIGNALED(status)


def kill_within_checkpoints(number: int) -> None:
    """Make this process kill itself at the n-th system call that writing checkpoints makes."""
    calls = 0
    inside = False
    save = loop.save_checkpoint

    def watched(*arguments, **keywords):
        nonlocal inside
        inside = True
        save(*arguments, **keywords)
        inside = False

    def counted(function):
        def call(*arguments, **keywords):
            nonlocal calls
            if inside:
                calls += 1
                if calls == number:
                    os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **keywords)

        return call

    loop.save_checkpoint = watched
    for name in ("fsync", "replace", "rename", "rmdir", "unlink", "open"):
        setattr(nmla.files.os, name, counted(getattr(os, name)))


def kill_at_call(number: int, total: Path) -> None:
    """Make this process kill itself at the n-th call of any function; should it live, note how many there were."""
    calls = itertools.count(1)

    def count(*_):
        if next(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    train = loop.train

    def counted(recipe):
        train(recipe)
        sys.setprofile(None)
        total.write_text(str(next(calls)))

    loop.train = counted
    sys.setprofile(count)


def fingerprint(output: Path) -> str:
    files = sorted(output.glob("*/model/*")) + sorted(output.glob("*/best/*/*"))
    return hashlib.sha256(b"".join(f"{p.relative_to(output)}".encode() + p.read_bytes() for p in files)).hexdigest()


def main(corpus: Path, workplace: Path) -> None:
    torch.set_num_threads(1)
    rng = random.Random(1)

    def recipe(name: str) -> Recipe:
        return parse_recipe(RECIPE, [f"data.corpus={corpus}", f"output={workplace / name}"])

    workplace.mkdir()
    assert not in_child(recipe("whole"), kill_at_event=0)
    events = int((workplace / "whole.events").read_text())
    expected = fingerprint(workplace / "whole")
    killed = {"inside": 0, "anywhere": 0}
    different = []
    for trial in range(INSIDE + ANYWHERE):
        name = f"trial-{trial}"
        if trial < INSIDE:  # each at another place of one of the first three checkpoints
            dead = in_child(recipe(name), kill_at_write=1 + trial * 4 + rng.randrange(4))
            killed["inside"] += dead
        else:
            dead = in_child(recipe(name), kill_at_event=rng.randrange(1, events * 9 // 10))
            killed["anywhere"] += dead
        assert not in_child(recipe(name))
        leftovers = [p.name for p in (workplace / name).rglob("*") if p.name.startswith(".")]
        if fingerprint(workplace / name) != expected or leftovers:
            different.append([name, leftovers])
    print(json.dumps({"killed": killed, "different": different}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
