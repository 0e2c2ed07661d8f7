"""The variance of a mean over seeds and problems at once, and the interval and test that follow from it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import scipy
from numpy.typing import NDArray

LEVEL = 0.05
SMALLEST_P = 1e-15
"""Smaller ones are not told apart; no test of a few seeds means them."""
ALL_EQUAL = 1e-9
"""Values that differ by less are the same but for rounding."""


@dataclass(frozen=True)
class Spread:
    """A mean over seeds and problems with the two parts of its variance.

    `by_items` is what other problems (and other samples) would change, `by_seeds` what other training runs would.
    """

    mean: float
    by_items: float
    by_seeds: float
    items_df: float
    seeds_df: float

    @property
    def se(self) -> float:
        """Standard error of the mean."""
        return math.sqrt(self.by_items + self.by_seeds)

    def half(self, alpha: float = LEVEL) -> float:
        """Half the width of the interval at level 1 − alpha: each part takes the t quantile of its own degrees of
        freedom (Howe 1974), so that few seeds widen it only as far as seeds are seen to differ."""
        items, seeds = scipy.special.stdtrit(self.items_df, alpha / 2), scipy.special.stdtrit(self.seeds_df, alpha / 2)
        return math.sqrt(items * items * self.by_items + seeds * seeds * self.by_seeds)

    def p(self) -> float:
        """Two-sided p of a mean of 0: the alpha whose interval ends at 0, so that test and interval never disagree."""
        if self.mean == 0:
            return 1.0
        if self.half(SMALLEST_P) <= abs(self.mean):
            return SMALLEST_P
        at = scipy.optimize.brentq(lambda x: self.half(math.exp(x)) - abs(self.mean), math.log(SMALLEST_P), 0.0)
        return math.exp(at)

    def df(self) -> float:
        """Degrees of freedom whose t quantile gives the same 95 % interval."""
        low, high = sorted((self.items_df, self.seeds_df))
        wanted = self.half() / self.se

        def beyond(df: float) -> float:
            return float(-scipy.special.stdtrit(df, LEVEL / 2)) - wanted

        if low == high or beyond(high) >= 0:
            return high
        return low if beyond(low) <= 0 else float(scipy.optimize.brentq(beyond, low, high))


def spread(values: NDArray[np.float64], seeds: NDArray[np.intp], items: NDArray[np.intp]) -> Spread:
    """The spread of the mean of values that were measured under `seeds` on `items` (their numbers, from 0, no gaps).

    Seeds and items are crossed, and a seed may lack items or have other ones. Variance components are those of
    Henderson's first method, which for a full table is the two-way analysis of variance. Needs two seeds and two items.
    """
    count, held, met = len(values), np.bincount(seeds), np.bincount(items)  # cells; cells of each seed, of each item
    mean = float(values.mean())
    off = values - mean
    total = float(off @ off)
    of_seeds = float((np.bincount(seeds, off) ** 2 / held).sum())
    of_items = float((np.bincount(items, off) ** 2 / met).sum())
    seed_share, item_share = float(held @ held) / count, float(met @ met) / count
    free = count - len(held)
    if free == 0:  # one item a seed: what seeds and what items do cannot be told apart
        return Spread(mean, 0.0, total / (count - 1) / count, count - 1, count - 1)
    moments = np.array(
        [
            [count - seed_share, len(held) - item_share, len(held) - 1],
            [len(met) - seed_share, count - item_share, len(met) - 1],
            [count - seed_share, count - item_share, count - 1],
        ]
    )
    seed, item, rest = 0.0, -1.0, 0.0
    if len(met) < count and np.linalg.cond(moments) < 1e12:
        seed, item, rest = np.linalg.solve(moments, [of_seeds, of_items, total])
    if item < 0 or rest < 0:  # one kind of variance within seeds explains them: items, or else the rest
        kind = 2 if item < 0 else 1
        within = (total - of_seeds) / free
        seed = (of_seeds - moments[0, kind] * within) / moments[0, 0]
        item, rest = (0.0, within) if kind == 2 else (within, 0.0)
    by_items = (item * item_share + rest) / count
    return Spread(mean, by_items, max(0.0, seed) * seed_share / count, min(len(met) - 1, free), len(held) - 1)
