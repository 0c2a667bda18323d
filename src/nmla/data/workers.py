"""Other processes that run functions: started clean, so they hold no torch, and ended by the end of their input.

They are no fork, which could inherit locks held by other threads, and they do not run the caller's main module again,
so `prepare` can be called from any script. A killed caller closes their input, and they leave.
"""

import os
import pickle
import queue
import subprocess
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import nmla
from nmla.errors import NmlaError

_ROOT = str(Path(nmla.__file__).parent.parent)


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Workers:
    """Runs functions in `count` processes; with none, in this one."""

    def __init__(self, count: int) -> None:
        path = os.pathsep.join(filter(None, (_ROOT, os.environ.get("PYTHONPATH"))))
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-c", "from nmla.data.workers import serve; serve()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,  # Ctrl-C is for the caller alone
            )
            for _ in range(count)
        ]
        self._free: queue.Queue[subprocess.Popen[bytes]] = queue.Queue()
        for process in self._processes:
            self._free.put(process)
        self._threads = ThreadPoolExecutor(max_workers=max(count, 1))

    def map(self, function: Callable[..., Any], jobs: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
        """Results in the order of the jobs, few of which are held at a time."""
        if not self._processes:
            for job in jobs:
                yield function(*job)
            return
        pending: deque[Future[Any]] = deque()
        for job in jobs:
            if len(pending) > len(self._processes):
                yield pending.popleft().result()
            pending.append(self._threads.submit(self._call, function, job))
        while pending:
            yield pending.popleft().result()

    def _call(self, function: Callable[..., Any], job: tuple[Any, ...]) -> Any:
        process = self._free.get()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            pickle.dump((function, job), process.stdin, protocol=pickle.HIGHEST_PROTOCOL)
            process.stdin.flush()
            result, error = pickle.load(process.stdout)
        except (EOFError, OSError, pickle.UnpicklingError):
            raise NmlaError(
                f"a worker must live until its work is done, but ended with code {process.wait()}; "
                "if memory ran out, use fewer processes"
            ) from None
        finally:
            self._free.put(process)
        if error is not None:
            raise error
        return result

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            process.communicate()


def serve() -> None:
    """What a worker does: functions and arguments in, results or exceptions out."""
    requests = sys.stdin.buffer
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library may print must not reach the caller as a reply
    while True:
        try:
            function, job = pickle.load(requests)
        except EOFError:
            return
        try:
            reply: tuple[Any, Exception | None] = (function(*job), None)
        except Exception as error:
            error.add_note(f"in a worker: {traceback.format_exc()}")
            reply = (None, error)
        try:
            pickle.dump(reply, replies, protocol=pickle.HIGHEST_PROTOCOL)
            replies.flush()
        except BrokenPipeError:  # the caller is gone
            os._exit(1)
