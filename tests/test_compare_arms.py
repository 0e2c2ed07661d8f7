"""Arms of a comparison: figures against slow counts, votes and placebos against a script, files against a kill."""

from __future__ import annotations

import json
import random
import shutil
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agon_cli import cli
from agon_cli.compare import contrasts, extras, spending
from agon_cli.compare.arms import Evaluated, Measured, OneSeed, collect, document, gather
from agon_cli.compare.costs import Answered, answering, cost, training
from agon_cli.compare.exchange import exchange
from agon_cli.compare.extras import Extra
from agon_cli.compare.stage import Stage, claim, empty, proposers, shuffled, vote
from agon_cli.errors import GradingError, UsageError
from agon_cli.evaluate import evaluate
from agon_cli.policy import Policy
from agon_cli.recipe import resolved
from agon_cli.runlog import read
from agon_cli.tally import Tally
from agon_cli.tiny.world import Equation, claims_hit
from agon_cli.types import Problem
from scripted import Line, arena, line, make_recipe, problem, script_of, silent, write_model

Row = dict[str, Any]
VERDICTS = ("correct", "correct", "wrong", "wrong", "unreadable", "timeout", "grader_error")


def made_up(seed: int, players: str = "AB", cascade: bool = True, samples: int = 2, items: int = 30) -> list[Row]:
    """Evaluation rows of steps 0, 20 and 40 on both splits, in which nothing is like anything else."""
    dice = random.Random(seed)
    rows: list[Row] = []
    for step, split in product((0, 20, 40), ("dev", "test")):
        if (step, split) == (20, "test"):
            continue
        said = {}
        for arm in [*players, *(f"{a}>{b}" for a, b in product(players, repeat=2) if (a != b or len(players) == 1))]:
            for item, sample in product(range(items), range(samples)):
                row = {
                    "step": step, "split": split, "arm": arm, "mode": "cascade" if ">" in arm else "single",
                    "player": arm[-1], "problem_id": f"p{item}", "sample": sample, "prompt_tokens": dice.randrange(50),
                    "tokens": dice.randrange(1, 99), "finish_reason": dice.choice(["stop", "stop", "length"]),
                    "verdict": dice.choice(VERDICTS), "text": "", "extracted": None, "format": 1,
                }  # fmt: skip
                said[arm, item, sample] = row
                if ">" in arm:
                    first = said[arm[0], item, sample]
                    row |= {"draft_verdict": first["verdict"], "draft_tokens": first["tokens"]}
                    row |= {"read": dice.random() < 0.8, "copied": dice.random() < 0.3}
                if cascade or ">" not in arm:
                    rows.append(row)
    return rows


def slow(rows: list[Row], arm: str, split: str = "test", step: int = 40) -> dict[str, Any]:
    """What an arm comes to, counted one question at a time."""
    mine = [row for row in rows if (row["arm"], row["split"], row["step"]) == (arm, split, step)]
    scores = {}
    for item in {row["problem_id"] for row in mine}:
        graded = [row for row in mine if row["problem_id"] == item and row["verdict"] != "grader_error"]
        if graded:
            scores[item] = len([row for row in graded if row["verdict"] == "correct"]) / len(graded)
    both = [row for row in mine if "grader_error" not in (row["verdict"], row.get("draft_verdict", "grader_error"))]
    table = [
        [len([r for r in both if ((r["draft_verdict"] == "correct"), (r["verdict"] == "correct")) == (a, b)])
         for b in (False, True)] for a in (False, True)
    ]  # fmt: skip
    read_wrong = [row for row in both if row["draft_verdict"] != "correct" and row["read"]]
    return {
        "scores": scores,
        "accuracy": float(np.mean(list(scores.values()))),
        "answer": float(np.mean([row["tokens"] for row in mine])),
        "prefill": float(np.mean([row["prompt_tokens"] for row in mine])),
        "draft": float(np.mean([row.get("draft_tokens", 0) for row in mine])),
        "truncated": len([row for row in mine if row["finish_reason"] == "length"]) / len(mine),
        "table": table,
        "copies": (len([row for row in read_wrong if row["copied"]]), len(read_wrong)),
    }


@pytest.mark.parametrize("samples", [1, 3])
def test_an_arm_is_what_slow_counts_say(samples):
    runs = {seed: made_up(seed, samples=samples) for seed in (3, 1, 2)}
    main, drafter, reverse = collect(runs, "agon", "cascade")
    assert [arm.name for arm in (main, drafter, reverse)] == ["agon", "agon drafter", "agon reverse"]
    assert [arm.kind for arm in (main, drafter, reverse)] == ["method", "part", "control"]
    assert list(main.seeds) == [1, 2, 3]
    told = document(main, {"value": 0.5, "low": 0.4, "high": 0.6})
    tables, copies, truncated = np.zeros((2, 2), int), np.zeros(2, int), []
    for seed, rows in runs.items():
        dev = {arm: slow(rows, arm, "dev")["accuracy"] for arm in ("A>B", "B>A")}
        best = "B>A" if dev["B>A"] > dev["A>B"] else "A>B"
        wanted = slow(rows, best)
        assert main.scores[seed] == pytest.approx(wanted["scores"])
        assert drafter.scores[seed] == pytest.approx(slow(rows, best[0])["scores"])
        assert reverse.scores[seed] == pytest.approx(slow(rows, best[::-1])["scores"])
        one = next(entry for entry in told["seeds"] if entry["seed"] == seed)
        assert one["direction"] == best
        assert one["dev"] == pytest.approx(dev)
        assert one["directions"] == pytest.approx({arm: slow(rows, arm)["accuracy"] for arm in dev})
        assert one["accuracy"] == pytest.approx(wanted["accuracy"])
        assert one["low"] < one["accuracy"] < one["high"]
        assert one["items"] == len(wanted["scores"])
        assert one["truncated"] == pytest.approx(wanted["truncated"])
        generated = wanted["draft"] + wanted["answer"]
        stages = {key: wanted[key] for key in ("draft", "prefill", "answer")} | {"generated": generated}
        assert one["tokens"] == pytest.approx(stages)
        tables += np.array(wanted["table"])
        copies += wanted["copies"]
        truncated.append(wanted["truncated"])
    assert told["table"] == tables.tolist()
    (_, fixed), (broken, _) = tables.tolist()
    rates = {"fix": fixed / tables[0].sum(), "break": broken / tables[1].sum(), "copy": copies[0] / copies[1]}
    assert told["rates"] == pytest.approx(rates)
    assert told["truncated"] == pytest.approx(np.mean(truncated))
    assert told["tokens"]["draft"] == pytest.approx(np.mean([one["tokens"]["draft"] for one in told["seeds"]]))
    assert (document(drafter, told["accuracy"])["table"], document(drafter, told["accuracy"])["rates"]) == (None, {})


