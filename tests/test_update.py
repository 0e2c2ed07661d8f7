"""One update: learning rate, AdamW and clipping by hand, the guards, and what leaves a player as it is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import reference
from agon_cli.errors import Exit, GuardError
from agon_cli.policy import Policy
from agon_cli.recipe.schema import Optim
from agon_cli.types import Completion, Group, Prompt, Rollout, Verdict
from agon_cli.update import Budget, accumulate_gradient, learning_rate, make_optimiser, update
from reference import Row
from scripted import knobs, make_recipe, problem, write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


def rollout(ids: Sequence[int], advantage: float, status: Any = "correct", sampled: float = -1.0) -> Rollout:
    completion = Completion(tuple(ids), tuple(sampled for _ in ids), "stop", "")
    return Rollout(Prompt("", (5, 6, 7)), completion, None, Verdict(status), 1, advantage=advantage)


def group(*rollouts: Rollout, player: str = "B") -> Group:
    return Group(problem(1), player, "draft", rollouts)


def states(policy: Policy, player: str, optimiser: torch.optim.AdamW) -> tuple[Any, Any]:
    parameters = policy.parameters(player)
    moments = {
        name: {key: torch.as_tensor(value).clone() for key, value in optimiser.state.get(p, {}).items()}
        for name, p in parameters.items()
    }
    return {name: p.detach().clone() for name, p in parameters.items()}, moments


def alike(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    return a.keys() == b.keys() and all(alike(a[key], b[key]) for key in a)


@pytest.mark.parametrize(("steps", "warmup"), [(200, 0.1), (20, 0.0), (1, 0.1), (7, 0.5), (10, 0.99)])
def test_the_rate_rises_over_the_warm_up_then_falls_linearly_and_never_is_zero(steps, warmup):
    optim = Optim(lr=2.0, warmup=warmup)
    rates = [learning_rate(step, steps, optim) for step in range(steps)]
    warm = math.ceil(warmup * steps)
    assert min(rates) > 0
    assert max(rates) == pytest.approx(2.0)
    for step in range(warm):
        assert rates[step] == pytest.approx(2.0 * (step + 1) / warm)
    for step in range(warm, steps):
        assert rates[step] == pytest.approx(2.0 * (steps - step) / (steps - warm))


@pytest.mark.parametrize("clip", [1e-3, 1e3])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_updates_equal_adamw_on_the_clipped_reference_gradient(folder, clip, decay):
    """AdamW written out, on the reference's own gradient, over several steps with rates that change."""
    recipe = make_recipe(folder, optim={"clip_norm": clip, "weight_decay": decay})
    policy = Policy(recipe)
    seat = policy.seats["B"]
    optimiser = make_optimiser(policy.parameters("B"), recipe.optim)
    first = {name: torch.zeros_like(p) for name, p in policy.parameters("B").items()}
    second = {name: torch.zeros_like(p) for name, p in policy.parameters("B").items()}
    for step, lr in enumerate((1e-2, 3e-3, 2e-2), start=1):
        before = {name: p.detach().clone() for name, p in policy.parameters("B").items()}
        rows = [rollout((9 + step, 10, 11), 1.5), rollout((12, 13), -0.5), rollout((14,) * 6, 0.0)]
        said = [Row(r.prompt.ids, r.completion.ids, r.advantage) for r in rows]
        loss, gradient = reference.loss_and_gradient(seat.model, seat.adapter, said, knobs(recipe))
        norm = math.sqrt(sum(float((g.double() ** 2).sum()) for g in gradient.values()))
        done = update(policy, "B", [group(*rows)], optimiser, recipe.optim, recipe.rollout.temperature, lr)
        assert done.applied
        assert done.grad_norm == pytest.approx(norm, rel=1e-4), "the norm is that before clipping"
        assert done.loss == pytest.approx(loss, abs=1e-6)
        assert done.lr == lr
        for name, parameter in policy.parameters("B").items():
            g = gradient[name] * min(1.0, clip / norm)
            first[name] = 0.9 * first[name] + 0.1 * g
            second[name] = 0.999 * second[name] + 0.001 * g * g
            m, v = first[name] / (1 - 0.9**step), second[name] / (1 - 0.999**step)
            want = before[name] * (1 - lr * decay) - lr * m / (v.sqrt() + 1e-8)
            settled = g.abs() > 1e-5 * g.abs().max()  # where g is rounding noise, so is the sign of Adam's step
            off = (parameter.detach() - want).abs()
            assert float(off[settled].max()) < 2e-3 * lr, name


