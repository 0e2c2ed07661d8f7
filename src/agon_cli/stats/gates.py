"""Conditions that a comparison is to meet: `agon>grpo`, `agon>=grpo+2`, `agon>=45`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from agon_cli.errors import UsageError
from agon_cli.recipe.explain import closest
from agon_cli.stats.means import Scores, over_seeds_and_items
from agon_cli.stats.pairs import paired
from agon_cli.stats.verdicts import over, points

FORMS = "a gate reads A>B, A>=B, A>=B+2 or A>=45, with names of arms and percentage points"
ROUNDING = 1e-9
_OPERATOR = re.compile(r">=?")
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?")
_MARGIN = re.compile(rf"(?P<name>.+?)\s*(?P<margin>[+−-]\s*{_NUMBER.pattern})", re.DOTALL)


class Condition(NamedTuple):
    """A parsed gate: `right` is None for a fixed figure; `margin` is a share."""

    left: str
    shown: bool
    right: str | None
    margin: float


def gate(text: str, arms: Mapping[str, Scores]) -> tuple[bool, str]:
    """Whether the condition holds, and why.

    `A>B` has to be shown: the whole 95 % interval of A − B lies above 0 (or the margin). `A>=B` compares the figures
    themselves: A − B is at least 0 (or the margin). UsageError for a text of another form or an arm that is not there.
    """
    condition = parse(text, arms)
    if condition.right is None:
        found = over_seeds_and_items(arms[condition.left])
        if found.value is None:
            return False, f"{condition.left} has no graded answer"
        value, low = found.value, found.low
        told = f"{condition.left} has {points(value)} % [{points(low)}, {points(found.high)}]"
        unit = " %"
    else:
        try:
            pair = paired(arms[condition.left], arms[condition.right])
        except UsageError:
            return False, f"{condition.left} and {condition.right} share no problem under the same seed"
        value, low = pair.difference, pair.low
        bounds = f"[{points(low, sign=True)}, {points(pair.high, sign=True)}]"
        told = f"{condition.left} minus {condition.right} is {points(value, sign=True)} points {bounds}, {over(pair)}"
        unit = " points"
    edge = f"{points(condition.margin)}{unit}"
    if condition.shown:
        return low > condition.margin + ROUNDING, f"{told}; the whole interval has to lie above {edge}"
    return value >= condition.margin - ROUNDING, f"{told}; at least {edge} was asked for"


def parse(text: str, arms: Mapping[str, Scores]) -> Condition:
    """The condition that the text states about these arms, whose names may hold spaces, signs and `>`."""
    operators = list(_OPERATOR.finditer(text))
    if not operators:
        raise UsageError(f"{text!r} is no gate", FORMS)
    sides = [(text[: found.start()].strip(), found[0] == ">", text[found.end() :].strip()) for found in operators]
    for left, shown, written in sides:
        against = _against(text, written, arms)
        if left in arms and against is not None:
            return Condition(left, shown, *against)
    left, _, written = next((side for side in sides if side[0] in arms), sides[0])
    margin = _MARGIN.fullmatch(written)
    unknown = (margin["name"] if margin else written) if left in arms else left
    if not unknown:
        raise UsageError(f"{text!r} is no gate", FORMS)
    message = f"gate {text!r}: no arm is called {unknown!r}{closest(unknown, arms)}"
    raise UsageError(message, f"arms of this comparison: {', '.join(arms)}")


def _against(text: str, written: str, arms: Mapping[str, Scores]) -> tuple[str | None, float] | None:
    """What the right side names: an arm and a margin, or None and a figure. None of neither. A name goes first, so that
    `agon-bonus-3` is the arm of that name if there is one."""
    if written in arms:
        return written, 0.0
    if _NUMBER.fullmatch(written):
        if 0 < float(written) < 1 or float(written) > 100:
            raise UsageError(
                f"gate {text!r}: {written} is no percentage", "figures are points, 0 or from 1 to 100: A>=45"
            )
        return None, float(written) / 100
    margin = _MARGIN.fullmatch(written)
    if margin and margin["name"] in arms:
        by = float(re.sub(r"\s", "", margin["margin"]).replace("−", "-"))  # tables print U+2212
        if abs(by) > 100:
            raise UsageError(f"gate {text!r}: no two arms are {abs(by):g} points apart", "margins go up to 100 points")
        return margin["name"], by / 100
    return None
