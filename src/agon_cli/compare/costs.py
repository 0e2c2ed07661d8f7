"""What arms cost: of training tokens, seconds and memory, from the logs of the runs; of inference tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agon_cli.compare.arms import Measured
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


def cost(arm: Measured, trained: Sequence[Spent]) -> Cost:
    """An arm's part of the audit, means over the runs that trained its players; of none, training is None. `peak_bytes`
    is the most that any of them logged, and left out where none did."""
    tokens = arm.tokens
    inference = {"draft": tokens["draft"], "prefill": tokens["prefill"], "answer": tokens["answer"]}
    if not (trained and arm.trained):
        return {"arm": arm.name, "training": None, "training_seconds": None, "inference": inference}
    count = len(trained)
    sums = {name: sum(getattr(spent, name) for spent in trained) for name in ("drafted", "prefilled", "answered")}
    means = {name: total / count for name, total in sums.items()}
    peaks = [spent.peak_bytes for spent in trained if spent.peak_bytes is not None]
    phases = dict.fromkeys(phase for spent in trained for phase in spent.seconds)
    return {
        "arm": arm.name,
        "training": means | ({"peak_bytes": float(max(peaks))} if peaks else {}),
        "training_seconds": {
            phase: sum(spent.seconds.get(phase, 0.0) for spent in trained) / count for phase in phases
        },
        "inference": inference,
    }
