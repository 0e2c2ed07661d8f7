"""Near duplicates: questions that say the same in nearly the same words, about the same numbers.

Sets of problems are full of templates, in which two questions differ by a number and have different answers. So the
words alone decide nothing: numbers and signs must be the same, in the same order.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from agon_cli.types import Problem

_TOKEN = re.compile(r"[^\W\d_]+|\d+(?:[.,]\d+)*|[^\w\s]|_")
_IDLE = frozenset(".,;:?\"'`$’‘“”")  # "!" may be a factorial
_RUN = 3

Runs = frozenset[tuple[str, ...]]


@dataclass(frozen=True)
class _Print:
    """What of a question is compared: numbers and signs in order, and every run of three words."""

    signs: tuple[str, ...]
    runs: Runs


def _print(question: str) -> _Print:
    tokens = _TOKEN.findall(question.casefold())
    words = [token for token in tokens if token.isalpha()]
    signs = tuple(token for token in tokens if not token.isalpha() and token not in _IDLE)
    return _Print(signs, frozenset(tuple(words[at : at + _RUN]) for at in range(max(1, len(words) - _RUN + 1))))


def near_duplicates(
    problems: Sequence[Problem], threshold: float, held_out: Sequence[Problem] = ()
) -> list[tuple[Problem, Problem]]:
    """Every problem that is nearly another, and that other: one held out, or an earlier one not itself returned.

    `threshold` is the least share of their runs of three words that both have (Jaccard), above 0. The search is exact:
    two sets that share so much must share one of their rarest runs, so only those are looked up.
    """
    everything = [*held_out, *problems]
    prints = [_print(problem.question) for problem in everything]
    rarity = Counter(run for one in prints for run in one.runs)
    index: dict[tuple[tuple[str, ...], tuple[str, ...]], list[int]] = {}
    found = []
    for place, own in enumerate(prints):
        ordered = sorted(own.runs, key=lambda run: (rarity[run], run))
        least = math.ceil(threshold * len(ordered) - 1e-9)
        keys = [(own.signs, run) for run in ordered[: len(ordered) - least + 1]]
        if place >= len(held_out):
            candidates = dict.fromkeys(other for key in keys for other in index.get(key, ()))
            twin = next((other for other in candidates if _alike(own.runs, prints[other].runs, threshold)), None)
            if twin is not None:
                found.append((everything[place], everything[twin]))
                continue
        for key in keys:
            index.setdefault(key, []).append(place)
    return found


def _alike(a: Runs, b: Runs, threshold: float) -> bool:
    return len(a & b) >= threshold * len(a | b) - 1e-9
