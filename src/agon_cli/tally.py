"""Evaluation rows added up by arm: what is right, what it took, what became of drafts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from agon_cli.document import Tokens
from agon_cli.metrics import mean

Row = Mapping[str, Any]
Table = list[list[int]]


@dataclass
class Tally:
    """Running counts over the rows of one arm at one step and split. Rows the grader itself failed on are in `errors`,
    and in no score and no table; their tokens count."""

    mode: str = ""
    rows: int = 0
    samples: int = 0
    """Completions of a problem."""
    errors: int = 0
    truncated: int = 0
    well_formed: int = 0
    """Graded completions of the format asked for."""
    draft: int = 0
    prefill: int = 0
    answer: int = 0
    table: Table = field(default_factory=lambda: [[0, 0], [0, 0]])
    """Counts of completions, table[draft right?][final right?]."""
    wrong_read: int = 0
    """Answers to wrong drafts that were shown a summary."""
    copied: int = 0
    """How many of those repeat the draft's answer."""
    right: dict[str, list[int]] = field(default_factory=dict)
    """By problem: right completions, graded completions."""

    def add(self, row: Row) -> None:
        """Count one row."""
        self.mode = row["mode"]
        self.rows += 1
        self.samples = max(self.samples, row["sample"] + 1)
        self.truncated += row["finish_reason"] == "length"
        self.prefill += row["prompt_tokens"]
        self.answer += row["tokens"]
        two_stages = "draft_tokens" in row
        self.draft += row["draft_tokens"] if two_stages else 0
        if row["verdict"] == "grader_error":
            self.errors += 1
            return
        self.well_formed += row["format"]
        correct = row["verdict"] == "correct"
        counts = self.right.setdefault(row["problem_id"], [0, 0])
        counts[0] += correct
        counts[1] += 1
        before = row["draft_verdict"] if two_stages and "draft_verdict" in row else "grader_error"
        if before != "grader_error":
            self.table[before == "correct"][correct] += 1
            if before != "correct" and row["read"]:
                self.wrong_read += 1
                self.copied += row["copied"]

    @property
    def scores(self) -> dict[str, float]:
        """By problem: the mean over its completions, in the order of the rows."""
        return {name: right / graded for name, (right, graded) in self.right.items()}

    @property
    def accuracy(self) -> float | None:
        """pass@1: the mean over problems."""
        return mean(self.scores.values())

    @property
    def tokens(self) -> Tokens:
        """Means over completions of the last stage."""
        draft, prefill, answer = (total / max(1, self.rows) for total in (self.draft, self.prefill, self.answer))
        return {"draft": draft, "prefill": prefill, "answer": answer, "generated": draft + answer}


class Place(NamedTuple):
    """Where in an evaluation a row belongs."""

    step: int
    split: str
    arm: str


def tallies(rows: Iterable[Row]) -> dict[Place, Tally]:
    """Every arm of an evaluation log at every step and split, in one pass that keeps no text."""
    found: dict[Place, Tally] = {}
    for row in rows:
        found.setdefault(Place(row["step"], row["split"], row["arm"]), Tally()).add(row)
    return found


def rates(tallied: Sequence[Tally]) -> dict[str, float | None]:
    """`fix`, `break` and `copy` (METHOD's rates) of all that was counted."""
    wrong, right = table_of(tallied)
    copied, read = (sum(getattr(tally, name) for tally in tallied) for name in ("copied", "wrong_read"))
    return {"fix": share(wrong[1], sum(wrong)), "break": share(right[0], sum(right)), "copy": share(copied, read)}


def table_of(tallied: Sequence[Tally]) -> list[list[int]]:
    """Counts of completions over all of them, table[draft right?][final right?]."""
    return [[sum(tally.table[a][b] for tally in tallied) for b in (0, 1)] for a in (0, 1)]


def share(part: int, whole: int) -> float | None:
    """A share; None of nothing."""
    return part / whole if whole else None
