"""Where problems come from, how they are split, and every way in which a source can be wrong."""

from __future__ import annotations

import ast
import csv
import json
import os
import random
from collections import Counter
from decimal import Decimal
from pathlib import Path

import pytest

from agon_cli import data
from agon_cli.errors import AgonError, MachineError, UnreachableError, UsageError
from agon_cli.inspect_data import inspect
from agon_cli.recipe.data import NAMED
from agon_cli.recipe.schema import Recipe
from agon_cli.types import Problem
from agon_cli.verifiers import make
from agon_cli.verifiers.exact import NumberVerifier
from agon_cli.verifiers.gym import score

REAL = Path(os.environ.get("AGON_SHARED_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
needs_real = pytest.mark.skipif(not REAL.is_dir(), reason="AGON_SHARED_DATA names no folder with gsm8k/ and svamp/")


def recipe(source: dict | str, *, split: dict | None = None, verifier: str = "number", seed: int = 0) -> Recipe:
    return Recipe.model_validate(
        {
            "model": {"id": "x"},
            "data": source,
            "split": {"dev": 3, "test": 3} | (split or {}),
            "verifier": {"type": verifier},
            "seed": seed,
        }
    )


def write(path: Path, rows: list) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def rows(count: int, start: int = 0) -> list[dict]:
    return [{"question": f"What is {n} + 1?", "answer": str(n + 1), "level": n} for n in range(start, start + count)]


def jsonl(tmp_path: Path, content: list, name: str = "d.jsonl", **extra) -> dict:
    return {"type": "jsonl", "path": write(tmp_path / name, content)} | extra


def ids(problems) -> list[str]:
    return [problem.id for problem in problems]


# -------------------------------------------------------------------------------------------------- splits and steps


def test_splits_are_disjoint_complete_and_independent_of_the_order_of_rows(tmp_path):
    content = rows(40)
    first = data.load(recipe(jsonl(tmp_path, content)))
    random.Random(1).shuffle(content)
    again = data.load(recipe(jsonl(tmp_path, content, "e.jsonl")))
    assert (first.train, first.dev, first.test) == (again.train, again.dev, again.test)
    assert (len(first.train), len(first.dev), len(first.test)) == (34, 3, 3)
    assert len(set(ids(first.train + first.dev + first.test))) == 40
    assert {p.question: p.gold for p in first.train}.items() <= {r["question"]: r["answer"] for r in content}.items()


def test_the_seed_and_the_cap_on_training_change_no_split(tmp_path):
    source = jsonl(tmp_path, rows(40))
    whole = data.load(recipe(source))
    capped = data.load(recipe(source, split={"train": 5}, seed=7))
    assert (capped.dev, capped.test) == (whole.dev, whole.test)
    assert capped.train == whole.train[:5]


def test_another_test_size_leaves_dev_alone(tmp_path):
    source = jsonl(tmp_path, rows(40))
    small, large = data.load(recipe(source)), data.load(recipe(source, split={"test": 9}))
    assert small.dev == large.dev
    assert large.test[:3] == small.test


def test_white_space_and_composition_are_no_content_but_words_are(tmp_path):
    content = [
        *rows(20),
        {"question": "Café  is\nwhat?", "answer": "1"},
        {"question": "Cafe\u0301 is what?", "answer": "1"},
    ]
    loaded = data.load(recipe(jsonl(tmp_path, content)))
    assert loaded.counts == {"rows": 22, "duplicates": 1}
    assert len(loaded.train) == 21 - 6


def test_a_question_with_two_golds_is_dropped_because_nobody_knows_the_right_one(tmp_path):
    content = [*rows(20), {"question": "What is 3 + 1?", "answer": "5"}]
    loaded = data.load(recipe(jsonl(tmp_path, content)))
    assert "What is 3 + 1?" not in {p.question for p in loaded.train + loaded.dev + loaded.test}
    assert loaded.counts["same question, different answers"] == 2


def test_a_test_file_of_its_own_keeps_its_problems_out_of_training(tmp_path):
    source = jsonl(tmp_path, rows(20), test_path=write(tmp_path / "t.jsonl", rows(10, start=15)))
    loaded = data.load(recipe(source))
    assert {int(p.gold) for p in loaded.test} <= set(range(16, 26))
    assert {int(p.gold) for p in loaded.train + loaded.dev} == set(range(1, 16))
    assert loaded.counts["also in the test split"] == 5


def test_the_tiny_world_keeps_its_own_splits_capped():
    whole = data.load(recipe({"type": "tiny"}, split={"dev": 300, "test": 300}, verifier="exact"))
    assert (len(whole.train), len(whole.dev), len(whole.test)) == (655, 217, 217)
    capped = data.load(recipe({"type": "tiny"}, split={"train": 10, "dev": 5, "test": 4}), NumberVerifier())
    assert (capped.train, capped.dev, capped.test) == (whole.train[:10], whole.dev[:5], whole.test[:4])


def test_an_epoch_repeats_nothing_and_a_step_depends_on_nothing_but_itself():
    problems = [Problem(str(n), "q", "g") for n in range(10)]
    steps = [data.batch(problems, step, 3, seed=0) for step in range(9)]
    for epoch in range(3):
        seen = [p.id for step in steps[3 * epoch : 3 * epoch + 3] for p in step]
        assert len(seen) == len(set(seen)) == 9
    assert [data.batch(problems, step, 3, seed=0) for step in reversed(range(9))] == steps[::-1]
    assert steps[:3] != steps[3:6]
    assert steps != [data.batch(problems, step, 3, seed=1) for step in range(9)]
    reached = {p.id for step in range(60) for p in data.batch(problems, step, 3, seed=0)}
    assert len(reached) == 10, "what one epoch leaves over, another takes"


def test_fewer_problems_than_a_batch_make_one_batch_of_them_all():
    problems = [Problem(str(n), "q", "g") for n in range(3)]
    assert sorted(ids(data.batch(problems, 5, 8, 0))) == ["0", "1", "2"]


# --------------------------------------------------------------------------------------------- columns and filters


@pytest.mark.parametrize(
    ("extract", "cell", "gold"),
    [
        ("plain", " 18 ", "18"), ("plain", 145.0, "145"), ("plain", 0.5, "0.5"), ("plain", 7, "7"),
        ("plain", True, "true"),
        ("hashes", "3 * 4 = <<3*4=12>>12\n#### 12", "12"), ("hashes", "#### 1\n#### 1,234,567", "1234567"),
        ("hashes", "#### 1, 2", "1, 2"), ("hashes", "####-5", "-5"),
        ("boxed", r"so \boxed{1} no, \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
    ],
)  # fmt: skip
def test_the_gold_is_read_by_the_rule(tmp_path, extract, cell, gold):
    source = jsonl(tmp_path, [{"q": f"question {n}", "a": cell} for n in range(9)])
    source["columns"] = {"question": ["q"], "answer": "a", "extract": extract}
    assert {p.gold for p in data.load(recipe(source)).train} == {gold}


def test_question_columns_are_joined_and_rows_without_question_or_answer_are_counted(tmp_path):
    content = [{"body": f"There are {n}.", "ask": "How many?", "a": "#### 4"} for n in range(9)]
    content += [{"body": "", "ask": None, "a": "#### 4"}, {"body": "x", "ask": "y", "a": "4"}]
    content += [{"body": "z", "ask": "y", "a": None}]
    source = jsonl(tmp_path, content)
    source["columns"] = {"question": ["body", "ask"], "answer": "a", "extract": "hashes"}
    loaded = data.load(recipe(source))
    assert "There are 0. How many?" in {p.question for p in loaded.train + loaded.dev + loaded.test}
    assert loaded.counts == {"rows": 12, "no question": 1, "no answer found": 2}


FILTERED = [
    ({"column": "level", "minimum": 5, "maximum": 14}, range(5, 15)),
    ({"column": "level", "equals": 3.0}, [3]),
    ({"column": "name", "equals": "n7"}, [7]),
    ({"column": "even", "equals": True}, range(0, 20, 2)),
    ({"column": "even", "equals": 1.0}, []),
    ({"column": "name", "excludes": ["N1", " n2 "]}, [0, *range(3, 20)]),
    ({"column": "name", "minimum": 0}, []),
    ({"column": "digits", "minimum": 18}, [18, 19]),
    ({"column": "digits", "equals": 3}, [3]),
]


@pytest.mark.parametrize(("test", "kept"), FILTERED)
def test_filters_keep_what_they_say(tmp_path, test, kept):
    content = [
        row | {"name": f"n{n}", "even": n % 2 == 0, "digits": str(n)} for n, row in enumerate(rows(20))
    ]  # fmt: skip
    source = jsonl(tmp_path, [*content, *({**row, "question": f"q{n}"} for n, row in enumerate(content))])
    source["filters"] = [test]
    if not list(kept):
        with pytest.raises(UsageError, match=rf"dropped by the filter on {test['column']} 40"):
            data.load(recipe(source))
        return
    if len(list(kept)) == 1:
        with pytest.raises(UsageError, match="train split is empty"):
            data.load(recipe(source, split={"dev": 1, "test": 1}))
        return
    loaded = data.load(recipe(source, split={"dev": 1, "test": 1}))
    assert {int(p.gold) - 1 for p in loaded.train + loaded.dev + loaded.test} == set(kept)
    assert loaded.counts[f"dropped by the filter on {test['column']}"] == 2 * (20 - len(list(kept)))


# ----------------------------------------------------------------------------------------------------------- golds


def test_a_gold_that_its_own_verifier_refuses_never_reaches_a_split(tmp_path):
    content = [*rows(20), *({"question": f"bad {n}", "answer": "many"} for n in range(15))]
    loaded = data.load(recipe(jsonl(tmp_path, content)), NumberVerifier())
    everything = loaded.train + loaded.dev + loaded.test
    assert Counter(p.gold == "many" for p in everything) == {False: 20}
    assert (len(loaded.dev), len(loaded.test)) == (3, 3), "good problems take the places of bad ones"
    assert loaded.counts["gold refused by its verifier"] == 15


def test_check_golds_says_which_and_why_and_refuses_when_all_are_bad():
    good, bad = Problem("1", "q", "5"), Problem("2", "q", "five")
    kept, dropped = data.check_golds([bad, good], NumberVerifier())
    assert kept == [good]
    assert [(problem.id, verdict.status) for problem, verdict in dropped] == [("2", "unreadable")]
    assert data.check_golds([], NumberVerifier()) == ([], [])
    with pytest.raises(UsageError, match="'five' is unreadable"):
        data.check_golds([bad], NumberVerifier())


def test_a_formula_that_cannot_be_parsed_is_no_gold(tmp_path):
    verifier = make(recipe({"type": "tiny"}, verifier="math"))
    golds = [r"\frac{1}{2}", r"\text{no solution}", "1=1", r"\frac{", "x+1"]
    try:
        kept, _ = data.check_golds([Problem(str(n), "q", gold) for n, gold in enumerate(golds)], verifier)
    finally:
        verifier.close()
    assert [problem.gold for problem in kept] == [r"\frac{1}{2}", r"\text{no solution}", "x+1"]


@needs_real
def test_every_gold_of_gsm8k_and_svamp_passes_and_no_pair_of_different_golds_does():
    verifier = make(recipe({"type": "tiny"}, verifier="math"))
    gsm8k = {"type": "jsonl", "path": str(REAL / "gsm8k/train.jsonl"), "test_path": str(REAL / "gsm8k/test.jsonl")}
    gsm8k |= {"columns": {"extract": "hashes"}}
    svamp = {"type": "jsonl", "path": str(REAL / "svamp/svamp.jsonl")}
    svamp |= {"columns": {"question": ["Body", "Question"], "answer": "Answer"}}
    pool: list[Problem] = []
    for source, count, test in ((gsm8k, 8792, 1319), (svamp, 1000, 300)):
        loaded = data.load(recipe(source, split={"dev": 300, "test": test}, verifier="math"), verifier)
        assert loaded.counts["rows"] == count
        assert "gold refused by its verifier" not in loaded.counts
        assert "no answer found" not in loaded.counts
        everything = [*loaded.train, *loaded.dev, *loaded.test]
        lost = sum(loaded.counts.get(k, 0) for k in ("duplicates", "same question, different answers"))
        lost += loaded.counts.get("also in the test split", 0)
        assert len(everything) + lost == count
        pool += everything
    draw = random.Random(0)
    pairs = [(p, q) for p, q in (draw.sample(pool, 2) for _ in range(2200)) if float(p.gold) != float(q.gold)][:2000]
    verdicts = verifier.grade([(p, q.gold) for p, q in pairs])
    assert [v.status for v in verdicts] == ["wrong"] * 2000
    verifier.close()


# ---------------------------------------------------------------------------------------------- everything that fails


def fails(source: dict, kind: type[AgonError], **extra) -> AgonError:
    with pytest.raises(kind) as caught:
        data.load(recipe(source, **extra))
    assert caught.value.hint
    return caught.value


def test_a_missing_file_a_folder_and_an_empty_file(tmp_path):
    missing = fails({"type": "jsonl", "path": str(tmp_path / "no.jsonl")}, UnreachableError)
    assert missing.code == 4
    assert "no such file" in missing.message
    assert fails({"type": "jsonl", "path": str(tmp_path)}, UnreachableError).code == 4
    assert "no rows" in fails(jsonl(tmp_path, []), UsageError).message


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"question": "q", "answer": }', "not JSON"),
        (b'{"question": "q"', "not JSON"),
        (b'["q", "a"]', "not a JSON object"),
        (b'{"question": "q", "answer": NaN}', "NaN is no JSON number"),
        (b'{"question": "q", "answer": -Infinity}', "-Infinity is no JSON number"),
        (b'{"question": "q", "answer": 1e999}', "too large"),
        (b'{"question": "q", "answer": ' + b"9" * 5000 + b"}", "not JSON"),
        (b'{"question": "q\xff", "answer": "1"}', "not UTF-8"),
        (b"[" * 100_000, "not JSON"),
        (b'{"question": "\\ud800", "answer": "1"}', "broken character"),
        (b'{"question": ["q"], "answer": "1"}', "holds a list, not text"),
        (b'{"question": "q", "answer": {"value": 1}}', "holds a dict, not text"),
        (b"\x00\x00", "not JSON"),
    ],
)
def test_a_broken_row_is_named_by_file_and_line(tmp_path, line, said):
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"question": "a", "answer": "1"}\n\n' + line + b"\n")
    error = fails({"type": "jsonl", "path": str(path)}, UsageError)
    assert error.message.startswith(f"{path}:3: ")
    assert said in error.message


