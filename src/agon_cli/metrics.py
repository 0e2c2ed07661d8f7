"""Numbers about a step: what each player did, what the exchange did, and signs that a role is collapsing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from agon_cli.errors import GradingError
from agon_cli.types import Group, Rollout

Equal = Callable[[str, str], bool]
WINDOW = 10
GRADER_ERRORS = 0.02
GRADER_HANDFUL = 5


def mean(values: Iterable[float]) -> float | None:
    """The mean; None of nothing, so that no rate is invented."""
    listed = list(values)
    return sum(listed) / len(listed) if listed else None


def stream_metrics(groups: Sequence[Group]) -> dict[str, Any]:
    """Rates over one player's rollouts in one role. Rewards and rates leave masked rollouts out; length is tokens."""
    every = [rollout for group in groups for rollout in group.rollouts]
    kept = [rollout for rollout in every if not rollout.verdict.masked]
    return {
        "reward": mean(r.reward for r in kept),
        "accuracy": mean(r.verdict.correct for r in kept),
        "length": mean(len(r.completion.ids) for r in every),
        "truncated": mean(r.completion.finish_reason == "length" for r in every),
        "format": mean(r.format for r in kept),
        "zero_signal": mean(all(r.advantage == 0.0 for r in group.rollouts) for group in groups),
        "no_summary": mean(r.summary is None for r in every),
        "leaked": mean(r.leaked for r in every if r.summary is not None),
        "unreadable": mean(r.verdict.status == "unreadable" for r in every),
        "timeout": mean(r.verdict.status == "timeout" for r in every),
        "masked": mean(r.verdict.masked for r in every),
    }


def faced(drafts: Group, challenges: Group) -> list[tuple[Rollout, Rollout]]:
    """(draft, challenge) pairs of one problem in which both could be graded."""
    pairs = [(drafts.rollouts[r.draft_index], r) for r in challenges.rollouts if r.draft_index is not None]
    return [(a, b) for a, b in pairs if not (a.verdict.masked or b.verdict.masked)]


def exchange_metrics(drafts: Sequence[Group], challenges: Sequence[Group], equal: Equal) -> dict[str, Any]:
    """What reading did. `fix`: right after a wrong draft; `break`: wrong after a right one; `copy`: the draft's own
    answer after a wrong draft (among those that were shown a summary)."""
    pairs = [pair for group in zip(drafts, challenges, strict=True) for pair in faced(*group)]
    wrong = [(a, b) for a, b in pairs if not a.verdict.correct]
    right = [(a, b) for a, b in pairs if a.verdict.correct]
    return {
        "fix": mean(b.verdict.correct for _, b in wrong),
        "break": mean(not b.verdict.correct for _, b in right),
        "copy": mean(copied(a, b, equal) for a, b in wrong if b.read_summary is not None),
    }


def copied(draft: Rollout, challenge: Rollout, equal: Equal) -> bool:
    """Whether a challenge gives the answer its draft gave."""
    a, b = draft.verdict.extracted, challenge.verdict.extracted
    return a is not None and b is not None and equal(b, a)


def bonus_metrics(drafts: Sequence[Group], challenges: Sequence[Group]) -> dict[str, Any]:
    """What the rival term did. `advantage_vs_wrong` and `advantage_vs_right`: mean advantage of right challenges by
    their draft's verdict. `revived`: share of groups in which every challenge is right with the same format, so that
    only the drafts' being mixed gives a signal."""
    vs_wrong: list[float] = []
    vs_right: list[float] = []
    revived: list[bool] = []
    for against, group in zip(drafts, challenges, strict=True):
        for a, b in faced(against, group):
            if b.verdict.correct:
                (vs_right if a.verdict.correct else vs_wrong).append(b.advantage)
        kept = [r for r in group.rollouts if not r.verdict.masked]
        alike = all(r.verdict.correct for r in kept) and len({r.format for r in kept}) == 1
        revived.append(alike and any(r.advantage != 0.0 for r in kept))
    return {
        "advantage_vs_wrong": mean(vs_wrong),
        "advantage_vs_right": mean(vs_right),
        "revived": mean(revived),
    }


def grader_errors(groups: Sequence[Group]) -> tuple[int, int]:
    """How many completions the grader itself failed on, and how many there were."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return sum(r.verdict.masked for r in rollouts), len(rollouts)


def check_grading(errors: int, total: int) -> None:
    """Raises GradingError when more than 2 % of the completions, and more than a handful, were ungradable."""
    if errors > max(GRADER_HANDFUL, GRADER_ERRORS * total):
        raise GradingError(
            f"the grader itself failed on {errors} of {total} completions",
            "see `verdict` and `extracted` in the run's rollouts.jsonl and evals.jsonl, and check verifier.type",
        )


class Watch:
    """Notices a role that collapses: its length halves against its first steps, or it copies nearly every wrong draft.

    Fed one metrics row a step, in order; a resumed run feeds it the rows it already has.
    """

    def __init__(self) -> None:
        self._lengths: dict[str, list[float]] = defaultdict(list)
        self._copies: dict[str, list[float]] = defaultdict(list)
        self._told: set[str] = set()

    def flags(self, row: dict[str, Any]) -> list[str]:
        """Sentences about what this row made plain; each role and sign is told once."""
        found = []
        for name, player in row["players"].items():
            for role in ("draft", "challenge"):
                stream = player.get(role)
                if stream is None:
                    continue
                key = f"{name} {role}"
                self._lengths[key].append(stream["length"] or 0.0)
                if stream.get("copy") is not None:
                    self._copies[key].append(stream["copy"])
                found += self._halved(key) + self._copying(key)
        return found

    def _halved(self, key: str) -> list[str]:
        lengths = self._lengths[key]
        if len(lengths) < 2 * WINDOW:
            return []
        start, now = sum(lengths[:WINDOW]) / WINDOW, sum(lengths[-WINDOW:]) / WINDOW
        told = self._tell(f"{key} length", now < 0.5 * start)
        return (
            [f"{key}: mean length fell from {start:.0f} to {now:.0f} tokens; the role may be collapsing"]
            if told
            else []
        )

    def _copying(self, key: str) -> list[str]:
        copies = self._copies[key]
        if len(copies) < WINDOW:
            return []
        now = sum(copies[-WINDOW:]) / WINDOW
        told = self._tell(f"{key} copy", now > 0.9)
        return [f"{key}: copies {now:.0%} of wrong drafts; it may have stopped solving"] if told else []

    def _tell(self, key: str, holds: bool) -> bool:
        new = holds and key not in self._told
        self._told |= {key} if new else set()
        return new
