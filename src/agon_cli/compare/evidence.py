"""What runs say of themselves: manifests, and evaluation rows that are checked before anything is made of them."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

from agon_cli import data
from agon_cli.compare.cells import Method, Run
from agon_cli.compare.checks import Asked
from agon_cli.compare.rows import checked
from agon_cli.document import Curve, CurvePoint
from agon_cli.errors import UsageError
from agon_cli.manifest import read_manifest
from agon_cli.recipe import Recipe, resolved
from agon_cli.runlog import read
from agon_cli.tally import Place, Row, Tally, tallies
from agon_cli.types import Problem


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
        deque(checked(run.folder, "metrics"), maxlen=0)
        if (run.folder / "inference.jsonl").exists():
            deque(checked(run.folder, "inference"), maxlen=0)
    manifests = {run.name: read_manifest(run.folder) for run in runs}
    return Evidence(runs, manifests, {run.name: _asked(run, manifests[run.name]) for run in runs})


def _asked(run: Run, manifest: Mapping[str, Any]) -> Asked:
    last, asked = last_asked(run.folder, manifest)
    if last != run.steps:
        reached = f"its last one is of step {last} of {run.steps}" if last >= 0 else "there is none"
        message = f"{run.folder} has not finished its evaluations on the test split: {reached}"
        raise UsageError(message, "let `agon train` go on with it")
    return asked


def last_asked(run: Path, manifest: Mapping[str, Any]) -> tuple[int, Asked]:
    """The step of a run's last evaluation on the test split, −1 where there is none, and what it asked."""
    last, ids, samples = -1, dict[str, None](), 0
    for row in checked(run, "evals"):
        if row["split"] == "test" and row["step"] >= last:
            if row["step"] > last:
                last, ids, samples = row["step"], {}, 0
            ids[row["problem_id"]] = None
            samples = max(samples, row["sample"] + 1)
    digest = manifest.get("hashes", {}).get("data.test")
    return last, Asked(None if digest is None else str(digest), tuple(ids), samples)


def curve(evidence: Evidence, run: Run, method: str, arm: str) -> Curve:
    """Dev accuracy of an arm during a run."""
    spent = spending((row["tokens"]["sampled"], row["seconds"].values()) for row in read(run.folder, "metrics"))
    return {"method": method, "seed": run.seed, "points": curve_points(evidence.tallied(run), arm, spent)}


def spending(steps: Iterable[tuple[float, Iterable[float]]]) -> list[tuple[float, float]]:
    """Tokens sampled and seconds spent by every step, none by the first, from each one's tokens and seconds."""
    each = ((float(tokens), float(sum(seconds))) for tokens, seconds in steps)
    return list(accumulate(each, lambda a, b: (a[0] + b[0], a[1] + b[1]), initial=(0.0, 0.0)))


def curve_points(found: Mapping[Place, Tally], arm: str, spent: Sequence[tuple[float, float]]) -> list[CurvePoint]:
    """Dev accuracy of an arm at each of its evaluations; `spent` is that of `spending`."""
    return [
        {"step": place.step, "accuracy": tally.accuracy, "length": tally.tokens["answer"],
         "tokens": spent[place.step][0], "seconds": spent[place.step][1]}
        for place, tally in sorted(found.items(), key=lambda item: item[0])
        if (place.split, place.arm) == ("dev", arm) and tally.accuracy is not None and place.step < len(spent)
    ]  # fmt: skip


def flags(run: Run) -> list[str]:
    """What a run warned of while it trained."""
    return [str(flag) for row in read(run.folder, "metrics") for flag in row.get("flags", [])]


def problems(recipe: Recipe, asked: Asked) -> dict[str, Problem]:
    """Every problem of a recipe's data by id. Golds are not checked again. Raises what reading the data raises, and
    UsageError where the data have changed since the test problems were `asked`."""
    values = resolved(recipe)
    parts = {key: values[key] for key in ("data", "split")}
    drawn = recipe.seed if "reasoning_gym" in json.dumps(parts["data"]) else 0
    key = json.dumps([parts, drawn, recipe.verifier.type])
    if key not in _known:
        journal = data.Journal()
        splits = data.load(recipe, None, journal)
        every = [*reversed(journal.pool), *journal.held_out, *chain.from_iterable(splits.by_name().values())]
        _known.clear()
        _known[key] = {problem.id: problem for problem in every}
    known = _known[key]
    if asked.digest not in (None, data.digest(known[name] for name in asked.ids if name in known)):
        raise UsageError("the test problems are no longer those that were asked", "put the data back as they were")
    return known


_known: dict[str, dict[str, Problem]] = {}