def test_the_direction_is_chosen_on_dev_whatever_the_test_split_says():
    rows = made_up(0)
    for row in rows:
        if ">" in row["arm"]:
            good = {"dev": "B>A", "test": "A>B"}[row["split"]]
            row["verdict"] = "correct" if row["arm"] == good else "wrong"
    main = collect({0: rows}, "agon", "cascade")[0]
    assert (main.seeds[0].arm, main.seeds[0].tally.accuracy) == ("B>A", 0.0)
    assert main.seeds[0].directions == {"A>B": 1.0, "B>A": 0.0}


def test_which_arms_a_method_has():
    def names(method: str, deploy: Any, players: str) -> list[tuple[str, str, bool]]:
        rows = made_up(0, players)
        return [(arm.name, arm.kind, arm.trained) for arm in collect({0: rows}, method, deploy)]

    assert names("moa", "cascade", "A") == [("moa", "method", False)]
    assert names("zero_shot", "single", "A") == [("zero_shot", "method", False)]
    assert names("grpo", "single", "A") == [("grpo", "method", True)]
    assert names("self_refine", "cascade", "A") == [
        ("self_refine", "method", True), ("self_refine drafter", "part", True),
    ]  # fmt: skip
    assert [kind for _, kind, _ in names("shuffled", "cascade", "AB")] == ["control", "part", "control"]
    assert names("competition_only", "single", "AB") == [("competition_only", "method", True)]
    named = collect({0: made_up(0)}, "agon", "cascade", "agon:bonus=3")
    assert [arm.name for arm in named][:2] == ["agon:bonus=3", "agon:bonus=3 drafter"]
    assert "bonus=3" in named[0].label


def test_of_players_that_answer_alone_the_dev_split_chooses_too():
    rows = made_up(5, cascade=False)
    one = collect({0: rows}, "competition_only", "single")[0].seeds[0]
    dev = {arm: slow(rows, arm, "dev")["accuracy"] for arm in "AB"}
    assert one.arm == max(dev, key=lambda arm: dev[arm])
    assert one.dev == pytest.approx(dev)


def test_rows_that_do_not_suffice_are_refused():
    rows = made_up(0)
    with pytest.raises(UsageError, match="agon, seed 7: no evaluation on the test split"):
        collect({7: [row for row in rows if row["split"] == "dev"]}, "agon", "cascade")
    with pytest.raises(UsageError, match="no dev evaluation at step 40 to choose among A>B, B>A"):
        collect({7: [row for row in rows if (row["split"], row["step"]) != ("dev", 40)]}, "agon", "cascade")
    with pytest.raises(UsageError, match="no dev evaluation"):
        collect({7: [row for row in rows if (row["split"], row["arm"]) != ("dev", "B>A")]}, "agon", "cascade")
    with pytest.raises(UsageError, match="no test rows in mode cascade"):
        collect({7: made_up(0, cascade=False)}, "agon", "cascade")
    with pytest.raises(UsageError, match="x, seed 2: there is no row"):
        gather({1: rows, 2: []}, "x", "", "control", "agon", "cascade", True)


def test_what_the_grader_failed_on_is_counted_and_scores_nothing():
    rows = [row | {"verdict": "grader_error"} if row["problem_id"] == "p3" else row for row in made_up(0)]
    arm = collect({0: rows}, "agon", "cascade")[0]
    assert "p3" not in arm.scores[0]
    mine = [row for row in rows if (row["arm"], row["split"], row["step"]) == (arm.seeds[0].arm, "test", 40)]
    assert arm.grader_errors == sum(row["verdict"] == "grader_error" for row in mine) > 2


# --- votes and budgets ---


def sample(answer: str | None, verdict: str = "wrong", tokens: int = 10, item: int = 0) -> Row:
    return {"extracted": answer, "verdict": verdict, "tokens": tokens, "prompt_tokens": 4, "problem_id": f"p{item}",
            "sample": 0, "finish_reason": "stop", "text": "t"}  # fmt: skip


def test_a_vote_is_by_equality_and_a_tie_goes_to_the_answer_that_came_first():
    def same(a: str, b: str) -> bool:
        return a.lower() == b.lower()

    def chosen(*answers: str | None) -> int | None:
        return spending.winner(spending.classes([sample(answer) for answer in answers], same))

    assert chosen("a", "b", "B") == 1
    assert chosen("b", "a") == 0
    assert chosen(None, "a", "b") == 1
    assert chosen("a", None, None, "b", "B") == 3
    assert chosen("b", "a", "A", "B") == 0
    assert chosen(None, None) is None
    refused = [sample("a", "unreadable"), sample("a", "unreadable"), sample("b")]
    assert spending.winner(spending.classes(refused, same)) == 2, "what the verifier cannot read does not vote"


@pytest.mark.parametrize("seed", range(30))
def test_a_vote_is_what_a_slow_count_says(seed):
    dice = random.Random(seed)
    samples = [sample(dice.choice(["1", "2", "3", None])) for _ in range(dice.randrange(1, 12))]
    best, most = None, 0
    for place, mine in enumerate(samples):
        votes = sum(mine["extracted"] is not None and other["extracted"] == mine["extracted"] for other in samples)
        if votes > most:
            best, most = place, votes
    assert spending.winner(spending.classes(samples, lambda a, b: a == b)) == best


