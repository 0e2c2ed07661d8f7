"""One policy-gradient update of one player's adapter."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import Parameter

from agon_cli.batching import by_token_budget
from agon_cli.errors import GuardError
from agon_cli.losses import PolicyBatch, policy_gradient_loss
from agon_cli.memory import shrinking
from agon_cli.policy import Policy
from agon_cli.ranks import ALONE, Ranks
from agon_cli.recipe.schema import Optim
from agon_cli.types import Group, Rollout


@dataclass(frozen=True)
class Update:
    """What one update did. `gap` is the mean |trainer - sampler| log-probability (nats per token) over its rows, and
    `grad_norm` the norm before clipping; both 0 when the player had no signal and was left as it was."""

    loss: float
    grad_norm: float
    lr: float
    gap: float
    kl: float
    applied: bool


class Budget:
    """Tokens of one micro-batch: the recipe's until memory runs out, half of that from then on. `tell` is told so."""

    def __init__(self, tokens: int, tell: Callable[[str], None] = lambda text: None) -> None:
        self.tokens = tokens
        self._tell = tell

    def lower(self, tokens: int, reason: str) -> None:
        """Go on with this many."""
        self.tokens = tokens
        self._tell(f"out of memory in an update ({reason}): going on with micro-batches of {tokens} tokens")


def learning_rate(step: int, steps: int, optim: Optim) -> float:
    """Rises linearly over the warm-up share of the steps to `lr`, then falls linearly; the last step still moves."""
    warm = math.ceil(optim.warmup * steps)
    if step < warm:
        return optim.lr * (step + 1) / warm
    return optim.lr * (steps - step) / max(1, steps - warm)


def make_optimiser(parameters: dict[str, Parameter], optim: Optim) -> torch.optim.AdamW:
    """AdamW over exactly these parameters."""
    return torch.optim.AdamW(list(parameters.values()), lr=optim.lr, weight_decay=optim.weight_decay, foreach=False)


def token_weights(rollouts: Sequence[Rollout], denominator: str) -> list[float]:
    """The weight of each completion's tokens in the loss, counted over all unmasked rollouts of the player's
    whole step.

    `token`: 1 / (completion tokens of the step). `sequence`: 1 / (completions of the step x this completion's tokens).
    """
    counted = [rollout for rollout in rollouts if not rollout.verdict.masked]
    if denominator == "token":
        total = sum(len(rollout.completion.ids) for rollout in counted)
        return [1.0 / max(1, total)] * len(rollouts)
    return [1.0 / (max(1, len(counted)) * len(rollout.completion.ids)) for rollout in rollouts]


def moves(rollout: Rollout, optim: Optim) -> bool:
    """Whether a rollout has any part in the loss."""
    return not rollout.verdict.masked and (rollout.advantage != 0.0 or optim.kl > 0.0)


def _tokens(rollout: Rollout) -> int:
    return len(rollout.prompt.ids) + len(rollout.completion.ids)


def accumulate_gradient(
    policy: Policy,
    player: str,
    groups: Sequence[Group],
    optim: Optim,
    temperature: float,
    mine: Container[int] | None = None,
    budget: Budget | None = None,
) -> tuple[float, float, float]:
    """Put the gradient of the player's step into its parameters; returns loss, sampler gap (nats per token) and KL.

    Only the groups whose indices are in `mine` (None: all) are computed; denominators are counted over all of them.
    Where a micro-batch of `budget` tokens does not fit into memory, all begins again with ones half as large.

    Ranks that share a base (`policy.sharded_over`) all compute as many micro-batches as the one that has most; those
    beyond a rank's own weigh nothing. Running out of memory then ends the run.

    Rollouts without advantage add nothing and are not recomputed, unless a KL term needs them. On its way back the loss
    is scaled by about its denominator, a power of two: else a float16 base would round most of a large step to zero.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    owned = [mine is None or number in mine for number, group in enumerate(groups) for _ in group.rollouts]
    weights = token_weights(rollouts, optim.denominator)
    scale = 2.0 ** round(-math.log2(max(weights)))
    wanted = [
        index for index, rollout in enumerate(rollouts)
        if owned[index] and moves(rollout, optim)
    ]  # fmt: skip
    lengths = [_tokens(rollouts[index]) for index in wanted]

    def in_batches_of(most: int) -> tuple[float, float, float, int]:
        for parameter in policy.parameters(player).values():
            parameter.grad = None
        sums = (0.0, 0.0, 0.0, 0)
        batches = by_token_budget(lengths, most)
        passes = max(together.gather(len(batches)))  # asked before the first: it cannot end without the other ranks
        for batch in batches:
            chosen = [wanted[index] for index in batch]
            rows, shares = [rollouts[index] for index in chosen], [weights[index] for index in chosen]
            part = _one_batch(policy, player, rows, shares, optim, temperature, scale)
            sums = tuple(map(sum, zip(sums, part, strict=True)))  # type: ignore[assignment]
        idle = replace(min(rollouts, key=_tokens), advantage=0.0)
        for _ in range(passes - len(batches)):
            _one_batch(policy, player, [idle], [0.0], optim, temperature, scale)
        return sums

    budget, together = budget or Budget(optim.micro_batch_tokens), policy.sharded_over
    floor = max(lengths, default=1) if together.size == 1 else budget.tokens  # one rank cannot begin again by itself
    loss, gap, kl, tokens = shrinking(in_batches_of, budget.tokens, budget.lower, floor)
    for parameter in policy.parameters(player).values():
        if parameter.grad is not None:
            parameter.grad /= scale
    return loss, gap / max(1, tokens), kl


def _one_batch(
    policy: Policy,
    player: str,
    rows: Sequence[Rollout],
    shares: list[float],
    optim: Optim,
    temperature: float,
    scale: float,
) -> tuple[float, float, float, int]:
    """Add one micro-batch's gradient, times `scale`; its sums of loss, gap (nats) and KL, and its completion tokens."""
    pairs = [(row.prompt.ids, row.completion.ids) for row in rows]
    scored_at = rows[0].completion.scored_at
    temperatures = [temperature] if scored_at == temperature else [temperature, scored_at]
    logprobs_M, *elsewhere = policy.logprobs_at(player, pairs, temperatures, recompute=optim.checkpointing)
    reference_M = None
    if optim.kl > 0.0:
        with torch.no_grad():
            reference_M = policy.logprobs(player, pairs, temperature, bare=True)
    advantages_M = _spread([row.advantage for row in rows], rows, logprobs_M)
    inputs = PolicyBatch(logprobs_M, advantages_M, _spread(shares, rows, logprobs_M), reference_M)
    loss, sums = policy_gradient_loss(inputs, optim.kl)
    with policy.sharded_over.computing():
        (loss * scale).backward()
    sampled_M = torch.tensor([value for row in rows for value in row.completion.logprobs], device=logprobs_M.device)
    gap = float(([logprobs_M, *elsewhere][-1].detach() - sampled_M).abs().sum())
    return float(loss.detach()), gap, sums.get("kl", 0.0), len(sampled_M)