def test_a_wrong_column_is_answered_with_the_likely_one_and_the_list(tmp_path):
    source = jsonl(tmp_path, rows(9))
    for columns, filters in (
        ({"question": ["questoin"]}, []),
        ({"answer": "anwser"}, []),
        ({}, [{"column": "levle", "minimum": 1}]),
    ):
        error = fails(source | {"columns": columns, "filters": filters}, UsageError)
        assert error.code == 2
        assert error.message.startswith(f"{source['path']}:1: no column")
        assert "did you mean" in error.hint
        assert "answer, level, question" in error.hint


@pytest.mark.parametrize(("count", "empty"), [(2, "dev"), (3, "dev"), (6, "train"), (5, "train")])
def test_a_split_left_empty_is_named(tmp_path, count, empty):
    error = fails(jsonl(tmp_path, rows(count)), UsageError)
    assert f"the {empty} split is empty" in error.message
    assert f"rows {count}" in error.message


# --------------------------------------------------------------------------------------------------------- programs


TESTS = {"input": ["1\n", "2\n"], "output": ["2\n", "4\n"]}


def test_code_contests_rows_become_problems_whose_tests_no_question_shows(tmp_path):
    content = [
        {
            "description": f"Double the number. Task {n}.",
            "public_tests": {"input": ["7\r\n"], "output": ["14\n"]},
            "private_tests": TESTS,
            "generated_tests": [{"input": "5", "output": "10"}],
            "cf_rating": 800 + 100 * n,
        }
        for n in range(9)
    ]
    content.append(
        content[0] | {"description": "no tests", "public_tests": None, "private_tests": {}, "generated_tests": []}
    )
    content[-1]["private_tests"] = {"input": [], "output": []}
    source = jsonl(tmp_path, content, filters=[{"column": "cf_rating", "minimum": 1, "maximum": 1200}])
    source["columns"] = {"question": ["description"], "answer": "private_tests"}
    loaded = data.load(recipe(source, split={"dev": 1, "test": 1}, verifier="code"))
    assert loaded.counts == {"rows": 10, "dropped by the filter on cf_rating": 4, "no unit tests": 1}
    for problem in loaded.train + loaded.dev + loaded.test:
        assert problem.meta["tests"] == {"inputs": ["7\n", "1\n", "2\n", "5"], "outputs": ["14\n", "2\n", "4\n", "10"]}
        assert problem.gold, "an answer tag around it must not be empty"
        assert "14" not in problem.question
        json.dumps(problem.meta)


