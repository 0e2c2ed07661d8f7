"""What a reader must know of a comparison's limits, each in a sentence."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from agon_cli.compare import checks
from agon_cli.compare.arms import Measured
from agon_cli.compare.cells import Run
from agon_cli.compare.contrasts import equal_budget
from agon_cli.compare.evidence import Evidence, flags
from agon_cli.document import Contrast

_MOST_FLAGS = 12


def notes(
    evidence: Evidence, arms: Sequence[Measured], lead: Measured, found: Sequence[Contrast], left_out: int
) -> list[str]:
    """All of them, most important first."""
    return [
        *_how_much(arms, lead, found),
        *_unmatched(lead, found),
        *_intersection(left_out),
        *_directions(arms),
        *_seeds(arms, lead),
        *checks.parity(evidence.runs),
        *_unlike("base weights", _of_manifests(evidence, "hashes", "base.")),
        *_unlike("problems of the dev split", _of_manifests(evidence, "hashes", "data.dev")),
        *_unlike("versions", _of_manifests(evidence, "versions")),
        *_ungraded(arms),
        *_flagged(evidence.runs),
    ]


def _how_much(arms: Sequence[Measured], lead: Measured, found: Sequence[Contrast]) -> list[str]:
    said = []
    if len(lead.seeds) == 1:
        said.append(
            "One seed: intervals are over problems alone and say nothing of how another training run would end."
        )
    mine = [contrast for contrast in found if contrast["left"] == lead.name]
    if mine:
        telling = next((c for c in mine if c["right"] in ("coop", "grpo")), mine[0])
        points = 100 * telling["detectable"]
        said.append(
            f"With {telling['items']:,} problems and {_count(telling['seeds'], 'seed')} a true difference between "
            f"{telling['left']} and {telling['right']} below {points:.1f} points would often go unseen."
        )
    if len(found) > 1:
        said.append(f"p values are adjusted over all {len(found)} contrasts (Holm).")
    return said


def _unmatched(lead: Measured, found: Sequence[Contrast]) -> list[str]:
    mine = [c for c in found if c["left"] == lead.name and not c["right"].startswith(f"{lead.name} ")]
    bare = [c["right"] for c in mine if not equal_budget(c["budget_ratio"]) and c["matched"] is None]
    if not bare:
        return []
    return [
        f"{lead.name} generates over 10 % more or fewer tokens a problem than {', '.join(bare)}, and no arm spends as "
        "many on their players."
    ]


def _intersection(left_out: int) -> list[str]:
    return [
        f"{_count(left_out, 'problem')} that not all runs of a seed share are left out (--intersect); what a "
        "pair does during training is over all of its own."
    ] * (left_out > 0)


def _directions(arms: Sequence[Measured]) -> list[str]:
    if not any(one.directions for arm in arms for one in arm.seeds.values()):
        return []
    return ["Each seed's direction was chosen on its own dev split; the other one is reported beside it."]


def _seeds(arms: Sequence[Measured], lead: Measured) -> list[str]:
    """Arms with other seeds than the lead's."""
    return [
        f"{arm.name} has {_named(arm.seeds)}, {lead.name} {_named(lead.seeds)}: they are compared on those they share."
        for arm in arms
        if arm.kind == "method" and set(arm.seeds) != set(lead.seeds)
    ]


def _named(seeds: Any) -> str:
    return ("seed " if len(seeds) == 1 else "seeds ") + ", ".join(map(str, sorted(seeds)))


def _of_manifests(evidence: Evidence, part: str, prefix: str = "") -> list[tuple[Run, Any]]:
    """A part of every manifest. A hash is named by what it is of: players may have other names."""
    found = []
    for run in evidence.runs:
        held = evidence.manifests[run.name].get(part, {})
        values = {key: value for key, value in held.items() if key.startswith(prefix)}
        found.append((run, sorted(set(map(str, values.values()))) if part == "hashes" else values))
    return found


def _unlike(what: str, values: Sequence[tuple[Run, Any]]) -> list[str]:
    groups: dict[str, list[str]] = {}
    for run, value in values:
        groups.setdefault(json.dumps(value, sort_keys=True), []).append(run.name)
    if len(groups) < 2:
        return []
    first, *others = groups.values()
    return [f"Other {what} than {first[0]}: {', '.join(names)}." for names in others]


def _ungraded(arms: Sequence[Measured]) -> list[str]:
    return [
        f"{arm.name}: {_count(arm.grader_errors, 'completion')} left out because the grader itself failed."
        for arm in arms
        if arm.grader_errors
    ]


def _flagged(runs: Sequence[Run]) -> list[str]:
    """What runs warned of while they trained."""
    said = [f"{run.name} warned: {flag}." for run in runs for flag in flags(run)]
    more = [f"… and {len(said) - _MOST_FLAGS} more warnings: see `flags` in metrics.jsonl."]
    return said[:_MOST_FLAGS] + (more if len(said) > _MOST_FLAGS else [])


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
