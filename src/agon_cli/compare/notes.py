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
from agon_cli.document import Contrast, Exchange

_MOST_FLAGS = 12
LEAKING = 0.25
"""Share of summaries that give the answer away from which on it is said."""


def notes(
    evidence: Evidence,
    arms: Sequence[Measured],
    lead: Measured,
    found: Sequence[Contrast],
    exchanges: Sequence[Exchange],
    left_out: int,
) -> list[str]:
    """All of them, most important first."""
    return [
        *_how_much(arms, lead, found),
        *_unmatched(lead, found),
        *_leaking(exchanges),
        *_intersection(left_out),
        *_directions(arms),
        *_seeds(arms, lead),
        *checks.parity(evidence.runs),
        *_unlike("base weights", _of_manifests(evidence, "hashes", "base.")),
        *_trained_on(evidence),
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
    if len(lead.seeds) == 2:
        said.append(
            "Two seeds: what differs between training runs is estimated from one difference (t with one degree of "
            "freedom), so intervals may be very wide, or narrow by luck; three seeds or more tell much more."
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
        said.append(_adjusted(len(mine), len(found) - len(mine), lead))
    return said


def _adjusted(mine: int, others: int, lead: Measured) -> str:
    if not (mine and others):
        return f"p values are adjusted over all {mine + others} contrasts (Holm)."
    return (
        f"p values are adjusted (Holm) in two families: the {_count(mine, 'contrast')} of {lead.name}, which the claim "
        f"rests on, and the {_count(others, 'other')}, which describe."
    )


def _unmatched(lead: Measured, found: Sequence[Contrast]) -> list[str]:
    mine = [c for c in found if c["left"] == lead.name and not c["right"].startswith(f"{lead.name} ")]
    bare = [_apart(c) for c in mine if not equal_budget(c["budget_ratio"]) and c["matched"] is None]
    if not bare:
        return []
    budgets = "the same budget" if len(bare) == 1 else "their players and the same budget"
    return [f"{lead.name} generates {', '.join(bare)}; no arm was measured at {budgets}."]


def _apart(contrast: Contrast) -> str:
    ratio, right = contrast["budget_ratio"], contrast["right"]
    if ratio is None:
        return f"tokens where {right} generates none"
    return f"{100 * abs(ratio - 1):,.0f} % {'more' if ratio > 1 else 'fewer'} tokens a problem than {right}"


def _leaking(exchanges: Sequence[Exchange]) -> list[str]:
    """Pairs whose solver could copy the answer off the summary."""
    found = [(one["method"], leak) for one in exchanges if (leak := one["end"]["leak"]) is not None and leak > LEAKING]
    if not found:
        return []
    shares = ", ".join(f"{name} {100 * leak:.0f} %" for name, leak in found)
    return [
        f"Summaries that the answer can be read off, at the end of training: {shares}. A gain may then partly be "
        "answers copied from drafts; the copy rates and the placebos tell more."
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


def _trained_on(evidence: Evidence) -> list[str]:
    """Runs under one seed that were trained on other problems."""
    held = [(run, value) for run, value in _of_manifests(evidence, "hashes", "data.train") if run.steps]
    seeds = dict.fromkeys(run.seed for run, _ in held)
    mine = ([(run, value) for run, value in held if run.seed == seed] for seed in seeds)
    return [said for values in mine for said in _unlike("problems of the training split", values)]


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
