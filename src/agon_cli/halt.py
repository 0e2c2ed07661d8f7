"""SIGINT and SIGTERM: finish the step, save, end; or end at once where nothing is lost by it."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from agon_cli.errors import Exit

_SHOW_CURSOR = b"\x1b[?25h"


AGAIN = 0.05
"""Seconds until a signal is sent again whose exception was lost."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, where it ends what is under way."""


class Halt:
    """SIGINT and SIGTERM while it is entered. While no step is under way they end the command there and then; in a step
    the first is remembered, for the loop to finish it and save, and the second ends the process at once."""

    def __init__(self, quiet: bool = False) -> None:
        self.signal: signal.Signals | None = None
        self._quiet = quiet
        self._holding = False
        self._remembered = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Halt:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._received)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __call__(self) -> bool:
        """Whether a signal has come."""
        return self.signal is not None

    @property
    def code(self) -> Exit:
        """The exit code that tells which signal it was."""
        return Exit.SIGTERM if self.signal is signal.SIGTERM else Exit.SIGINT

    def watch(self, kind: str, payload: dict[str, Any]) -> None:
        """Learn from training's events whether some step is not saved: from its first phase to the next checkpoint.
        Between those, and in an evaluation there, ending at once loses nothing."""
        if kind == "checkpoint":
            self._holding = False
        elif kind == "phase" and payload["name"] not in ("load", "evaluate"):
            self._holding = True

    def _received(self, number: int, _: FrameType | None) -> None:
        again, self._remembered = self._remembered, self._holding
        self.signal = signal.Signals(number)
        if not self._holding:
            raise Terminated if number == signal.SIGTERM else KeyboardInterrupt
        # Plain writes: buffers and locks may be held by the very code that was interrupted.
        if again:
            _write_error(_SHOW_CURSOR if os.isatty(2) else b"")
            os._exit(self.code)
        if not self._quiet:
            text = f"\n{self.signal.name}: finishing this step, then saving; a second signal ends at once\n"
            _write_error(text.encode())


@contextmanager
def orderly_end() -> Iterator[None]:
    """SIGTERM unwinds what is under way, as Ctrl-C does, so that what it holds on disk and at servers is let go.

    Python drops what is raised inside a `__del__`: a signal that comes there is sent again a moment later.
    """
    if threading.current_thread() is not threading.main_thread():  # where Python takes no signals
        yield
        return
    before, tell = signal.signal(signal.SIGTERM, _terminate), sys.unraisablehook

    def dropped(what: Any) -> None:
        if not isinstance(what.exc_value, KeyboardInterrupt):
            tell(what)
            return
        number = signal.SIGTERM if isinstance(what.exc_value, Terminated) else signal.SIGINT
        again = threading.Timer(AGAIN, os.kill, (os.getpid(), number))
        again.daemon = True
        again.start()

    sys.unraisablehook = dropped
    try:
        yield
    finally:
        sys.unraisablehook = tell
        signal.signal(signal.SIGTERM, before)


def _terminate(number: int, _: FrameType | None) -> None:
    raise Terminated


def _write_error(text: bytes) -> None:
    with suppress(OSError):
        os.write(2, text)
