"""The deployed pair: who can take a seat, what is printed, and that it is the cascade of training."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import agon_cli
from agon_cli import cli, engines
from agon_cli.cascade import Cascade, Settings
from agon_cli.errors import UsageError
from agon_cli.players import find, in_folder, recipe_of
from agon_cli.questions import UNGRADED, batch_problems, read_problems
from agon_cli.recipe import load
from commands import agon

SOURCE = Path(agon_cli.__file__).parents[1]
BASE = "package:agon_cli/tiny/base"
PROBLEM = "9 *5 +7"
SMALL = ["steps=3", "rollout.problems=2", "eval.every=0", "split.dev=12", "split.test=4", "rollout.max_tokens=24"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A working directory that holds a small run."""
    path = tmp_path_factory.mktemp("cascade")
    before = Path.cwd()
    os.chdir(path)
    try:
        assert cli.main(["train", "tiny", *SMALL, "-q"]) == 0
    finally:
        os.chdir(before)
    return path


@pytest.fixture
def here(folder, monkeypatch):
    monkeypatch.chdir(folder)
    return folder


def record(capsys, *words):
    code, out, err = agon(capsys, "cascade", *words, "--json")
    assert code == 0, err
    return next(row for row in map(json.loads, out.splitlines()) if row["event"] == "answer")


@pytest.mark.parametrize("gold", ["", "  "])
def test_an_empty_gold_answer_is_refused(gold):
    """It would be graded like any other, and call every answer wrong."""
    with pytest.raises(UsageError, match="--gold is empty"):
        read_problems("1 + 1", None, gold)
    with pytest.raises(UsageError, match="f:2: the gold answer is empty"):
        batch_problems([b'{"question": "x"}\n', json.dumps({"question": "x", "gold": gold}).encode()], "f")


