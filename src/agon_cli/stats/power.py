"""The smallest true difference that a comparison of this size finds with probability 0.8 at two-sided 0.05."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import scipy
from numpy.typing import NDArray

from agon_cli.stats.crossed import LEVEL

POWER = 0.8


def detectable(se: float, df: float) -> float:
    """The difference, in the unit of its standard error `se`, that a t test with `df` degrees of freedom finds."""
    edge = -float(scipy.special.stdtrit(df, LEVEL / 2))
    # That the test rejects on the other side has a probability below 1e-4 there.
    shift = scipy.optimize.brentq(
        lambda shift: 1 - float(scipy.special.nctdtr(df, shift, edge)) - POWER, 0.1, 4 * edge + 4
    )
    return se * float(shift)


def mcnemar_power(difference: float, discordant: float, items: int) -> float:
    """Probability that the exact McNemar test of `items` pairs rejects where the share `discordant` of them differs."""
    differing, most = np.arange(items + 1), _most_of_the_rarer(items)
    left = (1 + difference / discordant) / 2
    binom = scipy.stats.binom
    rejects = binom.cdf(most, differing, left) + binom.sf(differing - most - 1, differing, left)
    return float(binom.pmf(differing, items, discordant) @ rejects)


@lru_cache(maxsize=8)
def _most_of_the_rarer(items: int) -> NDArray[np.float64]:
    """For each number of discordant pairs up to `items`, how many of the rarer kind still reject; −1 where none do."""
    return np.asarray(scipy.stats.binom.ppf(LEVEL / 2, np.arange(items + 1), 0.5) - 1)


def detectable_of_pairs(discordant: float, items: int) -> float:
    """The difference that the exact McNemar test finds among `items` pairs, at the observed share of discordant ones,
    or at as many as the difference needs. 1 where no difference is found: fewer than six pairs."""
    if mcnemar_power(1.0, 1.0, items) < POWER:
        return 1.0
    return float(scipy.optimize.brentq(lambda d: mcnemar_power(d, max(d, discordant), items) - POWER, 1e-6, 1.0))