def test_a_column_of_tests_may_have_any_name_and_is_bounded(tmp_path):
    many = {"inputs": ["x" * 300_000, *map(str, range(100))], "outputs": ["y"] * 101}
    source = jsonl(tmp_path, [{"question": f"q{n}", "checks": many} for n in range(9)])
    source["columns"] = {"answer": "checks"}
    tests = data.load(recipe(source, verifier="code")).train[0].meta["tests"]
    assert len(tests["inputs"]) == len(tests["outputs"]) == 32
    assert tests["inputs"][0] == "0"


@pytest.mark.parametrize(
    "cell", ["text", {"input": ["1"]}, {"input": ["1"], "output": []}, {"input": [1], "output": ["1"]}]
)
def test_a_column_without_tests_is_refused(tmp_path, cell):
    source = jsonl(tmp_path, [{"question": "q", "checks": cell}], columns={"answer": "checks"})
    assert "holds no unit tests" in fails(source, UsageError, verifier="code").message


# ---------------------------------------------------------------------------------------------------- reasoning-gym


def gym(task: str = "chain_sum", size: int = 30, **args) -> dict:
    return {"type": "reasoning_gym", "task": task, "size": size, "args": args}


def test_generated_problems_are_repeatable_seeded_and_scored_by_their_own_task():
    source = gym(min_terms=2, max_terms=2)
    first, again = data.load(recipe(source)), data.load(recipe(source))
    other = data.load(recipe(source | {"seed": 1}))
    assert first == again == data.load(recipe(source, seed=1)), "the run's seed changes no problem"
    assert set(ids(first.train)) != set(ids(other.train))
    everything = first.train + first.dev + first.test
    assert len(everything) == 30 - first.counts.get("duplicates", 0)
    for problem in everything:
        assert NumberVerifier().grade([(problem, str(value_of(problem.question)))])[0].correct
        json.dumps(problem.meta)


