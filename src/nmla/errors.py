"""Errors that are the user's to mend: shown as one line, without a traceback.

Each message says what must hold, what was found, and where it helps, what to do.
"""


class NmlaError(Exception):
    """Something the user can mend; `exit_code` is what a command returns."""

    exit_code = 1


class UsageError(NmlaError):
    """A wrong option, path or setting."""

    exit_code = 2


class DataError(NmlaError):
    """Input that cannot be used as it is."""

    exit_code = 3


class Stopped(NmlaError):
    """Work that was asked to stop by a signal, and has."""

    def __init__(self, signal_number: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number
