"""Arms that need models after training: votes and proposers at a cascade's budget, placebos for what is read, the tiny
world's free check. Evaluated once from a run's newest checkpoint, and kept as evaluation rows beside the runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from agon_cli.compare.arms import SINGLE_OF, Evaluated, Kind, Measured, gather
from agon_cli.compare.folder import replace
from agon_cli.compare.spending import MOST
from agon_cli.compare.stage import PLAYED, Stage, on_stage
from agon_cli.document import Budget, Estimate
from agon_cli.manifest import read_manifest
from agon_cli.metrics import check_grading
from agon_cli.players import recipe_of
from agon_cli.recipe import resolved
from agon_cli.recipe.presets import PRESETS
from agon_cli.runlog import read
from agon_cli.tally import tallies

Row = dict[str, Any]
What = Literal["vote", "proposers", "shuffled", "empty", "claim"]
FORMAT = 2
"""Of the rows and of how they are drawn; rows of another are made again."""
_ANSWER = ("problem_id", "arm", "sample", "text", "tokens", "verdict")


@dataclass(frozen=True)
class Extra:
    """An arm to evaluate. `vote` and `proposers` spend `budget`, generated tokens a problem."""

    what: What
    budget: float = 0.0


def rows(
    run: Path,
    path: Path,
    wanted: Sequence[Extra],
    tell: Callable[[str], None],
    staged: Callable[[Path, Evaluated], AbstractContextManager[Stage]] = on_stage,
) -> dict[What, list[Row]]:
    """The rows of every extra wanted of a run, by what it is. Those that `path` holds under the same key (the run's
    recipe, inputs, step and last answers, the direction, the budget, FORMAT) are read; the others are evaluated and
    written there, each as soon as it is whole.

    `tell` hears what is being evaluated. Raises UsageError for a run that is not finished or whose inputs changed,
    GradingError where the verifier fails too often, ResourceError when the disk is full.
    """
    recipe = recipe_of(run)
    evaluated = Evaluated(tallies(read(run, "evals")), str(run), recipe.method.deploy)
    made_of = _digest([resolved(recipe), read_manifest(run)["hashes"]])
    samples = evaluated.deployed().tally.samples
    common = [FORMAT, made_of, evaluated.step, evaluated.chosen, samples, _answers(run, evaluated.step)]
    keys = {extra.what: _digest([*common, extra.what, _rounded(extra.budget)]) for extra in wanted}
    held = _held(path)
    missing = [extra for extra in wanted if held.get(extra.what, ("", []))[0] != keys[extra.what]]
    if missing:
        with staged(run, evaluated) as stage:
            for extra in missing:
                tell(extra.what)
                made = PLAYED[extra.what](stage, _rounded(extra.budget))
                check_grading(sum(row["verdict"] == "grader_error" for row in made), len(made))
                held[extra.what] = keys[extra.what], [{"extra": extra.what} | row for row in made]
                _write(path, held)
    return {extra.what: held[extra.what][1] for extra in wanted}


def _answers(run: Path, step: int) -> str:
    """A digest of what a run answered on the test split at a step, which tells its players from those of another run of
    the same recipe."""
    digest = hashlib.sha256()
    for row in read(run, "evals"):
        if (row["split"], row["step"]) == ("test", step):
            digest.update(json.dumps([row[key] for key in _ANSWER]).encode())
    return digest.hexdigest()[:16]


def _rounded(budget: float) -> float:
    """What is left of a budget once sums in another order no longer tell."""
    return float(f"{budget:.6g}")


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


Held = dict[What, tuple[str, list[Row]]]


def _held(path: Path) -> Held:
    """The key and rows of every extra that a file holds; nothing of one that is torn, edited or not there."""
    with suppress(OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        with path.open("rb") as file:
            header, *rest = [json.loads(line) for line in file]
        held: Held = {what: (entry["key"], []) for what, entry in header["extras"].items()}
        for row in rest:
            held[row["extra"]][1].append(row)
        if header == _header(held):
            return held
    return {}


def _header(held: Held) -> Row:
    entries = {what: {"key": held[what][0], "rows": _digest(held[what][1])} for what in sorted(held)}
    return {"format": FORMAT, "extras": entries}


def _write(path: Path, held: Held) -> None:
    """Write all in one step: a kill leaves the old file or the new one."""
    rows = [_header(held), *(row for what in sorted(held) for row in held[what][1])]
    replace(path, (json.dumps(row, separators=(",", ":")) + "\n" for row in rows))


def measured(runs: Mapping[int, Sequence[Row]], what: What, method: str, name: str) -> Measured:
    """The arm that an extra's rows, by seed, come to. `method` is the preset of its runs, `name` that of the method
    which the arm is called after. What spends a budget tells how many samples a problem that took: `grpo vote@1.9`.
    """
    method = SINGLE_OF.get(method, method) if what in ("vote", "claim") else method
    kind: Kind = "control" if what in ("shuffled", "empty") else "equal_tokens"
    # A vote's single samples and its points along k have other names than its arm; a placebo's rows are all its arm.
    mine = {seed: [row for row in rows if kind == "control" or _is(row, what, what)] for seed, rows in runs.items()}
    spends = what in ("vote", "proposers")
    ks = [row["k"] for rows in mine.values() for row in rows] if spends else []
    k = f"{sum(ks) / len(ks):.1f}".removesuffix(".0") if ks else ""
    words = {
        "vote": f"majority of {k} one-pass samples of {name}",
        "proposers": f"{name} reading {k} drafts at once",
        "shuffled": f"{name}, its solver shown drafts of other problems",
        "empty": f"{name}, its solver shown nothing",
        "claim": f"two one-pass samples of {name}, the one kept that claims to have checked its answer",
    }
    deploy: Any = "cascade" if kind == "control" else what
    title = f"{name} {what}" + (f"@{k}" if spends else "")
    return gather(mine, title, words[what], kind, method, deploy, PRESETS[method]["players"] != "base")


def _is(row: Row, what: What, arm: str) -> bool:
    """Whether a row is of an arm of this kind, and not of a player who bears the arm's name."""
    return (row["mode"], row["arm"]) == (what, arm)


def family(runs: Mapping[int, Sequence[Row]], what: What, name: str, over: Callable[[Measured], Estimate]) -> Budget:
    """Accuracy along k for every whole k that all seeds have. `name` is that of the method which the arms are called
    after; `over` gives an arm's estimate over seeds and items."""
    words = {"vote": f"majority votes of {name}", "proposers": f"{name} with more proposers"}
    points = []
    for k in range(1, MOST + 1):
        mine = {seed: [row for row in rows if _is(row, what, f"{what}@{k}")] for seed, rows in runs.items()}
        if not (mine and all(mine.values())):
            break
        arm = gather(mine, f"{name} {what}@{k}", "", "equal_tokens", name, "single", True)
        estimate = over(arm)
        points.append({
            "k": float(k), "tokens": arm.tokens["generated"], "accuracy": estimate["value"] or 0.0,
            "low": estimate["low"], "high": estimate["high"],
        })  # fmt: skip
    return {"name": f"{name} {what}", "label": words[what], "points": points}