def test_a_vote_costs_all_its_samples_and_is_graded_as_its_winner():
    samples = [sample(None, "unreadable", 5), sample("2", "correct", 7), sample("2", "wrong", 11)]
    row = spending.voted(samples, [None, 1, 1])
    assert (row["verdict"], row["extracted"], row["chosen"]) == ("correct", "2", 1)
    assert (row["tokens"], row["prompt_tokens"], row["k"]) == (23, 12, 3)
    failed = [sample("2", "grader_error", 5), *samples[1:]]
    assert (spending.voted(failed, [0, 0, 0])["verdict"], spending.voted(failed, [0, 0, 0])["chosen"]) == ("correct", 1)
    assert spending.voted(failed[:1], [0])["verdict"] == "grader_error"
    nobody = spending.voted(samples[:1], [None])
    assert (nobody["verdict"], nobody["extracted"], nobody["chosen"]) == ("unreadable", None, None)


@pytest.mark.parametrize("budget", [5.0, 12.0, 19.0, 28.7, 45.5, 300.0])
def test_the_budget_is_met_as_nearly_as_whole_samples_can(budget):
    dice = random.Random(1)
    lengths = [[dice.randrange(5, 25) for _ in range(20)] for _ in range(60)]

    def rows_at(k: int) -> list[Row]:
        return [sample("1", tokens=sum(mine[:k]), item=item) | {"k": k} for item, mine in enumerate(lengths)]

    points = spending.grown(budget, rows_at)
    means = [np.mean([sum(mine[:k]) for mine in lengths]) for k in range(1, 17)]
    needed = next((k for k, mean in enumerate(means, 1) if mean >= budget), 16)
    assert len(points) == needed
    rows = spending.at_budget(points, budget)
    assert [row["problem_id"] for row in rows] == [f"p{item}" for item in range(60)]
    assert {row["k"] for row in rows} <= {max(1, needed - 1), needed}
    if means[0] <= budget <= means[-1]:
        assert spending.spent(rows) == pytest.approx(budget, rel=0.02)
    else:
        assert rows == points[-1]


def test_which_problems_get_one_sample_more_does_not_depend_on_how_they_are_answered():
    def raised(verdict: str, budget: float) -> set[str]:
        points = [[sample("1", verdict, tokens=10 * k, item=i) | {"k": k} for i in range(40)] for k in (1, 2)]
        return {row["problem_id"] for row in spending.at_budget(points, budget) if row["k"] == 2}

    assert raised("correct", 15.0) == raised("wrong", 15.0)
    assert len(raised("wrong", 15.0)) == 20
    assert raised("wrong", 12.0) < raised("wrong", 15.0), "more budget adds problems and takes none away"


# --- on a scripted stage ---


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


def stage(model: Path, arm: str, script: Any, roles: list[str], method: str = "agon", **sections: Any) -> Any:
    """A stage of four problems whose engine follows the script, and that engine. The scripted index of a sample is
    always 0 where one is drawn at a time, so the script goes by the name of the call."""
    recipe = make_recipe(model, method, **sections)
    board, engine = arena(recipe, Policy(recipe))
    engine.begin(script, roles)
    return Stage(board, [problem(n) for n in range(4)], arm, 1, 40), engine


def answers(table: dict[str, list[str]]) -> Any:
    """A script: by question, the kind of line of the first, second, … call."""

    def say(role: str, question: str, _: int) -> Line:
        call = int(role[1:])
        return line(table[question][call], f"D {question} x{call}", str(int(question[1:])), fill=1)

    return say


VOTES = {
    "q0": ["wrong", "right", "right"],
    "q1": ["unreadable", "right", "wrong"],
    "q2": ["right", "wrong", "wrong"],
    "q3": ["truncated", "unclosed", "empty_wrong"],
}


def test_majorities_of_scripted_samples(model):
    board, engine = stage(model, "A", answers(VOTES), ["s0", "s1", "s2"], "grpo")
    rows = vote(board, budget=22.0)
    samples = [row for row in rows if row["arm"] == "A"]
    lengths = {(row["problem_id"], row["sample"]): row["tokens"] for row in samples}
    assert {place for _, place in lengths} == {1, 2, 3}, "the evaluation used sample 0"
    votes = {(row["arm"], row["problem_id"]): row for row in rows if row["mode"] == "vote"}
    said = {
        k: [votes[f"vote@{k}", f"id-{n}"]["verdict"] for n in range(4)] for k in (1, 2, 3)
    }  # fmt: skip
    assert said == {
        1: ["wrong", "unreadable", "correct", "unreadable"],
        2: ["wrong", "correct", "correct", "unreadable"],
        3: ["correct", "correct", "wrong", "wrong"],
    }
    for k in (1, 2, 3):
        for n in range(4):
            assert votes[f"vote@{k}", f"id-{n}"]["tokens"] == sum(lengths[f"id-{n}", i] for i in range(1, k + 1))
    spent = [votes["vote", f"id-{n}"] for n in range(4)]
    assert {row["k"] for row in spent} <= {2, 3}
    assert all({**row, "arm": f"vote@{row['k']}"} == votes[f"vote@{row['k']}", row["problem_id"]] for row in spent)
    seeds = [entry[5] for entry in engine.seen]
    assert len(set(seeds)) == 12
    engine.begin(script_of(0, 4), ["draft"])
    evaluate(board.arena, board.problems, "test", 40, "single", 4, silent)
    assert not set(seeds) & {entry[5] for entry in engine.seen}, "its luck is not the evaluation's"


def test_a_budget_below_one_sample_is_one_sample(model):
    board, _ = stage(model, "A", answers(VOTES), ["s0"], "grpo")
    rows = vote(board, budget=1.0)
    assert {row["arm"] for row in rows} == {"A", "vote@1", "vote"}


def proposed(marks: str, words: int = 1) -> Any:
    """Drafts with summaries of so many words, without one where the call's mark is a blank; right challenges."""

    def say(role: str, question: str, _: int) -> Line:
        kind, call = role[0], int(role[1:])
        if kind == "c":
            return line("right", f"C {question} x{call}", str(int(question[1:])))
        if marks[call] == " ":
            return line("truncated", f"D {question} x{call}", "1")
        told = " ".join([f"x{call}"] * words)
        return Line(f"<think> w1 </think> {told} <answer> 3 </answer>", "stop", False, 1, told)

    return say