def test_a_step_without_signal_leaves_player_and_optimiser_as_they_are(folder):
    recipe = make_recipe(folder)
    policy = Policy(recipe)
    optimiser = make_optimiser(policy.parameters("B"), recipe.optim)
    moving = group(rollout((9, 10), 1.0), rollout((11, 12), -1.0))
    update(policy, "B", [moving], optimiser, recipe.optim, 0.7, 1e-2)
    before = states(policy, "B", optimiser)
    assert any(before[1].values()), "there is momentum that could move it"
    still = group(rollout((9, 10), 0.0), rollout((11, 12), 0.0, "grader_error"))
    for groups in ([still], [still, still], []):
        done = update(policy, "B", groups, optimiser, recipe.optim, 0.7, 1e-2)
        assert not done.applied
        after = states(policy, "B", optimiser)
        assert alike(before[0], after[0])
        assert alike(before[1], after[1])
    assert optimiser.param_groups[0]["weight_decay"] == 0.0


def test_with_a_kl_weight_a_step_of_ungradable_rows_moves_nothing(folder):
    recipe = make_recipe(folder, optim={"kl": 0.1})
    policy = Policy(recipe)
    optimiser = make_optimiser(policy.parameters("B"), recipe.optim)
    update(policy, "B", [group(rollout((9, 10), 1.0), rollout((11, 12), -1.0))], optimiser, recipe.optim, 0.7, 1e-2)
    before = states(policy, "B", optimiser)
    masked = group(rollout((9, 10), 0.0, "grader_error"), rollout((11, 12), 0.0, "grader_error"))
    done = update(policy, "B", [masked], optimiser, recipe.optim, 0.7, 1e-2)
    after = states(policy, "B", optimiser)
    assert alike(before[0], after[0])
    assert alike(before[1], after[1])
    assert not done.applied


def test_with_a_kl_weight_a_step_without_advantage_still_pulls_to_the_base(folder):
    recipe = make_recipe(folder, optim={"kl": 0.5, "lr": 1e-3}, players={"A": {}, "B": {"noise": 0.2}})
    policy = Policy(recipe)
    optimiser = make_optimiser(policy.parameters("B"), recipe.optim)
    rows = group(rollout((9, 10, 30, 31), 0.0), rollout((11, 12, 40, 41), 0.0))
    divergence = [update(policy, "B", [rows], optimiser, recipe.optim, 0.7, 3e-3).kl for _ in range(25)]
    assert divergence[0] > 1e-3
    assert divergence[-1] < 0.5 * divergence[0]


def test_ungradable_rows_move_nothing_whatever_they_say(folder):
    recipe = make_recipe(folder)
    rows = [rollout((9, 10), 1.0), rollout((11, 12), -1.0)]
    results = []
    for extra in ([], [rollout((20,) * 30, 0.0, "grader_error")]):
        policy = Policy(recipe)
        optimiser = make_optimiser(policy.parameters("B"), recipe.optim)
        update(policy, "B", [group(*rows, *extra)], optimiser, recipe.optim, 0.7, 1e-2)
        results.append({name: p.detach().clone() for name, p in policy.parameters("B").items()})
    assert alike(*results)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_stops_the_run_before_it_moves_anything(folder, bad):
    recipe = make_recipe(folder)
    policy = Policy(recipe)
    optimiser = make_optimiser(policy.parameters("B"), recipe.optim)
    update(policy, "B", [group(rollout((9, 10), 1.0), rollout((11, 12), -1.0))], optimiser, recipe.optim, 0.7, 1e-2)
    before = states(policy, "B", optimiser)
    sick = group(rollout((9, 10), bad), rollout((11, 12), -1.0))
    with pytest.raises(GuardError) as caught:
        update(policy, "B", [sick], optimiser, recipe.optim, 0.7, 1e-2)
    assert caught.value.code == Exit.GUARD == 6
    assert "B" in caught.value.message
    assert caught.value.hint
    after = states(policy, "B", optimiser)
    assert alike(before[0], after[0])
    assert alike(before[1], after[1])


def test_weights_that_are_not_finite_stop_the_run(folder):
    recipe = make_recipe(folder)
    policy = Policy(recipe)
    optimiser = make_optimiser(policy.parameters("B"), recipe.optim)
    with torch.no_grad():
        next(iter(policy.parameters("B").values()))[0, 0] = float("nan")
    with pytest.raises(GuardError):
        update(policy, "B", [group(rollout((9, 10), 1.0), rollout((11,), -1.0))], optimiser, recipe.optim, 0.7, 1e-2)


def test_a_gradient_of_zero_under_advantages_that_are_not_stops_the_run(folder):
    """Both factors of every adapter at zero: the loss looks fine, nothing would ever be learnt."""
    recipe = make_recipe(folder)
    policy = Policy(recipe)
    optimiser = make_optimiser(policy.parameters("B"), recipe.optim)
    with torch.no_grad():
        for parameter in policy.parameters("B").values():
            parameter.zero_()
    with pytest.raises(GuardError, match="zero"):
        update(policy, "B", [group(rollout((9, 10), 1.0), rollout((11,), -1.0))], optimiser, recipe.optim, 0.7, 1e-2)


