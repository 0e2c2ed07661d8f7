"""Errors a user can act on. Each says what is wrong, what to do, and which exit code the command ends with."""

from __future__ import annotations

import errno
from enum import IntEnum

DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""`OSError.errno` values that mean there is no room left: a full disk, a quota, a file size limit."""


class Exit(IntEnum):
    """Exit codes of every `agon` command."""

    DONE = 0
    BUG = 1
    USAGE = 2
    MACHINE = 3
    UNREACHABLE = 4
    RESOURCES = 5
    GUARD = 6
    GRADING = 7
    GATE = 100
    SIGINT = 130
    SIGTERM = 143


class AgonError(Exception):
    """What went wrong, in one sentence, and a hint that says what to do about it."""

    code: Exit = Exit.BUG

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(AgonError):
    """The command line or the recipe asks for something that cannot be (exit 2)."""

    code = Exit.USAGE


class MachineError(AgonError):
    """This machine lacks something: an extra, a GPU, a sandbox (exit 3)."""

    code = Exit.MACHINE


class MissingExtra(MachineError):
    """A library of one of agon's extras is not installed."""

    def __init__(self, message: str, extra: str, instead: str = "") -> None:
        pins = "" if extra == "vllm" else "-c constraints.txt "  # vLLM has a torch of its own
        super().__init__(message, f"in agon's source folder: pip install {pins}-e '.[{extra}]'{instead}")


class UnreachableError(AgonError):
    """A model or data set could not be read (exit 4)."""

    code = Exit.UNREACHABLE


class ResourceError(AgonError):
    """Memory or disk ran out (exit 5)."""

    code = Exit.RESOURCES


class GuardError(AgonError):
    """A guard stopped the run because its numbers can no longer be trusted (exit 6)."""

    code = Exit.GUARD


class GradingError(AgonError):
    """The verifier itself failed too often (exit 7)."""

    code = Exit.GRADING


class LostRank(AgonError):
    """Another process of the run is gone or silent, so this one cannot go on either (exit 1)."""


class Stopped(AgonError):
    """A signal ended the run after its state was saved (exit 130 or 143)."""

    def __init__(self, message: str, hint: str, code: Exit) -> None:
        super().__init__(message, hint)
        self.code = code