def test_an_aggregator_reads_every_draft_that_can_be_read(model):
    board, engine = stage(model, "A>A", proposed("x x"), ["d0", "c0", "d1", "c1", "d2", "c2"], "moa")
    rows = proposers(board, budget=30.0)
    shown = {}
    for role, _, question, _, prompt, _ in engine.seen:
        if role[0] == "c":
            words = prompt.text.split()
            shown[role, question] = [word for word in words if word[0] == "x"] if "rival" in words else None
    assert shown["c0", "q2"] == ["x0"]
    assert shown["c1", "q2"] == ["x0"], "the second draft was cut off"
    assert shown["c2", "q2"] == ["x0", "x2"]
    third = [row for row in rows if row["arm"] == "proposers@3"]
    assert [row["verdict"] for row in third] == ["correct"] * 4
    assert {row["k"] for row in third} == {3}
    one = [row for row in rows if row["arm"] == "proposers@1"]
    assert all(a["draft_tokens"] > b["draft_tokens"] for a, b in zip(third, one, strict=True))
    nothing, engine = stage(model, "A>A", proposed(" "), ["d0", "c0"], "moa")
    proposers(nothing, budget=1.0)
    assert all("rival" not in entry[4].text.split() for entry in engine.seen)


def test_several_summaries_share_the_room_that_prompts_leave(model):
    def lengths(most: int) -> tuple[list[int], list[int]]:
        """Tokens of the longest prompt of each aggregator, and how much of each draft is in the last one."""
        sections = {"rollout": {"max_prompt_tokens": most}, "summary": {"max_tokens": 10}}
        roles = ["d0", "c0", "d1", "c1"]
        board, engine = stage(model, "A>A", proposed("xx", words=12), roles, "moa", **sections)
        proposers(board, budget=45.0)
        seen = {role: [e[4] for e in engine.seen if e[0] == role] for role in ("c0", "c1")}
        words = seen["c1"][0].text.split()
        return [max(len(p.ids) for p in seen[role]) for role in seen], [words.count(f"x{call}") for call in (0, 1)]

    (one, two), shares = lengths(most=64)
    assert (two - one, shares) == (10, [10, 10]), "there is room for both"
    (_, tight), shares = lengths(most=one + 4)
    assert (tight, shares) == (one + 4, [7, 7])


def test_placebos_differ_from_the_cascade_in_what_is_read_alone(model):
    board, engine = stage(model, "B>A", script_of(3, 4), ["draft", "draft", "challenge", "challenge"])
    real = [
        r for r in evaluate(board.arena, board.problems, "test", 40, "cascade", 1, silent).rows if r["arm"] == "B>A"
    ]
    seeds = {(player, question): seed for role, player, question, _, _, seed in engine.seen if role == "challenge"}
    for placebo in (empty, shuffled):
        engine.begin(script_of(3, 4), ["draft", "challenge"])
        rows = placebo(board, 0.0)
        for key in ("problem_id", "arm", "mode", "draft_verdict", "draft_tokens", "sample"):
            assert [row[key] for row in rows] == [row[key] for row in real]
        finals = [entry for entry in engine.seen if entry[0] == "challenge"]
        assert all(seeds[player, question] == seed for _, player, question, _, _, seed in finals)
        words = {question: prompt.text.split() for _, _, question, _, prompt, _ in finals}
        if placebo is empty:
            assert not any(row["read"] for row in rows)
            assert all("rival" not in said for said in words.values())
        else:
            sources = {question: said[said.index("rival") + 2] for question, said in words.items() if "rival" in said}
            assert len(sources) >= 2
            assert all(question != source for question, source in sources.items())


def test_a_summary_claims_a_hit_by_its_last_value():
    equation = Equation(target=9, factor=5, shift=7)
    assert claims_hit("4 5 7 9", equation)
    assert claims_hit("7 9", equation)
    for said in (
        None,
        "",
        "9",
        "9 4",
        "4 9 10 2",
        "4 5 9",
        "x 9",
        "4 \u0669",
        "٤ 9",
        "4 09",
        "-4 9",
        "11 9",
        "9" * 9999,
    ):
        assert not claims_hit(said, equation), said
    assert not claims_hit("<script> 9", equation)


def test_of_two_samples_the_first_that_claims_is_kept_else_the_first(model):
    told = {"q0": ("4 5", "7 9"), "q1": ("4 9", "7 9"), "q2": ("4 5", "7 2"), "q3": ("4 9", "7 2")}

    def say(_: str, question: str, index: int) -> Line:
        text = f"<think> w1 </think> {told[question][index]} <answer> {index} </answer>"
        return Line(text, "stop", False, 1, told[question][index])

    board, _ = stage(model, "A", say, ["draft"], "grpo")
    meta = {"target": 9, "factor": 5, "shift": 7}
    asked = [Problem(f"id-{n}", f"q{n}", "0", meta) for n in range(4)]
    rows = claim(Stage(board.arena, asked, "A", 1, 40), 0.0)
    assert [row["extracted"] for row in rows] == ["1", "0", "0", "0"]
    assert [row["verdict"] for row in rows] == ["wrong", "correct", "correct", "correct"]
    assert {row["tokens"] for row in rows} == {18}, "both samples are paid for"
    assert {(row["arm"], row["mode"], row["sample"]) for row in rows} == {("claim", "claim", 0)}


# --- kept by key ---


