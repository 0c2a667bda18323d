"""Run all stages of a table that are not done yet, several at a time, each in a process of its own."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from nmla.errors import NmlaError, Stopped, UsageError
from nmla.files import locked
from nmla.progress import progress_bar, say
from nmla.reproduce.render import render
from nmla.reproduce.stages import Stage, as_json, stages
from nmla.reproduce.table import load_table

POLL_SECONDS = 0.2
LOG = "stage.log"  # what a stage said


def reproduce(path: Path, jobs: int = 1) -> str:
    """Make a table, or what is missing of it, and return it as Markdown, which is also written to its output."""
    if jobs < 1:
        raise UsageError(f"jobs must be at least 1, but is {jobs}")
    table, recipes = load_table(path)
    wanted = stages(table, recipes)
    output = Path(table.output)
    output.mkdir(parents=True, exist_ok=True)
    root = output / "stages"
    with locked(output / f".{path.stem}.lock", output / path.stem):
        run_all([stage for of in wanted.values() for stage in of.needed()], root, jobs)
    return render(path, table, wanted, root)


def run_all(needed: Sequence[Stage], root: Path, jobs: int) -> None:
    """Run what is not done, in its order as far as inputs are there."""
    waiting = {stage.key: stage for stage in needed if not stage.done(root)}
    say(f"nmla reproduce: {len({stage.key for stage in needed})} stages, {len(waiting)} of them to do")
    running: dict[str, subprocess.Popen[bytes]] = {}
    threads = max((os.cpu_count() or 1) // jobs, 1)
    with ExitStack() as held:
        bar = held.enter_context(progress_bar())
        task = bar.add_task("stages", total=len(waiting))
        asked = held.enter_context(_Asked())
        held.callback(_end, running)
        began = {}
        while waiting or running:
            ready = [stage for stage in waiting.values() if all(of.done(root) for of in stage.inputs.values())][
                : jobs - len(running)
            ]
            for stage in ready:
                running[stage.key] = _start(stage, root, threads)
                began[stage.key] = (stage, time.monotonic())
                del waiting[stage.key]
            time.sleep(POLL_SECONDS)
            if asked.number:
                _end(running)
                raise Stopped(asked.number, "stopped; what is done is kept, and the same command goes on from there")
            for key, process in [*running.items()]:
                if process.poll() is not None:
                    del running[key]
                    stage, then = began[key]
                    _tell(stage, root, process.returncode, time.monotonic() - then)
                    bar.advance(task)


def _start(stage: Stage, root: Path, threads: int) -> "subprocess.Popen[bytes]":
    directory = stage.directory(root)
    directory.mkdir(parents=True, exist_ok=True)
    say(f"begins: {directory.name}")
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    with (directory / LOG).open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "nmla.reproduce.stages", str(root)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches it through us, once
        )
    assert process.stdin is not None
    process.stdin.write(json.dumps(as_json(stage)).encode())
    process.stdin.close()
    return process


def _tell(stage: Stage, root: Path, code: int, seconds: float) -> None:
    directory = stage.directory(root)
    if code or not stage.done(root):
        said = (directory / LOG).read_text(encoding="utf-8", errors="replace").strip().split("\n")
        raise NmlaError(f"{directory}: this stage must succeed, but: {said[-1] or f'it ended with {code}'}")
    say(f"done:   {directory.name}, {seconds / 60:.1f} minutes")


def _end(running: dict[str, "subprocess.Popen[bytes]"]) -> None:
    """Let those that run save and stop."""
    for process in running.values():
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
    for process in running.values():
        process.wait()
    running.clear()


class _Asked:
    """Takes note of SIGINT and SIGTERM."""

    def __init__(self) -> None:
        self.number = 0

    def __enter__(self) -> "_Asked":
        self._before = {number: signal.signal(number, self._take) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _take(self, number: int, _: object) -> None:
        self.number = number
