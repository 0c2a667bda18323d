"""Several processes: started by the recipe, by torchrun, and as SLURM would tell of them."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import yaml
from safetensors.torch import load_file

from conftest import COPY_RECIPE
from nmla.config import MachineConfig
from nmla.training.machine import explained, processes

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
SMALL = (
    "model.d_model=16",
    "model.feed_forward=32",
    "train.steps=5",
    "finetune.steps=3",
    "train.max_tokens=200",
    "finetune.max_tokens=200",
    "train.dropout=0.1",  # each batch draws its own random numbers, whoever computes it
    "train.checkpoint_every=2",
    "machine.accelerator=cpu",
)


@pytest.fixture
def start(digits, tmp_path):
    """A function that starts `nmla train` on the digits with some overrides, below `launcher` if there is one."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({**yaml.safe_load(COPY_RECIPE), "data": {"corpus": str(digits / "corpus")}}))

    def run(name, *overrides, launcher=(sys.executable,), module=("-m", "nmla.cli")):
        command = [*launcher, *module, "train", recipe, f"output={tmp_path / name}", *SMALL, *overrides]
        return subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    return run


def finish(process):
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out


def difference(one, other):
    one, other = (load_file(path / "finetune" / "model" / "model.safetensors") for path in (one, other))
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def test_two_processes_reach_what_one_reaches_with_twice_the_accumulation(start, tmp_path):
    precise = "machine.precision=float64"
    alone = start("alone", precise, "train.accumulate=4", "finetune.accumulate=2")
    finish(alone)
    out = finish(start("shared", precise, "machine.devices=2", "train.accumulate=2"))
    assert out == f"{tmp_path / 'shared' / 'finetune' / 'model'}\n"  # once, not once a process
    assert load_file(tmp_path / "shared" / "finetune" / "model" / "model.safetensors")["embedding.weight"].dtype == (
        torch.float64
    )
    assert difference(tmp_path / "alone", tmp_path / "shared") < 1e-10
    logs = [
        [json.loads(line) for line in (tmp_path / name / "train" / "log.jsonl").read_text().splitlines()]
        for name in ("alone", "shared")
    ]
    assert [r["loss"] for r in logs[0] if "loss" in r] == pytest.approx([r["loss"] for r in logs[1] if "loss" in r])


def test_torchrun_starts_the_processes(start, tmp_path):
    finish(start("alone", "machine.precision=float64", "train.accumulate=2", "finetune.accumulate=2"))
    finish(start("shared", "machine.precision=float64", launcher=TORCHRUN))
    assert difference(tmp_path / "alone", tmp_path / "shared") < 1e-10


TELL_THREADS = """
import atexit, os, sys

@atexit.register  # before any other, so called after it
def tell_threads():
    names = [open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task")]
    os.write(1, f"left: {names}\\n".encode())

from nmla.cli import main
sys.exit(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="threads are listed in /proc")
def test_no_thread_of_the_connection_outlives_the_training(start, tmp_path):
    # One that lets go of its last tensor while Python ends aborts the process, though all is written.
    (tmp_path / "tell_threads.py").write_text(TELL_THREADS)
    out = finish(start("shared", launcher=TORCHRUN, module=(tmp_path / "tell_threads.py",)))
    assert out.count("left:") == 2
    assert "gloo" not in out


def children(process):
    listed = subprocess.run(["ps", "--ppid", str(process.pid), "-o", "pid="], capture_output=True, text=True).stdout
    return [int(pid) for pid in listed.split()]


def test_dead_worker_is_told_and_the_run_goes_on(start, tmp_path):
    many = ("train.steps=100000", "train.checkpoint_every=5")
    process = start("run", "machine.devices=2", *many)
    deadline = time.monotonic() + 120
    while not list((tmp_path / "run" / "train" / "checkpoints").glob("0*")):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.1)
    (worker,) = children(process)
    os.kill(worker, signal.SIGKILL)
    _, err = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "a worker of this training has died" in err
    assert "Traceback" not in err
    done = int(max((tmp_path / "run" / "train" / "checkpoints").glob("0*")).name)
    more = (f"train.steps={done + 1}", "train.checkpoint_every=5", "finetune=null")
    finish(start("run", "train.accumulate=2", *more))  # one process with twice the accumulation goes on with it


def test_sigterm_stops_all_processes_and_saves(start, tmp_path):
    process = start("run", "machine.devices=2", "train.steps=100000", "train.checkpoint_every=100000")
    deadline = time.monotonic() + 120
    while not (tmp_path / "run" / "train" / "log.jsonl").exists():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.1)
    workers = children(process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM, err
    assert err.count("stopped and saved at step") == 1
    assert list((tmp_path / "run" / "train" / "checkpoints").glob("0*"))
    while any(os.path.exists(f"/proc/{worker}") for worker in workers):
        assert time.monotonic() < deadline + 60
        time.sleep(0.1)


def test_refused_run_stops_all_processes_with_one_line(start, tmp_path):
    finish(start("run", "finetune=null"))
    process = start("run", "machine.devices=2", "finetune=null", "train.learning_rate=1")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 2
    assert err.count("a run must keep its settings") == 1
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried", "lower max_tokens"),
        ("Connection closed by peer [127.0.0.1]:1234", "a worker of this training has died"),
        ("mat1 and mat2 shapes cannot be multiplied", ""),
    ],
)
def test_errors_of_torch_that_a_user_can_mend(message, why):
    told = explained(RuntimeError(message))
    assert why in told
    assert bool(why) == bool(told)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (4, 2)),
        ({"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "8", "WORLD_SIZE": "24"}, (8, 3)),
        ({"SLURM_NTASKS": "16", "SLURM_NNODES": "4", "SLURM_JOB_NAME": "train"}, (4, 4)),
        ({"SLURM_NTASKS": "16", "SLURM_NNODES": "4", "SLURM_JOB_NAME": "bash"}, (4, 2)),
    ],
)
def test_launchers_tell_how_many_processes_there_are(monkeypatch, environment, expected):
    for name in ("TORCHELASTIC_RUN_ID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert processes(MachineConfig(devices=4, nodes=2)) == expected
