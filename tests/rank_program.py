"""What tests/test_ranks.py has each of 1, then 2, then 3 processes do: `python rank_program.py MODEL OUT`.

All must find the same. Groups come from a script, so that what is compared is the sharing of work and not the luck of
sampling. Everything heavy is loaded once, then the ranks are forked.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from agon_cli.errors import GuardError
from agon_cli.evaluate import evaluate
from agon_cli.policy import Policy
from agon_cli.ranks import Ranks, join
from agon_cli.recipe.schema import Recipe
from agon_cli.roles import pairing
from agon_cli.rollout import play
from agon_cli.types import Group
from agon_cli.update import accumulate_gradient, make_optimiser, update
from scripted import arena, line, make_recipe, problem, script_of, silent


def played(folder: Path, ranks: Ranks, count: int, method: str = "agon") -> list[Group]:
    """The groups of a step with `count` problems, as every rank sees them."""
    recipe = make_recipe(folder, method)
    board, engine = arena(recipe, Policy(recipe))
    engine.begin(script_of(3, 4), ["draft", "challenge"])
    problems = [problem(number) for number in range(1, 1 + count)]
    return play(replace(board, ranks=ranks), pairing(0, recipe.cast, "rotate"), problems, 3, silent)


def evaluated(folder: Path, ranks: Ranks, count: int) -> list[dict[str, Any]]:
    recipe = make_recipe(folder, "shuffled")
    board, engine = arena(recipe, Policy(recipe))
    engine.begin(script_of(5, 2), ["draft", "draft", "challenge", "challenge"])
    problems = [problem(number) for number in range(count)]
    return evaluate(replace(board, ranks=ranks), problems, "dev", 4, "cascade", 2, silent).rows


def gradient(recipe: Recipe, groups: list[Group], ranks: Ranks) -> dict[str, torch.Tensor | None]:
    """B's gradient of the step, summed over ranks; in float64 it would be the same to the last bits."""
    policy = Policy(recipe)
    parameters = policy.parameters("B")
    for parameter in parameters.values():
        parameter.requires_grad_(True)
        parameter.grad = None
    costs = [sum(len(r.completion.ids) for r in group.rollouts) for group in groups]
    accumulate_gradient(policy, "B", groups, recipe.optim, 0.7, ranks.deal(costs))
    ranks.add_up(parameters)
    return {name: p.grad for name, p in parameters.items()}


def updated(recipe: Recipe, groups: list[Group], ranks: Ranks, tamper: bool = False) -> dict[str, Any]:
    """Two updates of B and what they said; `tamper` moves one number of this rank's adapter in between."""
    policy = Policy(recipe)
    optimiser = make_optimiser(policy.parameters("B"), recipe.optim)
    done = []
    try:
        for _ in range(2):
            done.append(update(policy, "B", groups, optimiser, recipe.optim, 0.7, 1e-2, ranks))
            if tamper:
                with torch.no_grad():
                    next(iter(policy.parameters("B").values()))[0, 0] += 1e-6
        said = ""
    except GuardError as error:
        said = error.message
    return {"updates": done, "said": said, "adapter": {n: p.detach() for n, p in policy.parameters("B").items()}}


def main(folder: Path, out: Path) -> None:
    ranks = join()
    few, uneven = played(folder, ranks, 1), played(folder, ranks, 5)
    own = [group for group in uneven if group.player == "B"]
    quiet = [replace(g, rollouts=tuple(replace(r, advantage=0.0) for r in g.rollouts)) for g in own]
    sick = [replace(own[2], rollouts=(replace(own[2].rollouts[0], advantage=float("nan")), *own[2].rollouts[1:]))]
    by_sequence = make_recipe(folder, optim={"denominator": "sequence"})
    with_kl = make_recipe(folder, optim={"kl": 0.3}, players={"A": {}, "B": {"noise": 0.2}})
    plain = make_recipe(folder)
    wide = [line("right", "C q1 x0", "1")] if ranks.first else None
    found = {
        "rank": (ranks.rank, ranks.size),
        "whole": [ranks.whole(ranks.mine(list(range(count)))) for count in range(8)],
        "places": [ranks.mine(list(range(7)))[i] == ranks.place(i) for i in range(len(ranks.mine(list(range(7)))))],
        "told": ranks.told(lambda: wide),
        "few": few,
        "uneven": uneven,
        "shuffled": [played(folder, ranks, count, "shuffled") for count in (1, 2, 3, 5)],
        "grpo": played(folder, ranks, 3, "grpo"),
        "evaluated": [evaluated(folder, ranks, count) for count in (1, 5)],
        "gradient": gradient(plain, own, ranks),
        "by_sequence": gradient(by_sequence, own, ranks),
        "kl": gradient(with_kl, own, ranks),
        "updated": updated(plain, own, ranks),
        "updated_kl": updated(with_kl, own, ranks),
        "one_group": updated(plain, own[1:2], ranks),
        "no_signal": updated(plain, quiet, ranks),
        "not_finite": updated(plain, own[:2] + sick, ranks),
        "tampered": updated(plain, own, ranks, tamper=ranks.rank == 1),
    }
    torch.save(found, out / f"{ranks.size}-{ranks.rank}.pt")
    last = out / f"{ranks.size}-last"
    if ranks.rank == ranks.size - 1:
        time.sleep(1.0)
        last.touch()
    ranks.leave()
    assert last.exists(), "nobody goes before all are done"


def fork(main: Callable[[Path, Path], None], rank: int, size: int, folder: Path, out: Path) -> int:
    """Start one rank; its process id."""
    child = os.fork()
    if child == 0:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size,
                 "AGON_STORE": out / f"store-{size}"}  # fmt: skip
        os.environ.update({name: str(value) for name, value in place.items()})
        try:
            main(folder, out)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return child


def in_turn(main: Callable[[Path, Path], None], counts: Sequence[int]) -> None:
    """Run `main` in so many processes at once, one count after the other; ends with 1 where one fails."""
    torch.set_num_threads(1)
    for count in counts:
        children = [fork(main, rank, count, Path(sys.argv[1]), Path(sys.argv[2])) for rank in range(count)]
        if any(os.waitpid(child, 0)[1] for child in children):
            sys.exit(1)


if __name__ == "__main__":
    in_turn(main, (1, 2, 3))