def value_of(question: str) -> int:
    """The value of `a + b - c`, the only arithmetic in the question's text."""
    words = question.replace("=", " ").replace("?", " ").replace(".", " ").replace(":", " ").split()
    terms = [word for word in words if word in "+-" or word.isdigit()]
    total, sign = 0, 1
    for term in terms:
        if term in "+-":
            sign = 1 if term == "+" else -1
        else:
            total += sign * int(term)
    return total


@pytest.mark.parametrize("task", ["rearc", "arc_agi", "countdown", "knights_knaves", "word_ladder", "mini_sudoku"])
def test_the_kept_entry_still_satisfies_the_scorer(task):
    """Some scorers compare tuples, which JSON would turn into lists."""
    loaded = data.load(recipe(gym(task, size=8), split={"dev": 1, "test": 1}))
    for problem in loaded.train:
        assert ast.literal_eval(problem.meta["entry"])["question"] == problem.question
        assert score(task, "{}", problem.gold, problem.meta["entry"])[0] == "correct"


def test_a_task_that_is_not_there_or_refuses_its_arguments():
    error = fails(gym("chain_sun"), UsageError)
    assert "did you mean 'chain_sum'" in error.hint
    assert "unexpected keyword argument 'terms'" in fails(gym(terms=2), UsageError).message
    assert "min_terms must be positive" in fails(gym(min_terms=0), UsageError).message
    assert "no gold answers" in fails(gym("rubiks_cube", size=8), UsageError).message


