"""The training loop: competitive cross-model reinforcement learning.

Where this departs from the paper (arXiv 2607.07690) or fills what it leaves open, and from plain GRPO, and why:

 1. Every method is a set of values of the same few knobs; nothing below asks for a method's name.
 2. Players are separate lists of tensors with an optimiser each; the idle player's stay bit-identical. Nothing is
    merged.
 3. A group's std is the population's, without an epsilon; a group of exactly equal rewards is dropped, so none is
    needed.
 4. The loss divides by the completion tokens of the player's whole step (a recipe value), counted before
    micro-batching.
 5. One update per batch of rollouts, so the ratio is 1 and there is no clipping; KL weight 0 unless the recipe says so.
 6. Log-probabilities are those of the policy at the sampling temperature; the gap to the sampler's is measured, not
    corrected.
 7. A completion that hit the cap has no answer and no summary; its challenger gets the plain prompt and no rival term.
 8. Only a failure of the grader itself is masked. What cannot be read or exhausts the grader is wrong.
 9. A player without any signal in a step is left as it is: momentum alone must not move it.
10. With one player in both roles, both streams feed one update, each normalised within its own groups.
11. Every random draw is a hash of seed, step, player, role, problem and index, so a run can stop and go on anywhere,
    on any number of processes.
12. Several processes share each step's problems; gradients are summed over them, and each takes the same step. One
    process is simply their number being 1: nothing below asks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from agon_cli import data
from agon_cli.assemble import World
from agon_cli.canary import Canary
from agon_cli.checkpoint import PlayerState, Snapshot, load, newest, save
from agon_cli.clock import Clock
from agon_cli.evaluate import arms, evaluate
from agon_cli.memory import peak_bytes
from agon_cli.metrics import Watch, check_grading, grader_errors
from agon_cli.records import rollout_rows, step_metrics, telling_sample
from agon_cli.roles import Pairing, pairing
from agon_cli.rollout import play
from agon_cli.runlog import RunFolder
from agon_cli.types import Group
from agon_cli.update import Budget, Update, learning_rate, make_optimiser, update

Emit = Callable[..., None]


def train(world: World, run: RunFolder | None, emit: Emit, stop: Callable[[], bool], until: int | None = None) -> int:
    """Train from the newest whole checkpoint to the recipe's last step (or `until`); returns the step reached.

    `run` is None on every rank but the first, which alone reads and writes the run folder. `stop` is asked after every
    step, on all ranks, and gives all the same answer; when it says so the state is saved and the loop ends. Raises
    GuardError (numbers that cannot be trusted), GradingError (the verifier fails too often), ResourceError (disk) and
    LostRank (another rank is gone or silent).
    """
    recipe, policy, ranks = world.recipe, world.policy, world.arena.ranks
    optimisers = {name: make_optimiser(policy.parameters(name), recipe.optim) for name in recipe.cast}
    start, watch, grading = resume(world, run, optimisers, emit)
    budget = Budget(recipe.optim.micro_batch_tokens, lambda text: emit("warning", text=text))
    canary = Canary(policy, world.arena.engine, world.telling_prompts(), recipe.rollout.max_tokens)
    canary.start()
    last = max(start, min(recipe.training_steps, until if until is not None else recipe.steps))
    for step in range(start, last):
        evaluate_if_due(world, run, step, emit)
        clock = Clock(emit)
        pair = pairing(step, recipe.cast, recipe.method.roles)
        problems = data.batch(world.splits.train, step, recipe.rollout.problems, recipe.seed)
        groups = play(world.arena, pair, problems, step, clock)
        grading.check(groups)
        world.arena.engine.rest()
        clock("update")
        lr = learning_rate(step, recipe.steps, recipe.optim)
        updates = {}
        for player in dict.fromkeys(pair):
            own = [group for group in groups if group.player == player]
            updates[player] = update(
                policy, player, own, optimisers[player], recipe.optim, recipe.rollout.temperature, lr, ranks, budget
            )
            world.arena.engine.publish(player)
        for player in updates:
            canary.published(player)
        clock("")
        log(world, run, step, pair, groups, updates, clock.seconds, watch, emit)
        halted = stop()
        if halted or step + 1 == last or (step + 1) % recipe.save.every == 0:
            checkpoint(world, run, optimisers, step + 1, emit)
        if halted:
            return step + 1
    if last == recipe.training_steps and evaluate_if_due(world, run, last, emit):
        checkpoint(world, run, optimisers, last, emit)
    return last


def resume(
    world: World, run: RunFolder | None, optimisers: dict[str, torch.optim.AdamW], emit: Emit
) -> tuple[int, Watch, Grading]:
    """Put the newest whole checkpoint into players and optimisers and cut the logs to it; the step to go on from."""
    ranks, watch, grading = world.arena.ranks, Watch(), Grading()
    path, snapshot = ranks.told(lambda: _stored(run, emit))
    for name, state in snapshot.players.items():
        world.policy.load_adapter_state(name, state.adapter, f"{path}/{name}")
        _restore(optimisers[name], world.policy.parameters(name), state.optimiser)
    for name in world.recipe.cast:
        hint = "all ranks must read the same base and use the same versions"
        ranks.check_same(f"player {name}'s adapter at the start", world.policy.parameters(name), hint)
    for row in ranks.told(lambda: _cut_to(snapshot, run)):
        watch.flags(row)
        grading.count(row["grader_errors"], row["completions"])
    if path is not None:
        emit("resumed", step=snapshot.step, checkpoint=path)
    return snapshot.step, watch, grading


def _stored(run: RunFolder | None, emit: Emit) -> tuple[str | None, Snapshot]:
    """The newest whole checkpoint and where it lies; before the first, an empty one at step 0."""
    assert run is not None
    path, skipped = newest(run.path / "checkpoints")
    for sentence in skipped:
        emit("warning", text=sentence)
    return (None, Snapshot(0, {}, {})) if path is None else (str(path), load(path))


def _cut_to(snapshot: Snapshot, run: RunFolder | None) -> list[dict[str, Any]]:
    """The rows of metrics that are left once the logs are as long as they were at the checkpoint."""
    assert run is not None
    run.cut(snapshot.log_sizes)
    return list(run.read("metrics"))


class Grading:
    """Stops a run whose grader itself fails on too many completions."""

    def __init__(self) -> None:
        self.errors = self.total = 0

    def count(self, errors: int, total: int) -> None:
        """Add the completions of one step."""
        self.errors += errors
        self.total += total

    def check(self, groups: Sequence[Group]) -> None:
        """Raises GradingError once too many of all completions so far were ungradable."""
        self.count(*grader_errors(groups))
        check_grading(self.errors, self.total)


def evaluate_if_due(world: World, run: RunFolder | None, step: int, emit: Emit) -> bool:
    """Evaluate before the first step and after the last on dev and test, in between on dev every `eval.every` steps,
    unless the run already holds it."""
    recipe = world.recipe
    ends = step in (0, recipe.training_steps)
    if not ends and not (recipe.eval.every and step % recipe.eval.every == 0):
        return False
    have = world.arena.ranks.told(lambda: {(row["step"], row["split"]) for row in run.read("evals")} if run else set())
    due = [split for split in (("dev", "test") if ends else ("dev",)) if (step, split) not in have]
    for split in due:
        clock = Clock(emit)
        rows, spent = evaluate(world.arena, getattr(world.splits, split), split, step, recipe.method.deploy, 1, clock)
        clock("")
        if run is not None:
            run.append("inference", spent)
            run.append("evals", rows)  # last: with them the evaluation is there
        figures = arms(rows)
        emit("eval", step=step, split=split, arms=figures, seconds=clock.seconds)
        check_grading(sum(arm["grader_errors"] for arm in figures), len(rows))
    return bool(due)


def checkpoint(
    world: World, run: RunFolder | None, optimisers: dict[str, torch.optim.AdamW], step: int, emit: Emit
) -> None:
    """Save both players, both optimisers and the logs' sizes as one whole; they are the same on every rank."""
    if run is None:
        return
    players = {}
    for name in world.recipe.cast:
        tensors, config = world.policy.adapter_state(name)
        moments = _moments(optimisers[name], world.policy.parameters(name))
        players[name] = PlayerState(tensors, config, moments, {})
    path = save(run.path / "checkpoints", Snapshot(step, players, run.sizes()))
    emit("checkpoint", step=step, path=str(path))


