"""Accuracy of one arm with its 95 % interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import scipy  # its parts load where they are first used: an evaluation needs the smallest alone

from agon_cli.stats.crossed import ALL_EQUAL, spread

Scores = Mapping[int, Mapping[str, float]]
"""Seed → problem id → score in [0, 1], the mean over samples."""
RESAMPLES = 9999
BATCH = 4_000_000
"""Most values that are drawn at once, so that no number of problems takes much memory."""


@dataclass(frozen=True)
class Estimated:
    """A mean score and its 95 % interval; None and (0, 1) of nothing."""

    value: float | None
    low: float
    high: float
    items: int
    """Distinct problems."""
    seeds: int


def interval(scores: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """Interval for the mean of per-problem scores in [0, 1].

    Exact (Clopper-Pearson) when every score is 0 or 1, which is one completion per problem; with several, a
    bias-corrected bootstrap over problems. Scores that are all the same fraction, which a bootstrap would call certain,
    get the exact interval of as many problems. (0, 1) of nothing.
    """
    if not scores:
        return 0.0, 1.0
    if all(score in (0, 1) for score in scores) or min(scores) == max(scores):
        return _exact(round(sum(scores)), len(scores), (1 - level) / 2)
    batch = max(1, BATCH // len(scores))
    drawn = scipy.stats.bootstrap(
        (np.asarray(scores),), np.mean, confidence_level=level, batch=batch, rng=np.random.default_rng(0)
    )
    return float(drawn.confidence_interval.low), float(drawn.confidence_interval.high)


def _exact(hits: int, count: int, tail: float) -> tuple[float, float]:
    low = float(scipy.special.betaincinv(hits, count - hits + 1, tail)) if hits else 0.0
    return low, float(scipy.special.betaincinv(hits + 1, count - hits, 1 - tail)) if hits < count else 1.0


def over_seeds_and_items(scores: Scores) -> Estimated:
    """The mean score with an interval for other problems and other training runs together; `interval` under one seed.

    Scores that are all the same get the exact interval of as many problems, however many seeds there are.
    """
    cells = [(seed, item, scores[seed][item]) for seed in sorted(scores) for item in sorted(scores[seed])]
    items = sorted({item for _, item, _ in cells})
    seeds = sorted({seed for seed, _, _ in cells})
    values = np.array([value for _, _, value in cells], dtype=np.float64)
    if not cells:
        return Estimated(None, 0.0, 1.0, 0, 0)
    if len(seeds) == 1:
        low, high = interval(values.tolist())
    elif len(items) == 1 or np.ptp(values) < ALL_EQUAL:
        low, high = interval([float(values.mean())] * len(items))
    else:
        place, rank = {seed: n for n, seed in enumerate(seeds)}, {item: n for n, item in enumerate(items)}
        found = spread(
            values, np.array([place[seed] for seed, _, _ in cells]), np.array([rank[i] for _, i, _ in cells])
        )
        low, high = max(0.0, found.mean - found.half()), min(1.0, found.mean + found.half())
    return Estimated(float(values.mean()), low, high, len(items), len(seeds))