def test_a_pipe_gets_only_the_answer(here):
    done = subprocess.run(
        [sys.executable, "-m", "agon_cli.cli", "cascade", "--drafter", "A", "--solver", "B", PROBLEM],
        env=os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1
    assert done.stdout.strip() in {str(number) for number in range(11)} | {""}
    assert "A of runs/tiny at step 3 drafts" in done.stderr
    assert "unknown" not in done.stderr
    assert "\x1b" not in done.stdout + done.stderr


def test_the_answer_is_the_one_in_the_solvers_text_and_luck_is_the_seeds(here, capsys):
    first = record(capsys, "--drafter", "A", "--solver", "B", PROBLEM)
    assert f"<answer> {first['answer']} </answer>" in first["final"]["text"]
    assert first["draft"]["verdict"] is first["final"]["verdict"] is first["outcome"] is None
    assert record(capsys, "--drafter", "A", "--solver", "B", PROBLEM) == first
    others = [record(capsys, "--drafter", "A", "--solver", "B", PROBLEM, "--seed", str(seed)) for seed in range(1, 5)]
    assert any(other["draft"]["text"] != first["draft"]["text"] for other in others)
    plain = record(capsys, "--drafter", "A", "--solver", "B", PROBLEM, "--greedy")
    assert plain == record(capsys, "--drafter", "A", "--solver", "B", PROBLEM, "--greedy", "--seed", "9")


def test_greedy_equals_plain_peft_with_the_players_folder(here, capsys):
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base = SOURCE / "agon_cli/tiny/base"
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), "runs/tiny/A")
    ours = record(capsys, "--drafter", "A", "--solver", "A", PROBLEM, "--greedy")
    prompts = [f"solve {PROBLEM} :", f"solve {PROBLEM} rival {ours['summary']} :"]
    for prompt, stage in zip(prompts, ("draft", "final"), strict=True):
        turns = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        ids = model.generate(**inputs, max_new_tokens=24, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        assert tokenizer.decode(ids, skip_special_tokens=True).strip() == ours[stage]["text"].strip()


def test_a_player_by_name_and_by_folder_is_the_same_player(here, capsys):
    by_name = record(capsys, "--drafter", "A", "--solver", "B", PROBLEM)
    by_folder = record(capsys, "--drafter", "runs/tiny/A", "--solver", "runs/tiny/B", PROBLEM)
    assert {k: v for k, v in by_folder.items() if k not in ("drafter", "solver")} == {
        k: v for k, v in by_name.items() if k not in ("drafter", "solver")
    }


def test_an_adapter_folder_away_from_its_run_plays_by_a_named_recipe(here, tmp_path, monkeypatch, capsys):
    by_name = record(capsys, "--drafter", "A", "--solver", "B", PROBLEM, "--greedy")
    for name in "AB":
        shutil.copytree(here / "runs/tiny" / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    moved = record(capsys, "--drafter", "./A", "--solver", "./B", "--recipe", "tiny", PROBLEM, "--greedy")
    for stage in ("draft", "final"):
        assert moved[stage]["text"].startswith(by_name[stage]["text"])


def test_the_base_alone_can_take_a_seat_next_to_an_adapter(here, capsys):
    bare = record(capsys, "--drafter", BASE, "--solver", BASE, PROBLEM, "--recipe", "tiny", "--greedy")
    mixed = record(capsys, "--drafter", BASE, "--solver", "B", PROBLEM, "--recipe", "tiny", "--greedy")
    assert mixed["draft"] == bare["draft"]
    assert (mixed["drafter"], mixed["solver"]) == (BASE, "B")


def test_seats_not_named_are_those_of_the_direction_chosen_on_dev(here, capsys):
    evals = [json.loads(line) for line in (here / "runs/tiny/evals.jsonl").read_text().splitlines()]
    right = {"A>B": 0, "B>A": 0}
    for row in evals:
        if (row["step"], row["split"]) == (3, "dev") and row["arm"] in right:
            right[row["arm"]] += row["verdict"] == "correct"
    best = max(right, key=right.__getitem__)
    found = record(capsys, PROBLEM)
    assert f"{found['drafter']}>{found['solver']}" == best
    half = record(capsys, "--drafter", "B", PROBLEM)
    assert (half["drafter"], half["solver"]) == ("B", "A")


def test_gold_grades_both_stages(here, capsys):
    first = record(capsys, "--drafter", "A", "--solver", "B", PROBLEM)
    graded = record(capsys, "--drafter", "A", "--solver", "B", PROBLEM, "--gold", first["answer"])
    assert graded["final"]["verdict"] == "correct"
    same = first["draft"]["answer"] == first["answer"]
    assert graded["outcome"] == ("right" if same else "fix")
    against = record(capsys, "--drafter", "A", "--solver", "B", PROBLEM, "--gold", "none of them")
    assert (against["draft"]["verdict"], against["final"]["verdict"], against["outcome"]) == ("wrong", "wrong", "wrong")
    _, out, err = agon(capsys, "cascade", "--drafter", "A", "--solver", "B", PROBLEM, "--gold", first["answer"])
    assert out.strip() == first["answer"]
    assert "answer correct" in err


def test_words_that_a_players_tokenizer_does_not_know_are_told(here, capsys):
    code, out, err = agon(capsys, "cascade", "--drafter", "runs/tiny/A", "--solver", "B", "What is 9 *5 +7")
    assert code == 0
    assert "runs/tiny/A at step 3 drafts" in err
    assert "2 of its 5 words are unknown to the tokenizer of player runs/tiny/A and player B: What, is\n" in err
    assert "unknown" not in out
    code, out, err = agon(capsys, "cascade", "--drafter", "A", "--solver", "B", "What is 9 *5 +7", "--json")
    (warning,) = [row for row in map(json.loads, out.splitlines()) if row["event"] == "warning"]
    assert "What, is" in warning["text"]
    assert (code, err) == (0, "")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("cascade", "--drafter", "A", "--solver", "B", PROBLEM), ["it is away", "it is away"]),
        (("eval", "runs/tiny", "--mode", "single", "--limit", "2"), ["it serves nobody", "it is away", "it is away"]),
    ],
)
def test_what_an_engine_waits_for_is_told(here, capsys, monkeypatch, words, told):
    """Of a server that nobody needs a cascade does not speak: its other player may need it."""
    make = engines.make

    def waiting(recipe, policy, scratch=None, tell=lambda text: None):
        tell("it serves nobody")
        engine = make(recipe, policy)
        sample = engine.sample
        monkeypatch.setattr(engine, "sample", lambda *given: (tell("it is away"), sample(*given))[1])
        return engine

    monkeypatch.setattr(engines, "make", waiting)
    code, out, _ = agon(capsys, *words, "--json")
    assert code == 0
    assert [row["text"] for row in map(json.loads, out.splitlines()) if row["event"] == "warning"] == told


