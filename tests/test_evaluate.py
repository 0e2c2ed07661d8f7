"""Evaluation rows and figures against slow counts; intervals against the definition of Clopper and Pearson."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from scipy.stats import beta, binom, binomtest

from agon_cli.evaluate import arms, choose, direction, evaluate
from agon_cli.policy import Policy
from agon_cli.stats import interval
from scripted import arena, make_recipe, problem, script_of, silent, write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


def run(
    folder: Any, method: Any = "agon", samples: int = 1, mode: str = "cascade", **sections: Any
) -> list[dict[str, Any]]:
    recipe = make_recipe(folder, method, **sections)
    board, engine = arena(recipe, Policy(recipe))
    players = len(recipe.cast)
    engine.begin(script_of(7, 8), ["draft"] * players + ["challenge"] * max(1, players * (players - 1)))
    return evaluate(board, [problem(n) for n in range(16)], "dev", 40, mode, samples, silent).rows


def test_every_arm_has_one_row_per_problem_and_sample(folder):
    rows = run(folder, samples=2)
    counts: dict[str, int] = {}
    for row in rows:
        counts[row["arm"]] = counts.get(row["arm"], 0) + 1
        assert (row["step"], row["split"]) == (40, "dev")
    assert counts == {"A": 32, "B": 32, "A>B": 32, "B>A": 32}
    assert {row["player"] for row in rows if row["arm"] == "A>B"} == {"B"}
    assert {row["stage"] for row in rows if row["mode"] == "single"} == {"draft"}
    assert {row["stage"] for row in rows if row["mode"] == "cascade"} == {"final"}


def test_one_pass_methods_have_no_cascade(folder):
    assert {row["arm"] for row in run(folder, "grpo", mode="single")} == {"A"}
    assert {row["arm"] for row in run(folder, "moa")} == {"A", "A>A"}
    three = {"A": {}, "B": {"noise": 0.1}, "C": {"noise": 0.1}}
    assert {row["arm"] for row in run(folder, players=three)} == {
        *("A", "B", "C", "A>B", "B>A", "A>C", "C>A", "B>C", "C>B")
    }


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("method", ["agon", "moa", "shuffled"])
def test_figures_are_slow_counts(folder, method, samples):
    rows = run(folder, method, samples)
    random.Random(0).shuffle(rows)
    figures = {arm["arm"]: arm for arm in arms(rows)}
    for name, found in figures.items():
        mine = [row for row in rows if row["arm"] == name]
        per_problem: dict[str, list[int]] = {}
        for row in mine:
            if row["verdict"] != "grader_error":
                per_problem.setdefault(row["problem_id"], []).append(1 if row["verdict"] == "correct" else 0)
        means = [sum(values) / len(values) for values in per_problem.values()]
        assert found["problems"] == len(means)
        assert found["accuracy"] == pytest.approx(sum(means) / len(means))
        assert found["low"] <= found["accuracy"] <= found["high"]
        assert found["tokens"] == pytest.approx(sum(row["tokens"] for row in mine) / len(mine))
        assert found["prompt_tokens"] == pytest.approx(sum(row["prompt_tokens"] for row in mine) / len(mine))
        assert found["truncated"] == pytest.approx(sum(row["finish_reason"] == "length" for row in mine) / len(mine))
        assert found["grader_errors"] == sum(row["verdict"] == "grader_error" for row in mine)
        if ">" in name:
            check_exchange(found, mine, [row for row in rows if row["arm"] == name.split(">")[0]])


def check_exchange(found: dict[str, Any], finals: list[dict[str, Any]], drafts: list[dict[str, Any]]) -> None:
    """The 2x2 table from the drafter's own solo rows, not from what the final rows say about them."""
    by_key = {(row["problem_id"], row["sample"]): row for row in drafts}
    table = [[0, 0], [0, 0]]
    copies = seen = 0
    for final in finals:
        draft = by_key[final["problem_id"], final["sample"]]
        assert final["draft_verdict"] == draft["verdict"]
        assert final["draft_tokens"] == draft["tokens"]
        if "grader_error" in (draft["verdict"], final["verdict"]):
            continue
        right = draft["verdict"] == "correct"
        table[right][final["verdict"] == "correct"] += 1
        if not right and final["read"]:
            seen += 1
            copies += draft["extracted"] is not None and draft["extracted"] == final["extracted"]
    assert found["table"] == table
    assert found["fix"] == pytest.approx(table[0][1] / sum(table[0]))
    assert found["break"] == pytest.approx(table[1][0] / sum(table[1]))
    assert found["copy"] == pytest.approx(copies / seen)


def test_a_cascade_reads_the_draft_of_its_own_problem_except_in_the_control(folder):
    for method in ("agon", "moa", "grpo_two_pass", "coop", "fixed_roles"):
        recipe = make_recipe(folder, method)
        board, engine = arena(recipe, Policy(recipe))
        engine.begin(script_of(7, 8), ["draft"] * len(recipe.cast) + ["challenge"] * 2)
        evaluate(board, [problem(n) for n in range(16)], "dev", 0, "cascade", 1, silent)
        challenges = [entry for entry in engine.seen if entry[0] == "challenge"]
        reads = [(question, prompt.text.split()) for _, _, question, _, prompt, _ in challenges]
        shown = [(question, words[words.index("rival") + 2]) for question, words in reads if "rival" in words]
        assert len(shown) >= 8
        assert all(question == source for question, source in shown)