@pytest.mark.parametrize(("source", "module"), [(gym(), "reasoning_gym"), ({"type": "hub", "id": "a/b"}, "datasets")])
def test_without_the_extra_the_command_that_installs_it_is_named(monkeypatch, source, module):
    monkeypatch.setitem(__import__("sys").modules, module, None)
    error = fails(source, MachineError)
    assert error.code == 3
    assert "pip install -c constraints.txt -e '.[tasks]'" in error.hint


# -------------------------------------------------------------------------------------------------------------- Hub


@pytest.fixture
def hub_folder(tmp_path, monkeypatch) -> str:
    """A data set folder, which the datasets library reads by the same call as one on the Hub."""
    folder = tmp_path / "set"
    folder.mkdir()
    write(folder / "train.jsonl", [row | {"notes": "long"} for row in rows(20)])
    write(folder / "test.jsonl", [row | {"notes": "long"} for row in rows(8, start=100)])
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return str(folder)


def test_a_hub_data_set_gives_the_same_problems_as_its_file(hub_folder):
    hub = data.load(recipe({"type": "hub", "id": hub_folder, "test_split": "test"}))
    local = {"type": "jsonl", "path": f"{hub_folder}/train.jsonl", "test_path": f"{hub_folder}/test.jsonl"}
    assert hub == data.load(recipe(local))
    assert {int(p.gold) for p in hub.test} <= set(range(101, 109))


def test_a_hub_column_or_split_that_is_not_there(hub_folder):
    error = fails({"type": "hub", "id": hub_folder, "columns": {"answer": "answers"}}, UsageError)
    assert "did you mean 'answer'" in error.hint
    assert "trian" in fails({"type": "hub", "id": hub_folder, "split": "trian"}, UsageError).message


def test_name_configuration_and_revision_reach_the_library(monkeypatch):
    import datasets

    asked = []

    def remember(*args, **named):
        asked.append((args, named))
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", remember)
    for identity in ("openai/gsm8k:main@e53f048", "openai/gsm8k", "a/b@v1"):
        assert fails({"type": "hub", "id": identity}, UnreachableError).message == f"{identity}: no route"
    assert asked == [
        (("openai/gsm8k", "main"), {"split": "train", "revision": "e53f048"}),
        (("openai/gsm8k", None), {"split": "train", "revision": None}),
        (("a/b", None), {"split": "train", "revision": "v1"}),
    ]


def test_the_commit_that_was_read_is_known_and_told(monkeypatch):
    import datasets

    commit = "e53f048856ff4f594e959d75785d2c2d37b678ee"

    def stand_in(*args, **named):
        table = datasets.Dataset.from_list([{"question": f"q {n}", "answer": str(n)} for n in range(20)])
        address = f"hf://datasets/openai/gsm8k@{commit}/main/train-00000-of-00001.parquet"
        table.info.download_checksums = {address: {"num_bytes": 1}}
        return table

    monkeypatch.setattr(datasets, "load_dataset", stand_in)
    loaded = data.load(recipe({"type": "hub", "id": "openai/gsm8k:main"}))
    assert loaded.revisions == {"openai/gsm8k:main": commit}
    assert loaded.unpinned() == [
        f"openai/gsm8k:main is read as it is today (now {commit}): its rows, and with them the splits, may change"
    ]
    pinned = data.load(recipe({"type": "hub", "id": f"openai/gsm8k:main@{commit}"}))
    assert pinned.unpinned() == []
    assert set(pinned.revisions.values()) == {commit}


def test_offline_the_hub_is_unreachable_at_once(monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    error = fails({"type": "hub", "id": "nobody/nothing-here"}, UnreachableError)
    assert error.code == 4
    assert "HF_HUB_OFFLINE" in error.hint


# ------------------------------------------------------------------------------------------------------ kinds of files


def in_every_format(tmp_path: Path, content: list[dict]) -> dict[str, str]:
    """The same rows, by `data.type`, as the file or folder that type reads."""
    import datasets

    table = datasets.Dataset.from_list(content)
    (tmp_path / "d.json").write_text(json.dumps(content))
    with (tmp_path / "d.csv").open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, list(content[0]))
        writer.writeheader()
        writer.writerows(content)
    table.to_parquet(str(tmp_path / "d.parquet"))
    table.save_to_disk(str(tmp_path / "d.saved"))
    paths = {kind: str(tmp_path / f"d.{kind}") for kind in ("json", "csv", "parquet", "saved")}
    return {"jsonl": write(tmp_path / "d.jsonl", content)} | paths


