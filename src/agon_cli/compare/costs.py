"""What arms cost in training and in inference: tokens, seconds and memory, from the logs of the runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agon_cli.compare.arms import Measured
from agon_cli.compare.rows import checked
from agon_cli.document import Cost
from agon_cli.runlog import read


@dataclass
class Spent:
    """What the steps of one run took. `peak_bytes` is None where the run did not log it."""

    drafted: int = 0
    prefilled: int = 0
    answered: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    peak_bytes: int | None = None

    def add(self, row: Mapping[str, Any]) -> None:
        """Count one row of metrics. Completions that nobody is to read are answers, as they are when deployed."""
        sampled, roles = row["tokens"]["sampled"], row["roles"]
        drafted = 0
        if roles["challenge"] is not None:  # one challenge faces one draft, so half of the completions are drafts
            drafted = round((row["players"][roles["draft"]]["draft"]["length"] or 0) * row["completions"] / 2)
        self.drafted += drafted
        self.answered += sampled - drafted
        self.prefilled += row["tokens"]["prompt"]
        for phase, seconds in row["seconds"].items():
            self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds
        if row.get("peak_bytes") is not None:
            self.peak_bytes = max(self.peak_bytes or 0, row["peak_bytes"])


def training(run: Path) -> Spent:
    """What a run's training took, from its metrics. Raises UsageError with file and line for a row without."""
    spent = Spent()
    for row in read(run, "metrics"):
        spent.add(row)
    return spent


@dataclass(frozen=True)
class Answered:
    """What one run's evaluation of an arm on the test split took: seconds of a completion by phase, and the most memory
    that the process had used by the end of it before the first training step, None for one that has trained."""

    seconds: dict[str, float]
    peak_bytes: int | None


def answering(run: Path, arm: str, step: int) -> Answered | None:
    """Of the evaluation at a step. None where the run did not log it. Raises UsageError with file and line for a row
    that no run writes."""
    if not (run / "inference.jsonl").exists():
        return None
    rows = [row for row in checked(run, "inference") if (row["split"], row["arm"]) == ("test", arm)]
    mine = next((row for row in rows if row["step"] == step and row["completions"]), None)
    if mine is None:
        return None
    peak = next((row["peak_bytes"] for row in rows if row["step"] == 0), None)
    return Answered({phase: seconds / mine["completions"] for phase, seconds in mine["seconds"].items()}, peak)


def cost(arm: Measured, trained: Sequence[Spent], answered: Sequence[Answered]) -> Cost:
    """An arm's part of the audit, means over the runs that trained its players and over those that timed its answers;
    where there are none, training and the seconds of inference are None. `peak_bytes` is the most that any of them
    logged, and left out where none did."""
    tokens = arm.tokens
    inference = {"draft": tokens["draft"], "prefill": tokens["prefill"], "answer": tokens["answer"]}
    most = [one.peak_bytes for one in answered if one.peak_bytes is not None]
    inference |= {"peak_bytes": float(max(most))} if most else {}
    taken = _means([one.seconds for one in answered]) if answered else None
    if not (trained and arm.trained):
        return {"arm": arm.name, "training": None, "training_seconds": None, "inference": inference,
                "inference_seconds": taken}  # fmt: skip
    count = len(trained)
    sums = {name: sum(getattr(spent, name) for spent in trained) for name in ("drafted", "prefilled", "answered")}
    means = {name: total / count for name, total in sums.items()}
    peaks = [spent.peak_bytes for spent in trained if spent.peak_bytes is not None]
    return {
        "arm": arm.name,
        "training": means | ({"peak_bytes": float(max(peaks))} if peaks else {}),
        "training_seconds": _means([spent.seconds for spent in trained]),
        "inference": inference,
        "inference_seconds": taken,
    }


def _means(spent: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean seconds by phase; a phase that one lacks took none."""
    phases = dict.fromkeys(phase for seconds in spent for phase in seconds)
    return {phase: sum(seconds.get(phase, 0.0) for seconds in spent) / len(spent) for phase in phases}