def test_a_batch_keeps_its_order_and_each_line_is_what_it_would_be_alone(here, tmp_path, capsys):
    questions = [PROBLEM, "2 *3 +2", "0 *7 +1", PROBLEM]
    lines = [{"question": questions[0], "gold": 7}, {"problem": questions[1]},
             {"question": questions[2], "answer": "3"}, {"question": questions[3]}]  # fmt: skip
    file = tmp_path / "batch.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    code, out, err = agon(capsys, "cascade", "--drafter", "A", "--solver", "B", "-f", str(file))
    assert code == 0
    alone = [record(capsys, "--drafter", "A", "--solver", "B", question)["answer"] for question in questions]
    assert out.split("\n")[:-1] == [answer or "" for answer in alone]
    assert "of 2 right" in err


def test_a_bad_line_is_named_before_anything_is_sampled(here, tmp_path, capsys):
    file = tmp_path / "batch.jsonl"
    file.write_text('{"question": "1"}\n{"question": 1}\n')
    code, out, err = agon(capsys, "cascade", "-f", str(file))
    assert (code, out) == (2, "")
    assert f"{file}:2" in err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"{", "not JSON"),
        (b"[1]", "not a JSON object"),
        (b"{}", "no question"),
        (b'{"question": " "}', "no question"),
        (b'{"question": "1", "gold": [1]}', "text or a number"),
        (b'{"question": "1", "gold": true}', "text or a number"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
    ],
)
def test_a_bad_line_says_what_is_wrong_with_it(line, said):
    with pytest.raises(UsageError, match=said) as caught:
        batch_problems([b'{"question": "1"}', b"", line], "file")
    assert caught.value.message.startswith("file:3: ")


def test_problems_keep_their_gold_or_are_marked_as_ungraded():
    problems = batch_problems([b'{"question": "1", "gold": 0}', b'{"problem": "1"}'], "file")
    assert [(p.question, p.gold) for p in problems] == [("1", "0"), ("1", "")]
    assert [p.meta == UNGRADED for p in problems] == [False, True]
    assert problems[0].id == problems[1].id


@pytest.mark.parametrize(
    ("text", "file", "gold"), [(None, None, None), ("p", "f", None), (" ", None, None), (None, "f", "1")]
)
def test_no_problem_or_two_are_refused(text, file, gold):
    with pytest.raises(UsageError):
        read_problems(text, file, gold)


def test_stdin_is_a_problem_or_a_batch(here, monkeypatch, capsys):
    class Stdin:
        def __init__(self, data):
            import io

            self.buffer = io.BytesIO(data)

    monkeypatch.setattr(sys, "stdin", Stdin(PROBLEM.encode() + b"\n"))
    assert read_problems("-", None, None)[0].question == PROBLEM
    monkeypatch.setattr(sys, "stdin", Stdin(b'{"question": "a"}\n{"question": "b"}\n'))
    assert [p.question for p in read_problems(None, "-", None)] == ["a", "b"]
    monkeypatch.setattr(sys, "stdin", Stdin(b"\xff"))
    with pytest.raises(UsageError, match="UTF-8"):
        read_problems("-", None, None)


@pytest.mark.parametrize(("text", "file"), [("-", None), (None, "-")])
def test_a_closed_stdin_is_said_so(monkeypatch, text, file):
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UsageError, match="stdin is closed"):
        read_problems(text, file, None)


def edited(source, target, **changes):
    """A copy of an adapter folder whose config has changed; a value of None removes the key."""
    shutil.copytree(source, target)
    config = json.loads((target / "adapter_config.json").read_text())
    for key, value in changes.items():
        config.pop(key) if value is None else config.__setitem__(key, value)
    (target / "adapter_config.json").write_text(json.dumps(config))
    return target