def written(folder: Path, recipe: Any, evals: list[Row], metrics: list[Row] = ()) -> Path:  # type: ignore[assignment]
    """A run folder that holds these rows."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.resolved.json").write_text(json.dumps(resolved(recipe)) if recipe is not None else "{}")
    (folder / "manifest.json").write_text(json.dumps({"hashes": {"prompts": "p", "base.A": "b"}}))
    for name, rows in (("evals", evals), ("metrics", metrics)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


class Theatre:
    """Stages scripted players, and counts how often."""

    def __init__(self, model: Path, kind: str = "right") -> None:
        self.model, self.kind, self.opened = model, kind, 0

    @contextmanager
    def __call__(self, run: Path, evaluated: Evaluated) -> Any:
        self.opened += 1
        board, engine = stage(self.model, evaluated.chosen, self._say, [f"s{n}" for n in range(40)], "grpo")
        engine.roles = [f"s{n}" for n in range(40)]
        yield board

    def _say(self, role: str, question: str, index: int) -> Line:
        return line(self.kind, f"D {question} x{index}", str(int(question[1:])), fill=1 + int(role[1:]) % 4)


@pytest.fixture
def finished(model, tmp_path):
    recipe = make_recipe(model, "grpo")
    return written(tmp_path / "run", recipe, made_up(0, "A", cascade=False, samples=1))


def test_nothing_is_evaluated_twice(model, finished, tmp_path):
    path, theatre, told = tmp_path / "extras" / "grpo-seed-0.jsonl", Theatre(model), []

    def rows(*wanted: Extra) -> Any:
        return extras.rows(finished, path, wanted, told.append, theatre)

    first = rows(Extra("vote", 22.0))
    assert (theatre.opened, told) == (1, ["vote"])
    whole = path.read_bytes()
    assert rows(Extra("vote", 22.0)) == first
    assert rows(Extra("vote", 22.0000000001)) == first, "a sum in another order is the same budget"
    assert (theatre.opened, path.read_bytes()) == (1, whole)
    both = rows(Extra("vote", 22.0), Extra("shuffled"))
    assert (theatre.opened, told) == (2, ["vote", "shuffled"])
    assert both["vote"] == first["vote"]
    assert rows(Extra("shuffled"), Extra("vote", 22.0)) == both
    assert theatre.opened == 2
    other = rows(Extra("vote", 60.0))
    assert (theatre.opened, told[2:]) == (3, ["vote"]), "another budget"
    assert len(other["vote"]) > len(first["vote"])
    assert rows(Extra("shuffled"))["shuffled"] == both["shuffled"]
    assert theatre.opened == 3


def test_another_recipe_step_or_input_is_another_key(model, finished, tmp_path):
    path, theatre = tmp_path / "x.jsonl", Theatre(model)
    wanted = [Extra("vote", 22.0)]

    def opened() -> int:
        extras.rows(finished, path, wanted, silent, theatre)
        extras.rows(finished, path, wanted, silent, theatre)
        return theatre.opened

    assert opened() == 1
    written(finished, make_recipe(model, "grpo", seed=1), made_up(0, "A", cascade=False, samples=1))
    assert opened() == 2
    written(finished, make_recipe(model, "grpo", seed=1), [r | {"step": r["step"] + 1} for r in made_up(0, "A")])
    assert opened() == 3
    (finished / "manifest.json").write_text(json.dumps({"hashes": {"prompts": "other"}}))
    assert opened() == 4


def test_another_run_of_an_equal_recipe_is_another_key(model, finished, tmp_path):
    path, theatre = tmp_path / "x.jsonl", Theatre(model)
    recipe, evals = make_recipe(model, "grpo"), made_up(0, "A", cascade=False, samples=1)
    last = [place for place, row in enumerate(evals) if (row["step"], row["split"]) == (40, "test")][-1]

    def opened(rows: list[Row]) -> int:
        extras.rows(written(tmp_path / "other", recipe, rows), path, [Extra("vote", 22.0)], silent, theatre)
        return theatre.opened

    extras.rows(finished, path, [Extra("vote", 22.0)], silent, theatre)
    assert opened(evals) == 1, "the same run in another folder"
    for times, said in enumerate(({"text": "x"}, {"tokens": 1000}, {"verdict": "x"}), start=2):
        assert opened([row | said if place == last else row for place, row in enumerate(evals)]) == times, said
    before = times
    assert opened([row | {"text": "x"} if row["step"] < 40 else row for row in evals]) == before + 1
    assert opened(evals) == before + 1, "what it answered before its last step has no say"


def test_a_torn_or_edited_file_is_made_again_to_the_same_bytes(model, finished, tmp_path):
    path, theatre = tmp_path / "x.jsonl", Theatre(model)
    wanted = [Extra("vote", 22.0), Extra("empty")]

    def opened() -> int:
        extras.rows(finished, path, wanted, silent, theatre)
        return theatre.opened

    assert opened() == 1
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    deep = b"[" * 100_000 + b"\n"
    torn = [b"", whole[:-5], b"".join(lines[:-1]), lines[0], b"\n" + whole, whole + b"{}\n", b"[]\n", b"null\n", deep]
    torn += [
        whole.replace(b'"extra":"vote"', b'"extra":"other"', 1),
        whole.replace(b'"tokens":', b'"tokens":1'),
        b'{"extras":[1]}\n',
        b"\xff\xfe\n",
        whole + b"x",
    ]
    for times, content in enumerate(torn, start=2):
        path.write_bytes(content)
        assert opened() == times, content[:80]
        assert path.read_bytes() == whole
    assert [entry.name for entry in tmp_path.iterdir() if "x.jsonl" in entry.name] == ["x.jsonl"]


def test_what_was_whole_before_a_kill_is_kept(model, finished, tmp_path, monkeypatch):
    path, theatre = tmp_path / "x.jsonl", Theatre(model)

    def killed(*_: object) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setitem(extras.PLAYED, "empty", killed)
    with pytest.raises(KeyboardInterrupt):
        extras.rows(finished, path, [Extra("vote", 22.0), Extra("empty")], silent, theatre)
    monkeypatch.undo()
    told: list[str] = []
    extras.rows(finished, path, [Extra("vote", 22.0), Extra("empty")], told.append, theatre)
    assert told == ["empty"]


def test_a_grader_that_fails_all_along_ends_it(model, finished, tmp_path):
    with pytest.raises(GradingError):
        extras.rows(finished, tmp_path / "x.jsonl", [Extra("vote", 300.0)], silent, Theatre(model, "fault"))
    assert not (tmp_path / "x.jsonl").exists()


def test_extras_become_arms_and_families(model, finished, tmp_path):
    found = {
        seed: extras.rows(finished, tmp_path / f"{seed}.jsonl", [Extra("vote", 22.0)], silent, Theatre(model))["vote"]
        for seed in (0, 1)
    }
    arm = extras.measured(found, "vote", "grpo_two_pass", "grpo")
    ks = [row["k"] for rows in found.values() for row in rows if row["arm"] == "vote"]
    assert arm.name == f"grpo vote@{sum(ks) / len(ks):.1f}".removesuffix(".0")
    assert (arm.kind, arm.method, arm.deploy, arm.trained) == ("equal_tokens", "grpo", "vote", True)
    assert arm.tokens["generated"] == pytest.approx(22.0, rel=0.1)
    line_up = extras.family(found, "vote", "zero_shot", lambda arm: {"value": 0.25, "low": 0.0, "high": 1.0})
    assert line_up["name"] == "zero_shot vote"
    tokens = [point["tokens"] for point in line_up["points"]]
    assert [point["k"] for point in line_up["points"]] == [float(k) for k in range(1, len(tokens) + 1)]
    assert tokens == sorted(tokens)
    assert tokens[-2] < 22.0 <= tokens[-1]
    shorter = {0: found[0], 1: [row for row in found[1] if row["arm"] != f"vote@{len(tokens)}"]}
    assert len(
        extras.family(shorter, "vote", "zero_shot", lambda arm: {"value": 0.0, "low": 0.0, "high": 1.0})["points"]
    ) == (len(tokens) - 1)


@pytest.mark.parametrize("what", ["vote", "claim"])
def test_a_player_who_is_called_like_an_arm_is_not_taken_for_it(what):
    alone = sample("1", tokens=10) | {"arm": what, "mode": "single", "format": 1}
    rows = {0: [alone, alone | {"mode": what, "k": 2, "tokens": 30}]}
    assert extras.measured(rows, what, "grpo", "grpo").tokens["generated"] == 30


# --- what a pair does ---


def slow_overlap(rows: list[Row], step: int) -> dict[str, float]:
    right: dict[str, list[bool]] = {"A": [], "B": []}
    for item, place in product({row["problem_id"] for row in rows}, {row["sample"] for row in rows}):
        pair = [
            row["verdict"]
            for player in "AB"
            for row in rows
            if (row["arm"], row["step"], row["split"]) == (player, step, "test")
            and (row["problem_id"], row["sample"]) == (item, place)
        ]
        if "grader_error" not in pair:
            right["A"].append(pair[0] == "correct")
            right["B"].append(pair[1] == "correct")
    a, b = ~np.array(right["A"]), ~np.array(right["B"])
    return {
        "both_wrong": (a & b).mean(),
        "both_wrong_if_independent": a.mean() * b.mean(),
        "correlation": np.corrcoef(a, b)[0, 1],
        "divergence": (a != b).mean(),
    }


def steps_of(seed: int, count: int, challenges: bool = True) -> list[Row]:
    """Rows of metrics, with the sums they must come to under `truth`."""
    dice = random.Random(seed)
    rows = []
    for step in range(count):
        drafts, finals = ([dice.randrange(1, 60) for _ in range(32 if challenges else 64)] for _ in range(2))
        finals = finals if challenges else []
        first, second = ("A", "B") if step % 2 == 0 else ("B", "A")
        players: Row = {first: {"draft": {"length": sum(drafts) / len(drafts), "leaked": dice.random()}}}
        if challenges:
            keys = ("revived", "advantage_vs_wrong", "advantage_vs_right")
            players[second] = {"challenge": {key: dice.choice([None, dice.random()]) for key in keys}}
        rows.append({
            "step": step, "roles": {"draft": first, "challenge": second if challenges else None}, "players": players,
            "completions": len(drafts) + len(finals), "seconds": {"draft": dice.random(), "update": dice.random()},
            "tokens": {"sampled": sum(drafts) + sum(finals), "prompt": dice.randrange(1000)},
            "peak_bytes": dice.randrange(10**9), "truth": (sum(drafts), sum(finals)),
        })  # fmt: skip
    return rows


@pytest.mark.parametrize("steps", [4, 37, 250])
def test_an_exchange_is_what_slow_counts_say(tmp_path, steps):
    evals, metrics = {s: made_up(s) for s in (0, 1)}, {s: steps_of(s, steps) for s in (0, 1)}
    runs = {s: written(tmp_path / str(s), None, evals[s], metrics[s]) for s in (0, 1)}
    told = exchange("agon", "cascade", runs)
    window = max(10, steps // 10)
    for name, step in (("start", 0), ("end", 40)):
        wanted: dict[str, list[float]] = {}
        for seed in (0, 1):
            rows, best = evals[seed], collect({0: evals[seed]}, "agon", "cascade")[0].seeds[0].arm
            figures = slow(rows, best, step=step)
            (wrong, fixed), (broken, right) = figures["table"]
            one = {"fix": fixed / (wrong + fixed), "break_": broken / (broken + right)}
            one |= {"copy": figures["copies"][0] / figures["copies"][1]} | slow_overlap(rows, step)
            near = metrics[seed][:window] if name == "start" else metrics[seed][-window:]
            said = [row["players"][row["roles"]["challenge"]]["challenge"] for row in near]
            means = {
                key: np.mean([entry[key] for entry in said if entry[key] is not None])
                for key in ("revived", "advantage_vs_wrong", "advantage_vs_right")
            }
            leaks = [row["players"][row["roles"]["draft"]]["draft"]["leaked"] for row in near]
            one |= {"revived": means["revived"], "leak": np.mean(leaks)}
            one |= {"weight": means["advantage_vs_wrong"] / means["advantage_vs_right"]}
            for key, value in one.items():
                wanted.setdefault(key, []).append(value)
        assert told[name] == pytest.approx({key: np.mean(values) for key, values in wanted.items()})  # type: ignore[literal-required]


def test_an_exchange_without_reading_has_no_fixes_and_one_without_variance_no_correlation(tmp_path):
    rows = made_up(0, cascade=False)
    for row in rows:
        if row["arm"] == "A":
            row["verdict"] = "wrong"
    told = exchange("competition_only", "single", {0: written(tmp_path / "a", None, rows, steps_of(0, 4))})["end"]
    assert (told["fix"], told["break_"], told["copy"], told["correlation"]) == (None, None, None, None)
    assert told["both_wrong"] == pytest.approx(told["both_wrong_if_independent"])
    with pytest.raises(UsageError, match="one player"):
        exchange("moa", "cascade", {0: written(tmp_path / "b", None, made_up(0, "A"))})


def test_a_weight_against_nothing_is_none(tmp_path):
    metrics = steps_of(0, 4)
    for row in metrics:
        row["players"][row["roles"]["challenge"]]["challenge"] |= {
            "advantage_vs_right": -0.1,
            "advantage_vs_wrong": 1.0,
        }
    told = exchange("agon", "cascade", {0: written(tmp_path / "a", None, made_up(0), metrics)})
    assert told["end"]["weight"] is None


def test_torn_rows_and_missing_keys_are_told_with_file_and_line(tmp_path):
    run = written(tmp_path / "run", None, made_up(0), steps_of(0, 4))
    metrics = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(metrics[:2]) + metrics[2].replace('"leaked"', '"leeked"'))
    with pytest.raises(UsageError, match=r"metrics\.jsonl:3: no 'leaked'"):
        exchange("agon", "cascade", {0: run})
    (run / "metrics.jsonl").write_text("".join(metrics)[:-9])
    for reader in (lambda: exchange("agon", "cascade", {0: run}), lambda: training(run)):
        with pytest.raises(UsageError, match=r"metrics\.jsonl:4: "):
            reader()
    evals = (run / "evals.jsonl").read_text().replace('"verdict"', '"verdikt"', 1)
    (run / "evals.jsonl").write_text(evals)
    with pytest.raises(UsageError, match=r"evals\.jsonl:1: no 'verdict'"):
        exchange("agon", "cascade", {0: run})


# --- costs ---


def test_costs_are_sums_over_the_steps_and_means_over_the_runs(tmp_path):
    metrics = {seed: steps_of(seed, 9) for seed in (0, 1)}
    spent = [training(written(tmp_path / str(seed), None, [], rows)) for seed, rows in metrics.items()]
    arm = collect({0: made_up(0)}, "agon", "cascade")[0]
    told = cost(arm, spent, [Answered({"answer": 0.5, "draft": 0.25}, 700), Answered({"answer": 0.7}, None)])
    every = [row for rows in metrics.values() for row in rows]
    assert told["training"] == pytest.approx({
        "drafted": sum(row["truth"][0] for row in every) / 2,
        "answered": sum(row["truth"][1] for row in every) / 2,
        "prefilled": sum(row["tokens"]["prompt"] for row in every) / 2,
        "peak_bytes": max(row["peak_bytes"] for row in every),
    })  # fmt: skip
    assert told["training_seconds"] == pytest.approx(
        {phase: sum(row["seconds"][phase] for row in every) / 2 for phase in ("draft", "update")}
    )
    tokens = {key: arm.tokens[key] for key in ("draft", "prefill", "answer")}  # type: ignore[literal-required]
    assert told["inference"] == tokens | {"peak_bytes": 700}
    assert told["inference_seconds"] == pytest.approx({"answer": 0.6, "draft": 0.125})


def test_answering_is_timed_at_the_last_evaluation_and_its_memory_before_the_first_step(tmp_path):
    run = written(tmp_path / "run", None, [])
    assert answering(run, "A>B", 4) is None, "a run of an older version"
    place = {"split": "test", "arm": "A>B", "completions": 4}
    rows = [
        place | {"step": 0, "seconds": {"answer": 9.0}, "peak_bytes": 500},
        place | {"step": 4, "seconds": {"answer": 2.0, "verify": 1.0, "draft": 8.0}, "peak_bytes": 900},
        place | {"step": 4, "arm": "A", "seconds": {"answer": 7.0}, "peak_bytes": 900},
        place | {"step": 4, "split": "dev", "seconds": {"answer": 5.0}, "peak_bytes": 900},
    ]
    (run / "inference.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert answering(run, "A>B", 4) == Answered({"answer": 0.5, "verify": 0.25, "draft": 2.0}, 500)
    assert answering(run, "A", 4) == Answered({"answer": 1.75}, None)
    assert answering(run, "B>A", 4) is None
    for key, value, what in (
        ("seconds", {"answer": -1}, "'seconds' holds no times"),
        ("seconds", 3, "'seconds' holds no times"),
        ("peak_bytes", 1e400, "'peak_bytes' is no count"),
        ("arm", None, "'arm' is no text"),
    ):
        (run / "inference.jsonl").write_text(json.dumps(rows[0] | {key: value}) + "\n")
        with pytest.raises(UsageError, match=rf"inference\.jsonl:1: {what}"):
            answering(run, "A>B", 4)


def test_one_pass_writes_answers_alone_and_an_old_run_has_no_peak(tmp_path):
    metrics = steps_of(0, 3, challenges=False)
    for row in metrics:
        del row["peak_bytes"]
    spent = training(written(tmp_path / "run", None, [], metrics))
    assert (spent.drafted, spent.answered) == (0, sum(row["tokens"]["sampled"] for row in metrics))
    arm = collect({0: made_up(0, "A")}, "grpo", "single")[0]
    told = cost(arm, [spent], [])
    assert told["training"] is not None
    assert "peak_bytes" not in told["training"]
    untrained = cost(collect({0: made_up(0, "A")}, "moa", "cascade")[0], [spent], [])
    assert (untrained["training"], untrained["training_seconds"]) == (None, None)


# --- a real run ---

SMALL = ["rollout.problems=3", "rollout.group_size=4", "eval.every=0", "split.dev=12", "split.test=24", "steps=2"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A base and a pair of the tiny world, as `agon train` leaves them."""
    folder = tmp_path_factory.mktemp("runs")
    for method in ("moa", "agon"):
        assert cli.main(["train", "tiny", *SMALL, f"method={method}", "--out", str(folder / method), "-q"]) == 0
    return folder


