"""The error family of xmem; each class carries the exit code that the command line ends with."""

from __future__ import annotations

EXIT_OK = 0
EXIT_DOES_NOT_FIT = 1
EXIT_USAGE = 2
EXIT_UNREADABLE = 3
EXIT_REFUSED = 4


class XmemError(Exception):
    """A request that cannot be served: says what failed and where, and what to do next.

    `message` is one or two sentences; `hint` is the next step, shown on its own line.
    Only the command line catches this family.
    """

    exit_code = EXIT_USAGE

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n{self.hint}" if self.hint else self.message


class UsageError(XmemError):
    """Wrong use: option, missing file, bad SQL, unknown GPU or run, missing extra (exit 2)."""


class UnreadableError(XmemError):
    """The input cannot be read: empty, wrong kind, no memory events (exit 3)."""

    exit_code = EXIT_UNREADABLE


class RefusedError(XmemError):
    """The request was understood and refused: hostile file, fenced SQL, exists without --force (exit 4)."""

    exit_code = EXIT_REFUSED
