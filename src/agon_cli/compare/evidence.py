"""What runs say of themselves: manifests, and evaluation rows that are checked before anything is made of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from agon_cli import data
from agon_cli.compare.arms import Place, Row, Tally, tallies
from agon_cli.compare.cells import Method, Run
from agon_cli.compare.checks import Asked
from agon_cli.document import Curve, CurvePoint
from agon_cli.errors import UsageError
from agon_cli.recipe import Recipe, resolved
from agon_cli.runlog import read
from agon_cli.types import Problem

_MOST = 1 << 53
_TEXTS = ("split", "arm", "mode", "player", "problem_id", "finish_reason", "verdict", "text")
_COUNTS = ("step", "sample", "tokens", "prompt_tokens")
_CASCADE: dict[str, type] = {"draft_verdict": str, "draft_tokens": int, "read": bool, "copied": bool}


@dataclass(frozen=True)
class Evidence:
    """The runs of a comparison and what was read of them. `kept` holds the problems to compare on by seed; None is all
    of them."""

    runs: Sequence[Run]
    manifests: Mapping[str, Mapping[str, Any]]
    asked: Mapping[str, Asked]
    kept: Mapping[int, frozenset[str]] | None = None
    _tallied: dict[str, dict[Place, Tally]] = field(default_factory=dict)

    def rows(self, run: Run) -> Iterator[Row]:
        """A run's evaluation rows, on the test split those of the problems to compare on."""
        kept = self.kept
        for row in read(run.folder, "evals"):
            if kept is None or row["split"] != "test" or row["problem_id"] in kept[run.seed]:
                yield row

    def only_kept(self, rows: Sequence[dict[str, Any]], seed: int) -> list[dict[str, Any]]:
        """Of rows of the test split, those of the problems to compare on."""
        return [row for row in rows if self.kept is None or row["problem_id"] in self.kept[seed]]

    def tallied(self, run: Run) -> dict[Place, Tally]:
        """A run's evaluations, added up. Read once."""
        if run.name not in self._tallied:
            self._tallied[run.name] = tallies(self.rows(run))
        return self._tallied[run.name]

    def methods(self) -> dict[Method, dict[int, Run]]:
        """The runs that answer for each method, by seed; a method's own runs where several cells could."""
        found: dict[Method, dict[int, Run]] = {}
        for run in sorted(self.runs, key=lambda run: run.seed):
            for method in run.cell.methods:
                found.setdefault(method, {}).setdefault(run.seed, run)
        return dict(sorted(found.items(), key=lambda pair: self._place(pair[0])))

    def _place(self, method: Method) -> int:
        return list(dict.fromkeys(m for run in self.runs for m in run.cell.methods)).index(method)


def gather(runs: Sequence[Run]) -> Evidence:
    """Read and check every run. Raises UsageError, with file and line where there is one, for a run that has not
    finished and for rows that no run of ours writes."""
    for run in runs:
        for number, row in enumerate(read(run.folder, "metrics"), start=1):
            if flaw := _flaw_of_step(row):
                raise _bad(run.folder / "metrics.jsonl", number, flaw)
    manifests = {run.name: _manifest(run.folder) for run in runs}
    return Evidence(runs, manifests, {run.name: _asked(run, manifests[run.name]) for run in runs})


def _manifest(run: Path) -> dict[str, Any]:
    path = run / "manifest.json"
    hint = "put the file back, or leave the run out"
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read: {error}", hint) from error
    parts = [found.get(key, {}) for key in ("hashes", "versions", "hardware")] if isinstance(found, dict) else [None]
    if not all(isinstance(part, dict) for part in parts):
        raise UsageError(f"{path}: no manifest of a run", hint)
    return dict(found)