def _moments(optimiser: torch.optim.AdamW, parameters: dict[str, Parameter]) -> dict[str, Tensor]:
    return {
        f"{key}.{name}": torch.as_tensor(value).detach().cpu().clone()
        for name, parameter in parameters.items()
        for key, value in optimiser.state.get(parameter, {}).items()
    }


def _restore(optimiser: torch.optim.AdamW, parameters: dict[str, Parameter], moments: dict[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        found = {
            key: moments[f"{key}.{name}"].to(parameter.device if key != "step" else "cpu")
            for key in ("step", "exp_avg", "exp_avg_sq")
            if f"{key}.{name}" in moments
        }
        if found:
            optimiser.state[parameter] = found


def log(
    world: World,
    run: RunFolder | None,
    step: int,
    pair: Pairing,
    groups: Sequence[Group],
    updates: dict[str, Update],
    seconds: dict[str, float],
    watch: Watch,
    emit: Emit,
) -> None:
    """One metrics row and one row per completion, of all ranks."""
    if run is None:
        return
    row = step_metrics(step, pair, groups, updates, seconds, world.arena.verifier.equal)
    row["peak_bytes"] = peak_bytes()
    row["flags"] = watch.flags(row)
    run.append("rollouts", rollout_rows(world.recipe, step, groups))
    run.append("metrics", [row])
    emit("step", row=row, sample=telling_sample(groups))
    for flag in row["flags"]:
        emit("warning", text=flag)
