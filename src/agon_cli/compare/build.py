"""The document of a comparison, put together from runs that are there. Nothing in it depends on the time of day, on
where the comparison folder lies, or on the order in which things were done."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agon_cli.compare import after, arms, notes
from agon_cli.compare.arms import Measured
from agon_cli.compare.asked import Asked
from agon_cli.compare.cells import Method, Run
from agon_cli.compare.contrasts import contrasts, lead_of, verdict
from agon_cli.compare.costs import Answered, Spent, answering, cost, training
from agon_cli.compare.evidence import Evidence, curve, problems
from agon_cli.compare.exchange import exchange
from agon_cli.compare.samples import samples
from agon_cli.document import FORMAT, Cost, Curve, Document, Estimate, Exchange, Gate, Sample
from agon_cli.errors import AgonError
from agon_cli.recipe import resolved
from agon_cli.stats import gate, over_seeds_and_items

Emit = Callable[..., None]
Runs = dict[str, dict[int, Run]]


def build(
    evidence: Evidence,
    out: Path,
    title: str,
    asked: Asked,
    record: Mapping[str, Any],
    left_out: int,
    emit: Emit,
) -> Document:
    """The whole document. Arms that need models are evaluated where they are missing, unless none are asked for.

    `record` is what the document remembers of what was asked; `left_out` counts problems that not all runs share.
    Raises UsageError for rows that do not suffice, for unknown arms in a gate, and what evaluating raises.
    """
    found = evidence.methods()
    by_name: Runs = {method.name: runs for method, runs in found.items()}
    measured = [
        arm
        for method, runs in found.items()
        for arm in arms.collect(
            {seed: evidence.rows(run) for seed, run in runs.items()}, method.preset, method.deploy, method.name
        )
    ]
    lead = lead_of(measured)
    further = after.further(evidence, lead, out, _estimate, emit) if asked.extras else after.After([], [], [])
    measured += further.arms
    estimates = {arm.name: _estimate(arm) for arm in measured}
    compared, apart = contrasts(measured, lead)
    exchanges = _exchanges(found)
    limits = notes.notes(evidence, measured, lead, compared, exchanges, left_out)
    shown, unshown = _samples(evidence, measured, lead, by_name)
    without = [] if asked.extras else ["Arms of equal tokens and placebos are left out (--no-extras)."]
    return {
        "format": FORMAT,
        "title": title,
        "command": asked.told().command(),
        "kind": "comparison",
        "verdict": verdict(lead, estimates[lead.name], compared),
        "notes": [*limits, *apart, *further.notes, *without, *unshown, *record["said"]],
        "arms": [arms.document(arm, estimates[arm.name]) for arm in measured],
        "contrasts": compared,
        "budgets": further.budgets,
        "curves": _curves(evidence, measured, by_name),
        "exchanges": exchanges,
        "costs": _costs(evidence, measured, by_name),
        "samples": shown,
        "gates": _gates(asked.gates, measured),
        "recipe": _recipe(evidence.runs, lead),
        "provenance": _provenance(evidence) | {"asked": dict(record)},
    }  # fmt: skip


def _estimate(arm: Measured) -> Estimate:
    found = over_seeds_and_items(arm.scores)
    return {"value": found.value, "low": found.low, "high": found.high}


def _curves(evidence: Evidence, measured: Sequence[Measured], runs: Runs) -> list[Curve]:
    """Of every method that is trained, under every seed."""
    return [
        curve(evidence, runs[arm.name][seed], arm.name, one.arm)
        for arm in measured
        if arm.trained and arm.name in runs
        for seed, one in arm.seeds.items()
    ]


def _exchanges(found: Mapping[Method, Mapping[int, Run]]) -> list[Exchange]:
    """Of every method whose players have a rival."""
    return [
        exchange(method.name, method.deploy, {seed: run.folder for seed, run in runs.items()})
        for method, runs in found.items()
        if all(len(run.recipe.cast) > 1 for run in runs.values())
    ]


def _costs(evidence: Evidence, measured: Sequence[Measured], by_name: Runs) -> list[Cost]:
    """Of every arm; its players' training is that of the runs it was measured in. Only methods are
    timed."""
    spent: dict[str, Spent] = {}
    found = []
    for arm in measured:
        runs = [run for run in evidence.runs if run.seed in arm.seeds and _acts(run, arm)] if arm.trained else []
        for run in runs:
            spent.setdefault(run.name, training(run.folder))
        found.append(cost(arm, [spent[run.name] for run in runs], _answered(arm, by_name)))
    return found


def _answered(arm: Measured, by_name: Runs) -> list[Answered]:
    """What a method's own evaluations took."""
    runs = by_name.get(arm.name, {})
    timed = [answering(runs[seed].folder, one.arm, runs[seed].steps) for seed, one in arm.seeds.items() if seed in runs]
    return [one for one in timed if one is not None]


def _acts(run: Run, arm: Measured) -> bool:
    """Whether an arm is of a run's players: it is called after a method that the run answers for."""
    return any(arm.name == method.name or arm.name.startswith(f"{method.name} ") for method in run.cell.methods)


def _samples(
    evidence: Evidence, measured: Sequence[Measured], lead: Measured, runs: Runs
) -> tuple[list[Sample], list[str]]:
    """The samples, or why there are none."""
    first = runs[lead.name][min(lead.seeds)]
    try:
        known = problems(first.recipe, evidence.asked[first.name])
    except AgonError as error:
        return [], [f"No samples: the problems cannot be read ({error.message})."]
    others = [arm for arm in measured if arm.name in runs and arm is not lead]
    return samples(evidence, lead, others, runs, known), []


def _gates(texts: Sequence[str], measured: Sequence[Measured]) -> list[Gate]:
    scores = {arm.name: arm.scores for arm in measured}
    return [{"text": text, "met": met, "why": why} for text in texts for met, why in [gate(text, scores)]]


def _recipe(runs: Sequence[Run], lead: Measured) -> dict[str, Any]:
    """The recipe of the lead's first run, which is everyone's but for the method and the seed."""
    mine = [run for run in runs if any(method.name == lead.name for method in run.cell.methods)]
    return resolved(min(mine, key=lambda run: run.seed).recipe)


def _provenance(evidence: Evidence) -> dict[str, Any]:
    manifests = evidence.manifests
    sizes = sorted({len(asked.ids) for asked in evidence.asked.values()})
    kept = evidence.kept
    return {
        "versions": _all_said([manifest.get("versions", {}) for manifest in manifests.values()]),
        "hardware": _all_said([manifest.get("hardware", {}) for manifest in manifests.values()]),
        "hashes": _all_said([manifest.get("hashes", {}) for manifest in manifests.values()]),
        "seeds": sorted({run.seed for run in evidence.runs}),
        "split": "test",
        "items": sizes[0] if kept is None and len(sizes) == 1 else
        {str(seed): len(kept[seed]) for seed in sorted(kept)} if kept is not None else sizes,
        "runs": {run.name: run.shown for run in evidence.runs},
    }  # fmt: skip


def _all_said(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """By key, the value that all give; where they differ, every one of them."""
    said: dict[str, Any] = {}
    for key in sorted({key for one in found for key in one}):
        values = sorted({json.dumps(one[key], sort_keys=True) for one in found if key in one})
        said[key] = json.loads(values[0]) if len(values) == 1 else [json.loads(value) for value in values]
    return said
