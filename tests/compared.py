"""Run folders made up for comparisons: real recipes, manifests and rows, and no training."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agon_cli.data import digest
from agon_cli.recipe import load, resolved
from agon_cli.tiny import world

Row = dict[str, Any]
SMALL = ["split.dev=8", "split.test=20", "steps=4", "rollout.problems=2", "rollout.group_size=2"]


def made_up(
    folder: Path, method: str, seed: int, right: float, *overrides: str, luck: str = "",
    change: Callable[[Row], Row | None] = lambda row: row, hashes: Row | None = None,
) -> Path:  # fmt: skip
    """A finished run of the tiny recipe whose answers are right with probability `right`. `change` has the last word on
    every evaluation row and may drop it."""
    recipe = load("tiny", [*SMALL, *overrides, f"method={method}", f"seed={seed}"])
    folder.mkdir(parents=True)
    (folder / "recipe.resolved.json").write_text(json.dumps(resolved(recipe)))
    test = digest(world.problems("test")[: recipe.split.test])
    known = {"base.A": "b", "data.train": "t", "data.dev": "d", "data.test": test, "prompts": "p"} | (hashes or {})
    manifest = {"seed": seed, "argv": ["agon", "train"], "hashes": known, "versions": {"agon": "0"}, "hardware": {}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    dice = random.Random(f"{method} {seed} {luck}")
    last = 0 if recipe.method.players == "base" else recipe.steps
    rows = []
    for step in dict.fromkeys((0, last)):
        for split, count in (("dev", recipe.split.dev), ("test", recipe.split.test)):
            ids = [problem.id for problem in world.problems(split)[:count]]
            rows += _evaluated(ids, recipe.cast, recipe.method.deploy, {"step": step, "split": split}, right, dice)
    _write(folder / "evals.jsonl", [row for row in map(change, rows) if row is not None])
    _write(folder / "metrics.jsonl", [_step(step, recipe.cast, dice) for step in range(last)])
    return folder


def _evaluated(ids: list[str], cast: Any, deploy: str, place: Row, right: float, dice: random.Random) -> list[Row]:
    rows: list[Row] = []
    drafts: dict[tuple[str, str], Row] = {}
    for player in cast:
        for name in ids:
            row = _row(place, player, "single", player, name, right - 0.1, dice)
            drafts[player, name] = row
            rows.append(row)
    pairs = [(a, b) for a in cast for b in cast if a != b or len(cast) == 1]
    for a, b in pairs if deploy == "cascade" else []:
        for name in ids:
            draft = drafts[a, name]
            more = {"draft_verdict": draft["verdict"], "draft_tokens": draft["tokens"], "read": True, "copied": False}
            rows.append(_row(place, f"{a}>{b}", "cascade", b, name, right, dice) | more)
    return rows


def _row(place: Row, arm: str, mode: str, player: str, name: str, right: float, dice: random.Random) -> Row:
    correct = dice.random() < right
    return place | {
        "arm": arm, "mode": mode, "player": player, "problem_id": name, "sample": 0,
        "stage": "draft" if mode == "single" else "final", "prompt_hash": "h", "prompt_tokens": 5,
        "tokens": dice.randrange(10, 30), "finish_reason": "stop", "text": f"{player} on {name}", "summary": "1 2",
        "verdict": "correct" if correct else "wrong", "extracted": "3", "format": 1,
    }  # fmt: skip


def _step(step: int, cast: Any, dice: random.Random) -> Row:
    stream = {"reward": 1.0, "accuracy": 0.5, "length": 20.0, "truncated": 0.0, "format": 1.0, "zero_signal": 0.2,
              "no_summary": 0.0, "leaked": 0.1, "unreadable": 0.0, "timeout": 0.0, "masked": 0.0}  # fmt: skip
    pair = (cast[0], cast[-1] if len(cast) > 1 else None)
    players: Row = {name: {"lr": 1e-3} for name in pair if name is not None}
    players[pair[0]]["draft"] = stream
    if pair[1] is not None:
        bonus = {"fix": 0.2, "break": 0.1, "copy": 0.3, "advantage_vs_wrong": 1.5, "advantage_vs_right": 1.0}
        players[pair[1]]["challenge"] = stream | bonus | {"revived": 0.05}
    return {
        "step": step, "roles": {"draft": pair[0], "challenge": pair[1]}, "players": players, "completions": 8,
        "grader_errors": 0, "tokens": {"sampled": 160, "prompt": 40},
        "seconds": {"draft": 0.5, "update": dice.random()}, "peak_bytes": 1 << 20, "flags": [],
    }  # fmt: skip


def _write(path: Path, rows: list[Row]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
