"""Work in a child process that is killed by SIGKILL at a chosen moment."""

import itertools
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path


def in_child(work: Callable[[], object]) -> bool:
    """Do `work` in a child, which must succeed unless it is killed; whether it was."""
    child = os.fork()
    if child == 0:
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            work()
        except BaseException as error:
            print(f"child failed: {error!r}", flush=True)
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "a child failed"
    return os.WIFSIGNALED(status)


def kill_at_call(work: Callable[[], object], number: int, total: Path) -> None:
    """Do `work`, and kill this process at the n-th call of any function; should it live, note how many there were."""
    calls = itertools.count(1)

    def count(*_: object) -> None:
        if next(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(count)
    work()
    sys.setprofile(None)
    total.write_text(str(next(calls)))
