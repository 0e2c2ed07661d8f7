"""What tests/test_sharding.py has one process, then two do: `python shard_program.py MODEL OUT`.

One process keeps the base whole; two lay it over both. All must find the same.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

from agon_cli import cli, engines
from agon_cli import update as updates
from agon_cli.engines.hf import HFEngine
from agon_cli.policy import Policy
from agon_cli.ranks import Ranks, join
from agon_cli.recipe.schema import Recipe
from agon_cli.sharding import shard
from agon_cli.types import Group
from rank_program import in_turn, played
from scripted import make_recipe

SMALL = ["rollout.problems=3", "rollout.group_size=4", "rollout.max_tokens=24", "eval.every=0", "split.dev=5",
         "split.test=5", "steps=3", "optim.micro_batch_tokens=200", "engine.type=server",
         "engine.urls=[http://127.0.0.1:9]"]  # fmt: skip


def laid(recipe: Recipe, ranks: Ranks) -> Policy:
    """The recipe's policy, its base cut where there are several ranks."""
    policy = Policy(recipe, "cpu")
    if ranks.size > 1:
        shard(policy, ranks)
    return policy


def bytes_here(policy: Policy) -> int:
    """Of the decoder's frozen layers, what this rank holds between two passes."""
    layers = policy.seats["A"].model.get_base_model().get_decoder().layers
    own = [p for name, p in layers.named_parameters() if ".player_" not in name]
    return sum((p.to_local() if hasattr(p, "to_local") else p).nbytes for p in own)


def gradient(recipe: Recipe, groups: list[Group], ranks: Ranks) -> dict[str, Any]:
    """B's gradient of the step, summed over ranks, and how many micro-batches this rank had of its own."""
    policy = laid(recipe, ranks)
    parameters = policy.parameters("B")
    for parameter in parameters.values():
        parameter.requires_grad_(True)
    own = [0]
    cut = updates.by_token_budget

    def counted(lengths: list[int], most: int) -> list[list[int]]:
        batches = cut(lengths, most)
        own[0] = len(batches)
        return batches

    updates.by_token_budget = counted
    mine = ranks.deal([sum(len(r.completion.ids) for r in group.rollouts) for group in groups])
    sums = updates.accumulate_gradient(policy, "B", groups, recipe.optim, 0.7, mine)
    updates.by_token_budget = cut
    ranks.add_up(parameters)
    loss, _, kl = (sum(column) for column in zip(*ranks.gather(sums), strict=True))
    held = bytes_here(policy)
    return {
        "batches": own[0],
        "loss": loss,
        "kl": kl,
        "bytes": held,
        "grads": {n: p.grad for n, p in parameters.items()},
    }


def updated(recipe: Recipe, groups: list[Group], ranks: Ranks) -> dict[str, Any]:
    """Three updates of B, what they said, and B as it is stored and put back."""
    policy = laid(recipe, ranks)
    optimiser = updates.make_optimiser(policy.parameters("B"), recipe.optim)
    done = [updates.update(policy, "B", groups, optimiser, recipe.optim, 0.7, 1e-2, ranks) for _ in range(3)]
    stored, config = policy.adapter_state("B")
    policy.load_adapter_state("B", {name: tensor + 1.0 for name, tensor in stored.items()}, "here")
    moved, _ = policy.adapter_state("B")
    there = all(torch.equal(moved[name], stored[name] + 1.0) for name in stored)
    return {"updates": done, "adapter": stored, "config": config, "there": there, "hashes": policy.base_hashes()}


def scored(recipe: Recipe, ranks: Ranks) -> list[torch.Tensor]:
    """Log-probabilities of a batch whose prompts repeat and of one where they do not; of several ranks each has one."""
    policy, prompt = laid(recipe, ranks), tuple(range(8, 32))
    batches = [[(prompt, (40, 41, 42)), (prompt, (43, 44))], [(prompt, (45, 46))]]
    with torch.no_grad():
        return [policy.logprobs("B", rows, 0.7) for rows in ranks.mine(batches)]