def _spread(values: list[float], rows: Sequence[Rollout], like: Tensor) -> Tensor:
    """One value per completion, repeated over its tokens."""
    counts = torch.tensor([len(row.completion.ids) for row in rows])
    return torch.tensor(values, dtype=like.dtype).repeat_interleave(counts).to(like.device)


def update(
    policy: Policy,
    player: str,
    groups: Sequence[Group],
    optimiser: torch.optim.Optimizer,
    optim: Optim,
    temperature: float,
    lr: float,
    ranks: Ranks = ALONE,
    budget: Budget | None = None,
) -> Update:
    """One optimiser step for `player` on its groups; without any advantage (and without KL) the player is left alone.

    Every rank has all groups of the step, computes the gradient of its part of them, and takes the same step on the
    sum. Raises GuardError when the loss or the gradient is not finite, or zero although some advantage is not, or when
    the adapter is no longer the same on all ranks.
    """
    counted = [rollout for group in groups for rollout in group.rollouts if not rollout.verdict.masked]
    signal = any(rollout.advantage != 0.0 for rollout in counted)
    if not signal and (optim.kl == 0.0 or not counted):
        return Update(0.0, 0.0, lr, 0.0, 0.0, applied=False)
    parameters = policy.parameters(player)
    for parameter in parameters.values():
        parameter.requires_grad_(True)
    tokens = [sum(len(r.completion.ids) for r in group.rollouts if moves(r, optim)) for group in groups]
    mine = ranks.deal(tokens)
    sums = accumulate_gradient(policy, player, groups, optim, temperature, mine, budget)
    loss, gap, kl = _over_ranks(ranks, *sums, sum(tokens[index] for index in mine))
    ranks.add_up(parameters)
    norm = float(torch.nn.utils.clip_grad_norm_(parameters.values(), optim.clip_norm))
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise GuardError(
            f"player {player}: the loss is {loss} and its gradient's norm {norm}",
            "lower optim.lr or use model.dtype bfloat16 or float32; the last checkpoint is untouched",
        )
    if norm == 0.0 and signal:
        raise GuardError(
            f"player {player}: the gradient is zero although some advantages are not",
            "its adapter is not part of the computation; check lora.targets",
        )
    for group in optimiser.param_groups:
        group["lr"] = lr
    optimiser.step()
    optimiser.zero_grad(set_to_none=True)
    hint = "a rank computes or is told other numbers: check its hardware; the last checkpoint is untouched"
    ranks.check_same(f"player {player}'s adapter after its update", parameters, hint)
    return Update(loss, norm, lr, gap, kl, applied=True)


def _over_ranks(ranks: Ranks, loss: float, gap: float, kl: float, tokens: int) -> tuple[float, float, float]:
    """Loss and KL summed over ranks, and the gap (nats per token) averaged over the tokens of all."""
    parts = ranks.gather((loss, gap * tokens, kl, tokens))
    losses, gaps, kls, counts = zip(*parts, strict=True)
    return sum(losses), sum(gaps) / max(1, sum(counts)), sum(kls)