def _asked(run: Run, manifest: Mapping[str, Any]) -> Asked:
    last, ids, samples = -1, set[str](), 0
    for number, row in enumerate(read(run.folder, "evals"), start=1):
        flaw = _flaw(row)
        if flaw:
            raise UsageError(
                f"{run.folder / 'evals.jsonl'}:{number}: {flaw}", "put the file back, or leave the run out"
            )
        if row["split"] == "test" and row["step"] >= last:
            if row["step"] > last:
                last, ids, samples = row["step"], set(), 0
            ids.add(row["problem_id"])
            samples = max(samples, row["sample"] + 1)
    if last != run.steps:
        reached = f"its last evaluation on the test split is of step {last}" if last >= 0 else "it has no evaluation"
        raise UsageError(f"{run.folder} has not finished: {reached}, of {run.steps}", "let `agon train` go on with it")
    digest = manifest.get("hashes", {}).get("data.test")
    return Asked(None if digest is None else str(digest), frozenset(ids), samples)


def _bad(path: Path, number: int, flaw: str) -> UsageError:
    return UsageError(f"{path}:{number}: {flaw}", "put the file back, or leave the run out")


def _flaw_of_step(row: Mapping[str, Any]) -> str | None:
    """What is wrong with a metrics row where it matters here; None where nothing is."""
    counts = (row["tokens"], "sampled"), (row["tokens"], "prompt"), (row, "step"), (row, "completions")
    for part, key in counts:
        if type(part[key]) is not int or not 0 <= part[key] < _MOST:
            return f"{key!r} is no count"
    seconds = row["seconds"]
    if not (isinstance(seconds, dict) and all(_is_time(value) for value in seconds.values())):
        return "'seconds' holds no times"
    roles, players = row["roles"], row["players"]
    if not (isinstance(players, dict) and roles["draft"] in players and roles["challenge"] in (None, *players)):
        return "'roles' names no player of the step"
    return None


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < _MOST  # so neither NaN nor infinite


def _flaw(row: Mapping[str, Any]) -> str | None:
    """What is wrong with an evaluation row's values; None where nothing is."""
    for key in _TEXTS:
        if not isinstance(row[key], str):
            return f"{key!r} is no text"
    for key in _COUNTS:
        if type(row[key]) is not int or not 0 <= row[key] < _MOST:
            return f"{key!r} is no count"
    for key, kind in _CASCADE.items() if row["mode"] == "cascade" else ():
        if type(row[key]) is not kind:
            return f"{key!r} is no {'text' if kind is str else 'count' if kind is int else 'true or false'}"
    return None


def curve(evidence: Evidence, run: Run, method: str, arm: str) -> Curve:
    """Dev accuracy of an arm during a run."""
    spent = list(accumulate(map(_spent, read(run.folder, "metrics")), _add, initial=(0.0, 0.0)))
    points: list[CurvePoint] = []
    for place, tally in sorted(evidence.tallied(run).items()):
        if place.split == "dev" and place.arm == arm and tally.accuracy is not None and place.step < len(spent):
            tokens, seconds = spent[place.step]
            points.append({
                "step": place.step, "accuracy": tally.accuracy, "length": tally.tokens["answer"], "tokens": tokens,
                "seconds": seconds,
            })  # fmt: skip
    return {"method": method, "seed": run.seed, "points": points}


def _spent(row: Mapping[str, Any]) -> tuple[float, float]:
    return float(row["tokens"]["sampled"]), float(sum(row["seconds"].values()))


def _add(a: tuple[float, float], b: tuple[float, float]) -> tuple[float, float]:
    return a[0] + b[0], a[1] + b[1]


def flags(run: Run) -> list[str]:
    """What a run warned of while it trained."""
    return [str(flag) for row in read(run.folder, "metrics") for flag in row.get("flags", [])]


def problems(recipe: Recipe) -> dict[str, Problem]:
    """Every problem of a recipe's data by id. Golds are not checked again. Raises what reading the data raises."""
    values = resolved(recipe)
    parts = {key: values[key] for key in ("data", "split")}
    drawn = recipe.seed if "reasoning_gym" in json.dumps(parts["data"]) else 0
    key = json.dumps([parts, drawn])
    if key not in _known:
        journal = data.Journal()
        splits = data.load(recipe, None, journal)
        every = [*journal.pool, *(problem for part in splits.by_name().values() for problem in part)]
        _known.clear()
        _known[key] = {problem.id: problem for problem in every}
    return _known[key]


_known: dict[str, dict[str, Problem]] = {}
