"""What a difference means, in a word and a sentence."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from agon_cli.stats.crossed import LEVEL
from agon_cli.stats.pairs import Paired

Verdict = Literal["better", "worse", "cannot tell", "higher", "lower"]
SAME_BUDGET = 1.1
"""Budgets within this factor of one another count as equal."""


class Judgement(NamedTuple):
    """A verdict word and the sentence that goes with it."""

    verdict: Verdict
    sentence: str


class Matched(NamedTuple):
    """An arm that spends left's tokens on right's players, and the verdict on left against it."""

    name: str
    verdict: Verdict


_BESIDE = {
    "better": "it is better", "higher": "it is higher", "cannot tell": "it cannot be told apart",
    "lower": "it is lower", "worse": "it is worse",
}  # fmt: skip


def judged(
    found: Paired,
    p_holm: float,
    left: str,
    right: str,
    budget_ratio: float | None = 1.0,
    matched: Matched | None = None,
) -> Judgement:
    """The verdict on left against right.

    `p_holm` is adjusted over the contrasts of one family; `budget_ratio` is generated tokens of left over those of
    right, None where they were not measured. Without a `matched` arm, and with budgets further apart than
    `SAME_BUDGET`, nothing is called better or worse, only higher or lower; with one, the sentence tells how that ends.
    """
    equal = budget_ratio is not None and 1 / SAME_BUDGET <= budget_ratio <= SAME_BUDGET
    cost = "" if equal else _cost(budget_ratio)
    apart = found.low > 0 or found.high < 0
    if p_holm >= LEVEL or not apart:
        return Judgement("cannot tell", _cannot_tell(found, p_holm, left, right, cost, apart))
    up = found.difference > 0
    ends = (found.low, found.high) if up else (-found.high, -found.low)
    by, within = f"{points(abs(found.difference))} points", f"[{points(ends[0])}, {points(ends[1])}]"
    if not equal and matched is None:
        word: Verdict = "higher" if up else "lower"
        told = f"{left} is {by} {word} than {right} {within}{cost}, {over(found)}"
        return Judgement(word, f"{told}; {left} was not set against {right} at equal tokens.")
    word = "better" if up else "worse"
    beside = "" if equal or matched is None else f"; {_beside(matched)}"
    return Judgement(word, f"{left} is {word} than {right} by {by} {within}{cost}, {over(found)}{beside}.")


def points(share: float, sign: bool = False) -> str:
    """A share as percentage points with one decimal; `sign` puts a + before positive ones."""
    rounded = round(100 * share, 1) + 0.0  # no -0.0
    return f"{rounded:+.1f}" if sign and rounded else f"{rounded:.1f}"


def over(found: Paired) -> str:
    """What the figures are over."""
    items = "1 problem" if found.items == 1 else f"{found.items:,} problems"
    return f"over {items} and {'one seed' if found.seeds == 1 else f'{found.seeds} seeds'}"


def _beside(matched: Matched) -> str:
    return f"against {matched.name}, which spends as many tokens, {_BESIDE[matched.verdict]}"


def _cost(budget_ratio: float | None) -> str:
    if budget_ratio is None or not math.isfinite(budget_ratio):
        return " for an unknown share of the tokens"
    return f" for {f'{budget_ratio:.1f}' if budget_ratio >= 0.95 else f'{budget_ratio:.2f}'} times the tokens"


def _cannot_tell(found: Paired, p_holm: float, left: str, right: str, cost: str, apart: bool) -> str:
    bounds = f"[{points(found.low, sign=True)}, {points(found.high, sign=True)}]"
    why = f" (p {p_holm:.2g} after Holm's correction)" if apart else ""
    found_at = f"a true difference of {points(found.detectable)} points would be found four times in five"
    difference = f"the difference is {points(found.difference, sign=True)} points {bounds}{why}{cost}"
    return f"Cannot tell {left} from {right}: {difference}, {over(found)}; {found_at}."
