"""`agon train --gpus N`, here as N processes on the CPU: the same run as with one, and a good end whatever dies."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

import agon_cli
from agon_cli import cli

pytestmark = pytest.mark.slow
SOURCE = Path(agon_cli.__file__).parents[1]
SMALL = ["rollout.problems=3", "eval.every=0", "split.dev=7", "split.test=7", "rollout.max_tokens=24",
         "rollout.group_size=4"]  # fmt: skip
LONG = [*SMALL, "steps=400", "save.every=3"]
LIMIT = 150
"""Seconds that any command here may take."""


@contextmanager
def started(folder: Path, *words: str, **environment: str) -> Iterator[subprocess.Popen]:
    """A running `agon train tiny`; at the end neither it nor any process of it is left."""
    present = os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | environment
    process = subprocess.Popen(
        [sys.executable, "-m", "agon_cli.cli", "train", "tiny", *words], cwd=folder, env=present, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        for one in [*family(process), process]:
            with suppress(psutil.NoSuchProcess, ProcessLookupError):
                one.kill()
        process.communicate()


def family(process: subprocess.Popen) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(process.pid).children(recursive=True)
    return []


def worker(process: subprocess.Popen, rank: int) -> psutil.Process:
    (found,) = [child for child in psutil.Process(process.pid).children() if child.environ().get("RANK") == str(rank)]
    return found


def finished(folder: Path, *words: str, **environment: str) -> tuple[int, str, str]:
    """Run `agon train tiny` to its end: exit code, stdout, stderr."""
    with started(folder, *words, **environment) as process:
        out, err = process.communicate(timeout=LIMIT)
        return process.returncode, out, err


def until_step(process: subprocess.Popen, run: Path, count: int) -> None:
    """Wait until a run has logged so many steps."""
    log, deadline = run / "metrics.jsonl", time.monotonic() + LIMIT
    while not log.exists() or log.read_bytes().count(b"\n") < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def gone(processes: list[psutil.Process], seconds: float) -> bool:
    return not psutil.wait_procs(processes, timeout=seconds)[1]


def bytes_of(run: Path, name: str) -> bytes:
    return (run / f"{name}.jsonl").read_bytes()


def metrics(run: Path) -> list[dict]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in ("seconds", "peak_bytes")} for row in rows]


def adapters(run: Path) -> dict[str, dict]:
    return {name: load_file(run / name / "adapter_model.safetensors") for name in ("A", "B")}


ROUNDING = 1e-5
"""How far two runs' adapters may lie apart after a few steps at a rate of 1e-3. Their gradients agree to 1e-6, but
where a gradient is no more than rounding, Adam takes a step of the rate's own size in its direction."""


def furthest(a: dict[str, dict], b: dict[str, dict]) -> float:
    """The largest difference of two runs' adapters, and infinity where they are not of one shape."""
    if {name: t.keys() for name, t in a.items()} != {name: t.keys() for name, t in b.items()}:
        return float("inf")
    return max(float((a[name][key] - b[name][key]).abs().max()) for name in a for key in a[name])


