"""The commands as a user runs them: exit codes, what goes to stdout and to stderr, stopping and going on."""

import json
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import agon_cli
from agon_cli import cli, models, session
from agon_cli.errors import Exit, ResourceError
from agon_cli.evaluate import is_complete
from agon_cli.halt import Halt, Terminated, orderly_end
from agon_cli.players import recipe_of
from agon_cli.recipe.schema import Model
from agon_cli.runlog import RunFolder
from agon_cli.types import Verdict
from commands import agon

SOURCE = Path(agon_cli.__file__).parents[1]
SMALL = ["steps=4", "rollout.problems=4", "eval.every=0", "split.dev=16", "split.test=16", "rollout.max_tokens=24"]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
AGON = [sys.executable, "-m", "agon_cli.cli"]


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def tensors(run):
    return {path.parent.name: path.read_bytes() for path in run.glob("?/adapter_model.safetensors")}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A small run that nothing disturbed, and what the command printed. It runs where no socket may be opened."""
    folder = tmp_path_factory.mktemp("trained")
    offline = (
        "import socket, sys\n"
        "def refuse(*a): raise SystemExit(f'network: {a[1:]}')\n"
        "socket.socket.connect = socket.socket.connect_ex = refuse\n"
        "from agon_cli.cli import main\n"
        "sys.exit(main())"
    )
    environment = {key: value for key, value in ENVIRONMENT.items() if key != "HF_HUB_OFFLINE"}
    done = subprocess.run(
        [sys.executable, "-c", offline, "train", "tiny", *SMALL], cwd=folder, env=environment, capture_output=True,
        text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder, done


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


# --- a whole run ----------------------------------------------------------------------------------------------------


def test_results_go_to_stdout_and_talk_to_stderr_without_control_codes(trained):
    _, done = trained
    assert "\x1b" not in done.stdout + done.stderr
    assert "before (step 0) and after step 4" in done.stdout
    for arm in ("A alone", "B alone", "A>B cascade", "B>A cascade"):
        assert arm in done.stdout
    assert done.stdout.count("direction chosen on dev") == 1
    assert "agon cascade --run runs/tiny" in done.stdout
    assert "sampling: temperature 1, top_p 1, top_k off, max_tokens 24" in done.stderr
    assert "step 4/4" in done.stderr
    assert "sampling:" not in done.stdout


def test_the_table_tells_what_the_rows_hold(trained):
    folder, done = trained
    last = [row for row in rows(folder / "runs/tiny/evals.jsonl") if (row["step"], row["split"]) == (4, "test")]
    right = [row["verdict"] == "correct" for row in last if row["arm"] == "A"]
    line = next(line for line in done.stdout.splitlines() if line.startswith("A alone"))
    assert f"{100 * sum(right) / 16:.1f} [" in line


def test_a_complete_run_prints_its_results_again_and_touches_no_log(trained, monkeypatch, capsys):
    folder, done = trained
    monkeypatch.chdir(folder)
    before = (folder / "runs/tiny/rollouts.jsonl").read_bytes()
    code, out, err = agon(capsys, "train", "tiny", *SMALL)
    assert (code, out) == (0, done.stdout)
    assert "complete" in err
    assert (folder / "runs/tiny/rollouts.jsonl").read_bytes() == before


def test_another_recipe_in_the_same_folder_is_refused_with_the_difference(trained, monkeypatch, capsys):
    folder, _ = trained
    monkeypatch.chdir(folder)
    code, out, err = agon(capsys, "train", "tiny", *SMALL, "optim.lr=1e-4")
    assert (code, out) == (2, "")
    assert "optim.lr: 0.001 -> 0.0001" in err
    assert "--out" in err


def test_json_is_lines_on_stdout_and_goes_on_with_a_run_cut_short(here, trained, capsys):
    whole = trained[0] / "runs/tiny"
    code, out, err = agon(capsys, "train", "tiny", *SMALL, "--max-steps", "2", "--json")
    events = [json.loads(line) for line in out.splitlines()]
    assert (code, err) == (0, "")
    assert events[0]["event"] == "start"
    assert events[0]["sampling"]["temperature"] == 1.0
    assert [event["row"]["step"] for event in events if event["event"] == "step"] == [0, 1]
    assert events[-1]["event"] == "done"
    assert (events[-1]["complete"], events[-1]["step"]) == (False, 2)
    code, out, _ = agon(capsys, "train", "tiny", *SMALL, "--json")
    done = json.loads(out.splitlines()[-1])
    assert code == 0
    assert [arm["arm"] for arm in done["arms"]] == ["A", "B", "A>B", "B>A"]
    assert done["chosen"] in ("A>B", "B>A")
    assert tensors(here / "runs/tiny") == tensors(whole) != {}


def test_a_limit_below_the_step_of_a_run_tells_the_step_it_is_at(here, capsys):
    agon(capsys, "train", "tiny", *SMALL, "--max-steps", "2")
    code, _, err = agon(capsys, "train", "tiny", *SMALL, "--max-steps", "1")
    assert code == 0
    assert "stopped at step 2 of 4" in err
    assert err.splitlines()[-1] == shlex.join(["go", "on", "with:", "agon", "train", "tiny", *SMALL])


def test_a_start_says_how_many_problems_there_are_and_which_rows_were_left_out(here, capsys):
    lines = ['{"question": "9 *5 +7", "answer": "7"}', '{"question": "9 *5 +7", "answer": "7"}']
    lines += [f'{{"question": "{target} *2 +0", "answer": "{target}"}}' for target in range(11)]
    (here / "data.jsonl").write_text("\n".join(lines))
    words = ["data={type: jsonl, path: data.jsonl}", "split={dev: 3, test: 3}", "steps=1"]
    code, _, err = agon(capsys, "train", "tiny", *SMALL[1:3], *words, "rollout.max_tokens=8")
    assert code == 0
    assert "problems 6 train, 3 dev, 3 test; rows: 13; duplicates: 1" in err


def test_a_prompt_and_a_completion_that_outgrow_the_models_context_are_refused(here, capsys):
    code, _, err = agon(capsys, "train", "tiny", *SMALL[:-1], "rollout.max_tokens=300")
    assert code == 2
    assert "can take 364 tokens" in err
    assert "256" in err


def test_a_grader_that_fails_too_often_ends_training_and_evaluation_with_7(here, trained, monkeypatch, capsys):
    def grade(_, items):
        same = ((problem.gold == answer, answer) for problem, answer in items)  # so that golds pass
        return [Verdict("correct" if right else "grader_error", answer) for right, answer in same]

    monkeypatch.setattr("agon_cli.verifiers.exact.ExactVerifier.grade", grade)
    code, _, err = agon(capsys, "train", "tiny", *SMALL)
    assert code == 7
    assert "the grader itself failed on" in err
    assert rows(here / "runs/tiny/evals.jsonl"), "what it failed on can be looked at"
    code, out, _ = agon(capsys, "eval", str(trained[0] / "runs/tiny"))
    assert (code, out) == (7, "")


def test_a_run_whose_last_evaluation_could_not_be_graded_is_not_complete(trained, tmp_path, capsys):
    run = Path(shutil.copytree(trained[0] / "runs/tiny", tmp_path / "run", symlinks=True))
    assert is_complete(run, 4)
    assert not is_complete(run, 5)
    kept = rows(run / "evals.jsonl")
    last = [row for row in kept if (row["step"], row["split"]) == (4, "test")]
    for count, complete in ((5, True), (6, False)):
        for row in last[:count]:
            row["verdict"] = "grader_error"
        (run / "evals.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
        assert is_complete(run, 4) is complete
    (run / "evals.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept if row not in last))
    assert not is_complete(run, 4)
    (run / "evals.jsonl").write_text("".join(json.dumps(row | {"step": []}) + "\n" for row in kept))
    code, out, err = agon(capsys, "train", "tiny", *SMALL, "--out", str(run))
    assert (code, out) == (2, "")
    assert "evals.jsonl: a row whose step or split is none" in err


def test_an_evaluation_that_could_not_be_written_whole_is_made_again(here, monkeypatch, capsys):
    append = RunFolder.append

    def full(run, name, found):
        if name == "inference" and {(row["step"], row["split"]) for row in found} == {(4, "test")}:
            raise ResourceError("disk full", "")
        append(run, name, found)

    monkeypatch.setattr(RunFolder, "append", full)
    assert agon(capsys, "train", "tiny", *SMALL)[0] == 5
    assert not is_complete(here / "runs/tiny", 4)
    monkeypatch.setattr(RunFolder, "append", append)
    assert agon(capsys, "train", "tiny", *SMALL)[0] == 0
    assert is_complete(here / "runs/tiny", 4)
    logs = {name: rows(here / f"runs/tiny/{name}.jsonl") for name in ("evals", "inference")}
    places = [{(row["step"], row["split"], row["arm"]) for row in log} for log in logs.values()]
    assert places[0] == places[1]


def test_quiet_prints_results_only(trained, monkeypatch, capsys):
    folder, done = trained
    monkeypatch.chdir(folder)
    assert agon(capsys, "train", "tiny", *SMALL, "-q") == (0, done.stdout, "")


def test_a_dry_run_says_what_would_become_of_a_run_that_is_there(trained, monkeypatch, capsys):
    monkeypatch.chdir(trained[0])
    for more, said in [([], "is complete"), (["seed=1", "--fresh"], "would be discarded")]:
        code, out, _ = agon(capsys, "train", "tiny", *SMALL, *more, "--dry-run")
        assert code == 0
        assert said in out


def test_a_dry_run_says_that_a_run_would_go_on(here, capsys):
    assert agon(capsys, "train", "tiny", *SMALL, "--max-steps", "1", "-q")[0] == 0
    code, out, _ = agon(capsys, "train", "tiny", *SMALL, "--dry-run")
    assert (code, "would go on" in out) == (0, True)


def test_a_run_goes_on_with_smaller_batches(trained, here, capsys):
    assert agon(capsys, "train", "tiny", *SMALL, "--max-steps", "2", "-q")[0] == 0
    less = ["optim.micro_batch_tokens=256", "engine.batch_tokens=2048"]
    code, out, err = agon(capsys, "train", "tiny", *SMALL, *less, "--dry-run")
    assert (code, "would go on" in out) == (0, True), err
    assert agon(capsys, "train", "tiny", *SMALL, *less, "-q")[0] == 0
    (entry,) = json.loads((here / "runs/tiny/manifest.json").read_text())["resumed"]
    assert [line.partition(":")[0] for line in entry["recipe"]] == ["engine.batch_tokens", "optim.micro_batch_tokens"]
    assert recipe_of(here / "runs/tiny").optim.micro_batch_tokens == 256
    first, second = (rows(run / "runs/tiny/rollouts.jsonl") for run in (trained[0], here))
    assert [(row["step"], row["problem_id"]) for row in first] == [(row["step"], row["problem_id"]) for row in second]


@pytest.mark.parametrize(
    "words", [["seed=1"], ["players={complete: {}, B: {}}", "--out", "elsewhere"], ["--out", "."]],
    ids=["another recipe", "a player's name", "a folder of something else"],
)  # fmt: skip
def test_a_dry_run_refuses_what_training_refuses_in_the_same_words(trained, monkeypatch, capsys, words):
    monkeypatch.chdir(trained[0])
    dry = agon(capsys, "train", "tiny", *SMALL, *words, "--dry-run")
    assert (dry[0], dry[1]) == (Exit.USAGE, "")
    trained_for_real = agon(capsys, "train", "tiny", *SMALL, *words, "-q")
    assert (trained_for_real[0], trained_for_real[2]) == (Exit.USAGE, dry[2])


def test_a_row_that_lacks_a_key_is_named_on_resuming(here, capsys):
    assert agon(capsys, "train", "tiny", *SMALL, "--max-steps", "1", "-q")[0] == 0
    log = here / "runs/tiny/metrics.jsonl"
    row = json.loads(log.read_text())
    del row["grader_errors"]
    short = json.dumps(row, separators=(",", ":"))
    log.write_text(short + " " * (log.stat().st_size - len(short) - 1) + "\n")  # as long as the checkpoint knows it
    code, _, err = agon(capsys, "train", "tiny", *SMALL, "-q")
    assert code == Exit.USAGE
    assert "metrics.jsonl:1: no 'grader_errors'" in err


def test_the_next_command_names_one_method(here, capsys):
    _, out, _ = agon(capsys, "train", "tiny", *SMALL, "method=coop", "method.bonus_needs_summary=false")
    (command,) = [line for line in out.splitlines() if "-grpo" in line]
    assert command.count("method") == 1


def test_a_dry_run_shows_what_would_run_and_writes_nothing(here, capsys):
    code, out, _ = agon(capsys, "train", "tiny", *SMALL, "--dry-run")
    assert code == 0
    assert "4 steps of 4 problems x (8 drafts + 8 challenges) = 64 completions" in out
    assert "655 train, 16 dev, 16 test" in out
    assert "temperature 1, top_p 1, top_k off, max_tokens 24" in out
    assert list(here.iterdir()) == []
    code, out, _ = agon(capsys, "train", "tiny", *SMALL, "method=grpo", "--dry-run", "--json")
    plan = json.loads(out)
    assert (plan["event"], plan["drafts"], plan["challenges"], list(plan["players"])) == ("plan", 16, 0, ["A"])


# --- signals --------------------------------------------------------------------------------------------------------


def start(folder, *words):
    return subprocess.Popen(
        [*AGON, "train", "tiny", *SMALL, "steps=400", *words], cwd=folder, env=ENVIRONMENT, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def wait_for_steps(process, folder, count):
    log = folder / "runs/tiny/metrics.jsonl"
    deadline = time.monotonic() + 60
    while not log.exists() or log.read_bytes().count(b"\n") < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_step_saves_and_names_the_command_that_goes_on(tmp_path, capsys, monkeypatch, number):
    process = start(tmp_path)
    wait_for_steps(process, tmp_path, 3)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number, err
    assert out == ""
    log = tmp_path / "runs/tiny/metrics.jsonl"
    count = len(rows(log))
    assert (tmp_path / f"runs/tiny/checkpoints/step-{count:06d}/COMPLETE").exists()
    command = shlex.split(err.splitlines()[-1].removeprefix("hint: continue with: "))
    assert command == ["agon", "train", "tiny", *SMALL, "steps=400"]
    # The command goes on right there, and steps neither repeat nor are missing.
    monkeypatch.chdir(tmp_path)
    code, _, err = agon(capsys, *command[1:], "--max-steps", str(count + 1))
    assert code == 0
    assert f"going on from step {count}" in err
    assert [row["step"] for row in rows(log)] == list(range(count + 1))


def test_a_second_signal_ends_at_once():
    halt = "from agon_cli.halt import Halt\nimport os, signal, time\n"
    program = halt + (
        "with Halt() as halt:\n"
        "    halt.watch('phase', {'name': 'draft'})\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    print('first', halt(), flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(30)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], env=ENVIRONMENT, capture_output=True, text=True, timeout=20,
                          check=False)  # fmt: skip
    assert (done.returncode, done.stdout) == (130, "first True\n")
    assert "SIGTERM: finishing this step" in done.stderr


def test_between_steps_a_signal_ends_the_command_without_waiting():
    with pytest.raises(KeyboardInterrupt), Halt(quiet=True) as halt:  # noqa: PT012
        halt.watch("phase", {"name": "draft"})
        halt.watch("checkpoint", {})
        halt.watch("phase", {"name": "evaluate"})
        os.kill(os.getpid(), signal.SIGTERM)
    assert halt.code == Exit.SIGTERM


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("holder", [orderly_end, lambda: Halt(quiet=True)])
def test_a_signal_that_comes_inside_a_finaliser_is_not_lost(capsys, monkeypatch, holder, number):
    monkeypatch.setattr("agon_cli.halt.AGAIN", 0.3)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background inherits deafness

    class Slow:
        def __del__(self):
            os.kill(os.getpid(), number)
            time.sleep(0.01)

    try:
        with pytest.raises(KeyboardInterrupt) as caught, orderly_end(), holder():  # noqa: PT012
            slow = Slow()
            del slow
            time.sleep(10)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (caught.type is Terminated) == (number == signal.SIGTERM)
    assert capsys.readouterr().err == ""


def test_a_signal_sent_again_is_no_second_one(monkeypatch):
    """It may come when a step has begun: that one is then finished and saved, as after any first signal."""
    ended = []
    monkeypatch.setattr("os._exit", ended.append)
    with Halt(quiet=True) as halt:
        with pytest.raises(Terminated):  # and Python drops it
            os.kill(os.getpid(), signal.SIGTERM)
        halt.watch("phase", {"name": "draft"})
        os.kill(os.getpid(), signal.SIGTERM)
        assert (halt(), halt.code, ended) == (True, Exit.SIGTERM, [])
        os.kill(os.getpid(), signal.SIGTERM)
    assert ended == [Exit.SIGTERM]


def test_a_command_runs_in_a_thread_too(capsys):
    codes = []
    thread = threading.Thread(target=lambda: codes.append(cli.main(["verify", "--gold", "2", "--answer", "2"])))
    thread.start()
    thread.join()
    assert codes == [0], capsys.readouterr().err


def test_the_continuing_command_is_quoted_and_never_discards_the_run(here, capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(session, "_play", interrupted)
    words = ["train", "tiny", "prompts.system=Be brief; don't stop", "--out", "my run", "--fresh", "--max-steps", "3"]
    code, _, err = agon(capsys, *words)
    assert code == 130
    command = err.splitlines()[-1].removeprefix("hint: continue with: ")
    assert shlex.split(command) == ["agon", *[word for word in words if word != "--fresh"]]


# --- bad input ------------------------------------------------------------------------------------------------------

RECIPE = """
model: {id: package:agon_cli/tiny/base, dtype: float32}
data: {type: tiny}
verifier: {type: exact}
prompts: {plain: "solve {problem} :", rival: "solve {problem} rival {summary} :"}
summary: {withhold: tag, max_tokens: 16}
split: {dev: 8, test: 8}
rollout: {problems: 2, group_size: 2, temperature: 1.0, top_p: 1.0, max_tokens: 24, max_prompt_tokens: 64}
steps: 2
"""


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("", 2, "recipe.yaml"),
        ("\tmodel: x\n", 2, "recipe.yaml:1"),
        (RECIPE + "steps: 3\n", 2, "steps"),
        (RECIPE + "stepz: 3\n", 2, "did you mean"),
        (RECIPE.replace("group_size: 2", "group_sise: 2"), 2, "group_size"),
        (RECIPE.replace("steps: 2", "steps: two"), 2, "recipe.yaml:9: steps"),
        (RECIPE.replace("group_size: 2", "group_size: 1"), 2, "rollout.group_size"),
        (RECIPE + "method: argon\n", 2, "'agon'"),
        (RECIPE.replace("{type: tiny}", "{type: jsonl, path: missing.jsonl}"), 4, "missing.jsonl"),
        (RECIPE.replace("{type: tiny}", "{type: jsonl, path: data.jsonl, columns: {answer: reply}}"), 2, "reply"),
        (RECIPE.replace("package:agon_cli/tiny/base", "./nowhere"), 4, "nowhere"),
        (RECIPE.replace("package:agon_cli/tiny/base", "package:no_such_package/base"), 4, "no_such_package"),
        (RECIPE.replace("package:agon_cli/tiny/base", "nobody/no-such-model"), 4, "nobody/no-such-model"),
    ],
    ids=["empty", "tab", "duplicate key", "typo", "deep typo", "wrong type", "group size 1", "preset", "no data file",
         "wrong column", "no model folder", "no model package", "Hub id while offline"],
)  # fmt: skip
def test_bad_input_ends_with_its_code_a_place_and_a_hint(here, capsys, monkeypatch, text, code, said):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    if "huggingface_hub" in sys.modules:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (here / "recipe.yaml").write_text(text)
    (here / "data.jsonl").write_text('{"question": "1", "answer": "2"}\n' * 40)
    found, out, err = agon(capsys, "train", "recipe.yaml")
    assert (found, out) == (code, "")
    assert err.splitlines()[0].startswith(("error: ", "recipe ")), err
    assert said in err
    assert "hint: " in err
    assert "Traceback" not in err
    assert all(log.stat().st_size == 0 for log in here.glob("runs/*/metrics.jsonl"))


def test_a_number_in_scientific_notation_is_a_number(here, capsys):
    (here / "recipe.yaml").write_text(RECIPE + "optim: {lr: 1e-5}\n")
    code, out, _ = agon(capsys, "train", "recipe.yaml", "--dry-run", "--json")
    assert (code, json.loads(out)["lr"]) == (0, 1e-5)


def test_a_model_without_chat_template_is_refused(here, capsys):
    base = SOURCE / "agon_cli/tiny/base"
    (here / "base").mkdir()
    for file in base.iterdir():
        if file.name != "chat_template.jinja":
            (here / "base" / file.name).write_bytes(file.read_bytes())
    code, _, err = agon(capsys, "train", "tiny", *SMALL, "model.id=./base")
    assert code == 2
    assert "chat template" in err


def copy_of_base(folder):
    """The shipped base in a folder of its own, to be spoilt."""
    folder.mkdir()
    for file in (SOURCE / "agon_cli/tiny/base").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.mark.parametrize(
    ("file", "content"),
    [("model.safetensors", b""), ("model.safetensors", b"\xff" * 1000), ("config.json", b"[]"),
     ("tokenizer.json", b"{")],
    ids=["no weights", "garbled weights", "odd config", "torn tokenizer"],
)  # fmt: skip
def test_a_broken_model_folder_is_unreachable_not_a_bug(here, capsys, file, content):
    (copy_of_base(here / "base") / file).write_bytes(content)
    code, _, err = agon(capsys, "train", "tiny", *SMALL, "model.id=./base")
    assert code == 4
    assert "error: cannot load the model './base': " in err
    assert "Traceback" not in err


def test_a_broken_gguf_file_is_unreachable_not_a_bug(here, capsys, monkeypatch):
    pytest.importorskip("gguf")
    monkeypatch.setenv("AGON_CACHE", str(here / "cache"))
    (here / "base.gguf").write_bytes(b"GGUFxxxx")
    code, _, err = agon(capsys, "train", "tiny", *SMALL, "model.id=./base.gguf")
    assert code == 4
    assert "Traceback" not in err


def test_a_disk_that_is_full_while_a_gguf_file_is_converted_is_no_bug(here, capsys, monkeypatch):
    """A file size limit stands for the full disk; what safetensors raises for either hides the system's error."""
    pytest.importorskip("gguf")
    monkeypatch.setenv("AGON_CACHE", str(here / "cache"))
    (here / "base.gguf").write_bytes(b"GGUFxxxx")
    whole, _ = models.load(Model(id="package:agon_cli/tiny/base", dtype="float32"))
    monkeypatch.setattr("agon_cli.models.AutoModelForCausalLM.from_pretrained", lambda *_, **__: whole)
    monkeypatch.setattr("agon_cli.models.AutoTokenizer.from_pretrained", lambda *_, **__: None)
    before, limit = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limit[1]))
    try:
        code, _, err = agon(capsys, "train", "tiny", *SMALL, "model.id=./base.gguf")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, before)
    assert code == 5, err
    assert "error: disk full: " in err
    assert list((here / "cache/models").iterdir()) == []