@pytest.mark.slow
def test_extras_of_a_real_run_can_be_drawn_again(runs, tmp_path):
    wanted = {
        "moa": [Extra("vote", 40.0), Extra("proposers", 60.0), Extra("claim")],
        "agon": [Extra("shuffled"), Extra("empty")],
    }
    for name, asked in wanted.items():
        once, again = tmp_path / f"{name}.jsonl", tmp_path / f"{name}-again.jsonl"
        found = extras.rows(runs / name, once, asked, silent)
        extras.rows(runs / name, again, asked[::-1], silent)
        assert once.read_bytes() == again.read_bytes()
        for what, rows in found.items():
            arm = extras.measured({0: rows}, what, name, name)
            assert len(arm.scores[0]) == 24
            if what in ("vote", "proposers"):
                assert arm.tokens["generated"] == pytest.approx({"vote": 40.0, "proposers": 60.0}[what], rel=0.1)
    drafts = {
        row["problem_id"]: (row["verdict"], row["tokens"])
        for row in read(runs / "agon", "evals")
        if (row["step"], row["split"], row["arm"]) == (2, "test", found["empty"][0]["arm"][0])
    }
    for row in (*found["empty"], *found["shuffled"]):
        assert (row["draft_verdict"], row["draft_tokens"]) == drafts[row["problem_id"]]


