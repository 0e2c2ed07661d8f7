"""The answers of a cascade as they come: panels for one problem on a terminal, else a line each."""

from __future__ import annotations

import sys
from typing import Any

from agon_cli.console.observers import Observer, sampling_line
from agon_cli.console.results import answer_line, outcome_counts, outcome_sentence, show_exchange
from agon_cli.console.text import as_line, clean, one_line

Row = dict[str, Any]


class Answers:
    """Prints exchanges. stdout carries answers only; what became of the drafts goes to stderr, except on a screen."""

    def __init__(self, listen: Observer, *, alone: bool, as_json: bool, quiet: bool) -> None:
        self._listen = listen
        self._alone, self._json = alone, as_json
        self._talks = not (as_json or quiet)
        self._panels = alone and self._talks and sys.stdout.isatty()
        self._records: list[Row] = []

    def begin(self, seats: Row) -> None:
        """Say who plays, and how samples are drawn."""
        if self._json:
            sys.stdout.write(as_line("start", seats) + "\n")
        first, last = seats["drafter"], seats["solver"]
        self._say(f"{_whole(first)} drafts ({first['base']}), {_whole(last)} answers ({last['base']})")
        for name in ("drafter", "solver") if _luck(first) != _luck(last) else ("drafter",):
            self._say(f"{'' if _luck(first) == _luck(last) else name + ' '}{sampling_line(seats[name])}")

    def __call__(self, record: Row) -> None:
        """Print one exchange."""
        self._records.append({key: record[key] for key in ("outcome",)})
        with self._listen.aside():
            if self._json:
                sys.stdout.write(as_line("answer", record) + "\n")
            elif self._panels:
                show_exchange(record)
            else:
                sys.stdout.write(answer_line(record, self._alone) + "\n")
            sys.stdout.flush()
        if record["answer"] is None and not self._panels:
            self._say(f"warning: no answer could be read for {one_line(record['problem'], 60)!r}")
        if self._alone and record["outcome"] is not None and not self._panels:
            self._say(outcome_sentence(record))

    def end(self) -> None:
        """Say how a batch with gold answers came out."""
        if not self._alone and (counts := outcome_counts(self._records)):
            self._say(counts)

    def _say(self, text: str) -> None:
        if self._talks:
            with self._listen.aside():
                sys.stderr.write(clean(text) + "\n")


def _whole(seat: Row) -> str:
    """A player with the run it is of and the step it is at, as far as there are any."""
    of = f" of {seat['run']}" if seat["run"] else ""
    at = f" at step {seat['step']}" if seat["step"] is not None and (of or seat["adapter"]) else ""
    return f"{seat['player']}{of}{at}"


def _luck(seat: Row) -> Row:
    return {key: value for key, value in seat.items() if key not in ("player", "run", "step", "base", "adapter")}
