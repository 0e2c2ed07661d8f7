"""W4: one agon step (both players) against two GRPO steps of the same token count, in one process, alternating. Prints
one line of JSON.

A challenge's prompt holds the rival's summary, so at equal completions agon reads more. `grpo` makes up for it with
longer completions, so that both sides read and write as many tokens; `grpo_written` writes as many and reads less, and
shows what the reading costs. Lengths are forced, and every row has an advantage. Words of the form KEY.PATH=VALUE
override the recipe.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.optim import AdamW

from agon_cli import __version__, data
from agon_cli.assemble import World, assemble
from agon_cli.clock import Clock
from agon_cli.recipe import Recipe, load
from agon_cli.roles import pairing
from agon_cli.rollout import play
from agon_cli.update import learning_rate, make_optimiser, update
from staged import RIGHT, Staged
from workloads import machine, print_line


@dataclass
class Side:
    """A recipe made real, its engine staged, and how many of its steps one lap takes."""

    world: World
    engine: Staged
    optimisers: dict[str, AdamW]
    steps: int
    done: int = 0

    def lap(self) -> dict[str, Any]:
        """Seconds, tokens and prompt tokens of one lap."""
        self.engine.completions = self.engine.prompt_tokens = self.engine.tokens = 0
        clock = Clock()
        since = time.perf_counter()
        for _ in range(self.steps):
            self._step(clock)
        seconds = time.perf_counter() - since
        engine = self.engine
        return {
            "seconds": seconds, "completions": engine.completions, "tokens": engine.tokens,
            "prompt_tokens": engine.prompt_tokens, "all_tokens": engine.tokens + engine.prompt_tokens,
            "phases": clock.seconds,
        }  # fmt: skip

    def _step(self, clock: Clock) -> None:
        """One step as the training loop takes it, short of its log."""
        recipe, arena, policy = self.world.recipe, self.world.arena, self.world.policy
        pair = pairing(self.done, recipe.cast, recipe.method.roles)
        drawn = data.batch(self.world.splits.train, self.done, recipe.rollout.problems, recipe.seed)
        groups = play(arena, pair, [replace(problem, gold=RIGHT) for problem in drawn], self.done, clock)
        arena.engine.rest()
        clock("update")
        rate = learning_rate(self.done % recipe.steps, recipe.steps, recipe.optim)
        for player in dict.fromkeys(pair):
            own = [group for group in groups if group.player == player]
            assert all(rollout.advantage != 0.0 for group in own for rollout in group.rollouts)
            optimiser = self.optimisers[player]
            update(policy, player, own, optimiser, recipe.optim, recipe.rollout.temperature, rate)
            arena.engine.publish(player)
        clock("")
        self.done += 1


def side(recipe: Recipe, steps: int) -> Side:
    """One side, loaded and ready."""
    world = assemble(recipe)
    engine = Staged(world.arena.engine, recipe)
    world = replace(world, arena=replace(world.arena, engine=engine))
    optimisers = {name: make_optimiser(world.policy.parameters(name), recipe.optim) for name in recipe.cast}
    return Side(world, engine, optimisers, steps)


def measure(source: str, overrides: Sequence[str], pairs: int, rounds: int) -> dict[str, Any]:
    """All sides' laps of `rounds` agon steps' work each; a first lap of each is not counted.

    A GRPO step samples 2N completions of a problem, so with half the group size two of them draw as many as one agon
    step does.
    """
    recipe = load(source, [*overrides, "method=agon"])
    size = recipe.rollout.group_size
    if size % 2 or size < 4:
        raise SystemExit(f"rollout.group_size {size} cannot be halved: take an even one from 4 on")
    alone = [*overrides, "method=grpo", f"rollout.group_size={size // 2}"]
    sides = {"agon": side(recipe, rounds), "grpo_written": side(load(source, alone), 2 * rounds)}
    try:
        laps: dict[str, list[dict[str, Any]]] = {name: [one.lap()] for name, one in sides.items()}
        ours, theirs = laps["agon"][0], laps["grpo_written"][0]
        longer = (ours["prompt_tokens"] - theirs["prompt_tokens"]) // theirs["completions"]
        alone.append(f"rollout.max_tokens={recipe.rollout.max_tokens + longer}")
        sides["grpo"] = side(load(source, alone), 2 * rounds)
        laps["grpo"] = [sides["grpo"].lap()]
        for _ in range(pairs):
            for name, one in sides.items():
                laps[name].append(one.lap())
    finally:
        for one in sides.values():
            one.world.arena.verifier.close()
    return {
        "workload": "w4", "side": f"agon {__version__}", "recipe": source, "agon_steps": rounds,
        "laps": {name: counted[1:] for name, counted in laps.items()},
    } | machine() | {"overrides": list(overrides)}  # fmt: skip


def main(words: Sequence[str] | None = None) -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="tiny", help="a recipe file, or the name of a shipped recipe")
    parser.add_argument("--pairs", type=int, default=5, metavar="N")
    parser.add_argument(
        "--rounds", type=int, default=4, metavar="N", help="agon steps in a lap, so that it is no blink"
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY.PATH=VALUE")
    given = parser.parse_intermixed_args(words)
    print_line(measure(given.recipe, given.overrides, given.pairs, given.rounds))


if __name__ == "__main__":
    main()