def test_every_kind_of_file_gives_the_same_problems(tmp_path):
    content = [row | {"hard": n % 2 == 0, "note": 'a, "b"\nc'} for n, row in enumerate(rows(40))]
    filters = [{"column": "level", "minimum": 10}, {"column": "hard", "equals": True}]
    loaded = {
        kind: data.load(recipe({"type": kind, "path": path, "filters": filters}))
        for kind, path in in_every_format(tmp_path, content).items()
    }
    assert {int(p.gold) - 1 for p in loaded["csv"].train + loaded["csv"].dev + loaded["csv"].test} == set(
        range(10, 40, 2)
    )
    assert all(splits == loaded["jsonl"] for splits in loaded.values())


@pytest.mark.parametrize("kind", ["json", "csv", "parquet", "saved"])
def test_a_column_that_no_file_has_is_named_in_every_kind(tmp_path, kind):
    path = in_every_format(tmp_path, rows(9))[kind]
    error = fails({"type": kind, "path": path, "columns": {"answer": "anwser"}}, UsageError)
    assert isinstance(error, data.NoColumn)
    assert "did you mean 'answer'" in error.hint


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet", "saved"])
def test_a_file_that_is_not_there_is_unreachable_in_every_kind(tmp_path, kind):
    assert "no such file" in fails({"type": kind, "path": str(tmp_path / "no")}, UnreachableError).message


@pytest.mark.parametrize(
    ("kind", "content", "where", "said"),
    [
        ("json", b'{"question": "q", "answer": "1"}', "", "not a list"),
        ("json", b'[{"question": "q", "answer": "1"}, 3]', "[1]", "not a JSON object"),
        ("json", b'[{"question": "q", "answer": NaN}]', "", "NaN is no JSON number"),
        ("json", b'["\xff"]', "", "not UTF-8 (byte 2)"),
        ("csv", b"question,answer\nq,1\nq,1,2\n", ":3", "3 cells under 2 column names"),
        ("csv", b"question,answer\nq\n", ":2", "1 cells under 2"),
        ("csv", b"question,question\nq,1\n", ":1", "two columns have the same name"),
        ("csv", b'question,answer\n"q"x,1\n', ":2", "not CSV"),
        ("csv", b"question,answer\n\xff,1\n", ":2", "not UTF-8"),
        ("jsonl", b'{"question": "q", "answer": "1", "answer": "2"}', ":1", "the key 'answer' comes twice"),
        ("json", b'[{"question": "q", "question": "p", "answer": "1"}]', "", "the key 'question' comes twice"),
        ("parquet", b"PAR1 not really", "", "not of type parquet"),
        ("saved", b"a file", "", ""),
    ],
)
def test_a_broken_file_is_refused_where_it_breaks(tmp_path, kind, content, where, said):
    path = tmp_path / f"d.{kind}"
    path.write_bytes(content)
    error = fails({"type": kind, "path": str(path)}, AgonError)
    assert error.code in (2, 4)
    assert error.message.startswith(f"{path}{where}: ")
    assert said in error.message


def test_a_parquet_file_that_is_broken_inside_is_refused_and_not_called_unreachable(tmp_path):
    path = Path(in_every_format(tmp_path, rows(60))["parquet"])
    content = bytearray(path.read_bytes())
    content[60:90] = bytes(30)
    path.write_bytes(content)
    assert "not of type parquet" in fails({"type": "parquet", "path": str(path)}, UsageError).message


def test_a_cell_of_csv_may_be_long_and_a_gold_in_parquet_a_decimal(tmp_path):
    import pyarrow
    import pyarrow.parquet

    content = [row | {"note": "n" * 200_000} for row in rows(9)]
    assert data.load(recipe({"type": "csv", "path": in_every_format(tmp_path, content)["csv"]})).counts["rows"] == 9
    columns = {"question": [row["question"] for row in rows(9)], "answer": [Decimal("1.50")] * 9}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "decimal.parquet")
    assert data.load(recipe({"type": "parquet", "path": str(tmp_path / "decimal.parquet")})).train[0].gold == "1.50"


def test_a_saved_folder_of_several_splits_asks_which_one(tmp_path):
    import datasets

    parts = {"train": datasets.Dataset.from_list(rows(20)), "test": datasets.Dataset.from_list(rows(5, 50))}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "both"))
    error = fails({"type": "saved", "path": str(tmp_path / "both")}, UsageError)
    assert f"{tmp_path}/both/train" in error.hint
    loaded = data.load(
        recipe({"type": "saved", "path": f"{tmp_path}/both/train", "test_path": f"{tmp_path}/both/test"})
    )
    assert {int(p.gold) for p in loaded.test} <= set(range(51, 56))


@pytest.mark.parametrize(("kind", "module"), [("parquet", "pyarrow.parquet"), ("saved", "datasets")])
def test_a_file_that_needs_the_extra_names_it(tmp_path, monkeypatch, kind, module):
    path = in_every_format(tmp_path, rows(9))[kind]
    monkeypatch.setitem(__import__("sys").modules, module, None)
    assert "'.[tasks]'" in fails({"type": kind, "path": path}, MachineError).hint


