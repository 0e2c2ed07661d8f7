"""A run that is killed at any moment and resumed ends as one that never stopped: same adapters, same rows."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

OVERRIDES = [
    "steps=9", "save.every=2", "eval.every=4", "split.dev=12", "split.test=12", "rollout.problems=4",
    "rollout.group_size=4",
]  # fmt: skip

# Loads everything heavy once, then forks a child for every start of the run: `play` runs to the end, `kill SECONDS` is
# killed by SIGKILL that long after its start. Prints one JSON line per child.
SERVER = """
import json, os, signal, sys, time
import torch
torch.set_num_threads(1)
from agon_cli.recipe import load, resolved
from agon_cli.manifest import describe
from agon_cli.runlog import RunFolder
from agon_cli import assemble, train

def play(out):
    recipe = load("tiny", json.loads(sys.argv[1]))
    with RunFolder.open(out, "tiny", resolved(recipe), describe(0, {}, ["agon"]), False) as run:
        world = assemble.assemble(recipe)
        train.train(world, run, lambda kind, **_: None, lambda: False)

from pathlib import Path
for line in sys.stdin:
    word, out, seconds = json.loads(line)
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        try:
            play(Path(out))
            os._exit(0)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
    if word == "kill":
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    print(json.dumps([os.waitstatus_to_exitcode(status), time.monotonic() - began]), flush=True)
"""


@pytest.fixture
def server():
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, json.dumps(OVERRIDES)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip

    def ask(word: str, out: Path, seconds: float = 0.0) -> tuple[int, float]:
        process.stdin.write(json.dumps([word, str(out), seconds]) + "\n")
        process.stdin.flush()
        return tuple(json.loads(process.stdout.readline()))

    yield ask
    process.stdin.close()
    process.wait(10)


def rows(run: Path, name: str) -> list[dict]:
    found = [json.loads(line) for line in (run / f"{name}.jsonl").read_text().splitlines()]
    for row in found:
        for key in ("seconds", "peak_bytes"):
            row.pop(key, None)
    return found


def adapters(run: Path) -> dict[str, bytes]:
    return {name: (run / name / "adapter_model.safetensors").read_bytes() for name in ("A", "B")}


@pytest.mark.slow
def test_ten_kills_change_nothing(server, tmp_path):
    whole = tmp_path / "whole"
    code, duration = server("play", whole)
    assert code == 0
    draw = random.Random(time.time_ns())
    kills = runs = 0
    while kills < 10:
        killed, code = tmp_path / f"killed-{runs}", -signal.SIGKILL
        while code == -signal.SIGKILL and kills < 10:
            code, _ = server("kill", killed, draw.uniform(0.02, 0.9 * duration))
            kills += code == -signal.SIGKILL
        assert code in (0, -signal.SIGKILL)
        assert server("play", killed)[0] == 0
        assert adapters(killed) == adapters(whole)
        for name in ("metrics", "rollouts", "evals"):
            assert rows(killed, name) == rows(whole, name), name
        runs += 1
