"""Verdicts per second of the maths verifier on ordinary answers, with two worker processes.

Every pair is another one, so that no cache helps. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Callable, Sequence

from agon_cli.types import Problem
from agon_cli.verifiers.math import MathVerifier
from workloads import print_line

WORKERS = 2
Draw = Callable[[random.Random], tuple[str, str]]
"""A gold and an answer that is right about half the time."""


def near(draw: random.Random, value: int) -> int:
    """The value, or one beside it."""
    return value + draw.choice([0, 0, 1, -1])


def of(gold: str, answer: str | None = None) -> Draw:
    """Pairs from two patterns with {a}, {b}, {c} for numbers; the answer's {a} is off half the time."""

    def pair(draw: random.Random) -> tuple[str, str]:
        a, b, c = draw.randint(2, 90_000), draw.randint(2, 900), draw.randint(2, 90)
        values = {"{b}": str(b), "{c}": str(c)}
        texts = []
        for pattern, first in ((gold, a), (answer or gold, near(draw, a))):
            text = pattern.replace("{a}", str(first))
            for name, value in values.items():
                text = text.replace(name, value)
            texts.append(text)
        return texts[0], texts[1]

    return pair


KINDS: dict[str, tuple[int, Sequence[Draw]]] = {
    # kind: its share of the mixed set in percent, and how it is written
    "numbers": (
        45,
        (of("{a}"), of("{a}", "{a}.0"), of("{a}", "${a}$"), of("{a}", r"\frac{{a}}{1}"), of("{a}", "**{a}**")),
    ),
    "units": (
        10,
        (of("{a}", r"{a}\text{ cm}"), of("{a}", "{a} dollars"), of("{a}", r"{a}^\circ"), of("{a} cm", "{a} cm")),
    ),
    "roots": (10, (of(r"{a}\sqrt{{b}}"), of(r"\frac{{a}\pi}{{b}}", r"{a}\pi/{b}"), of(r"{a}+\sqrt{{c}}"))),
    "polynomials": (15, (of("{a}x^2+{b}x", "{b}x+{a}x^2"), of(r"\frac{{a}x}{{b}}"), of("x={a}", "{a}"))),
    "several": (
        10,
        (of("({a}, {b})"), of(r"\{{a}, {b}\}", r"\{{b}, {a}\}"), of(r"[{a},\infty)"), of(r"\pm {a}", "{a}, -{a}")),
    ),
    "words": (5, (of("Yes", "no"), of(r"\text{no solution}", "No solution"))),
    "functions": (
        5,
        (
            *(of(r"\ln {a}"), of("e^{{c}x}", "e^{{b}x}"), of(r"\sin {a}x"), of("x>{a}"), of("{a}x+{b}y={c}")),
            *(of(r"\log {a}"), of(r"{a}+\sin^2 x+\cos^2 x", "1+{a}")),
        ),
    ),
}


def draw_pairs(kind: str, count: int, seed: int) -> list[tuple[Problem, str]]:
    """Pairs of one kind, or of all kinds in their shares for `mixed`."""
    draw = random.Random(seed)
    names, shares = list(KINDS), [share for share, _ in KINDS.values()]
    pairs = []
    for index in range(count):
        chosen = kind if kind != "mixed" else draw.choices(names, shares)[0]
        gold, answer = draw.choice(KINDS[chosen][1])(draw)
        pairs.append((Problem(str(index), "", gold), answer))
    return pairs


def measure(kind: str, count: int, seed: int = 0) -> dict[str, float]:
    """Verdicts per second, and the share of each verdict, after the workers have started."""
    verifier = MathVerifier(timeout=5.0)
    try:
        verifier.grade([(Problem("", "", r"\log 2"), rf"\log {n}") for n in range(3, 3 + 2 * WORKERS)])
        pairs = draw_pairs(kind, count, seed)
        start = time.perf_counter()
        verdicts = verifier.grade(pairs)
        seconds = time.perf_counter() - start
    finally:
        verifier.close()
    found = {f"{status}": sum(v.status == status for v in verdicts) / count for status in ("correct", "wrong")}
    return {"verdicts_per_s": round(count / seconds, 1), "other": round(1 - sum(found.values()), 4), **found}


def main(words: Sequence[str] | None = None) -> None:
    """Measure each kind named, or all and the mixture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", nargs="*", default=[*KINDS, "mixed"], choices=[*KINDS, "mixed"])
    parser.add_argument("--count", type=int, default=400)
    chosen = parser.parse_args(words)
    os.cpu_count = lambda: WORKERS  # the pool sizes itself by it
    print_line({kind: measure(kind, chosen.count) for kind in chosen.kinds})


if __name__ == "__main__":
    main()
