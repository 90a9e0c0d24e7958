"""Exit codes."""

from __future__ import annotations

import enum

from legato_client import _errors


class ExitCode(enum.IntEnum):
    """The exit codes of `legato`."""

    OK = 0
    OTHER = 1
    USAGE = 2
    NOT_FOUND = 3
    UNAVAILABLE = 4
    DEADLINE = 5
    BUSY = 6
    INTERRUPTED = 130


HELP = (
    "exit codes: 0 ok, 1 other failure, 2 usage or invalid argument, 3 not found, "
    "4 server unavailable or engine lost, 5 deadline exceeded, 6 busy"
)


class CommandError(Exception):
    """The message is for the user."""

    def __init__(self, message: str, exit_code: ExitCode = ExitCode.OTHER) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def of_file(error: OSError) -> CommandError:
    """The failure of a file, by its name where that is known."""
    where = f"{error.filename}: " if error.filename else ""
    return CommandError(f"{where}{error.strerror or error}")


def exit_code_of(error: _errors.LegatoError) -> ExitCode:
    match error:
        case _errors.InvalidArgument():
            return ExitCode.USAGE
        case _errors.NotFound():
            return ExitCode.NOT_FOUND
        case _errors.Unavailable():
            return ExitCode.UNAVAILABLE
        case _errors.DeadlineExceeded():
            return ExitCode.DEADLINE
        case _errors.Busy():
            return ExitCode.BUSY
        case _:
            return ExitCode.OTHER