# ------------------------------------------------------------------------------------------------------ near duplicates


def ask(*questions: str) -> list[Problem]:
    return [Problem(f"{n:03}", question, "1") for n, question in enumerate(questions)]


LONG = "Ann walks {} miles on every day of the week but the last, and rests then. How many miles does she walk in all?"


def test_near_duplicates_have_the_same_numbers_and_nearly_the_same_words():
    near = ask(LONG.format(3), LONG.format(3).replace("?", "").upper(), LONG.format(3).replace("Ann", "Eve"))
    assert [(p.id, twin.id) for p, twin in data.near_duplicates(near, 0.8)] == [("001", "000"), ("002", "000")]
    other = ask(LONG.format(3), LONG.format(4), "Walk 3 miles.", "What is 3 + 4?", "What is 3 * 4?", "What is 4 + 3?")
    assert data.near_duplicates(other, 0.8) == []


def test_the_quick_search_finds_what_comparing_all_pairs_finds():
    draw = random.Random(3)
    words = ["the", "a", "of", "red", "blue", "pens", "cats", "runs", "walks", "buys", "sells", "how", "many"]
    questions = []
    for _ in range(60):
        text = draw.choices(words, k=draw.randrange(1, 20))
        questions.append(" ".join(text))
        text[draw.randrange(len(text))] = draw.choice(words)
        questions.append(" ".join(text))
    problems = ask(*questions)

    def runs(text: str) -> set:
        split = text.split()
        return {tuple(split[at : at + 3]) for at in range(max(1, len(split) - 2))}

    for threshold in (0.3, 0.6, 0.8, 1.0):
        kept: list[Problem] = []
        dropped = set()
        for problem in problems:
            own = runs(problem.question)
            shared = (len(own & runs(p.question)) / len(own | runs(p.question)) for p in kept)
            if any(share >= threshold for share in shared):
                dropped.add(problem.id)
            else:
                kept.append(problem)
        assert {p.id for p, _ in data.near_duplicates(problems, threshold)} == dropped
        assert 0 < len(dropped) < 119


def test_near_duplicates_are_dropped_when_the_recipe_says_so(tmp_path):
    content = [{"question": LONG.format(n), "answer": str(6 * n)} for n in range(20)]
    twins = [{"question": LONG.format(n).replace("Ann", "Eve"), "answer": str(6 * n)} for n in range(3)]
    source = jsonl(tmp_path, content + twins[:2], test_path=write(tmp_path / "t.jsonl", [*twins[2:], *rows(3)]))
    assert data.load(recipe(source)).counts == {"rows": 26}
    loaded = data.load(recipe(source | {"near_duplicates": 0.8}))
    # Two twins within the training file, and the question that is nearly one of the test file.
    assert loaded.counts == {"rows": 26, "near duplicates": 3}
    left = {p.question for p in loaded.train + loaded.dev}
    assert LONG.format(2) not in left
    assert len(left) == 19
    assert all((LONG.format(n) in left) != (LONG.format(n).replace("Ann", "Eve") in left) for n in range(2))


# ------------------------------------------------------------------------------------------------------------ mixtures


def mixture(tmp_path: Path, sizes: list[int], weights: list[float]) -> dict:
    starts = [1000 * index for index in range(len(sizes))]
    sources = [jsonl(tmp_path, rows(size, start), f"{start}.jsonl") for size, start in zip(sizes, starts, strict=True)]
    return {"type": "mix", "sources": sources, "weights": weights}


