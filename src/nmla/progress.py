"""What people see while they wait: on stderr, and a moving bar only on a terminal."""

import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


def progress_bar(enabled: bool = True) -> Progress:
    """A bar with counts, time spent and time left, silent where stderr is not a terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("<"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=not (enabled and sys.stderr.isatty()),
    )


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
