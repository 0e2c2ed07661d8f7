"""rollouts.jsonl alone gives every reward and advantage again: read back as JSON, judged by the slow reference."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from typing import Any

import pytest

import reference
from agon_cli.policy import Policy
from agon_cli.recipe.presets import PRESETS
from agon_cli.records import rollout_rows
from agon_cli.roles import pairing
from agon_cli.rollout import play
from reference import Fact, Knobs
from scripted import arena, make_recipe, problem, script_of, silent, write_model

DOCUMENTED = {
    *("step", "problem_id", "player", "role", "index", "draft_index", "prompt_hash", "text", "summary"),
    *("finish_reason", "tokens", "verdict", "extracted", "format", "reward", "advantage", "masked"),
}
METHODS: dict[str, Any] = {name: name for name in PRESETS} | {
    "weighted": {"preset": "agon_short", "bonus": 0.7, "format_weight": 0.3, "tie_break": 0.4},
    "margin shared": {"preset": "margin", "opponent": "shared", "bonus": 2.0},
    "bonus unread": {"bonus_needs_summary": False},
    "hidden margin": {"exchange": "none", "opponent": "shared", "reward": "margin"},
}


def fact(row: dict[str, Any]) -> Fact:
    assert row["masked"] == (row["verdict"] == "grader_error")
    return Fact(row["verdict"] == "correct", row["format"], row["tokens"], row["masked"], row["summary"])


def rule(row: dict[str, Any]) -> Knobs:
    """The row's own statement of how it was rewarded; it says whether a missing summary costs the rival term."""
    return Knobs(exchange="rival", **row["rule"])


def recompute(rows: list[dict[str, Any]]) -> dict[tuple[Any, ...], tuple[float, float]]:
    """(reward, advantage) of every row, by what identifies it."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: row["index"]):
        groups[row["step"], row["problem_id"], row["role"]].append(row)
    found = {}
    for (step, problem_id, role), members in groups.items():
        assert [row["index"] for row in members] == list(range(len(members)))
        rewards = []
        for row in members:
            if role == "draft":
                assert row["draft_index"] is None
                rewards.append(reference.reward_of_draft(fact(row), rule(row)))
            else:
                draft = groups[step, problem_id, "draft"][row["draft_index"]]
                read = "something" if row["read"] else None
                rewards.append(reference.reward_of_challenge(fact(row), fact(draft), read, rule(row)))
        advantages = reference.advantages(rewards, [row["masked"] for row in members])
        for row, reward, advantage in zip(members, rewards, advantages, strict=True):
            found[step, problem_id, role, row["index"]] = (reward, advantage)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("name", METHODS)
def test_rewards_and_advantages_follow_from_the_rows_alone(name, folder):
    recipe = make_recipe(folder, METHODS[name], rollout={"group_size": 6})
    board, engine = arena(recipe, Policy(recipe))
    lines = []
    for step in range(6):
        pair = pairing(step, recipe.cast, recipe.method.roles)
        engine.begin(script_of(step, 6), ["draft", "challenge"])
        groups = play(board, pair, [problem((step + i) % 16) for i in range(5)], step, silent)
        lines += [json.dumps(row) for row in rollout_rows(recipe, step, groups)]
    assert len(lines) == 6 * 5 * 12
    rows = [json.loads(line) for line in lines]
    assert all(row.keys() >= DOCUMENTED for row in rows)
    random.Random(0).shuffle(rows)
    found = recompute(rows)
    assert len(found) == len(rows)
    for row in rows:
        reward, advantage = found[row["step"], row["problem_id"], row["role"], row["index"]]
        assert row["reward"] == pytest.approx(reward, abs=1e-12)
        assert row["advantage"] == pytest.approx(advantage, abs=1e-12)
    assert sum(row["advantage"] != 0 for row in rows) > 50
    assert sum(row["masked"] for row in rows) > 0


def test_the_rows_of_a_step_say_who_was_shown_what(folder):
    recipe = make_recipe(folder)
    board, engine = arena(recipe, Policy(recipe))
    engine.begin(script_of(1, 4), ["draft", "challenge"])
    groups = play(board, pairing(1, recipe.cast, "rotate"), [problem(n) for n in (2, 3, 6, 7)], 1, silent)
    rows = rollout_rows(recipe, 1, groups)
    drafts = {(row["problem_id"], row["index"]): row for row in rows if row["role"] == "draft"}
    challenges = [row for row in rows if row["role"] == "challenge"]
    assert {row["player"] for row in drafts.values()} == {"B"}
    assert {row["player"] for row in challenges} == {"A"}
    for row in challenges:
        draft = drafts[row["problem_id"], row["draft_index"]]
        assert row["read"] == (draft["summary"] is not None)
        assert (row["prompt_hash"] == draft["prompt_hash"]) == (not row["read"])
    assert 0 < sum(row["read"] for row in challenges) < len(challenges)
