"""Who drafts and who challenges at a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Pairing(NamedTuple):
    """The two players of a step; a lone player meets itself."""

    drafter: str
    challenger: str


def directions(players: Sequence[str]) -> list[Pairing]:
    """All ordered pairs, so that each player drafts once before any drafts twice: A>B, B>A for two players; A>B, B>C,
    C>A, A>C, B>A, C>B for three. A lone player gives the pair with itself."""
    count = len(players)
    if count == 1:
        return [Pairing(players[0], players[0])]
    return [
        Pairing(players[index], players[(index + shift) % count]) for shift in range(1, count) for index in range(count)
    ]


def pairing(step: int, players: Sequence[str], roles: str) -> Pairing:
    """`rotate` walks through all directions, one a step; `fixed` keeps the first player drafting while the others take
    turns challenging."""
    pairs = directions(players)
    if roles == "fixed":
        pairs = [pair for pair in pairs if pair.drafter == players[0]]
    return pairs[step % len(pairs)]
