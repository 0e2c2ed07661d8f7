"""Rates of a step against counts in plain loops, and the watch over collapsing roles."""

from __future__ import annotations

from typing import Any

import pytest

from agon_cli.metrics import Watch, bonus_metrics, exchange_metrics, grader_errors, stream_metrics
from agon_cli.policy import Policy
from agon_cli.records import step_metrics, telling_sample
from agon_cli.roles import Pairing, pairing
from agon_cli.rollout import play
from agon_cli.types import Completion, Group, Prompt, Rollout, Verdict
from agon_cli.update import Update
from scripted import arena, make_recipe, problem, script_of, silent, write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


def same(a: str, b: str) -> bool:
    return a == b


def step_of(folder: Any, step: int, method: Any = "agon", size: int = 8) -> tuple[Any, list[Group]]:
    recipe = make_recipe(folder, method, rollout={"group_size": size})
    board, engine = arena(recipe, Policy(recipe))
    pair = pairing(step, recipe.cast, recipe.method.roles)
    engine.begin(script_of(step, size), ["draft", "challenge"])
    return pair, play(board, pair, [problem((3 * step + i) % 16) for i in range(6)], step, silent)


def share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def near(found: float | None, want: float | None) -> None:
    assert (found is None) == (want is None)
    if want is not None:
        assert found == pytest.approx(want)


@pytest.mark.parametrize("step", range(3))
@pytest.mark.parametrize("method", ["agon", "margin", "competition_only"])
def test_rates_of_a_stream_are_counts(folder, step, method):
    _, groups = step_of(folder, step, method)
    for role in ("draft", "challenge"):
        mine = [group for group in groups if group.role == role]
        found = stream_metrics(mine)
        total = kept = right = phi = tokens = cut = bare = shown = leaked = unreadable = slow = fault = 0
        reward = 0.0
        dead = 0
        for group in mine:
            dead += all(r.advantage == 0 for r in group.rollouts)
            for r in group.rollouts:
                total += 1
                tokens += len(r.completion.ids)
                cut += r.completion.finish_reason == "length"
                bare += r.summary is None
                unreadable += r.verdict.status == "unreadable"
                slow += r.verdict.status == "timeout"
                if r.summary is not None:
                    shown += 1
                    leaked += r.leaked
                if r.verdict.status == "grader_error":
                    fault += 1
                    continue
                kept += 1
                right += r.verdict.status == "correct"
                phi += r.format
                reward += r.reward
        near(found["reward"], reward / kept)
        near(found["accuracy"], right / kept)
        near(found["format"], phi / kept)
        near(found["length"], tokens / total)
        near(found["truncated"], cut / total)
        near(found["zero_signal"], dead / len(mine))
        near(found["no_summary"], bare / total)
        near(found["leaked"], share(leaked, shown))
        near(found["unreadable"], unreadable / total)
        near(found["timeout"], slow / total)
        near(found["masked"], fault / total)
    assert grader_errors(groups) == (
        sum(r.verdict.status == "grader_error" for g in groups for r in g.rollouts),
        sum(len(g.rollouts) for g in groups),
    )


@pytest.mark.parametrize("step", range(3))
def test_rates_of_the_exchange_are_counts(folder, step):
    _, groups = step_of(folder, step)
    drafts, challenges = groups[:6], groups[6:]
    wrong = fixed = right = broken = seen = copies = 0
    for against, group in zip(drafts, challenges, strict=True):
        for i, b in enumerate(group.rollouts):
            a = against.rollouts[i]
            if "grader_error" in (a.verdict.status, b.verdict.status):
                continue
            if a.verdict.status == "correct":
                right += 1
                broken += b.verdict.status != "correct"
                continue
            wrong += 1
            fixed += b.verdict.status == "correct"
            if b.read_summary is not None:
                seen += 1
                copies += a.verdict.extracted is not None and a.verdict.extracted == b.verdict.extracted
    found = exchange_metrics(drafts, challenges, same)
    near(found["fix"], share(fixed, wrong))
    near(found["break"], share(broken, right))
    near(found["copy"], share(copies, seen))
    assert wrong
    assert right


def rollout(correct: bool, phi: int = 1, advantage: float = 0.0, draft: int | None = None, **extra: Any) -> Rollout:
    verdict = Verdict(extra.pop("status", "correct" if correct else "wrong"), extra.pop("answer", "1"))
    completion = Completion((1, 2), (0.0, 0.0), "stop", extra.pop("text", ""))
    read = extra.pop("read", "s" if draft is not None else None)
    return Rollout(Prompt("", (1,)), completion, "s", verdict, phi, draft, read, advantage=advantage, **extra)