def out_of_memory(recipe: Recipe, groups: list[Group], ranks: Ranks) -> tuple[str, int]:
    """What an update says where no micro-batch fits, and how often it was tried."""
    policy = laid(recipe, ranks)
    tried = []

    def full(*_: Any, **__: Any) -> None:
        tried.append(1)
        raise torch.OutOfMemoryError("out of memory")

    policy.logprobs_at = full  # type: ignore[method-assign]
    try:
        updates.accumulate_gradient(policy, "B", groups, recipe.optim, 0.7)
    except torch.OutOfMemoryError as error:
        return str(error), len(tried)
    return "", len(tried)


def deserted(recipe: Recipe, groups: list[Group], ranks: Ranks) -> tuple[str, str]:
    """What a pass raises while the other rank has gone, by type and message."""
    policy = laid(recipe, ranks)
    if ranks.rank == 1:
        os._exit(0)
    row = groups[0].rollouts[0]
    try:
        policy.logprobs("B", [(row.prompt.ids, row.completion.ids)], 1.0)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


class Beside:
    """Stands for a server: it samples with a whole copy of the bases, and gets a player's adapter at each publish."""

    def __init__(self, policy: Policy, recipe: Recipe) -> None:
        self.policy = policy
        self.copy = Policy(recipe, "cpu")
        self.sampler = HFEngine(self.copy, 65536)
        self.sample, self.origins = self.sampler.sample, self.sampler.origins

    def publish(self, player: str) -> None:
        self.copy.load_adapter_state(player, self.policy.adapter_state(player)[0], "publish")

    def rest(self) -> None:
        """It has all its memory at all times."""

    def close(self) -> None:
        """It goes with the process."""


def trained(out: Path, run: str, *words: str) -> None:
    """`agon train tiny` in this process, as the rank it is."""
    engines.make = lambda recipe, policy, *_: Beside(policy, recipe)  # type: ignore[assignment]
    code = cli.main(["train", "tiny", *SMALL, "--quiet", "--out", str(out / run), *words])
    assert code == 0, code


def alone(folder: Path, out: Path) -> None:
    """Two ranks of which one leaves in the middle."""
    ranks = join()
    recipe = make_recipe(folder)
    own = [group for group in played(folder, ranks, 2) if group.player == "B"]
    torch.save(deserted(recipe, own, ranks), out / "deserted.pt")


def main(folder: Path, out: Path) -> None:
    ranks = join()
    own = [group for group in played(folder, ranks, 5) if group.player == "B"]
    small: dict[str, Any] = {"micro_batch_tokens": 96}
    noisy: dict[str, Any] = {"players": {"A": {}, "B": {"noise": 0.2}}}
    plain = make_recipe(folder, optim=small)
    found = {
        "uneven": gradient(plain, own, ranks),
        "kl": gradient(make_recipe(folder, optim=small | {"kl": 0.3}, **noisy), own, ranks),
        "recomputed": gradient(make_recipe(folder, optim=small | {"checkpointing": True}), own, ranks),
        "nothing": gradient(plain, own[1:2], ranks),
        "updated": updated(plain, own, ranks),
        "scored": scored(plain, ranks),
        "full": out_of_memory(plain, own, ranks),
    }
    torch.save(found, out / f"{ranks.size}-{ranks.rank}.pt")
    if ranks.size == 1:
        trained(out, "whole")
        trained(out, "then-sharded", "--max-steps", "1")
    else:
        trained(out, "then-sharded", "--shard")  # leaves the other rank at the end, as any run does


if __name__ == "__main__":
    in_turn(main, (1, 2))
    (Path(sys.argv[2]) / "store-2").unlink(missing_ok=True)  # where the ranks above met
    in_turn(alone, (2,))