def nearly(a: object, b: object) -> bool:
    """Equal, but for the rounding of numbers."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(nearly(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(nearly, a, b))
    return a == pytest.approx(b, rel=1e-4, abs=1e-6) if isinstance(a, float) else a == b


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Path:
    """A folder with a run of one process, `one`, and the same of two, `two`: three steps of three problems."""
    folder = tmp_path_factory.mktemp("pair")
    for out, more in (("one", []), ("two", ["--gpus", "2"])):
        code, text, err = finished(folder, *SMALL, "steps=3", "--out", out, *more)
        assert code == 0, err
        (folder / f"{out}.stdout").write_text(text)
        (folder / f"{out}.stderr").write_text(err)
    return folder


def test_two_processes_write_the_files_of_one(pair):
    one, two = pair / "one", pair / "two"
    for name in ("rollouts", "evals"):
        assert bytes_of(one, name) == bytes_of(two, name) != b""
    assert nearly(metrics(one), metrics(two))
    assert len(metrics(one)) == 3
    assert furthest(adapters(one), adapters(two)) <= ROUNDING


def test_the_user_sees_one_run_and_is_told_of_the_processes(pair):
    one, two = (pair / "one.stdout").read_text(), (pair / "two.stdout").read_text()
    assert two.replace("two", "one") == one
    err = (pair / "two.stderr").read_text()
    assert err.count("recipe ") == 1
    assert "2 processes share every step's problems, all on the CPU" in err
    assert "processes share" not in (pair / "one.stderr").read_text()


def test_the_manifest_records_the_number_of_processes_and_the_checkpoint_does_not(pair):
    said = [json.loads((pair / out / "manifest.json").read_text())["hardware"]["ranks"] for out in ("one", "two")]
    assert said == [1, 2]
    state = [(pair / out / "checkpoints/step-000003/state.json").read_bytes() for out in ("one", "two")]
    assert b"rank" not in state[1]
    assert json.loads(state[0]).keys() == json.loads(state[1]).keys()


@pytest.mark.parametrize("first", ["1", "2"])
def test_a_run_goes_on_with_another_number_of_processes(pair, tmp_path, first):
    then = {"1": "2", "2": "1"}[first]
    words = [*SMALL, "steps=3", "--out", "run"]
    assert finished(tmp_path, *words, "--gpus", first, "--max-steps", "1")[0] == 0
    code, _, err = finished(tmp_path, *words, "--gpus", then)
    assert (code, "going on from step 1" in err) == (0, True), err
    for name in ("rollouts", "evals"):
        assert bytes_of(tmp_path / "run", name) == bytes_of(pair / "one", name)
    assert furthest(adapters(tmp_path / "run"), adapters(pair / "one")) <= ROUNDING


def test_more_processes_than_problems(tmp_path):
    words = [*SMALL, "rollout.problems=1", "steps=2", "split.test=2"]
    assert finished(tmp_path, *words, "--out", "one")[0] == 0
    code, _, err = finished(tmp_path, *words, "--out", "three", "--gpus", "3")
    assert code == 0, err
    assert bytes_of(tmp_path / "one", "rollouts") == bytes_of(tmp_path / "three", "rollouts")
    assert furthest(adapters(tmp_path / "one"), adapters(tmp_path / "three")) <= ROUNDING


def test_a_killed_rank_ends_the_run_which_goes_on_to_the_same_end(tmp_path):
    words = [*SMALL, "steps=9", "save.every=2", "--gpus", "2"]
    assert finished(tmp_path, *words, "--out", "whole")[0] == 0
    with started(tmp_path, *words, "--out", "killed") as process:
        until_step(process, tmp_path / "killed", 3)
        workers = family(process)
        worker(process, 1).kill()
        began = time.monotonic()
        out, err = process.communicate(timeout=LIMIT)
        assert time.monotonic() - began < 20
        assert gone(workers, 5)
    assert (process.returncode, out) == (5, "")
    assert "error: rank 1 was killed by SIGKILL" in err
    command = shlex.split(err.splitlines()[-1].partition("continue with: ")[2])
    assert command == ["agon", "train", "tiny", *words[:-2], "--out", "killed", "--gpus", "2"]
    code, _, err = finished(tmp_path, *command[3:])
    assert (code, "going on from step" in err) == (0, True), err
    for name in ("rollouts", "evals"):
        assert bytes_of(tmp_path / "killed", name) == bytes_of(tmp_path / "whole", name)
    assert metrics(tmp_path / "killed") == metrics(tmp_path / "whole")
    assert furthest(adapters(tmp_path / "killed"), adapters(tmp_path / "whole")) == 0.0


def test_a_signal_finishes_the_step_on_every_rank_saves_once_and_ends(tmp_path):
    number = signal.SIGTERM
    with started(tmp_path, *LONG, "save.every=100", "--gpus", "2", "--out", "run") as process:
        until_step(process, tmp_path / "run", 2)
        workers = family(process)
        process.send_signal(number)
        out, err = process.communicate(timeout=LIMIT)
        assert gone(workers, 5)
    assert (process.returncode, out) == (128 + number, "")
    count = len(metrics(tmp_path / "run"))
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == [f"step-{count:06d}"]
    assert f"stopped by {number.name} after step {count} of 400; the state is saved" in err
    assert err.count("finishing this step") == 1
    assert err.splitlines()[-1].endswith("--gpus 2")


def test_nothing_outlives_a_parent_that_is_killed(tmp_path):
    with started(tmp_path, *LONG, "--gpus", "2", "--out", "run") as process:
        until_step(process, tmp_path / "run", 1)
        workers = family(process)
        assert len(workers) >= 2
        process.kill()
        assert gone(workers, 10)


def test_a_rank_that_hangs_is_found_out_and_says_where_it_is(tmp_path):
    with started(tmp_path, *LONG, "--gpus", "2", "--out", "run", AGON_RANK_TIMEOUT="4") as process:
        until_step(process, tmp_path / "run", 4)  # past the checkpoint that follows the third step's rows
        worker(process, 1).suspend()
        out, err = process.communicate(timeout=LIMIT)
    assert (process.returncode, out) == (1, "")
    assert "error: rank 1 hangs: rank 0 lost the others (it waits 4 s at most)" in err
    assert "most recent call first" in err, "the stack of the rank that hung"
    assert "continue with: agon train tiny" in err
    assert "Extension modules" not in err
    assert list((tmp_path / "run/checkpoints").glob("step-*/COMPLETE"))


# What a rank meets is put in its way before anything else of it runs. The third call is in the middle of a run.
TROUBLE = """
import os
if os.environ.get("RANK") == "1":
    from agon_cli.errors import {error}
    from agon_cli.verifiers.exact import ExactVerifier
    grade, calls = ExactVerifier.grade, []
    def troubled(self, items):
        calls.append(items)
        if len(calls) == 14:
            raise {error}("{message}"{hint})
        return grade(self, items)
    ExactVerifier.grade = troubled