def pairs(*cells: tuple[bool, bool, float]) -> tuple[list[Group], list[Group]]:
    """One problem; a cell is (draft right, challenge right, challenge's advantage)."""
    drafts = tuple(rollout(a) for a, _, _ in cells)
    challenges = tuple(rollout(b, advantage=adv, draft=i) for i, (_, b, adv) in enumerate(cells))
    return [Group(problem(1), "A", "draft", drafts)], [Group(problem(1), "B", "challenge", challenges)]


def test_the_bonus_is_seen_in_advantages_by_the_drafts_verdict():
    found = bonus_metrics(*pairs((False, True, 1.5), (True, True, 0.5), (True, True, 0.3), (False, False, -2.0)))
    assert found["advantage_vs_wrong"] == pytest.approx(1.5)
    assert found["advantage_vs_right"] == pytest.approx(0.4)
    assert found["revived"] == 0.0


def test_a_group_is_revived_when_all_challenges_are_right_and_still_differ():
    assert bonus_metrics(*pairs((False, True, 1.0), (True, True, -1.0)))["revived"] == 1.0
    assert bonus_metrics(*pairs((True, True, 0.0), (True, True, 0.0)))["revived"] == 0.0
    # Under the margin reward wrong challenges differ too; nobody was right, so nothing was revived.
    assert bonus_metrics(*pairs((False, False, 1.0), (True, False, -1.0)))["revived"] == 0.0


def test_no_rate_is_invented_where_there_was_nothing():
    empty = stream_metrics([])
    assert set(empty.values()) == {None}
    found = exchange_metrics(*pairs((True, True, 0.0)), same)
    assert (found["fix"], found["copy"], found["break"]) == (None, None, 0.0)


def test_a_step_s_row_says_who_did_what(folder):
    pair, groups = step_of(folder, 1)
    done = {name: Update(0.5, 0.25, 1e-3, 0.01, 0.0, applied=True) for name in pair}
    row = step_metrics(1, pair, groups, done, {"draft": 1.0}, same)
    assert row["roles"] == {"draft": "B", "challenge": "A"}
    assert set(row["players"]["B"]) & {"draft", "challenge"} == {"draft"}
    assert set(row["players"]["A"]) & {"draft", "challenge"} == {"challenge"}
    assert row["tokens"]["sampled"] == sum(len(r.completion.ids) for g in groups for r in g.rollouts)
    assert row["tokens"]["prompt"] == sum(len(r.prompt.ids) for g in groups for r in g.rollouts)
    assert row["completions"] == 6 * 16
    pair, groups = step_of(folder, 1, "grpo")
    row = step_metrics(1, pair, groups, {"A": done["A"]}, {}, same)
    assert row["roles"] == {"draft": "A", "challenge": None}
    assert "challenge" not in row["players"]["A"]
    pair, groups = step_of(folder, 1, "self_refine")
    row = step_metrics(1, pair, groups, {"A": done["A"]}, {}, same)
    assert set(row["players"]["A"]) >= {"draft", "challenge", "loss"}


def test_the_telling_sample_is_a_fix_then_a_break_then_anything():
    def told(*cells: tuple[bool, bool, float]) -> tuple[str, str]:
        drafts, challenges = pairs(*cells)
        sample = telling_sample([*drafts, *challenges])
        assert sample is not None
        return sample["draft_verdict"], sample["challenge_verdict"]

    assert told((True, True, 0.0), (True, False, 0.0), (False, True, 0.0)) == ("wrong", "correct")
    assert told((True, True, 0.0), (True, False, 0.0)) == ("correct", "wrong")
    assert told((True, True, 0.0)) == ("correct", "correct")


def watched(rows: list[dict[str, Any]]) -> list[str]:
    watch = Watch()
    return [flag for row in rows for flag in watch.flags(row)]


def row_of(name: str, role: str, length: float, copy: float | None = None) -> dict[str, Any]:
    return {"players": {name: {role: {"length": length, "copy": copy}}}}


def test_a_role_whose_length_halves_is_flagged_once():
    steady = [row_of("A", "draft", 100.0) for _ in range(40)]
    assert watched(steady) == []
    shrinking = [row_of("A", "draft", 100.0) for _ in range(15)] + [row_of("A", "draft", 40.0) for _ in range(30)]
    flags = watched(shrinking)
    assert len(flags) == 1
    assert flags[0].startswith("A draft: mean length fell")


def test_roles_of_one_player_are_watched_apart():
    rows = []
    for step in range(60):
        role, length = ("draft", 100.0) if step % 2 else ("challenge", 30.0)
        rows.append(row_of("A", role, length))
    assert watched(rows) == []


def test_a_challenger_that_copies_is_flagged_once():
    assert watched([row_of("B", "challenge", 50.0, 0.5) for _ in range(30)]) == []
    flags = watched([row_of("B", "challenge", 50.0, 0.95) for _ in range(30)])
    assert len(flags) == 1
    assert "copies 95% of wrong drafts" in flags[0]


def test_the_pairing_is_a_plain_pair():
    assert Pairing("A", "B") == ("A", "B")
