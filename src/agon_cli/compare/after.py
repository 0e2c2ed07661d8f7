"""Arms that need models after training: which run owes which, and what they come to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agon_cli.compare.arms import Measured
from agon_cli.compare.cells import Cell, Method, Run, by_cell
from agon_cli.compare.evidence import Evidence
from agon_cli.compare.workers import saved
from agon_cli.document import Budget, Estimate

if TYPE_CHECKING:
    from agon_cli.compare.extras import What

_SINGLES = ("zero_shot", "grpo")
_ALONG = ("vote", "proposers")
"""Extras that are a whole family of arms along what they spend."""


@dataclass(frozen=True)
class After:
    """Further arms, families of them along tokens, and what is missing."""

    arms: list[Measured]
    budgets: list[Budget]
    notes: list[str]


def further(
    evidence: Evidence, lead: Measured, out: Path, over: Callable[[Measured], Estimate], emit: Callable[..., None]
) -> After:
    """Evaluate what is not there yet, each run under the lead's seeds that it has. `over` gives an arm's estimate.

    A trained run whose last checkpoint is gone or torn can be put on no stage: a note says so in place of its arms.
    """
    from agon_cli.compare import extras  # whatever needs no models needs no torch either

    found = After([], [], [])
    for cell, runs in by_cell(evidence.runs):
        mine = {run.seed: run for run in runs if run.seed in lead.seeds}
        whats = _owed(cell, runs[0], lead)
        if not (mine and whats):
            continue
        bare = [run.name for run in mine.values() if run.steps and saved(run.folder) != run.steps]
        if bare:
            found.notes.append(
                f"{', '.join(bare)}: the last checkpoint is gone or torn, so {', '.join(whats)} could not be measured."
            )
            continue
        rows = {seed: _rows(run, lead, whats, out, emit) for seed, run in mine.items()}
        for what in whats:
            here = {seed: evidence.only_kept(of[what], seed) for seed, of in rows.items()}
            name = _whose(cell, what)
            found.arms.append(extras.measured(here, what, runs[0].recipe.method.preset, name))
            if what in _ALONG:
                found.budgets.append(extras.family(here, what, name, over))
    return found


def _owed(cell: Cell, run: Run, lead: Measured) -> list[What]:
    """Equal tokens for those that the lead, a cascade, is set against; placebos for the lead itself."""
    if lead.deploy != "cascade":
        return []
    preset = run.recipe.method.preset
    whats: list[What] = []
    if preset in ("zero_shot", "moa", "grpo", "grpo_two_pass"):
        whats.append("vote")
    if preset == "moa":
        whats.append("proposers")
    if preset in ("grpo", "grpo_two_pass") and run.recipe.data.type == "tiny":
        whats.append("claim")
    if any(method.name == lead.name for method in cell.methods) and run.recipe.method.exchange in ("rival", "shuffled"):
        whats += ["shuffled", "empty"]
    return whats


def _whose(cell: Cell, what: What) -> str:
    """The method of a cell that an extra's arm is called after: for single samples the one that is one pass, where the
    cell answers for it."""
    singles: Sequence[Method] = [method for method in cell.methods if method.preset in _SINGLES]
    return singles[0].name if singles and what in ("vote", "claim") else cell.methods[-1].name


def _rows(
    run: Run, lead: Measured, whats: Sequence[What], out: Path, emit: Callable[..., None]
) -> Mapping[What, list[dict[str, Any]]]:
    from agon_cli.compare.extras import Extra, rows

    budget = lead.seeds[run.seed].tally.tokens["generated"]
    wanted = [Extra(what, budget if what in _ALONG else 0.0) for what in whats]
    path = out / "extras" / f"{run.cell.name}-seed-{run.seed}.jsonl"
    return rows(run.folder, path, wanted, lambda what: emit("extra", name=run.name, called=run.called, what=what))