def by_source(problems) -> dict[int, int]:
    return dict(sorted(Counter((int(p.gold) - 1) // 1000 for p in problems).items()))


def test_weights_are_shares_of_every_split_and_the_scarcest_source_sets_the_size(tmp_path):
    loaded = data.load(recipe(mixture(tmp_path, [100, 30], [3, 1]), split={"dev": 8, "test": 12}))
    assert by_source(loaded.test) == {0: 9, 1: 3}
    assert by_source(loaded.dev) == {0: 6, 1: 2}
    # 85 and 25 are left; 3 to 1 of them is 75 and 25
    assert by_source(loaded.train) == {0: 75, 1: 25}
    capped = data.load(recipe(mixture(tmp_path, [100, 30], [3, 1]), split={"train": 10, "dev": 8, "test": 12}))
    assert by_source(capped.train) == {0: 8, 1: 2}
    assert set(ids(capped.train)) <= set(ids(loaded.train))


def test_without_weights_a_mixture_is_all_of_its_sources(tmp_path):
    loaded = data.load(recipe(mixture(tmp_path, [90, 30], []), split={"dev": 4, "test": 8}))
    assert by_source(loaded.test) == {0: 6, 1: 2}
    assert by_source(loaded.dev) == {0: 3, 1: 1}
    assert by_source(loaded.train) == {0: 81, 1: 27}


def test_a_problem_of_two_sources_belongs_to_the_first_and_a_test_problem_of_any_to_no_training(tmp_path):
    first = jsonl(tmp_path, rows(20), "a.jsonl")
    second = jsonl(tmp_path, rows(25, 15), "b.jsonl", test_path=write(tmp_path / "t.jsonl", rows(10)))
    loaded = data.load(recipe({"type": "mix", "sources": [first, second]}, split={"dev": 2, "test": 20}))
    assert loaded.counts == {"rows": 55, "also in the test split": 10, "also in an earlier source": 5}
    everything = ids(loaded.train + loaded.dev + loaded.test)
    assert len(everything) == len(set(everything))
    assert not {int(p.gold) - 1 for p in loaded.train + loaded.dev} & set(range(10))


def test_weights_that_do_not_fit_are_refused(tmp_path):
    for weights in ([1.0], [1.0, 0.0]):
        with pytest.raises(ValueError, match="one number above 0 for each of the 2 sources"):
            recipe(mixture(tmp_path, [9, 9], weights))


# -------------------------------------------------------------------------------------------------------- named sources

DEEPMATH = [
    {"question": f"hard {n}", "final_answer": str(n), "difficulty": 8.0, "topic": "x", "r1_solution_1": "long"}
    for n in range(20)
]
DEEPMATH += [
    DEEPMATH[0] | {"question": "easy", "difficulty": 7.5},
    DEEPMATH[0] | {"question": "y", "final_answer": "Yes"},
]
CONTESTS = [
    {"description": f"task {n}", "public_tests": TESTS, "private_tests": TESTS, "generated_tests": TESTS,
     "source": 2, "cf_rating": 100 * n, "input_file": "", "output_file": ""}
    for n in range(15)
]  # fmt: skip
CONTESTS += [
    CONTESTS[5] | {"description": "file", "input_file": "in.txt"},
    CONTESTS[5] | {"description": "s", "source": 1},
]
NAMED_ROWS = {
    "deepmath_hard": (DEEPMATH, "math", {str(n) for n in range(20)}, 20),
    "gsm8k": ([{"question": f"q {n}", "answer": f"so\n#### {n},000"} for n in range(15)], "number",
              {f"{n}000" for n in range(15)}, 15),
    "math500": ([{"problem": f"p {n}", "solution": "s", "answer": str(n), "subject": "a", "level": 1}
                 for n in range(15)], "math", {str(n) for n in range(15)}, 15),
    "codecontests_easy": (CONTESTS, "code", {"a program that passes the unit tests"}, 12),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMED_ROWS)
def test_a_named_source_reads_its_columns_from_a_local_file(tmp_path, name):
    content, verifier, golds, kept = NAMED_ROWS[name]
    loaded = data.load(recipe(jsonl(tmp_path, content, preset=name), verifier=verifier))
    everything = loaded.train + loaded.dev + loaded.test
    assert {p.gold for p in everything} == golds
    assert len(everything) == kept


def test_the_named_sources_are_these_and_come_from_the_hub(monkeypatch):
    import datasets

    asked = []

    def remember(*args, **named):
        asked.append((*args, named["split"]))
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", remember)
    assert set(NAMED) == set(NAMED_ROWS)
    for name in NAMED_ROWS:
        source = recipe(name)
        assert source == recipe({"preset": name})
        assert Recipe.model_validate(source.model_dump(mode="json")) == source
        with pytest.raises(UnreachableError, match="no route"):
            data.load(source)
    assert asked == [
        ("zwhe99/DeepMath-103K", None, "train"), ("openai/gsm8k", "main", "train"),
        ("HuggingFaceH4/MATH-500", None, "test"), ("deepmind/code_contests", None, "train"),
    ]  # fmt: skip


def test_what_is_written_beside_a_name_goes_before_it():
    source = recipe({"preset": "gsm8k", "id": "openai/gsm8k:main@e53f048", "columns": {"extract": "plain"}}).data
    assert (source.id, source.columns.extract, source.test_split) == ("openai/gsm8k:main@e53f048", "plain", "test")


def test_a_name_that_is_none_gets_the_nearest():
    with pytest.raises(ValueError, match=r"no data set is called 'gsm8'; did you mean 'gsm8k'\?"):
        recipe("gsm8")


@needs_real
@pytest.mark.parametrize(("source", "count"), [
    ({"preset": "gsm8k", "type": "jsonl", "path": "gsm8k/train.jsonl", "test_path": "gsm8k/test.jsonl"}, 8792),
    ({"type": "jsonl", "path": "svamp/svamp.jsonl",
      "columns": {"question": ["Body", "Question"], "answer": "Answer"}}, 1000),
])  # fmt: skip
def test_the_check_reads_the_real_sets_and_refuses_no_gold(source, count):
    paths = {key: str(REAL / value) for key, value in source.items() if key in ("path", "test_path")}
    found = list(inspect(recipe(source | paths, split={"dev": 100, "test": 100})))
    assert [values["stages"][0]["left"] for name, values in found if name == "counts"] == [count]
    (golds,) = [values for name, values in found if name == "golds"]
    assert golds["refused"] == 0
    assert {values["kind"] for name, values in found if name == "fault"} <= {"conflict", "overlap"}
