"""Two arms on the problems they share: the difference, its interval, a test, and what could have been found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import scipy
from numpy.typing import NDArray

from agon_cli.errors import UsageError
from agon_cli.stats.crossed import ALL_EQUAL, LEVEL, spread
from agon_cli.stats.means import BATCH, RESAMPLES, Scores
from agon_cli.stats.power import detectable, detectable_of_pairs

EXACT = "exact McNemar test"
FLIPS = "sign-flip test of the problems' mean differences"
CROSSED = "interval over seeds and problems, inverted"
UNVARIED = "exact bound: every difference is the same"


@dataclass(frozen=True)
class Paired:
    """Accuracy of left minus right, paired by seed and problem, as shares in [−1, 1]."""

    difference: float
    low: float
    high: float
    p: float
    test: str
    """Which test `p` is from, in words."""
    discordant: tuple[int, int]
    """Seed and problem pairs in which left alone did better, and right alone."""
    detectable: float
    items: int
    """Distinct problems."""
    seeds: int
    items_left_out: int
    """Scores of shared seeds that the other side lacks."""
    seeds_left_out: int
    """Seeds that only one side has."""


def paired(left: Scores, right: Scores) -> Paired:
    """The difference of two arms on what both have. A problem that one side lacks under a seed is left out of both.

    One seed: interval over problems alone (percentile bootstrap), exact McNemar for scores of 0 and 1, sign flips of
    item means for others. Several: interval and test over seeds and problems together. UsageError where nothing is
    shared.
    """
    seeds = sorted(set(left) & set(right))
    cells = [(seed, item) for seed in seeds for item in sorted(left[seed].keys() & right[seed].keys())]
    if not cells:
        message = "the two arms share no problem under the same seed"
        raise UsageError(message, "compare arms that were evaluated on the same split and seeds")
    sides = np.array([[left[seed][item], right[seed][item]] for seed, item in cells], dtype=np.float64)
    differences = sides[:, 0] - sides[:, 1]
    seed_numbers, item_numbers = (np.unique(column, return_inverse=True)[1] for column in zip(*cells, strict=True))
    several = int(seed_numbers.max()) > 0
    items = int(item_numbers.max()) + 1
    if np.ptp(differences) < ALL_EQUAL or items == 1:
        found = _unvaried(float(differences.mean()), items)
    elif several:
        found = _crossed(differences, seed_numbers, item_numbers)
    else:
        found = _one_seed(differences, bool(np.isin(sides, (0.0, 1.0)).all()))
    return replace(
        found,
        discordant=(int((differences > ALL_EQUAL).sum()), int((differences < -ALL_EQUAL).sum())),
        items=items,
        seeds=int(seed_numbers.max()) + 1,
        items_left_out=sum(len(left[seed].keys() ^ right[seed].keys()) for seed in seeds),
        seeds_left_out=len(set(left) ^ set(right)),
    )


def holm(ps: Sequence[float]) -> list[float]:
    """The p values adjusted over all of them (Holm 1979)."""
    from statsmodels.stats.multitest import multipletests

    return [float(p) for p in multipletests(ps, method="holm")[1]] if ps else []


def _found(difference: float, low: float, high: float, p: float, test: str, smallest: float) -> Paired:
    low, high = max(-1.0, low), min(1.0, high)
    return Paired(difference, low, high, p, test, (0, 0), min(1.0, smallest), 0, 0, 0, 0)


def _unvaried(difference: float, items: int) -> Paired:
    """All differences alike, which any estimate of spread would call certain. At most the share `unseen` of problems is
    of another kind (Clopper-Pearson's bound after `items` of one kind), and at worst those differ by 1 the other way.
    For a difference of 1 the p is McNemar's."""
    unseen = 1 - (LEVEL / 2) ** (1 / items)
    low, high = difference - unseen * (1 + difference), difference + unseen * (1 - difference)
    p = 1.0 if abs(difference) < ALL_EQUAL else min(1.0, 2 * (1 + abs(difference)) ** -items)
    return _found(difference, low, high, p, UNVARIED, detectable_of_pairs(0.0, items))


def _crossed(differences: NDArray[np.float64], seeds: NDArray[np.intp], items: NDArray[np.intp]) -> Paired:
    found = spread(differences, seeds, items)
    half = found.half()
    smallest = detectable(found.se, found.df())
    return _found(found.mean, found.mean - half, found.mean + half, found.p(), CROSSED, smallest)


def _one_seed(differences: NDArray[np.float64], single: bool) -> Paired:
    """`single`: all scores are 0 or 1. The interval reaches 0 wherever the test does not reject."""
    count, mean = len(differences), float(differences.mean())
    batch = max(1, BATCH // count)
    p = _mcnemar(differences) if single else _sign_flips(differences, batch)
    drawn = scipy.stats.bootstrap(
        (differences,),
        np.mean,
        n_resamples=RESAMPLES,
        batch=batch,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    low, high = float(drawn.low), float(drawn.high)
    if p >= LEVEL:
        low, high = min(low, 0.0), max(high, 0.0)
    if single:
        smallest = detectable_of_pairs(float((differences != 0).mean()), count)
    else:
        smallest = detectable(float(differences.std(ddof=1)) / count**0.5, count - 1)
    return _found(mean, low, high, p, EXACT if single else FLIPS, smallest)


def _mcnemar(differences: NDArray[np.float64]) -> float:
    from statsmodels.stats.contingency_tables import mcnemar

    table = [[0, int((differences > 0).sum())], [int((differences < 0).sum()), 0]]
    return float(mcnemar(table, exact=True).pvalue)


def _sign_flips(differences: NDArray[np.float64], batch: int) -> float:
    """Under no difference every problem's mean difference might as well have the other sign."""
    flipped = scipy.stats.permutation_test(
        (differences,),
        np.mean,
        permutation_type="samples",
        n_resamples=RESAMPLES,
        batch=batch,
        rng=np.random.default_rng(0),
    )
    return float(flipped.pvalue)