@pytest.mark.slow
def test_a_run_that_is_not_what_it_was_is_refused(runs, tmp_path):
    run = tmp_path / "agon"
    shutil.copytree(runs / "agon", run, symlinks=True)
    manifest = json.loads((run / "manifest.json").read_text())
    assert {"prompts", "base.A", "data.test"} <= manifest["hashes"].keys()
    for name in ("prompts", "base.A", "data.test"):
        changed = manifest | {"hashes": manifest["hashes"] | {name: "other"}}
        (run / "manifest.json").write_text(json.dumps(changed))
        with pytest.raises(UsageError, match=f"not what this run was trained on: {name}"):
            extras.rows(run, tmp_path / "x.jsonl", [Extra("empty")], silent)
    (run / "manifest.json").write_text(json.dumps(manifest))
    evals = [row for row in read(run, "evals") if row["step"] == 0]
    (run / "evals.jsonl").write_text("".join(json.dumps(row) + "\n" for row in evals))
    with pytest.raises(UsageError, match="evaluated at step 0, but its newest checkpoint is of step 2"):
        extras.rows(run, tmp_path / "x.jsonl", [Extra("empty")], silent)
    for text in ("{", "[]", '{"hashes": 3}', "{}"):
        (run / "manifest.json").write_text(text)
        with pytest.raises(UsageError, match=r"manifest\.json cannot be read"):
            extras.rows(run, tmp_path / "x.jsonl", [Extra("empty")], silent)


