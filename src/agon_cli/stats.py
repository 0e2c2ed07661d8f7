"""Intervals for evaluation figures."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.stats import binomtest, bootstrap


def interval(scores: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """Interval for the mean of per-problem scores in [0, 1].

    Exact (Clopper-Pearson) when every score is 0 or 1, which is one completion per problem; with several, a
    bias-corrected bootstrap over problems. Scores that are all the same fraction, which a bootstrap would call certain,
    get the exact interval of as many problems. (0, 1) of nothing.
    """
    if not scores:
        return 0.0, 1.0
    if all(score in (0, 1) for score in scores) or min(scores) == max(scores):
        found = binomtest(round(sum(scores)), len(scores)).proportion_ci(level, method="exact")
        return float(found.low), float(found.high)
    drawn = bootstrap((np.asarray(scores),), np.mean, confidence_level=level, rng=np.random.default_rng(0))
    return float(drawn.confidence_interval.low), float(drawn.confidence_interval.high)
