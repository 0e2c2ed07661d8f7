"""Who drafts, who challenges."""

from __future__ import annotations

from collections import Counter

import pytest

import reference
from agon_cli.roles import Pairing, directions, pairing


@pytest.mark.parametrize("roles", ["rotate", "fixed"])
@pytest.mark.parametrize("names", [("A",), ("A", "B"), ("x", "y")])
def test_one_and_two_players_follow_the_paper(names, roles):
    for step in range(7):
        assert tuple(pairing(step, names, roles)) == reference.who(step, names, roles)


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_a_round_holds_every_ordered_pair_once(count):
    names = [f"p{i}" for i in range(count)]
    size = count * (count - 1)
    rounds = [[pairing(step + size * turn, names, "rotate") for step in range(size)] for turn in range(2)]
    assert rounds[0] == rounds[1] == directions(names)
    assert Counter(rounds[0]) == {Pairing(a, b): 1 for a in names for b in names if a != b}


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_no_one_drafts_or_challenges_twice_before_all_have(count):
    names = [f"p{i}" for i in range(count)]
    for part in (0, 1):
        turns = [pairing(step, names, "rotate")[part] for step in range(count * (count - 1))]
        for start in range(0, len(turns), count):
            assert sorted(turns[start : start + count]) == names


@pytest.mark.parametrize("count", [2, 3, 4])
def test_fixed_roles_keep_one_drafter_and_let_all_others_challenge_alike(count):
    names = [f"p{i}" for i in range(count)]
    pairs = [pairing(step, names, "fixed") for step in range(3 * (count - 1))]
    assert {pair.drafter for pair in pairs} == {"p0"}
    assert Counter(pair.challenger for pair in pairs) == dict.fromkeys(names[1:], 3)


def test_a_step_s_roles_need_no_earlier_step():
    names = ("A", "B", "C")
    assert pairing(100, names, "rotate") == [pairing(step, names, "rotate") for step in range(101)][-1]