def verdict_of(*names: str) -> str:
    lead = Measured("agon", "", "method", "agon", "cascade", True, {0: OneSeed("A>B", Tally())})
    found: Any = [
        {"left": "agon", "right": name, "verdict": word, "sentence": name}
        for name, word in zip(names, ["better", "cannot tell"] * len(names), strict=False)
    ]
    return contrasts.verdict(lead, {"value": 1.0, "low": 0.0, "high": 1.0}, found)[0]


def facing(name: str, kind: Any, method: str, deploy: Any, tokens: int, right: int, start: int = 0) -> Measured:
    """An arm that has `right` of 100 problems right from number `start` on, for so many tokens each."""
    verdicts = ["correct" if start <= n < start + right else "wrong" for n in range(100)]
    rows = [sample("1", v, tokens, n) | {"arm": "A", "mode": "single", "format": 1} for n, v in enumerate(verdicts)]
    return gather({0: rows}, name, "", kind, method, deploy, True)


@pytest.mark.parametrize(
    ("voted", "word", "told"),
    [(79, "cannot tell", "it cannot be told apart"), (50, "better", "it is better"), (100, "worse", "it is worse")],
)
def test_a_difference_at_unlike_budgets_is_told_with_the_one_at_equal_tokens(voted, word, told):
    lead = facing("agon", "method", "agon", "cascade", 60, 80)
    vote_arm = facing("grpo vote@2", "equal_tokens", "grpo", "vote", 61, voted)
    others = [facing("coop", "method", "coop", "cascade", 60, 75), facing("grpo", "method", "grpo", "single", 30, 40)]
    found = {(c["left"], c["right"]): c for c in contrasts.contrasts([lead, *others, vote_arm], lead)[0]}
    plain = found["agon", "grpo"]
    assert (plain["verdict"], plain["matched"]) == ("better", "grpo vote@2")
    assert plain["sentence"].endswith(f"; against grpo vote@2, which spends as many tokens, {told}.")
    assert found["agon", "grpo vote@2"]["verdict"] == word
    assert ("coop", "grpo vote@2") not in found
    bystander = found["coop", "grpo"]
    assert (bystander["verdict"], bystander["matched"]) == ("higher", None), "nobody set coop against the votes"
    assert bystander["sentence"].endswith("; coop was not set against grpo at equal tokens.")


def test_the_verdict_names_five_arms_and_of_more_the_methods() -> None:
    five = verdict_of("moa", "grpo", "coop", "coop shuffled", "grpo claim")
    assert five.endswith(": better than moa, coop and grpo claim; not told apart from grpo and coop shuffled.")
    many = verdict_of("moa", "grpo", "grpo vote@2", "agon shuffled", "moa proposers@2", "agon empty")
    assert many.endswith(
        ": better than moa and 2 further arms; not told apart from grpo and 2 further arms (see the table)."
    )
    others = verdict_of("grpo vote@2", "grpo", "moa proposers@2", "coop", "zero_shot vote@3", "moa", "grpo claim")
    assert ": better than 4 arms; not told apart from grpo, coop and moa (see the table)." in others
