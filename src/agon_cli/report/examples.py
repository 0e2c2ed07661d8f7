"""Problems of a run's test split with what was written for them, as samples of its document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agon_cli.document import Sample, Stage
from agon_cli.evaluate import direction
from agon_cli.recipe import Recipe
from agon_cli.runlog import read
from agon_cli.types import Problem

Row = Mapping[str, Any]
Held = dict[tuple[int, str], dict[str, Row]]
"""Rows of the first sample by step and arm, then by problem."""
QUOTAS = {"fix": 4, "break": 3, "right": 2, "wrong": 3}
"""How many problems of each outcome, where there are as many."""
LONGEST = 4000
"""Characters of a text that are shown."""


def samples(
    run: Path, recipe: Recipe, chosen: str, steps: Sequence[int], problems: Mapping[str, Problem]
) -> list[Sample]:
    """A dozen problems by what became of them under the deployed arm at the last of `steps`, beside the other arms that
    answer then, and the same arm at the first. The log is read twice, so that few texts are held at once."""
    first, last = steps[0], steps[-1]
    verdicts = {row["problem_id"]: _outcome(row) for row in _first(run, last) if row["arm"] == chosen}
    picked = _picked(verdicts)
    held: Held = {}
    for step in sorted({first, last}):
        for row in _first(run, step):
            if row["problem_id"] in picked:
                held.setdefault((step, row["arm"]), {})[row["problem_id"]] = row
    cascade = ">" in chosen
    beside = [arm for step, arm in held if step == last and (">" in arm) == cascade and arm != chosen]
    shown = [(chosen, last, chosen), *((arm, last, arm) for arm in beside)]
    if first != last:
        shown.append((f"{chosen}, step {first}", first, chosen))
    withheld = recipe.method.exchange == "shuffled"
    return [_sample(name, shown, held, problems.get(name), recipe.seed, withheld) for name in picked]


def _first(run: Path, step: int) -> Any:
    """The rows of a step's evaluation on the test split that are of a problem's first sample."""
    return (row for row in read(run, "evals") if (row["split"], row["step"], row["sample"]) == ("test", step, 0))


def _outcome(row: Row) -> str:
    right = row["verdict"] == "correct"
    if "draft_verdict" not in row:
        return "right" if right else "wrong"
    before = row["draft_verdict"] == "correct"
    return ("right" if before else "fix") if right else ("break" if before else "wrong")


def _picked(outcomes: Mapping[str, str]) -> list[str]:
    """Problems in the order of the log: of each outcome its quota, then what comes next while there is room."""
    taken = [name for kind, most in QUOTAS.items() for name in [n for n in outcomes if outcomes[n] == kind][:most]]
    rest = [name for name in outcomes if name not in set(taken)]
    return taken + rest[: sum(QUOTAS.values()) - len(taken)]


def _sample(
    name: str, shown: Sequence[tuple[str, int, str]], held: Held, problem: Problem | None, seed: int, withheld: bool
) -> Sample:
    arms: dict[str, dict[str, Stage]] = {}
    outcome = {}
    for label, step, arm in shown:
        row = held.get((step, arm), {}).get(name)
        if row is None:
            continue
        arms[label] = {}
        draft = held.get((step, direction(arm).drafter), {}).get(name) if ">" in arm else None
        if draft is not None:
            # What was read is the draft's own summary, but for the control, which reads another problem's.
            read_it = bool(row["read"]) and not withheld
            arms[label]["draft"] = _stage(draft) if read_it else {**_stage(draft), "summary": None}
        arms[label]["final"] = _stage(row)
        outcome[label] = _outcome(row)
    question, gold = (problem.question, problem.gold) if problem is not None else ("", "")
    return {"problem_id": name, "question": _cut(question), "gold": _cut(gold), "seed": seed, "arms": arms,
            "outcome": outcome}  # fmt: skip


def _stage(row: Row) -> Stage:
    summary, extracted = row["summary"], row["extracted"]
    return {
        "player": str(row["player"]), "text": _cut(row["text"]),
        "summary": None if summary is None else _cut(summary), "verdict": str(row["verdict"]),
        "extracted": None if extracted is None else _cut(extracted), "tokens": int(row["tokens"]),
    }  # fmt: skip


def _cut(text: str) -> str:
    """A text whole, or its first characters and how many more there are."""
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}… ({len(text) - LONGEST:,} more characters)"
