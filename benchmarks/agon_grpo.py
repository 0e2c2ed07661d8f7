"""Agon's side of W1 and W2: one GRPO player through the product's own engine, referee and update.

Prints one line of JSON. Words of the form KEY.PATH=VALUE override grpo.yaml.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from agon_cli import __version__, data
from agon_cli.advantages import group_advantages
from agon_cli.assemble import World, assemble
from agon_cli.models import cache_folder, locate
from agon_cli.recipe import load
from agon_cli.rollout import draft
from agon_cli.types import Group
from agon_cli.update import learning_rate, make_optimiser, update
from staged import ForcedLength
from workloads import GRPO, HERE, Grpo, Laps, machine, peak_rss_mib, print_line, questions, reward, work_of

RECIPE = HERE / "grpo.yaml"


def prepare(factor: int) -> Path:
    """The model's folder; with a factor above 1 a copy whose vocabulary is that many times as large."""
    plain = Path(locate(load(str(RECIPE), []).model.id).source)
    wider = cache_folder() / "bench" / f"{plain.name}-vocabulary-x{factor}"
    if factor == 1 or (wider / "config.json").exists():
        return plain if factor == 1 else wider
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
    rows_VH = model.get_input_embeddings().weight.detach().clone()
    model.resize_token_embeddings(len(rows_VH) * factor, mean_resizing=False)
    with torch.no_grad():  # every token gets twins of itself, so that the new ones are as likely as the old
        for weight_VH in {model.get_input_embeddings().weight, model.get_output_embeddings().weight}:
            weight_VH.copy_(rows_VH.repeat(factor, 1))
    wider.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(dir=wider.parent, prefix=".building-"))
    model.save_pretrained(building)
    AutoTokenizer.from_pretrained(plain).save_pretrained(building)
    return building.rename(wider)


def world_of(work: Grpo, model: Path, steps: int, overrides: Sequence[str], folder: Path) -> World:
    """The recipe made real on the workload's problems."""
    problems = folder / "problems.jsonl"
    rows = [json.dumps({"question": question, "answer": gold}) for question, gold in questions()]
    problems.write_text("\n".join(rows) + "\n")
    sizes = {
        "model.id": model, "data.path": problems, "steps": steps, "rollout.problems": work.prompts,
        "rollout.group_size": work.completions // 2, "rollout.max_tokens": work.new_tokens,
    }  # fmt: skip
    world = assemble(load(str(RECIPE), [*(f"{key}={value}" for key, value in sizes.items()), *overrides]))
    arena = replace(world.arena, engine=ForcedLength(world.arena.engine)) if work.forced else world.arena
    return replace(world, arena=arena)


def rewarded(group: Group, dense: bool) -> Group:
    """The group under the workload's reward."""
    rewards_N = [
        reward(rollout.completion.text, group.problem.gold, index, dense)
        for index, rollout in enumerate(group.rollouts)
    ]
    advantages_N = group_advantages(rewards_N, [False] * len(rewards_N))
    scored = zip(group.rollouts, rewards_N, advantages_N, strict=True)
    return replace(group, rollouts=tuple(replace(r, reward=value, advantage=adv) for r, value, adv in scored))


def run_steps(world: World, laps: Laps, dense: bool) -> float:
    """Every step of the recipe; returns the share of completions that had an advantage."""
    recipe, arena, policy = world.recipe, world.arena, world.policy
    optimiser = make_optimiser(policy.parameters("A"), recipe.optim)
    count, moving, total = 2 * recipe.rollout.group_size, 0, 0
    for step in range(recipe.steps):
        problems = data.batch(world.splits.train, step, recipe.rollout.problems, recipe.seed)
        drafts = draft(arena, "A", problems, count, f"step {step}", lambda _: None)
        groups = [rewarded(group, dense) for group in drafts]
        arena.engine.rest()
        rate = learning_rate(step, recipe.steps, recipe.optim)
        update(policy, "A", groups, optimiser, recipe.optim, recipe.rollout.temperature, rate)
        arena.engine.publish("A")
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        laps.tokens.append(sum(len(rollout.completion.ids) for rollout in rollouts))
        laps.end()
        moving, total = moving + sum(rollout.advantage != 0.0 for rollout in rollouts), total + len(rollouts)
    return moving / total


def measure(
    workload: str, work: Grpo, model: Path, steps: int, warmup: int, dense: bool, overrides: Sequence[str]
) -> dict[str, Any]:
    """Figures of `steps` steps after `warmup` uncounted ones."""
    laps = Laps(warmup)
    with tempfile.TemporaryDirectory() as folder:
        world = world_of(work, model, steps + warmup, overrides, Path(folder))
    try:
        share = run_steps(world, laps, dense)
    finally:
        world.close()
    about = {
        "workload": workload, "new_tokens": world.recipe.rollout.max_tokens, "side": f"agon {__version__}",
        "dense": dense, "rows_with_advantage": share,
    }  # fmt: skip
    return about | laps.figures() | {"peak_rss_mib": peak_rss_mib()} | machine() | {"overrides": list(overrides)}


def main(words: Sequence[str] | None = None) -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", choices=GRPO, default="w1")
    parser.add_argument("--steps", type=int, default=3, choices=range(1, 1000), metavar="N")
    parser.add_argument("--warmup", type=int, default=1, choices=range(1, 10), metavar="N")
    parser.add_argument("--model-dir", type=Path, help="the model's folder; default: SmolLM2, converted where needed")
    parser.add_argument("--vocab-factor", type=int, default=1, choices=range(1, 9), metavar="N")
    parser.add_argument("--dense", action="store_true", help="rewards from a hash: every row has an advantage")
    parser.add_argument(
        "--prepare", action="store_true", help="make the model's folder, print its path, measure nothing"
    )
    parser.add_argument("--tokens", type=int, metavar="N", help="new tokens of a completion; default: the workload's")
    parser.add_argument("overrides", nargs="*", metavar="KEY.PATH=VALUE")
    given = parser.parse_intermixed_args(words)
    if given.prepare:
        print_line({"model_dir": str(prepare(given.vocab_factor))})
        return
    model = given.model_dir or prepare(given.vocab_factor)
    work = work_of(given.workload, given.tokens)
    print_line(measure(given.workload, work, model, given.steps, given.warmup, given.dense, given.overrides))


if __name__ == "__main__":
    main()
