"""Test problems side by side: the same ones for every method, chosen by a hash so that each kind of outcome appears."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256

from agon_cli.compare.arms import Measured, Row
from agon_cli.compare.cells import Run
from agon_cli.compare.evidence import Evidence
from agon_cli.document import Sample, Stage
from agon_cli.evaluate import direction
from agon_cli.types import Problem

QUOTAS = {"fix": 4, "break": 3, "right": 2, "wrong": 3}
"""How many problems of each outcome, where there are as many."""
LONGEST = 4000
"""Characters of a text that are shown."""


def samples(
    evidence: Evidence,
    lead: Measured,
    others: Sequence[Measured],
    runs: Mapping[str, Mapping[int, Run]],
    problems: Mapping[str, Problem],
) -> list[Sample]:
    """A dozen problems under the lead's first seed, with what every method wrote and made of them. Problems that are
    not among `problems` are left out. The lead's log is read twice, so that few texts are held at once."""
    seed = min(lead.seeds)
    arms = {arm.name: arm for arm in [lead, *others] if seed in arm.seeds and seed in runs.get(arm.name, {})}
    mine, run = lead.seeds[seed].arm, runs[lead.name][seed]
    outcomes = {
        row["problem_id"]: outcome(row)
        for row in first_samples(evidence.rows(run), run.steps)
        if row["arm"] == mine and row["problem_id"] in problems
    }
    order = sorted(outcomes, key=lambda name: sha256(name.encode("utf-8", "surrogatepass")).digest())
    picked = chosen({name: outcomes[name] for name in order})
    told = {name: _told(evidence, runs[name][seed], arm.seeds[seed].arm, picked) for name, arm in arms.items()}
    return [
        {
            "problem_id": name, "question": cut(problems[name].question), "gold": cut(problems[name].gold),
            "seed": seed, "arms": {arm: of[name][0] for arm, of in told.items() if name in of},
            "outcome": {arm: of[name][1] for arm, of in told.items() if name in of},
        }
        for name in picked
    ]  # fmt: skip


def _told(evidence: Evidence, run: Run, arm: str, picked: Sequence[str]) -> dict[str, tuple[dict[str, Stage], str]]:
    """By problem, what an arm wrote and what became of it."""
    drafter = direction(arm).drafter if ">" in arm else ""
    drafts, finals = dict[str, Row](), dict[str, Row]()
    for row in first_samples(evidence.rows(run), run.steps):
        if row["problem_id"] in picked and row["arm"] in (arm, drafter):
            (finals if row["arm"] == arm else drafts)[row["problem_id"]] = row
    withheld = run.recipe.method.exchange == "shuffled"
    return {name: (stages(row, drafts.get(name), withheld), outcome(row)) for name, row in finals.items()}


# --- what the page of a run shows in the same way ---------------------------------------------------------------------


def first_samples(rows: Iterable[Row], step: int) -> Iterator[Row]:
    """Of evaluation rows those of a problem's first sample on the test split at a step, as far as the grader did not
    fail on the answer or its draft: what became of those nobody knows."""
    mine = (row for row in rows if (row["split"], row["step"], row["sample"]) == ("test", step, 0))
    return (row for row in mine if "grader_error" not in (row["verdict"], row.get("draft_verdict")))


def outcome(row: Row) -> str:
    """What became of a draft under an arm, `fix`, `break`, `right` or `wrong`; of an answer alone one of the latter."""
    right = row["verdict"] == "correct"
    before = row["draft_verdict"] == "correct" if "draft_verdict" in row else right
    return ("right" if before else "fix") if right else ("break" if before else "wrong")


def chosen(outcomes: Mapping[str, str]) -> list[str]:
    """Of problems in their order as many of each outcome as there is room for, then whatever comes next; by outcome."""
    taken = [name for kind, most in QUOTAS.items() for name in [n for n in outcomes if outcomes[n] == kind][:most]]
    rest = [name for name in outcomes if name not in set(taken)]
    taken += rest[: sum(QUOTAS.values()) - len(taken)]
    kinds, places = list(QUOTAS), {name: place for place, name in enumerate(outcomes)}
    return sorted(taken, key=lambda name: (kinds.index(outcomes[name]), places[name]))


def stages(final: Row, draft: Row | None, withheld: bool) -> dict[str, Stage]:
    """`draft`, where there is one, and `final`. A draft's summary is told where it was read: not where the solver was
    shown none, and not where it was `withheld`, as from the control that reads another problem's."""
    if draft is None:
        return {"final": _stage(final)}
    told = _stage(draft)
    return {"draft": told if final["read"] and not withheld else {**told, "summary": None}, "final": _stage(final)}


def _stage(row: Row) -> Stage:
    summary, extracted = row.get("summary"), row.get("extracted")
    return {
        "player": row["player"], "text": cut(row["text"]), "summary": None if summary is None else cut(summary),
        "verdict": row["verdict"], "extracted": None if extracted is None else cut(extracted), "tokens": row["tokens"],
    }  # fmt: skip


def cut(text: str) -> str:
    """A text whole, or its first characters and how many more there are."""
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}… ({len(text) - LONGEST:,} more characters)"
