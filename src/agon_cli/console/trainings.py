"""Who listens to a comparison while it trains: a live line, plain lines now and then, JSON lines, or nobody."""

from __future__ import annotations

import sys
import time
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from agon_cli.console.observers import Events, Observer
from agon_cli.console.text import clean, duration

EVERY = 30.0
"""Seconds between two plain lines of progress."""


def trainings(as_json: bool, quiet: bool) -> Observer:
    """The one that suits the flags and where stderr goes."""
    if as_json or quiet:
        return Events() if as_json else Observer()
    terminal = sys.stderr.isatty()
    console = Console(stderr=True, force_terminal=terminal, highlight=False, width=None if terminal else 120)
    return Board(console) if terminal and not console.is_dumb_terminal else Lines(console)


class Lines(Observer):
    """Plain lines on stderr: how many runs there are, each that begins and ends, how far they are now and then."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._told = time.monotonic()

    def say(self, text: str) -> None:
        """One paragraph of plain text."""
        self.console.print(Text(clean(text)), soft_wrap=True)

    def on_trainings(self, done: int, total: int, jobs: int) -> None:
        """Say what is there and what is to be trained."""
        self.say(f"{total} {'run' if total == 1 else 'runs'}: {done} done, {total - done} to train, {jobs} at once")

    def on_began(self, called: str, step: int, **_: Any) -> None:
        """Say that a run begins or goes on."""
        self.say(f"{called} goes on at step {step}" if step else f"{called} begins")

    def on_ended(self, called: str, done: int, total: int, **_: Any) -> None:
        """Say that a run is complete."""
        self.say(f"{called} is done, {done} of {total}")

    def on_progress(self, **row: Any) -> None:
        """Say how far the runs are, unless that was said a moment ago."""
        if time.monotonic() - self._told >= EVERY:
            self._told = time.monotonic()
            self.say(progress_line(row))

    def on_measuring(self, runs: int) -> None:
        """Say that training is over."""
        self.say(f"{runs} {'run is' if runs == 1 else 'runs are'} there; comparing them")

    def on_extra(self, called: str, what: str, **_: Any) -> None:
        """Say which further arm is being evaluated."""
        self.say(f"{called}: evaluating {what}")


class Board(Lines):
    """A terminal: the same talk over a live line of progress."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._line = Text("")
        self._live = Live(
            console=console, get_renderable=lambda: self._line, refresh_per_second=2, transient=True,
            redirect_stdout=False, redirect_stderr=False,
        )  # fmt: skip

    def __enter__(self) -> Board:
        self._live.start()
        return self

    def close(self) -> None:
        """Give the screen back."""
        self._live.stop()

    def on_progress(self, **row: Any) -> None:
        """Show how far the runs are."""
        self._line = Text(clean(progress_line(row)))

    def on_measuring(self, runs: int) -> None:
        """Say that training is over."""
        self._line = Text("")
        super().on_measuring(runs)


def progress_line(row: dict[str, Any]) -> str:
    """Runs done, at work and to come, and how long it may take."""
    working = ", ".join(f"{one['called']} {_how_far(**one)}" for one in row["working"])
    left = "" if row["left"] is None else f", about {duration(row['left'])} left"
    parts = [f"{row['done']} of {row['total']} runs done", *([working] if working else [])]
    return "; ".join([*parts, f"{row['waiting']} to come{left}"])


def _how_far(step: int, steps: int, **_: Any) -> str:
    return f"{step}/{steps}" if step < steps else "evaluating"
