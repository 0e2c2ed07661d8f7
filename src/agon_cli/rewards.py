"""Rewards, each formula once. c is 1 for a right answer, phi is the format term, both 0 or 1."""

from __future__ import annotations

from agon_cli.recipe.schema import Method


def plain_reward(c: float, phi: float, method: Method) -> float:
    """R(a) = 2 c(a) + lambda phi(a): a draft's reward, and a challenge's without any rival term (eq. 2).

    A drafter is never paid for misleading its rival.
    """
    return 2.0 * c + method.format_weight * phi


def challenge_reward(
    c: float, c_draft: float, phi: float, length: int, draft_length: int, rival: bool, method: Method
) -> float:
    """A challenger's reward (eq. 3 for `competitive`): plain reward plus the rival term plus the tie-break.

    `rival` is False where no rival term may be earned: the draft could not be graded, or had no summary to read.
    Lengths are completion tokens. Ladder before format, bonus 1: wrong 0, right against right 2, right against wrong 3.
    """
    reward = plain_reward(c, phi, method)
    if rival and method.reward == "competitive":
        reward += method.bonus * c * (1.0 - c_draft)
    elif rival and method.reward == "margin":
        reward += method.bonus * (c - c_draft)
    shorter = 1.0 if length < draft_length else 0.0
    return reward + method.tie_break * c * c_draft * shorter
