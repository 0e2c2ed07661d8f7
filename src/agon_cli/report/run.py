"""A run folder as a document: what its logs say of it, before and after training and step by step."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from agon_cli.compare.arms import Measured, OneSeed
from agon_cli.compare.arms import document as arm_of
from agon_cli.compare.costs import answering, cost, training
from agon_cli.compare.evidence import curve_points, last_asked, problems, spending
from agon_cli.compare.rows import checked
from agon_cli.document import FORMAT, Arm, Cost, Curve, Line, RunDocument, Trace
from agon_cli.errors import AgonError, UsageError
from agon_cli.evaluate import best, direction
from agon_cli.manifest import read_manifest
from agon_cli.players import recipe_of
from agon_cli.recipe import Recipe, resolved
from agon_cli.report.examples import samples
from agon_cli.report.wording import interval, percent
from agon_cli.stats import interval as interval_of
from agon_cli.tally import Place, Tally, tallies
from agon_cli.types import Problem

Row = Mapping[str, Any]
UNITS: dict[str, Literal["share", "tokens", "reward"]] = {
    "reward": "reward", "accuracy": "share", "length": "tokens", "truncated": "share", "fix": "share",
    "break": "share", "copy": "share",
}  # fmt: skip
"""What is drawn step by step, by its key in metrics.jsonl."""
MOST_POINTS = 400
"""Points of a line; a longer run is drawn by means of neighbouring steps."""


@dataclass(frozen=True)
class Reached:
    """How far a run has come: the steps of its first and last evaluation on the test split, the steps it has taken, and
    those its recipe wants, 0 where nothing is trained."""

    first: int
    last: int
    taken: int
    wanted: int

    @property
    def unfinished(self) -> bool:
        """Whether the test split is yet to be answered by the players as they will be."""
        return self.last < self.wanted

    @property
    def when(self) -> str:
        """When the last test figures were measured, in words."""
        if not self.wanted:
            return "without training"
        return "before training" if self.last == 0 else f"after {self.last} steps"

    @property
    def headings(self) -> dict[str, str]:
        """What the arms of each kind stand under."""
        now = self.when if self.unfinished or not self.wanted else "after training"
        now = now[0].upper() + now[1:]
        return {"method": now, "part": f"{now}, each alone", "control": "Before training"}


def document(run: Path) -> RunDocument:
    """The document of one run, finished or not. Raises UsageError, with file and line where there is one, for a run
    without an evaluation on the test split, for torn rows and for rows that lack a key or hold something else there."""
    recipe, manifest = recipe_of(run), read_manifest(run)
    found = tallies(checked(run, "evals"))
    steps = sorted({place.step for place in found if place.split == "test"})
    if not steps:
        raise UsageError(
            f"{run / 'evals.jsonl'}: no evaluation on the test split", "let `agon train` get as far as its first one"
        )
    metrics = list(map(_numbers, checked(run, "metrics")))
    reached = Reached(steps[0], steps[-1], _taken(metrics, steps[-1]), recipe.training_steps)
    first, last = reached.first, reached.last
    chosen, on_dev = _deployed(found, last)
    measured = _measured(found, last, recipe, chosen)
    arms = list(map(_arm, measured))
    if first != last:
        arms += map(_arm, _measured(found, first, recipe, chosen, first))
    verdict = _verdict(arms, chosen, reached)
    if reached.unfinished:
        verdict = [_unfinished(found, reached, chosen, on_dev), *verdict]
    known = _problems(run, recipe, manifest)
    return {
        "format": FORMAT, "title": f"{recipe.method.preset}, seed {recipe.seed}: one run",
        "command": shlex.join(str(word) for word in manifest.get("argv", [])), "kind": "run",
        "verdict": verdict, "notes": _notes(metrics, found), "arms": arms,
        "contrasts": [], "budgets": [], "curves": _curves(found, metrics, recipe.seed, chosen), "exchanges": [],
        "costs": _costs(run, measured, last, bool(metrics)),
        "samples": samples(run, recipe, chosen, [first, last], known),
        "gates": [], "recipe": resolved(recipe), "provenance": _provenance(manifest, recipe, found, last, metrics),
        "traces": list(_traces(metrics)), "headings": reached.headings,
    }  # fmt: skip


def _problems(run: Path, recipe: Recipe, manifest: Row) -> dict[str, Problem]:
    """The problems by id, where they are at hand: of the tiny world, or in files that are still as they were. The logs
    name problems and do not hold them."""
    if recipe.data.type not in ("tiny", "jsonl"):
        return {}
    with suppress(AgonError, OSError):
        return problems(recipe, last_asked(run, manifest)[1])
    return {}


def _taken(metrics: Sequence[Row], last: int) -> int:
    """Steps that have been taken, `last` at least."""
    return max([last, *(int(row["step"]) + 1 for row in metrics)])


def _deployed(found: Mapping[Place, Tally], last: int) -> tuple[str, int | None]:
    """The arm that answers, and the step of dev that chose it: of those tested last, the direction or, for one pass,
    the player that did best on dev when all of them were last there; the first, and None, where they never were."""
    test = {place.arm: tally for place, tally in found.items() if (place.step, place.split) == (last, "test")}
    candidates = [arm for arm, tally in test.items() if tally.mode == "cascade"] or list(test)
    steps = {place.step for place in found if place.split == "dev" and place.step >= last}
    whole = [step for step in steps if all(Place(step, "dev", arm) in found for arm in candidates)]
    if not whole:
        return candidates[0], None
    dev = [{"arm": arm, "accuracy": found[Place(max(whole), "dev", arm)].accuracy} for arm in candidates]
    return best(dev), max(whole)


def _measured(
    found: Mapping[Place, Tally], step: int, recipe: Recipe, chosen: str, before: int | None = None
) -> list[Measured]:
    """Every arm of the test split at a step, the one that is deployed first; `before` names the step in their names."""
    arms = []
    for place, tally in sorted(found.items(), key=lambda item: (item[0].arm != chosen, item[1].mode != "cascade")):
        if (place.step, place.split) != (step, "test"):
            continue
        name, cascade = place.arm, tally.mode == "cascade"
        arms.append(Measured(
            name=name if before is None else f"{name}, step {before}",
            label=_words(name, cascade, name == chosen and before is None),
            kind="control" if before is not None else "method" if cascade or name == chosen else "part",
            method=name,
            deploy="cascade" if cascade else "single",
            trained=step > 0 and recipe.method.players != "base",
            seeds={recipe.seed: OneSeed(name, tally)},
        ))  # fmt: skip
    return arms


def _arm(measured: Measured) -> Arm:
    (one,) = measured.seeds.values()
    low, high = interval_of(list(one.tally.scores.values()))
    return arm_of(measured, {"value": one.tally.accuracy, "low": low, "high": high})


def _costs(run: Path, measured: Sequence[Measured], step: int, begun: bool) -> list[Cost]:
    """What every arm took; `begun` says whether there is training to tell of, that of all steps so far."""
    spent = [training(run)]
    found = []
    for arm in measured:
        (one,) = arm.seeds.values()
        answered = answering(run, one.arm, step)
        found.append(cost(replace(arm, trained=begun), spent, [] if answered is None else [answered]))
    return found


def _words(name: str, cascade: bool, chosen: bool) -> str:
    if not cascade:
        return f"{name} alone, one pass"
    pair = direction(name)
    return f"{pair.drafter} drafts, {pair.challenger} answers" + ("; chosen on dev" if chosen else "")


def _verdict(arms: Sequence[Arm], chosen: str, reached: Reached) -> list[str]:
    after = next(arm for arm in arms if arm["method"] == chosen and arm["kind"] == "method")
    before = next((arm for arm in arms if arm["method"] == chosen and arm["kind"] == "control"), None)
    items = after["seeds"][0]["items"]
    told = [f"{chosen} answers {_figure(after)} of {items} test problems {reached.when}"]
    told[0] += f"; it was {_figure(before)} at step {reached.first}." if before else "."
    rates, tokens = after["rates"], after["tokens"]
    then = f"At step {reached.last}, it" if reached.unfinished else "It"
    if rates:
        fix, broken = (f"{percent(rates[name], 0)} %" for name in ("fix", "break"))
        told.append(f"{then} answers {fix} of the wrong drafts right, and {broken} of the right ones wrong.")
    told.append(f"A problem takes {tokens['generated']:.0f} generated tokens.")
    return told


def _unfinished(found: Mapping[Place, Tally], reached: Reached, chosen: str, on_dev: int | None) -> str:
    """How far a run has come, and what dev, which is looked at in between, last said of it."""
    told = f"Not finished: step {reached.taken} of {reached.wanted}; test figures are of step {reached.last}"
    if on_dev is None or on_dev == reached.last:
        return f"{told}."
    tally = found[Place(on_dev, "dev", chosen)]
    low, high = interval_of(list(tally.scores.values()))
    figure = f"{percent(tally.accuracy)} % {interval(low, high)}"
    return f"{told}, and on dev {chosen} answers {figure} of {len(tally.right)} problems at step {on_dev}."


def _figure(arm: Arm) -> str:
    found = arm["accuracy"]
    return f"{percent(found['value'])} % {interval(found['low'], found['high'])}"


def _notes(metrics: Sequence[Row], found: Mapping[Place, Tally]) -> list[str]:
    notes = ["One run under one seed: another seed ends elsewhere. agon compare runs several and says how sure it is."]
    errors = sum(tally.errors for place, tally in found.items() if place.split == "test")
    if errors:
        notes.append(f"{errors} completions that the grader itself failed on are left out.")
    return notes + [f"Step {row['step']}: {flag}" for row in metrics for flag in row.get("flags", [])]


def _numbers(row: Row) -> Row:
    """Of a row of metrics what is used here."""
    streams = [
        (player, role, {key: values[role][key] for key in UNITS if key in values[role]})
        for player, values in row["players"].items()
        for role in ("draft", "challenge")
        if role in values
    ]
    return {"step": row["step"], "streams": streams, "tokens": row["tokens"]["sampled"],
            "seconds": sum(row["seconds"].values()), "flags": [str(flag) for flag in row.get("flags", [])]}  # fmt: skip


def _curves(found: Mapping[Place, Tally], metrics: Sequence[Row], seed: int, chosen: str) -> list[Curve]:
    """Dev accuracy of every arm, the deployed one first, with what training had spent by then."""
    arms = dict.fromkeys([chosen, *(place.arm for place in found if place.split == "dev")])
    spent = spending((row["tokens"], [row["seconds"]]) for row in metrics)
    curves: list[Curve] = [{"method": arm, "seed": seed, "points": curve_points(found, arm, spent)} for arm in arms]
    return [curve for curve in curves if len(curve["points"]) > 1]


def _traces(metrics: Sequence[Row]) -> Iterator[Trace]:
    """Every quantity that some stream has, stream by stream."""
    for name, unit in UNITS.items():
        lines: dict[tuple[str, str], list[tuple[int, float]]] = {}
        for row in metrics:
            for player, role, values in row["streams"]:
                if values.get(name) is not None:
                    lines.setdefault((player, role), []).append((row["step"], float(values[name])))
        if lines:
            yield {"name": name, "unit": unit, "lines": [_line(*key, points) for key, points in sorted(lines.items())]}


def _line(player: str, role: Any, points: Sequence[tuple[int, float]]) -> Line:
    size = -(-len(points) // MOST_POINTS)
    parts = [points[start : start + size] for start in range(0, len(points), size)]
    return {"player": player, "role": role, "steps": [part[-1][0] for part in parts],
            "values": [_mean(value for _, value in part) for part in parts]}  # fmt: skip


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)


def _provenance(
    manifest: Row, recipe: Recipe, found: Mapping[Place, Tally], last: int, metrics: Sequence[Row]
) -> dict[str, Any]:
    items = max(len(tally.right) for place, tally in found.items() if (place.step, place.split) == (last, "test"))
    held = {key: manifest[key] for key in ("versions", "hardware", "hashes", "started") if key in manifest}
    spent = {
        "steps": len(metrics),
        "tokens sampled": int(sum(row["tokens"] for row in metrics)),
        "seconds of steps": round(sum(row["seconds"] for row in metrics), 1),
    }
    return held | {"seeds": [recipe.seed], "split": "test", "items": items, "training": spent}
