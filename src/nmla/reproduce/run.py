"""Run all stages of a table that are not done yet, several at a time, each in a process of its own."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from nmla.data.workers import cores
from nmla.errors import NmlaError, Stopped, UsageError
from nmla.evaluation.measure import check_parallel, read_references
from nmla.evaluation.meteor import find_meteor
from nmla.progress import progress_bar, say
from nmla.reproduce.record import Record, gather, merged, read_record
from nmla.reproduce.render import render
from nmla.reproduce.stages import Stage, as_json, judging, language_model, stages, tidy
from nmla.reproduce.table import Table, load_table
from nmla.text.lines import read_lines

POLL_SECONDS = 0.2
LOG = "stage.log"  # what a stage said


def reproduce(path: Path, jobs: int = 1, so_far: bool = False, record: Path | None = None) -> str:
    """Make a table, or what is missing of it, and return it as Markdown, which is also written to its output.

    With `so_far` nothing is made, and what is done is shown. What a `record` tells, the JSON of the same table as it
    was made elsewhere, is not made again.
    """
    if jobs < 1:
        raise UsageError(f"jobs must be at least 1, but is {jobs}")
    table, recipes = load_table(path)
    references = read_references([*map(Path, table.test.references)])  # looked at now, not after hours
    named = [*zip(table.test.references, references, strict=True)]
    check_parallel(read_lines(Path(table.test.source)), named, f"line of {table.test.source}")
    wanted = stages(table, recipes)
    # What tells how fluent outputs are, whether or not one is decoded with it.
    lm = language_model(table.lm, Path(recipes[table.rows[0].name].data.corpus)) if table.lm is not None else None
    root = Path(table.output) / "stages"
    before = read_record(record) if record is not None else Record()
    told = {of for of, stage in wanted.items() if stage.directory(root).name in before.measured}
    if record is not None:
        if not told:
            raise UsageError(
                f"{record}: must tell of this table, but tells none of its {len(wanted)} measurements: settings, "
                "corpus, test set and sacrebleu's version must be the same"
            )
        say(f"nmla reproduce: {record} tells {len(told)} of {len(wanted)} measurements")
    kept = Path(table.output) / f"{path.stem}.json"  # from before, which may tell more than there is now
    if kept.exists():
        before = merged(read_record(kept), before)
    missing = []
    if so_far:
        missing = [of for of, stage in wanted.items() if of not in told and not stage.done(root)]
        wanted = {of: stage for of, stage in wanted.items() if of not in missing}
        if not wanted:
            raise UsageError(f"{path}: some of the table must be done to show it so far, but nothing is")
    else:
        here = [stage for of, stage in wanted.items() if of not in told or stage.done(root)]
        needed = [stage for of, scored in wanted.items() if of not in told for stage in scored.needed(root)]
        run_all([*needed, *([lm] if lm is not None and here else [])], root, jobs)
        _judge(table, here, root, jobs)
    found, test = gather(table, wanted, lm, root, before)
    return render(path, table, wanted, missing, lm, root, found, test)


def _judge(table: Table, scored: Sequence[Stage], root: Path, jobs: int) -> None:
    """Measure METEOR where the table asks for it; without its program, or where that fails, the table does without."""
    if not table.meteor or not scored:
        return
    try:
        find_meteor(table.meteor)
        run_all([judging(table, of) for of in scored], root, jobs)
    except Stopped:
        raise
    except NmlaError as error:
        say(f"nmla reproduce: METEOR is left out: {error}")


def run_all(needed: Sequence[Stage], root: Path, jobs: int) -> None:
    """Run what is not done, in its order as far as inputs are there. A stage that fails stops only what needs it."""
    waiting = {stage.key: stage for stage in needed if not stage.done(root)}
    for stage in needed:
        tidy(stage, root)  # what a kill left no time for
    say(f"nmla reproduce: {len({stage.key for stage in needed})} stages, {len(waiting)} of them to do")
    running: dict[str, _Running] = {}
    failed: dict[str, str] = {}
    with _Asked() as asked, progress_bar() as bar:
        task = bar.add_task("stages", total=len(waiting))
        try:
            while waiting or running:
                for stage in _ready(waiting, failed, root)[: jobs - len(running)]:
                    running[stage.key] = _Running(stage, root, max(cores() // jobs, 1))
                    del waiting[stage.key]
                if not running:
                    break  # what is left needs what failed
                time.sleep(POLL_SECONDS)
                if asked.count:
                    raise Stopped(
                        asked.number, "stopped; what is done is kept, and the same command goes on from there"
                    )
                for key, process in [*running.items()]:
                    if process.ended():
                        del running[key]
                        bar.advance(task)
                        if why := process.failure():
                            failed[key] = why
                            say(why)
        finally:
            _end(running, asked)
    if failed:
        first = next(iter(failed.values()))
        raise NmlaError(
            f"{len(failed)} of the stages failed, so the table is not whole; --so-far shows the rest; the first: "
            f"{first}"
        )


def _ready(waiting: Mapping[str, Stage], failed: Mapping[str, str], root: Path) -> list[Stage]:
    return [
        stage
        for stage in waiting.values()
        if all(of.key not in failed and of.done(root) for of in stage.inputs.values())
    ]


class _Running:
    """A stage at work in a process of its own, which ends when this one does, however that is."""

    def __init__(self, stage: Stage, root: Path, threads: int) -> None:
        self._stage, self._root, self._began = stage, root, time.monotonic()
        self._directory = stage.directory(root)
        self._directory.mkdir(parents=True, exist_ok=True)
        say(f"begins: {self._directory.name}")
        environment = {"OMP_NUM_THREADS": str(threads), **os.environ}  # unless the user has said otherwise
        with (self._directory / LOG).open("ab") as log:
            self._before = log.tell()  # what it said when it ran before
            self.process = subprocess.Popen(
                [sys.executable, "-m", "nmla.reproduce.stages", str(root)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,  # Ctrl-C reaches it through us
            )
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it could not even begin; how it ended is told
            self.process.stdin.write(json.dumps(as_json(stage)).encode() + b"\n")
            self.process.stdin.flush()  # and it stays open: its end tells that we have ended

    def ended(self) -> bool:
        return self.process.poll() is not None

    def close(self) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # what it never read
            self.process.stdin.close()

    def failure(self) -> str:
        """Why it failed; nothing if it did not, and then it is told as done."""
        self.close()
        code = self.process.returncode
        if code == 0 and self._stage.done(self._root):
            say(f"done:   {self._directory.name}, {(time.monotonic() - self._began) / 60:.1f} minutes")
            return ""
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        log = self._directory / LOG
        said = log.read_bytes()[self._before :].decode(errors="replace").strip().split("\n")[-1]
        return f"{log}: this stage must succeed, but ended with {how}, and last said: {said or 'nothing'}"


def _end(running: dict[str, _Running], asked: "_Asked") -> None:
    """Let those that still run save and stop; whoever asks again does not wait."""
    if running:
        say(f"stopping {len(running)} stages, which save what they have done; again to stop at once")
    for one in running.values():
        one.process.send_signal(signal.SIGTERM)
    before = asked.count
    while not all(one.ended() for one in running.values()):
        time.sleep(POLL_SECONDS)
        if asked.count > before:
            for one in running.values():
                one.process.kill()
    for one in running.values():
        one.close()


class _Asked:
    """Takes note of signals that ask to stop."""

    def __init__(self) -> None:
        self.number = self.count = 0

    def __enter__(self) -> "_Asked":
        asking = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        heard = [number for number in asking if signal.getsignal(number) != signal.SIG_IGN]  # nohup ignores one
        self._before = {number: signal.signal(number, self._take) for number in heard}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _take(self, number: int, _: object) -> None:
        self.number, self.count = number, self.count + 1
