"""How often the 95 % intervals of `agon_cli.stats` hold the truth, by simulation; prints a Markdown table.

A world draws problems of different difficulty, two arms that are good at different ones, training runs that are better
or worse than their method, and answers. The truth is the difference of the two methods over all problems and runs, or,
of one seed, of these two runs over all problems.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import numpy as np
from numpy.polynomial.hermite_e import hermegauss
from scipy.special import expit

from agon_cli.stats import Scores, over_seeds_and_items, paired, pairs

EDGE = 0.3
"""Logits by which left is above, and right below, the middle: about 9 points apart."""


@dataclass(frozen=True)
class World:
    """Logit standard deviations, but for `seed_points`."""

    items: int = 217
    seeds: int = 5
    seed_points: float = 2.0
    """Standard deviation of the difference between two runs that other seeds cause, in percentage points."""
    middle: float = 0.0
    """Logit of the mean accuracy of both."""
    difficulty: float = 1.5
    both: float = 0.5
    """What a seed makes of a problem for both arms alike."""
    method_item: float = 0.5
    """How differently the methods do on a problem, under every seed."""
    run_item: float = 1.0
    """How differently two runs of one method do on a problem."""
    samples: int = 1
    shared: float = 1.0
    """Share of the problems that all seeds have; each seed has others for the rest."""

    @property
    def spread(self) -> float:
        """Logit standard deviation of problems and runs, whole-run luck aside."""
        return float(np.sqrt(self.difficulty**2 + self.both**2 + self.method_item**2 + self.run_item**2))


@lru_cache
def accuracy(logit: float, spread: float) -> float:
    """Mean of the logistic function over a normal distribution."""
    nodes, weights = hermegauss(101)
    return float(weights @ expit(logit + spread * nodes) / weights.sum())


@lru_cache
def luck(world: World) -> float:
    """Logit standard deviation of one run's luck."""
    step = 0.01
    slope = (accuracy(world.middle + step, world.spread) - accuracy(world.middle - step, world.spread)) / (2 * step)
    return world.seed_points / 100 / np.sqrt(2) / slope if world.seeds > 1 else 0.0


def truth(world: World) -> tuple[float, float]:
    """Accuracy of left and of right over all problems and runs."""
    spread = float(np.hypot(world.spread, luck(world)))
    return accuracy(world.middle + EDGE, spread), accuracy(world.middle - EDGE, spread)


def draw(world: World, rng: np.random.Generator) -> tuple[Scores, Scores]:
    """The scores of left and right in one experiment."""
    common = round(world.shared * world.items)
    kept = np.arange(world.items) < common
    shape = (world.seeds, world.items)

    def of_items(spread: float) -> np.ndarray:
        """Something of a problem: the same under every seed that has the problem."""
        return np.where(kept, rng.normal(0, spread, world.items), rng.normal(0, spread, shape))

    ground = world.middle + of_items(world.difficulty) + rng.normal(0, world.both, shape)
    names = [[f"p{n}" if n < common else f"s{seed}-p{n}" for n in range(world.items)] for seed in range(world.seeds)]

    def arm(edge: float) -> Scores:
        runs = rng.normal(0, luck(world), (world.seeds, 1)) + rng.normal(0, world.run_item, shape)
        right = rng.binomial(world.samples, expit(ground + edge + of_items(world.method_item) + runs)) / world.samples
        return {seed: dict(zip(names[seed], right[seed].tolist(), strict=True)) for seed in range(world.seeds)}

    return arm(EDGE), arm(-EDGE)


Claim = Callable[[World, Scores, Scores], tuple[float, float, float]]
"""Low, high and truth of one interval."""


def of_difference(world: World, left: Scores, right: Scores) -> tuple[float, float, float]:
    """The interval of the paired difference."""
    found, (better, worse) = paired(left, right), truth(world)
    return found.low, found.high, better - worse


def of_arm(world: World, left: Scores, right: Scores) -> tuple[float, float, float]:
    """The interval of one arm's accuracy."""
    found = over_seeds_and_items(left)
    return found.low, found.high, truth(world)[0]


CLAIMS: dict[str, Claim] = {"difference": of_difference, "arm": of_arm}


def covers(world: World, repeats: int, claim: Claim = of_difference, seed: int = 0) -> tuple[float, float]:
    """The share of experiments whose interval holds the truth, and the median width."""
    rng = np.random.default_rng(seed)
    claims = [claim(world, *draw(world, rng)) for _ in range(repeats)]
    held = [low <= true <= high for low, high, true in claims]
    return float(np.mean(held)), float(np.median([high - low for low, high, _ in claims]))


STEADY = World(method_item=1.5, run_item=0.3)
WORLDS = {
    "no luck of runs": World(seed_points=0),
    "luck of 1 point": World(seed_points=1),
    "luck of 2 points": World(),
    "luck of 3 points": World(seed_points=3),
    "luck of 6 points": World(seed_points=6),
    "300 problems": World(items=300),
    "methods good at other problems, no luck": replace(STEADY, seed_points=0),
    "methods good at other problems, luck of 3 points": replace(STEADY, seed_points=3),
    "4 samples a problem": World(samples=4, method_item=1.0),
    "accuracy near 10 %": World(middle=-3.3),
    "accuracy near 2 %": World(middle=-5.5, seed_points=1),
    "half of the problems shared": World(shared=0.5),
    "other problems per seed": World(shared=0.0),
}
OF_ONE_ARM = ("no luck of runs", "luck of 2 points", "luck of 6 points", "accuracy near 10 %", "accuracy near 2 %")
SEEDS = (1, 2, 3, 5, 8)


def rows(claim: str, repeats: int) -> Iterator[str]:
    """The table of one claim, line by line; of one seed there is no luck of runs, so some cells are one experiment."""
    yield f"| {claim} | {' | '.join(f'S = {seeds}' for seeds in SEEDS)} |\n"
    yield "|---|" + "---|" * len(SEEDS) + "\n"
    cell = lru_cache(partial(covers, repeats=repeats, claim=CLAIMS[claim]))
    for name in WORLDS if claim == "difference" else OF_ONE_ARM:
        worlds = [replace(WORLDS[name], seeds=seeds) for seeds in SEEDS]
        worlds[0] = replace(worlds[0], seed_points=0, shared=1)
        yield f"| {name} | {' | '.join(f'{100 * c:.1f} ({100 * w:.1f})' for c, w in map(cell, worlds))} |\n"


def main() -> None:
    """Print the table: coverage in percent, and in brackets the median width in points."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("claim", choices=list(CLAIMS))
    parser.add_argument("--repeats", type=int, default=1000, help="experiments a cell")
    parser.add_argument("--resamples", type=int, default=1999, help="of a bootstrap; fewer than in use, to be quick")
    given = parser.parse_args()
    pairs.RESAMPLES = given.resamples
    for row in rows(given.claim, given.repeats):
        sys.stdout.write(row)
        sys.stdout.flush()


if __name__ == "__main__":
    main()
