"""Other ways to spend a cascade's tokens: how many samples they buy, how samples vote, what an aggregator reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from agon_cli.metrics import Equal
from agon_cli.prompts import Renderer
from agon_cli.types import seed_of

Row = dict[str, Any]
MOST = 16
"""Samples a problem at most, whatever the budget."""


def grown(budget: float, rows_at: Callable[[int], list[Row]]) -> list[list[Row]]:
    """`rows_at(k)`, one row a problem, for k = 1, 2, … until they spend the budget (generated tokens a problem) or k is
    MOST: the last point is the first that is not below it."""
    points = [rows_at(1)]
    while len(points) < MOST and spent(points[-1]) < budget:
        points.append(rows_at(len(points) + 1))
    return points


def spent(rows: Sequence[Row]) -> float:
    """Mean generated tokens a problem of rows that are one a problem."""
    return sum(map(_generated, rows)) / len(rows)


def at_budget(points: Sequence[list[Row]], budget: float) -> list[Row]:
    """One row a problem that together spend the budget as nearly as can be: some problems get the last point's k, the
    others one less. Which do is a matter of the hash of their ids; what more samples do for them has no say."""
    if len(points) == 1:
        return points[0]
    fewer, more = points[-2], points[-1]
    order = sorted(range(len(more)), key=lambda p: seed_of("budget", more[p]["problem_id"]))
    totals = [sum(map(_generated, fewer))]
    for p in order:
        totals.append(totals[-1] + _generated(more[p]) - _generated(fewer[p]))
    target = budget * len(more)
    raised = set(order[: min(range(len(totals)), key=lambda count: abs(totals[count] - target))])
    return [more[p] if p in raised else fewer[p] for p in range(len(more))]


def _generated(row: Row) -> int:
    return int(row["tokens"] + row.get("draft_tokens", 0))


def classes(samples: Sequence[Row], equal: Equal) -> list[int | None]:
    """For every sample of a problem, the place of the first whose answer equals its own; None for one whose answer
    cannot be read. Of the verdict nothing is used but that."""
    firsts: list[int] = []
    found: list[int | None] = []
    for place, sample in enumerate(samples):
        answer = sample["extracted"]
        if answer is None or sample["verdict"] == "unreadable":
            found.append(None)
            continue
        same = next((first for first in firsts if equal(answer, samples[first]["extracted"])), None)
        firsts += [place] if same is None else []
        found.append(place if same is None else same)
    return found


def winner(votes: Sequence[int | None]) -> int | None:
    """The class with most votes, of equals the one that was there first; None where nobody votes."""
    counts = Counter(vote for vote in votes if vote is not None)
    return min(counts, key=lambda vote: (-counts[vote], vote)) if counts else None


def voted(samples: Sequence[Row], votes: Sequence[int | None]) -> Row:
    """The row of a vote among all of these samples of a problem: the verdict of the sample that first gave the winning
    answer and could be graded, the tokens of all. Its text stays in that sample's row, whose place is `chosen`."""
    won = winner(votes)
    mine = [place for place, vote in enumerate(votes) if vote == won]
    graded = (place for place in mine if samples[place]["verdict"] != "grader_error")
    chosen = None if won is None else next(graded, won)
    none = {"verdict": "unreadable", "extracted": None} if chosen is None else {}
    return kept(samples, chosen or 0) | {"text": "", "chosen": chosen} | none


def kept(samples: Sequence[Row], place: int) -> Row:
    """One sample of a problem with the tokens of all."""
    total = {key: sum(sample[key] for sample in samples) for key in ("tokens", "prompt_tokens")}
    return samples[place] | total | {"sample": 0, "stage": "final", "k": len(samples)}


def room_for(count: int, renderer: Renderer, bare: Sequence[int], most: int) -> int:
    """Tokens of room for `count` summaries: as many times the room of one as the longest prompt leaves of `most`.
    `bare` are the lengths of the prompts that have no summary in them yet."""
    return max(1, min(count * renderer.summary_tokens, most - max(bare)))


def joined(summaries: Sequence[str], renderer: Renderer, room: int) -> str | None:
    """Summaries one after the other, each cut to its share of the room; None of none."""
    if not summaries:
        return None
    share = Renderer(renderer.tokenizer, renderer.prompts, max(1, room // len(summaries)))
    return "\n\n".join(share.shown(summary) for summary in summaries)
