"""Kill trainings with SIGKILL at many moments, let each go on, and compare its weights with an undisturbed run's.

Run by test_kill.py in a process of its own: its children are forked after torch is loaded, which only a process that
has never used a second thread can do.
"""

import functools
import hashlib
import json
import os
import random
import signal
import sys
from pathlib import Path

import torch

import nmla.files
import nmla.training.loop as loop
from killing import in_child, kill_at_call
from nmla.config import Recipe, parse_recipe

RECIPE = """
model: {d_model: 16, heads: 2, feed_forward: 32, encoder_layers: 1, decoder_layers: 1, upsample: 2}
train: {steps: 6, max_tokens: 200, validate_every: 3, checkpoint_every: 2, keep_last: 2, final: average}
finetune: {loss: ngram, steps: 3, warmup_steps: 2, max_tokens: 200, validate_every: 1, checkpoint_every: 1, final: best}
"""
INSIDE, ANYWHERE = 14, 18


def train_and_die_within_a_checkpoint(recipe: Recipe, number: int) -> None:
    """Train, but kill this process at the n-th system call that writing checkpoints makes."""
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
    loop.train(recipe)


def fingerprint(output: Path) -> str:
    files = sorted(output.glob("*/model/*")) + sorted(output.glob("*/best/*/*"))
    return hashlib.sha256(b"".join(f"{p.relative_to(output)}".encode() + p.read_bytes() for p in files)).hexdigest()


def main(corpus: Path, workplace: Path) -> None:
    torch.set_num_threads(1)
    rng = random.Random(1)

    def recipe(name: str) -> Recipe:
        return parse_recipe(RECIPE, [f"data.corpus={corpus}", f"output={workplace / name}"])

    workplace.mkdir()
    events = workplace / "events"
    assert not in_child(functools.partial(kill_at_call, functools.partial(loop.train, recipe("whole")), 0, events))
    count = int(events.read_text())
    expected = fingerprint(workplace / "whole")
    killed = {"inside": 0, "anywhere": 0}
    different = []
    for trial in range(INSIDE + ANYWHERE):
        name = f"trial-{trial}"
        train = functools.partial(loop.train, recipe(name))
        if trial < INSIDE:  # each at another place of one of the first three checkpoints
            at = 1 + trial * 4 + rng.randrange(4)
            killed["inside"] += in_child(functools.partial(train_and_die_within_a_checkpoint, recipe(name), at))
        else:
            at = rng.randrange(1, count * 9 // 10)
            killed["anywhere"] += in_child(functools.partial(kill_at_call, train, at, events))
        assert not in_child(train)
        leftovers = [p.name for p in (workplace / name).rglob("*") if p.name.startswith(".")]
        if fingerprint(workplace / name) != expected or leftovers:
            different.append([name, leftovers])
    print(json.dumps({"killed": killed, "different": different}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
