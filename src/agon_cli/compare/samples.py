"""Test problems side by side: the same ones for every method, chosen by a hash so that each kind of outcome appears."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256

from agon_cli.compare.arms import Measured, Row
from agon_cli.compare.cells import Run
from agon_cli.compare.evidence import Evidence
from agon_cli.document import Sample, Stage
from agon_cli.evaluate import direction
from agon_cli.types import Problem

QUOTAS = {"fix": 4, "break": 3, "right": 2, "wrong": 3}
"""How many problems of each outcome of the lead."""
LONGEST = 4000
"""Characters of a text that are shown."""


def samples(
    evidence: Evidence,
    lead: Measured,
    others: Sequence[Measured],
    runs: Mapping[str, Mapping[int, Run]],
    problems: Mapping[str, Problem],
) -> list[Sample]:
    """Problems under the lead's first seed. `others` are shown beside it where they have that seed; `runs` holds the
    runs of each method by name and seed."""
    seed = min(lead.seeds)
    stages: dict[str, dict[str, dict[str, Stage]]] = {}
    for arm in [lead, *others]:
        if seed in arm.seeds and seed in runs.get(arm.name, {}):
            stages[arm.name] = _stages(evidence, runs[arm.name][seed], arm.seeds[seed].arm)
    outcomes = {name: {one: _outcome(found) for one, found in of.items()} for name, of in stages.items()}
    return [
        {
            "problem_id": name, "question": _cut(problems[name].question), "gold": _cut(problems[name].gold),
            "seed": seed, "arms": {arm: of[name] for arm, of in stages.items() if name in of},
            "outcome": {arm: of[name] for arm, of in outcomes.items() if name in of},
        }
        for name in _chosen({name: one for name, one in outcomes[lead.name].items() if name in problems})
    ]  # fmt: skip


def _stages(evidence: Evidence, run: Run, arm: str) -> dict[str, dict[str, Stage]]:
    """By problem, what an arm wrote in its first sample: `final`, and for a cascade `draft`."""
    cascade = ">" in arm
    parts = {arm: "final"} | ({direction(arm).drafter: "draft"} if cascade else {})
    found: dict[str, dict[str, Stage]] = {}
    for row in evidence.rows(run):
        here = (row["split"], row["step"], row["sample"]) == ("test", run.steps, 0)
        if here and row["arm"] in parts:
            found.setdefault(row["problem_id"], {})[parts[row["arm"]]] = _stage(row)
    return {name: part for name, part in found.items() if len(part) == len(parts)}


def _stage(row: Row) -> Stage:
    summary, extracted = row.get("summary"), row.get("extracted")
    return {
        "player": row["player"], "text": _cut(row["text"]),
        "summary": None if summary is None else _cut(str(summary)), "verdict": row["verdict"],
        "extracted": None if extracted is None else _cut(str(extracted)), "tokens": row["tokens"],
    }  # fmt: skip


def _outcome(stages: Mapping[str, Stage]) -> str:
    right = stages["final"]["verdict"] == "correct"
    before = stages.get("draft", stages["final"])["verdict"] == "correct"
    return ("right" if before else "fix") if right else ("break" if before else "wrong")


def _chosen(outcomes: Mapping[str, str]) -> list[str]:
    """As many of each outcome as there is room for, then whatever comes next, in the order of the ids' hashes."""
    order = sorted(outcomes, key=lambda name: sha256(name.encode("utf-8", "surrogatepass")).digest())
    taken = [name for kind, most in QUOTAS.items() for name in [n for n in order if outcomes[n] == kind][:most]]
    rest = [name for name in order if name not in taken]
    taken += rest[: sum(QUOTAS.values()) - len(taken)]
    kinds = list(QUOTAS)
    return sorted(taken, key=lambda name: (kinds.index(outcomes[name]), order.index(name)))


def _cut(text: str) -> str:
    """A text whole, or its first characters and how many more there are."""
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}… ({len(text) - LONGEST:,} more characters)"