"""


def test_the_error_and_exit_code_of_the_rank_that_failed_are_the_commands(tmp_path):
    program = TROUBLE.format(error="GuardError", message="made up", hint=", 'do this'")
    (tmp_path / "sitecustomize.py").write_text(program)
    code, out, err = finished(
        tmp_path, *LONG, "--gpus", "2", "--out", "run", "--json", PYTHONPATH=f"{tmp_path}{os.pathsep}{SOURCE}"
    )
    assert code == 6, err
    assert err.splitlines() == ["error: rank 1: made up", "hint: do this"]
    last = json.loads(out.splitlines()[-1])
    assert last == {"event": "error", "message": "rank 1: made up", "hint": "do this", "code": 6}


def test_a_rank_that_lost_another_ends_without_a_word_however_its_threads_end(tmp_path):
    # gloo's threads sometimes abort the orderly end of a process that lost touch; here every orderly end does.
    program = TROUBLE.format(error="GuardError", message="made up", hint="")
    program += "elif os.environ.get('RANK') == '0':\n    import atexit\n    atexit.register(os.abort)\n"
    (tmp_path / "sitecustomize.py").write_text(program)
    code, _, err = finished(
        tmp_path, *LONG, "--gpus", "2", "--out", "run", "-q", PYTHONPATH=f"{tmp_path}{os.pathsep}{SOURCE}"
    )
    assert code == 6, err
    assert err.splitlines() == ["error: rank 1: made up"]


def test_a_bug_on_one_rank_is_told_with_its_traceback(tmp_path):
    program = TROUBLE.format(error="LostRank", message="no such key", hint="").replace(
        "raise LostRank", "raise KeyError"
    )
    (tmp_path / "sitecustomize.py").write_text(program)
    code, _, err = finished(
        tmp_path, *LONG, "--gpus", "2", "--out", "run", PYTHONPATH=f"{tmp_path}{os.pathsep}{SOURCE}"
    )
    assert code == 1
    assert "error: rank 1: KeyError: 'no such key'" in err
    assert "in troubled" in err
    assert "report it" in err


def test_a_rank_whose_adapter_is_changed_ends_the_run_with_6(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "if os.environ.get('RANK') == '1':\n"
        "    import torch\n"
        "    step, calls = torch.optim.AdamW.step, []\n"
        "    def tampered(self, *given, **named):\n"
        "        calls.append(0)\n"
        "        step(self, *given, **named)\n"
        "        if len(calls) == 5:\n"
        "            self.param_groups[0]['params'][0].data[0, 0] += 1e-7\n"
        "    torch.optim.AdamW.step = tampered\n"
    )
    code, _, err = finished(
        tmp_path, *LONG, "--gpus", "2", "--out", "run", PYTHONPATH=f"{tmp_path}{os.pathsep}{SOURCE}"
    )
    assert code == 6, err
    assert "adapter after its update: rank 1 has not what rank 0 has" in err
    assert not (tmp_path / "run/checkpoints/step-000003").exists(), "what is doubtful is not saved"


def test_mistakes_are_found_before_any_process_starts(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("agon_cli.launch._start", None)
    assert cli.main(["train", "tiny", "optim.lrr=1", "--gpus", "2"]) == 2
    assert cli.main(["train", "tiny", "--gpus", "0"]) == 2
    assert cli.main(["train", "tiny", "--gpus", "2", "--dry-run"]) == 0


def test_another_number_of_processes_than_the_launchers_is_refused(tmp_path):
    code, out, err = finished(tmp_path, "--gpus", "2", WORLD_SIZE="4", RANK="0")  # as torchrun sets them
    assert (code, out) == (2, "")
    assert "one of 4 processes already, not of 2" in err
    assert list(tmp_path.iterdir()) == []


def test_a_launcher_of_one_process_does_not_keep_the_others_from_being_started(tmp_path, monkeypatch):
    """As a job of one pod has it: WORLD_SIZE=1 says nothing about this machine's GPUs."""
    started = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr("agon_cli.launch.launch", lambda words, count, again: started.append(count))
    assert cli.main(["train", "tiny", "--gpus", "2"]) == 0
    assert started == [2]


def test_a_refused_run_folder_is_told_once(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/mine.txt").write_text("precious")
    code, out, err = finished(tmp_path, *SMALL, "--gpus", "2", "--out", "run")
    assert (code, out) == (2, "")
    assert err.count("is not empty and holds no run") == 1