def test_code_that_comes_with_a_model_is_never_run_whatever_stdin_says(here):
    base = copy_of_base(here / "base")
    config = json.loads((base / "config.json").read_text())
    config |= {"model_type": "unheard-of", "auto_map": {"AutoConfig": "x.C", "AutoModelForCausalLM": "x.M"}}
    (base / "config.json").write_text(json.dumps(config))
    (base / "x.py").write_text("open('ran', 'w')\nclass C: pass\nclass M: pass\n")
    done = subprocess.run(
        [*AGON, "train", "tiny", *SMALL, "model.id=./base"], cwd=here, env=ENVIRONMENT, input="y\n" * 9,
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 4, done.stderr
    assert not (here / "ran").exists()


def test_a_read_only_folder_is_refused(here, capsys):
    (here / "runs").mkdir()
    (here / "runs" / "tiny").write_text("a file in the way")
    code, _, err = agon(capsys, "train", "tiny", *SMALL)
    assert code == 2
    assert "runs/tiny" in err
    assert (here / "runs" / "tiny").read_text() == "a file in the way"


def test_a_disk_that_fills_up_in_a_save_loses_nothing(here, capsys, monkeypatch, trained):
    from agon_cli import checkpoint

    written = checkpoint._write_synced

    def full(path, content):
        if "step-000002" in str(path) and path.name == "adapter_model.safetensors":
            raise OSError(28, "No space left on device", str(path))
        written(path, content)

    words = ["train", "tiny", *SMALL, "save.every=1"]
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_write_synced", full)
        code, _, err = agon(capsys, *words)
    assert code == 5
    assert "disk full" in err
    assert "step-000001 is whole" in err
    code, _, err = agon(capsys, *words)
    assert code == 0
    assert "going on from step 1" in err
    assert tensors(here / "runs/tiny") == tensors(trained[0] / "runs/tiny")


def test_a_loss_that_is_no_number_stops_the_run(here, capsys):
    code, _, err = agon(capsys, "train", "tiny", *SMALL, "optim.lr=1e30", "optim.warmup=0", "save.every=1")
    assert code == 6
    assert "hint: " in err
    assert (here / "runs/tiny/checkpoints").exists()


def test_no_words_at_all_show_the_help(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["agon"])
    assert cli.main() == 0
    assert "cascade" in capsys.readouterr().out


def test_usage_errors_end_with_2_and_a_hint_and_are_json_too(here, capsys):
    code, out, err = agon(capsys, "train", "tiny", "--jsn", "--json")
    assert code == 2
    assert "--json" in err
    assert "hint: see agon train --help" in err
    assert json.loads(out)["event"] == "error"
    code, out, err = agon(capsys, "train", "nope", "--json")
    event = json.loads(out)
    assert (code, event["code"]) == (2, 2)
    assert "nope" in event["message"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (MemoryError(), 5),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"), 5),
        (RuntimeError("unable to mmap 617648 bytes from file <x>: Cannot allocate memory (12)"), 5),
        (OSError(28, "No space left on device", "x"), 5),
        (KeyboardInterrupt(), 130),
        (ValueError("odd\x1b[2J"), 1),
    ],
)
def test_what_goes_wrong_in_a_command_becomes_its_exit_code(here, capsys, monkeypatch, error, code):
    def fail(*_):
        raise error

    monkeypatch.setattr(session, "plan", fail)
    found, _, err = agon(capsys, "train", "tiny")
    assert found == code
    assert "\x1b" not in err
    assert ("Traceback" in err) == (code == 1)


