"""What people see while they wait: on stderr, and a moving bar only on a terminal."""

import sys
from contextlib import suppress

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


def progress_bar(enabled: bool = True, *, still: bool = False) -> Progress:
    """A bar with counts, time spent and time left, silent where stderr is not a terminal.

    A `still` one has no thread that draws it, which would disturb what is timed: who has it calls `refresh`.
    """
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("<"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        auto_refresh=not still,
        speed_estimate_period=3600.0,  # seconds: some steps take minutes
        disable=not (enabled and sys.stderr is not None and sys.stderr.isatty()),
    )


def say(message: str) -> None:
    """On stderr; who has closed it does not want to know, and that ends no work."""
    if sys.stderr is not None:
        with suppress(OSError):
            print(message, file=sys.stderr, flush=True)