@pytest.fixture
def other_base(tmp_path):
    """An untrained base of another width, with the same tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    base = tmp_path / "other"
    shutil.copytree(SOURCE / "agon_cli/tiny/base", base)
    config = AutoConfig.from_pretrained(base)
    config.intermediate_size = 96
    AutoModelForCausalLM.from_config(config).save_pretrained(base)
    return str(base)


def test_two_bases_can_play_together(here, capsys, other_base):
    found = record(capsys, "--drafter", other_base, "--solver", "B", PROBLEM)
    assert (found["drafter"], found["solver"]) == (other_base, "B")
    if found["summary"] is None:  # the solver then saw the plain prompt, as it would as a drafter
        assert found["final"]["prompt_tokens"] == record(capsys, "--drafter", "B", PROBLEM)["draft"]["prompt_tokens"]


def test_engines_of_two_bases_share_a_gpu_and_the_first_is_closed_when_the_second_fails(here, monkeypatch, other_base):
    class Engine:
        closed = False

        def close(self):
            self.closed = True

    made = []

    def make(recipe, policy, **_):
        if made:
            raise UsageError("no room", "")
        assert recipe.engine.memory == 0.3
        made.append(Engine())
        return made[0]

    monkeypatch.setattr("agon_cli.engines.make", make)
    monkeypatch.setattr("agon_cli.cascade.confirm", lambda *_: None)
    recipe = load("tiny", ["engine={type: vllm, memory: 0.6}"])
    seats = [find(name, here / "runs/tiny", recipe) for name in (other_base, "B")]
    with pytest.raises(UsageError, match="no room"):
        Cascade(*seats, Settings(None, recipe, 0, None, False))  # B plays by its run's own recipe
    assert made[0].closed


def test_an_adapter_of_another_base_is_refused(here, tmp_path, capsys, other_base):
    foreign = edited(here / "runs/tiny/A", tmp_path / "A", base_model_name_or_path=other_base)
    code, out, err = agon(capsys, "cascade", "--drafter", str(foreign), "--solver", "B", PROBLEM)
    assert (code, out) == (2, "")
    assert "does not fit" in err
    assert "another base" in err


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"base_model_name_or_path": None}, "which base"),
        ({"peft_type": "IA3"}, "no LoRA adapter"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"r": "16"}, "rank"),
    ],
)
def test_an_adapter_that_cannot_play_is_refused(here, tmp_path, changes, said):
    with pytest.raises(UsageError, match=said):
        in_folder(edited(here / "runs/tiny/A", tmp_path / "A", **changes), None)


def test_seats_that_cannot_be_found_are_refused_with_their_exit_code(here, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "empty").mkdir()
    cases = [("C", 2, "no player"), (str(tmp_path / "empty"), 2, "adapter_config.json"), ("./missing", 4, "no model"),
             ("nobody/no-such-model", 4, "nobody/no-such-model")]  # fmt: skip
    for name, expected, said in cases:
        code, out, err = agon(capsys, "cascade", "--drafter", name, "--solver", "B", PROBLEM)
        assert (code, out) == (expected, ""), err
        assert said in err
        assert "hint: " in err
    for flags in (["--temperature", "0"], ["--temperature", "nan"]):
        code, _, err = agon(capsys, "cascade", *flags, PROBLEM)
        assert code == 2
        assert "--greedy" in err


def test_without_any_run_both_seats_must_be_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, _, err = agon(capsys, "cascade", PROBLEM)
    assert code == 2
    assert "runs/" in err


def test_a_problem_longer_than_the_models_context_is_refused_before_sampling(here, capsys):
    code, out, err = agon(capsys, "cascade", " ".join(["9"] * 400))
    assert (code, out) == (2, "")
    assert "leaves the drafter no room" in err


def test_hostile_output_reaches_no_terminal(here, capsys, monkeypatch):
    from agon_cli.engines import hf

    def completions(*words):
        found = original(*words)
        evil = "<think> x </think> \x1b]0;owned\x07sum\x9b2J[red] <answer> \x1b[31m7\x1b[0m\u202e </answer>"
        return [type(c)(c.ids, c.logprobs, "stop", evil) for c in found]

    original = hf._completions
    monkeypatch.setattr(hf, "_completions", completions)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    code, out, _ = agon(capsys, "cascade", "--drafter", "A", "--solver", "B", PROBLEM)
    assert code == 0
    assert "answer: 7" in out.replace("\x1b[1m", "").replace("\x1b[0m", "")
    assert "[red]" in out
    for code_sent in ("\x1b]", "\x9b", "\x07", "\x1b[31m", "\u202e"):
        assert code_sent not in out


def test_a_run_by_another_players_name_finds_its_base_as_the_recipe_loads_it(here):
    run = Path("runs/tiny")
    found = find(BASE, run)
    assert found.model == recipe_of(run).model
    assert (found.adapter, found.lora) == (None, None)
