"""Rows of a run's logs, held against what runs write before anything is made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from agon_cli.errors import UsageError
from agon_cli.runlog import read
from agon_cli.types import Status

Row = Mapping[str, Any]
HINT = "put the file back, or leave the run out"
_MOST = 1 << 53
_TEXTS = ("split", "arm", "mode", "player", "problem_id", "finish_reason", "verdict", "text")
_COUNTS = ("step", "sample", "tokens", "prompt_tokens")
_CASCADE: dict[str, type] = {"draft_verdict": str, "draft_tokens": int, "read": bool, "copied": bool}
_STATUSES = get_args(Status)


def checked(run: Path, log: Literal["evals", "metrics", "inference"]) -> Iterator[dict[str, Any]]:
    """The rows of a log. Raises UsageError, with file and line where there is one, for a row that no run writes and for
    an evaluation in which not every arm answered the same."""
    path = run / f"{log}.jsonl"
    evaluations, number = _Evaluations(), 0
    look: Callable[[Row, int], str | None]
    look = {"evals": evaluations.flaw, "metrics": _flaw_of_step, "inference": _flaw_of_spending}[log]
    for number, row in enumerate(read(run, log), start=1):
        if flaw := look(row, number):
            raise UsageError(f"{path}:{number}: {flaw}", HINT)
        yield row
    if flaw := evaluations.unfinished():
        raise UsageError(f"{path}:{number}: {flaw}", HINT)


class _Evaluations:
    """Evaluations follow one another whole: each has every arm's every sample of every problem, once."""

    def __init__(self) -> None:
        self._over = set[tuple[int, str]]()
        self._now: tuple[int, str] | None = None
        self._answered: dict[str, set[tuple[str, int]]] = {}

    def flaw(self, row: Row, _: int) -> str | None:
        """What is wrong with the next row; None where nothing is."""
        if flaw := _flaw(row):
            return flaw
        if (row["step"], row["split"]) != self._now:
            if flaw := self.unfinished():
                return flaw
            self._now, self._answered = (row["step"], row["split"]), {}
            if self._now in self._over:
                return f"the evaluation of step {row['step']} on {row['split'][:20]!r} a second time"
            self._over.add(self._now)
        answered = self._answered.setdefault(row["arm"], set())
        if (row["problem_id"], row["sample"]) in answered:
            return f"a second time sample {row['sample']} of problem {row['problem_id'][:60]!r}"
        answered.add((row["problem_id"], row["sample"]))
        return None

    def unfinished(self) -> str | None:
        """What is wrong with the evaluation that ends here."""
        first = next(iter(self._answered), "")
        for arm, answered in self._answered.items():
            if answered != self._answered[first]:
                step, split = self._now or (0, "")
                return f"{arm[:40]!r} and {first[:40]!r} did not answer the same problems at step {step} on {split!r}"
        return None


def _flaw(row: Row) -> str | None:
    """What is wrong with an evaluation row's values."""
    for key in _TEXTS:
        if not isinstance(row[key], str):
            return f"{key!r} is no text"
    for key in _COUNTS:
        if not _is_count(row[key]):
            return f"{key!r} is no count"
    for key in ("summary", "extracted"):
        if not (row.get(key) is None or isinstance(row[key], str)):
            return f"{key!r} is no text"
    if type(row["format"]) is not int or row["format"] not in (0, 1):
        return "'format' is neither 0 nor 1"
    if row["mode"] not in ("single", "cascade"):
        return f"no run has the mode {row['mode'][:40]!r}"
    cascade = row["mode"] == "cascade"
    if [bool(player) for player in row["arm"].split(">")] != [True] * (1 + cascade):
        return f"{row['arm'][:80]!r} is no arm of mode {row['mode']}"
    return _flaw_of_draft(row) if cascade else _flaw_of_verdict(row["verdict"])


def _flaw_of_draft(row: Row) -> str | None:
    for key, kind in _CASCADE.items():
        if type(row[key]) is not kind:
            return f"{key!r} is no {'text' if kind is str else 'count' if kind is int else 'true or false'}"
    if not _is_count(row["draft_tokens"]):
        return "'draft_tokens' is no count"
    return _flaw_of_verdict(row["verdict"]) or _flaw_of_verdict(row["draft_verdict"])


def _flaw_of_verdict(verdict: str) -> str | None:
    return None if verdict in _STATUSES else f"no verdict is {verdict[:40]!r}"


def _flaw_of_step(row: Row, number: int) -> str | None:
    """What is wrong with a row of metrics where it matters here; None where nothing is."""
    for key in ("tokens", "roles", "players", "seconds"):
        if not isinstance(row[key], dict):
            return f"{key!r} holds {'no times' if key == 'seconds' else 'nothing'}"
    counts = (row["tokens"], "sampled"), (row["tokens"], "prompt"), (row, "step"), (row, "completions")
    for part, key in counts:
        if not _is_count(part[key]):
            return f"{key!r} is no count"
    if row["step"] != number - 1:
        return f"step {row['step']}, where step {number - 1} belongs"
    if not _are_times(row["seconds"]):
        return "'seconds' holds no times"
    if not (row.get("peak_bytes") is None or _is_count(row["peak_bytes"])):
        return "'peak_bytes' is no count"
    if not isinstance(row.get("flags", []), list):
        return "'flags' is no list"
    return _flaw_of_players(row["roles"], row["players"])


def _flaw_of_spending(row: Row, _: int) -> str | None:
    """What is wrong with a row of what an arm's answers took; None where nothing is."""
    for key in ("split", "arm"):
        if not isinstance(row[key], str):
            return f"{key!r} is no text"
    for key in ("step", "completions", "peak_bytes"):
        if not _is_count(row[key]):
            return f"{key!r} is no count"
    return None if _are_times(row["seconds"]) else "'seconds' holds no times"


def _are_times(seconds: Any) -> bool:
    return isinstance(seconds, dict) and all(_is_figure(value) and value >= 0 for value in seconds.values())


def _flaw_of_players(roles: Row, players: Row) -> str | None:
    named = [(roles["draft"], "draft")] + [(roles["challenge"], "challenge")] * (roles["challenge"] is not None)
    if not all(isinstance(player, str) and player in players for player, _ in named):
        return "'roles' names no player of the step"
    if not all(isinstance(values, dict) for values in players.values()):
        return "'players' holds nothing of one"
    streams = [players[player][role] for player, role in named]
    streams += [values[role] for values in players.values() for role in ("draft", "challenge") if role in values]
    if not all(isinstance(stream, dict) and all(map(_is_rate, stream.values())) for stream in streams):
        return "'players' holds what is no figure"
    return None


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MOST


def _is_figure(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < _MOST  # so neither NaN nor infinite


def _is_rate(value: Any) -> bool:
    return value is None or _is_figure(value)
