"""Problems of a run's test split with what was written for them, as samples of its document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from agon_cli.compare.arms import Row
from agon_cli.compare.samples import chosen, cut, first_samples, outcome, stages
from agon_cli.document import Sample, Stage
from agon_cli.evaluate import direction
from agon_cli.recipe import Recipe
from agon_cli.runlog import read
from agon_cli.types import Problem

Held = dict[tuple[int, str], dict[str, Row]]
"""Rows of the first sample by step and arm, then by problem."""


def samples(
    run: Path, recipe: Recipe, deployed: str, steps: Sequence[int], problems: Mapping[str, Problem]
) -> list[Sample]:
    """A dozen problems by what became of them under the deployed arm at the last of `steps`, beside the other arms that
    answer then, and the same arm at the first. The log is read twice, so that few texts are held at once."""
    first, last = steps[0], steps[-1]
    now = (row for row in first_samples(read(run, "evals"), last) if row["arm"] == deployed)
    picked = chosen({row["problem_id"]: outcome(row) for row in now})
    held: Held = {}
    for step in sorted({first, last}):
        for row in first_samples(read(run, "evals"), step):
            if row["problem_id"] in picked:
                held.setdefault((step, row["arm"]), {})[row["problem_id"]] = row
    cascade = ">" in deployed
    beside = [arm for step, arm in held if step == last and (">" in arm) == cascade and arm != deployed]
    shown = [(deployed, last, deployed), *((arm, last, arm) for arm in beside)]
    if first != last:
        shown.append((f"{deployed}, step {first}", first, deployed))
    withheld = recipe.method.exchange == "shuffled"
    return [_sample(name, shown, held, problems.get(name), recipe.seed, withheld) for name in picked]


def _sample(
    name: str, shown: Sequence[tuple[str, int, str]], held: Held, problem: Problem | None, seed: int, withheld: bool
) -> Sample:
    arms: dict[str, dict[str, Stage]] = {}
    outcomes = {}
    for label, step, arm in shown:
        row = held.get((step, arm), {}).get(name)
        if row is None:
            continue
        draft = held.get((step, direction(arm).drafter), {}).get(name) if ">" in arm else None
        arms[label] = stages(row, draft, withheld)
        outcomes[label] = outcome(row)
    question, gold = (problem.question, problem.gold) if problem is not None else ("", "")
    return {"problem_id": name, "question": cut(question), "gold": cut(gold), "seed": seed, "arms": arms,
            "outcome": outcomes}  # fmt: skip