def test_an_adapter_that_takes_no_part_stops_the_run(folder, monkeypatch):
    """As one that lora.targets put on layers which text never goes through."""
    recipe = make_recipe(folder)
    policy = Policy(recipe)
    optimiser = make_optimiser(policy.parameters("B"), recipe.optim)
    logprobs_at = policy.logprobs_at
    monkeypatch.setattr(policy, "logprobs_at", lambda *args, **options: logprobs_at(*args, **options, bare=True))
    with pytest.raises(GuardError, match="zero"):
        update(policy, "B", [group(rollout((9, 10), 1.0), rollout((11,), -1.0))], optimiser, recipe.optim, 0.7, 1e-2)


def test_stale_gradients_of_another_player_or_step_are_not_applied(folder):
    recipe = make_recipe(folder)
    clean, dirty = Policy(recipe), Policy(recipe)
    for player in ("A", "B"):
        for parameter in dirty.parameters(player).values():
            parameter.grad = torch.full_like(parameter, 7.0)
    rows = group(rollout((9, 10), 1.0), rollout((11, 12), -1.0))
    for policy in (clean, dirty):
        optimiser = make_optimiser(policy.parameters("B"), recipe.optim)
        update(policy, "B", [rows], optimiser, recipe.optim, 0.7, 1e-2)
    for player in ("A", "B"):
        for name, parameter in clean.parameters(player).items():
            assert torch.equal(parameter, dirty.parameters(player)[name]), name


@pytest.mark.parametrize("scored_at", [0.7, 1.0])
def test_the_gap_to_the_sampler_is_measured_per_token_at_the_samplers_temperature(folder, scored_at):
    recipe = make_recipe(folder)
    policy = Policy(recipe)
    pairs = [((5, 6, 7), (9, 10)), ((5, 6, 7), (11, 12, 13))]
    with torch.no_grad():
        logprobs = policy.logprobs("B", pairs, scored_at).tolist()
    rows = [rollout(ids, sign) for (_, ids), sign in zip(pairs, (1.0, -1.0), strict=True)]
    told = [logprobs[:2], [value + 0.3 for value in logprobs[2:]]]
    rows = [
        replace(row, completion=replace(row.completion, logprobs=tuple(values), scored_at=scored_at))
        for row, values in zip(rows, told, strict=True)
    ]
    optimiser = make_optimiser(policy.parameters("B"), recipe.optim)
    done = update(policy, "B", [group(*rows)], optimiser, recipe.optim, 0.7, 1e-2)
    assert done.gap == pytest.approx(0.3 * 3 / 5, abs=1e-5)


class Cramped:
    """A decoder that has room for so many tokens at a time, as torch's CPU allocator says when it has not."""

    def __init__(self, policy: Policy, room: int) -> None:
        self.sizes: list[int] = []
        self.room = room
        decoder = policy.seats["B"].model.get_base_model().get_decoder()
        self.hook = decoder.register_forward_pre_hook(self.before, with_kwargs=True)

    def before(self, _: Any, args: Any, kwargs: Any) -> None:
        self.sizes.append(kwargs["input_ids"].numel())
        if self.sizes[-1] > self.room:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes.")


def test_an_update_that_runs_out_of_memory_is_done_in_smaller_parts_from_then_on(folder):
    recipe, told = make_recipe(folder), []
    policy = Policy(recipe)
    rows = [rollout(range(9, 9 + length), sign) for length, sign in ((8, 1.0), (5, -1.0), (7, 0.5), (3, -0.5))]
    want = [parameter.grad.clone() for parameter in gradients(policy, rows, recipe)]
    cramped, budget = Cramped(policy, 12), Budget(64, told.append)
    try:
        found = gradients(policy, rows, recipe, budget)
        assert max(float((p.grad - w).abs().max()) for p, w in zip(found, want, strict=True)) < 1e-6
        assert any(float(w.abs().max()) > 1e-3 for w in want)
        assert budget.tokens == 16
        assert [text.rpartition("of ")[2] for text in told] == ["32 tokens", "16 tokens"]
        gradients(policy, rows, recipe, budget)
        assert len(told) == 2
    finally:
        cramped.hook.remove()


def test_an_update_of_which_a_single_row_does_not_fit_says_that_memory_is_out(folder):
    recipe = make_recipe(folder)
    policy = Policy(recipe)
    cramped = Cramped(policy, 10)
    try:
        with pytest.raises(RuntimeError, match="allocate memory"):
            gradients(policy, [rollout(range(9, 17), 1.0)], recipe, Budget(64))
        assert len(cramped.sizes) <= 4
    finally:
        cramped.hook.remove()


def gradients(policy: Policy, rows: list[Rollout], recipe: Any, budget: Budget | None = None) -> list[Any]:
    accumulate_gradient(policy, "B", [group(*rows)], recipe.optim, 0.7, None, budget)
    return [parameter for parameter in policy.parameters("B").values() if parameter.grad is not None]
