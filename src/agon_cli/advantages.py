"""Group-normalised advantages."""

from __future__ import annotations

import math
from collections.abc import Sequence


def group_advantages(rewards_N: Sequence[float], masked_N: Sequence[bool]) -> list[float]:
    """A_i = (R_i - mean) / std over the unmasked rollouts of one group (eq. 1); std is the population's.

    A masked rollout gets 0. A group whose rewards are all exactly equal carries no signal and gets zeros: the test is
    equality, so that a small but real spread is kept and a constant graded group is not.
    """
    kept = [reward for reward, masked in zip(rewards_N, masked_N, strict=True) if not masked]
    if not kept or min(kept) == max(kept):
        return [0.0] * len(rewards_N)
    mean = math.fsum(kept) / len(kept)
    std = math.sqrt(math.fsum((reward - mean) ** 2 for reward in kept) / len(kept))
    return [0.0 if masked else (reward - mean) / std for reward, masked in zip(rewards_N, masked_N, strict=True)]
