"""Figures of a stretch of steps, averaged over all of it: each player in each role, and the cascade."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
_RATES = ("reward", "accuracy", "length", "truncated", "zero_signal", "fix", "break", "copy")


@dataclass(frozen=True)
class Line:
    """One line of an interval's table. `change` is the accuracy's since the run's first interval, None in that one."""

    name: str
    figures: dict[str, float | None]
    change: float | None


def lines(rows: Sequence[Row], first: Sequence[Row]) -> list[Line]:
    """Lines for metrics rows of an interval, compared with those of the run's first interval.

    A player has a line for each role it played; the cascade pools all challenges, and its length is draft + challenge.
    """
    now, start = _streams(rows), _streams(first)
    same = [row["step"] for row in rows] == [row["step"] for row in first]
    found = []
    for name in sorted(now, key=lambda key: (key == "cascade", key)):
        figures = _means(now[name])
        before = _means(start[name])["accuracy"] if name in start and not same else None
        after = figures["accuracy"]
        found.append(Line(name, figures, None if before is None or after is None else after - before))
    return found


def _streams(rows: Iterable[Row]) -> dict[str, list[Row]]:
    streams: dict[str, list[Row]] = {}
    for row in rows:
        for name, player in row["players"].items():
            for role in ("draft", "challenge"):
                if role in player:
                    streams.setdefault(f"{name} {role}", []).append(player[role])
        solver = row["roles"]["challenge"]
        if solver is not None:
            final = row["players"][solver]["challenge"]
            draft = row["players"][row["roles"]["draft"]]["draft"]
            both = None if None in (draft["length"], final["length"]) else draft["length"] + final["length"]
            streams.setdefault("cascade", []).append(final | {"length": both})
    return streams


def _means(streams: Sequence[Row]) -> dict[str, float | None]:
    """Means over the steps; every step has as many completions, and one without a rate is left out."""
    found: dict[str, float | None] = {}
    for key in _RATES:
        values = [stream[key] for stream in streams if stream.get(key) is not None]
        found[key] = sum(values) / len(values) if values else None
    return found