def test_out_of_gpu_memory_is_exit_5():
    import torch

    found = session.failure(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore"))
    assert found is not None
    assert found.code == 5
    assert "batch_tokens" in found.hint


def test_a_reader_that_goes_away_is_no_error(here, monkeypatch):
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert cli.main(["train", "tiny", "--dry-run", "--json"]) == 0


def test_results_for_a_reader_that_has_gone_are_no_error_either(here, monkeypatch):
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert cli.main(["train", "tiny", "--dry-run"]) == 0


def test_training_goes_on_when_nobody_listens_to_stderr_any_more(here):
    training = subprocess.Popen([*AGON, "train", "tiny", *SMALL], env=ENVIRONMENT, stderr=subprocess.PIPE)
    training.stderr.close()
    assert training.wait(timeout=120) == 0
    assert (here / "runs/tiny/checkpoints/step-000004/COMPLETE").exists()


@pytest.mark.parametrize(
    ("redirection", "code"), [(">&-", 0), ("2>&-", 0), ("<&- >&- 2>&-", 0), (">/dev/full", 5), ("2>/dev/full", 0)]
)
def test_streams_that_are_closed_or_full_do_not_look_like_a_bug(here, redirection, code):
    command = f"{shlex.join([*AGON, 'train', 'tiny', '--dry-run', '--json'])} {redirection}"
    done = subprocess.run(["sh", "-c", command], env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


# --- eval -----------------------------------------------------------------------------------------------------------


def test_eval_of_a_run_repeats_the_figures_of_training_and_writes_nothing(trained, monkeypatch, capsys):
    folder, _ = trained
    monkeypatch.chdir(folder)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    code, out, _ = agon(capsys, "eval", "runs/tiny", "--json")
    assert code == 0
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    lines = [json.loads(line) for line in out.splitlines()]
    known = {(row["arm"], row["problem_id"]): row["text"] for row in rows(folder / "runs/tiny/evals.jsonl")
             if (row["step"], row["split"]) == (4, "test")}  # fmt: skip
    got = {(row["arm"], row["problem_id"]): row["text"] for row in lines
           if row["event"] == "row" and row["split"] == "test"}  # fmt: skip
    assert got == known != {}
    assert lines[-1]["event"] == "result"
    assert {arm["split"] for arm in lines[-1]["dev_arms"]} == {"dev"}


def test_eval_says_how_the_direction_was_chosen(trained, monkeypatch, capsys):
    folder, _ = trained
    monkeypatch.chdir(folder)
    code, out, err = agon(capsys, "eval", "tiny", "--limit", "4", "--mode", "single")
    assert code == 0
    assert "untrained base of tiny" in out  # a recipe comes before a run of the same name
    code, out, err = agon(capsys, "eval", "runs/tiny", "--limit", "4", "--samples", "2")
    assert code == 0
    assert "chosen on 4 dev problems" in out
    assert "sampling: temperature 1" in err
    assert "the first 4 of a split are used" in err


def test_eval_of_an_adapter_folder_uses_the_prompts_of_its_run(trained, monkeypatch, capsys):
    folder, _ = trained
    monkeypatch.chdir(folder)
    code, out, _ = agon(capsys, "eval", "runs/tiny/B", "--limit", "6", "--mode", "single", "--split", "dev", "--json")
    assert code == 0
    lines = [json.loads(line) for line in out.splitlines()]
    found = [row for row in lines if row["event"] == "row"]
    known = [row for row in rows(folder / "runs/tiny/evals.jsonl")
             if (row["step"], row["split"], row["arm"]) == (4, "dev", "B")]  # fmt: skip
    assert {row["arm"] for row in found} == {"model"}
    assert [row["prompt_hash"] for row in found] == [row["prompt_hash"] for row in known[:6]]


def test_eval_of_a_model_needs_problems_from_somewhere(here, capsys):
    base = str(SOURCE / "agon_cli/tiny/base")
    code, _, err = agon(capsys, "eval", base)
    assert code == 2
    assert "--recipe" in err
    code, out, _ = agon(capsys, "eval", base, "--recipe", "tiny", "--limit", "3", "-q", "split.dev=8", "split.test=8")
    assert code == 0
    assert "model>model cascade" in out


@pytest.mark.parametrize("source", ["runs/tiny", "tiny"])
def test_eval_never_ignores_a_recipe_that_was_named(trained, monkeypatch, capsys, source):
    monkeypatch.chdir(trained[0])
    code, out, err = agon(capsys, "eval", source, "--recipe", "qwen35")
    assert (code, out) == (2, "")
    assert "--recipe would do nothing" in err


def test_eval_of_nothing_known_is_a_usage_error(here, capsys):
    code, _, err = agon(capsys, "eval", "no-such-thing")
    assert code == 2
    assert "no-such-thing" in err


# --- quick commands -------------------------------------------------------------------------------------------------


def test_a_command_line_error_of_cascade_loads_no_torch(here):
    program = (
        "import sys; from agon_cli.cli import main; code = main(['cascade', '-f', 'bad.jsonl']);"
        "print(code, sorted({'torch', 'transformers', 'scipy'} & set(sys.modules)))"
    )
    (here / "bad.jsonl").write_text('{"question": "ok"}\n{"question": 3}\n')
    done = subprocess.run([sys.executable, "-c", program], env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.stdout == "2 []\n"
    assert "bad.jsonl:2" in done.stderr


def test_a_start_that_failed_on_its_data_does_not_block_the_corrected_one(here, capsys):
    data = ["data={type: jsonl, path: wrong.jsonl}", "--out", "mine"]
    assert agon(capsys, "train", "tiny", *SMALL, *data)[0] == 4
    code, out, _ = agon(capsys, "train", "tiny", *SMALL, "--out", "mine", "--dry-run")
    assert code == 0
    assert "refused" not in out
    code, _, err = agon(capsys, "train", "tiny", *SMALL, "--out", "mine")
    assert code == 0, err
    assert len(rows(here / "mine" / "metrics.jsonl")) == 4
    code, _, err = agon(capsys, "train", "tiny", *SMALL, *data)
    assert code == 2  # by now there is something to lose
    assert "different recipe" in err


def test_a_start_that_failed_is_not_the_newest_run(trained, monkeypatch, capsys):
    folder, _ = trained
    monkeypatch.chdir(folder)
    assert (
        agon(capsys, "train", "tiny", *SMALL, "data={type: jsonl, path: wrong.jsonl}", "--out", "runs/failed")[0] == 4
    )
    code, _, err = agon(capsys, "cascade", "9 *5 +7", "-q")
    assert code == 0, err


@pytest.mark.parametrize(
    "size", ["rollout.group_size=99999999999", "rollout.problems=99999999999", "lora.rank=99999999"]
)
def test_sizes_no_machine_has_room_for_are_refused_at_once(here, capsys, size):
    code, _, err = agon(capsys, "train", "tiny", size, "--dry-run")
    assert code == 2
    assert size.partition("=")[0] in err


def test_a_seat_for_nobody_is_named(trained, monkeypatch, capsys):
    folder, _ = trained
    monkeypatch.chdir(folder)
    code, _, err = agon(capsys, "cascade", "--drafter", "Z", "9 *5 +7")
    assert code == 2
    assert "'Z' is no player" in err
    assert "its players are A, B" in err


def test_a_mistyped_run_is_not_looked_for_on_the_hub(trained, monkeypatch, capsys):
    folder, _ = trained
    monkeypatch.chdir(folder)
    for words in (("eval", "runs/tny"), ("cascade", "--drafter", "runs/tny", "--solver", "A", "9 *5 +7")):
        code, _, err = agon(capsys, *words)
        assert code == 2
        assert "runs/tny is no run, and no folder" in err
        assert re.search(r"in runs/ there are: .*\btiny\b", err)
    code, _, err = agon(capsys, "cascade", "--drafter", "runs/tny", "9 *5 +7")
    assert code == 2
    assert re.search(r"'runs/tny' is no player of runs/\w+", err)
