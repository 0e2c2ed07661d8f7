"""One step as heavy as a recipe's can be, really taken, to see what it takes."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from agon_cli.assemble import World, assemble
from agon_cli.costs import Sizes, sizes
from agon_cli.memory import peak_bytes
from agon_cli.recipe.schema import Recipe
from agon_cli.roles import pairing
from agon_cli.types import Completion, Group, Problem, Prompt, Role, Rollout, Verdict
from agon_cli.update import make_optimiser, update

Row = dict[str, Any]


def probe(recipe: Recipe, gpus: int = 1) -> Row:
    """Take the share of the step that one of `gpus` devices has; the most memory that this process used (bytes), and
    seconds by phase.

    Prompts are as long as the recipe allows, of random tokens; every completion runs to its cap; every one counts in
    the update. Nothing is kept. Raises whatever a run raises, running out of memory before anything else.
    """
    begun = time.perf_counter()
    world = assemble(recipe)
    try:
        loaded = time.perf_counter()
        groups = _played(world, sizes(recipe, gpus))
        world.arena.engine.rest()
        sampled = time.perf_counter()
        trained = recipe.method.players != "base"
        for player in dict.fromkeys(group.player for group in groups) if trained else ():
            optimiser = make_optimiser(world.policy.parameters(player), recipe.optim)
            own = [group for group in groups if group.player == player]
            update(world.policy, player, own, optimiser, recipe.optim, recipe.rollout.temperature, recipe.optim.lr)
            world.arena.engine.publish(player)
        done = time.perf_counter()
    finally:
        world.close()
    taken = {"load": loaded - begun, "sampling": sampled - loaded, "update": done - sampled}
    return {"peak": peak_bytes(), "seconds": taken | {"step": done - loaded}}


def _played(world: World, step: Sizes) -> list[Group]:
    """Drafts and challenges of a step at their caps."""
    recipe = world.recipe
    pair = pairing(0, recipe.cast, recipe.method.roles)
    found = []
    streams: list[tuple[Role, str, int]] = [("draft", pair.drafter, step.drafts)]
    if step.challenges:
        streams.append(("challenge", pair.challenger, step.challenges))
    for role, player, count in streams:
        vocabulary = world.policy.seats[player].model.get_base_model().get_input_embeddings().weight.shape[0]
        own = 1 if role == "draft" else count  # drafts of a problem share their prompt
        prompts = [_prompt(step.prompt, vocabulary, f"{role} {index}") for index in range(step.problems * own)]
        forced = replace(world.arena.sampling, min_tokens=step.completion)
        seeds = [list(range(count // own))] * len(prompts)
        sampled = world.arena.engine.sample(prompts, player, forced, seeds)
        flat = [(prompt, done) for prompt, row in zip(prompts, sampled, strict=True) for done in row]
        found += [_group(role, player, flat[start : start + count]) for start in range(0, len(flat), count)]
    return found


def _prompt(length: int, vocabulary: int, seed: str) -> Prompt:
    return Prompt("", tuple(random.Random(seed).choices(range(vocabulary), k=length)))


def _group(role: Role, player: str, rows: Sequence[tuple[Prompt, Completion]]) -> Group:
    """Rows with made-up rewards, half of them better than average."""
    verdict = Verdict("correct")
    return Group(Problem("", "", ""), player, role, tuple(
        Rollout(prompt, done, None, verdict, 1, advantage=1.0 if index % 2 else -1.0)
        for index, (prompt, done) in enumerate(rows)
    ))  # fmt: skip