def test_evaluations_at_other_steps_face_the_same_luck_and_other_splits_do_not(folder):
    recipe = make_recipe(folder)
    board, engine = arena(recipe, Policy(recipe))

    def seeds(split: str, step: int) -> list[int]:
        engine.begin(script_of(0, 8), ["draft"] * 2 + ["challenge"] * 2)
        evaluate(board, [problem(n) for n in range(4)], split, step, "cascade", 2, silent)
        return [entry[5] for entry in engine.seen]

    assert seeds("dev", 0) == seeds("dev", 50)
    assert not set(seeds("dev", 0)) & set(seeds("test", 0))


def test_an_evaluation_tells_what_every_arm_took(folder):
    recipe = make_recipe(folder)
    board, engine = arena(recipe, Policy(recipe))
    engine.begin(script_of(7, 8), ["draft"] * 2 + ["challenge"] * 2)
    found = evaluate(board, [problem(n) for n in range(4)], "dev", 50, "cascade", 2, silent)
    assert [row["arm"] for row in found.spent] == list(dict.fromkeys(row["arm"] for row in found.rows))
    assert {(row["step"], row["split"], row["completions"]) for row in found.spent} == {(50, "dev", 8)}
    took = {row["arm"]: row["seconds"] for row in found.spent}
    assert set(took["A"]) == {"answer", "verify"}
    assert set(took["A>B"]) == {"draft", "answer", "verify"}
    assert took["A>B"]["draft"] == sum(took["A"].values())
    peaks = [row["peak_bytes"] for row in found.spent]
    assert peaks == sorted(peaks)
    assert peaks[0] > 1e6


def test_the_direction_is_the_best_of_the_dev_split_and_the_first_of_equals():
    def arm(name: str, accuracy: float | None) -> dict[str, Any]:
        return {"arm": name, "mode": "cascade" if ">" in name else "single", "accuracy": accuracy}

    assert choose([arm("A", 0.9), arm("A>B", 0.4), arm("B>A", 0.5)]) == "B>A"
    assert choose([arm("A>B", 0.5), arm("B>A", 0.5)]) == "A>B"
    assert choose([arm("A>B", None), arm("B>A", 0.1)]) == "B>A"
    assert choose([arm("A>B", None), arm("B>A", None)]) == "A>B"
    assert choose([arm("A", 0.9)]) is None
    assert direction("solver-1>B_2") == ("solver-1", "B_2")


def test_arms_keep_steps_and_splits_apart(folder):
    rows = run(folder, "grpo", mode="single")
    later = [row | {"step": 80, "verdict": "wrong"} for row in rows]
    test = [row | {"split": "test", "verdict": "correct"} for row in rows]
    found = [(arm["step"], arm["split"], arm["accuracy"]) for arm in arms([*rows, *later, *test])]
    assert found[1:] == [(80, "dev", 0.0), (40, "test", 1.0)]
    assert 0 < found[0][2] < 1
    assert arms([]) == []


@pytest.mark.parametrize(("right", "total"), [(0, 1), (1, 1), (0, 30), (30, 30), (7, 30), (150, 300), (299, 300)])
def test_the_interval_is_clopper_and_pearsons(right, total):
    low, high = interval([1.0] * right + [0.0] * (total - right))
    scipys = binomtest(right, total).proportion_ci(0.95, method="exact")
    assert (low, high) == pytest.approx((scipys.low, scipys.high), abs=1e-9)
    assert low == pytest.approx(0.0 if right == 0 else beta.ppf(0.025, right, total - right + 1), abs=1e-9)
    assert high == pytest.approx(1.0 if right == total else beta.ppf(0.975, right + 1, total - right), abs=1e-9)
    if 0 < right < total:
        # The definition: at either end the observation, or one further out, has probability 2.5 %.
        assert binom.sf(right - 1, total, low) == pytest.approx(0.025, abs=1e-6)
        assert binom.cdf(right, total, high) == pytest.approx(0.025, abs=1e-6)


def test_with_several_samples_the_interval_is_over_problems():
    dice = np.random.default_rng(0)
    scores = (dice.binomial(4, dice.beta(2, 2, size=80)) / 4).tolist()
    low, high = interval(scores)
    spread = 1.96 * float(np.std(scores)) / len(scores) ** 0.5
    assert low == pytest.approx(float(np.mean(scores)) - spread, abs=0.02)
    assert high == pytest.approx(float(np.mean(scores)) + spread, abs=0.02)
    assert interval(scores) == (low, high), "the same scores give the same interval"
    assert interval([]) == (0.0, 1.0)


def test_equal_partial_scores_are_not_certainty():
    """Ten problems that each scored one of two say little about the next; no interval of no width."""
    low, high = interval([0.5] * 10)
    assert low < 0.5 < high
    assert high - low > 0.1
