"""Whole runs on the real vLLM (`make test-vllm`): in-process, and on a server that is killed half-way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import vllm_server
from scripted import make_recipe

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
STEPS = 6


def recipe_file(folder: Path, engine: dict[str, Any]) -> Path:
    """Both players move at every step: the KL term pulls them to the base whatever the rewards are."""
    recipe = make_recipe(
        vllm_server.model(),
        players={"A": {"noise": 0.05}, "B": {"noise": 0.05}},
        engine=engine,
        optim={"lr": 1e-2, "kl": 1.0},
        split={"train": 16, "dev": 4, "test": 4},
        eval={"every": 0},
        save={"every": 2},
        steps=STEPS,
    )
    path = folder / "run.yaml"
    path.write_text(json.dumps(recipe.model_dump(mode="json")), encoding="utf-8")
    return path


def start(folder: Path, engine: dict[str, Any]) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", "from agon_cli.cli import main; raise SystemExit(main())", "train"]
    command += [str(recipe_file(folder, engine)), "--out", str(folder / "run")]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(
        command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    path = folder / "run" / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def check_whole(folder: Path) -> None:
    assert [row["step"] for row in rows(folder, "metrics")] == list(range(STEPS))
    found = [(r["step"], r["problem_id"], r["player"], r["role"], r["index"]) for r in rows(folder, "rollouts")]
    assert len(found) == len(set(found)) == STEPS * 4 * 4 * 2
    updates = [player for row in rows(folder, "metrics") for player in row["players"].values() if player["updated"]]
    assert updates
    assert all(0 < player["sampler_gap"] < 1e-3 for player in updates)
    early, late = (load_file(folder / f"run/checkpoints/step-{n:06d}/B/adapter_model.safetensors") for n in (4, STEPS))
    assert any(not early[key].equal(late[key]) for key in early), "the player moved, so its engine had to follow"
    assert not list((folder / "run" / ".adapters").glob("*"))


def test_a_run_in_process(tmp_path):
    run = start(tmp_path, {"type": "vllm"})
    out, err = run.communicate(timeout=400)
    assert run.returncode == 0, err[-3000:]
    check_whole(tmp_path)
    assert "INFO" not in out, "stdout carries results alone"


def test_a_server_killed_and_restarted_loses_no_step(tmp_path):
    server = vllm_server.running()
    run = start(tmp_path, {"type": "server", "urls": [server.url], "timeout": 300.0})
    while len(rows(tmp_path, "metrics")) < 2:
        assert run.poll() is None, run.communicate()[1][-3000:]
        time.sleep(0.02)
    server.kill()
    assert len(rows(tmp_path, "metrics")) < STEPS, "killed while steps were still to come"
    time.sleep(3)
    assert run.poll() is None, "it waits"
    server.start()
    _, err = run.communicate(timeout=400)
    assert run.returncode == 0, err[-3000:]
    check_whole(tmp_path)
