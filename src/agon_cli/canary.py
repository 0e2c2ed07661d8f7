"""Does the engine sample from the weights it was given? Asked at the start and after every publish, of each server.

The engine samples a few short completions of a fixed prompt from fixed seeds, and the trainer computes the
log-probabilities of the same tokens at the temperature that the engine scores at. Two questions are put to the
difference. Is it small: as small as two ways of rounding the same model are apart? And is it noise, or does it point at
weights that should not be in use: the base without the adapter, another player, an older version of this one? The
second finds what the first cannot: a young adapter is nearer to its base than bfloat16 arithmetic is to itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from agon_cli.engines.hf import HFEngine
from agon_cli.errors import GuardError
from agon_cli.policy import Policy
from agon_cli.types import Completion, Engine, Prompt, Sampling, seed_of

TOLERANCE = {"float32": 0.01, "bfloat16": 0.15, "float16": 0.15}
"""The largest mean |engine - trainer| (nats per token) by type of the base. docs/engines.md has what was measured."""
ROWS, TOKENS = 4, 24
TEMPERATURE = 0.7
"""Not 1: an engine that scores at another temperature than it says would not be noticed there."""
SURE = 4.0
"""How many standard errors past half-way between two sets of weights a sample must lie to count as from one of them.
The trainer's own rounding is in both ends, so a small distance between them decides nothing."""


@dataclass(frozen=True)
class Finding:
    """`gap`: mean |engine - trainer| (nats per token). `told_apart`: the other weights which this sample could have
    been found to come from, and was not. Of several servers: the largest gap, and what each was told apart from."""

    gap: float
    told_apart: frozenset[str]


class Canary:
    """Keeps of every player the weights that its engine was last seen to have moved on from."""

    def __init__(self, policy: Policy, engine: Engine, prompts: Mapping[str, Prompt], max_tokens: int) -> None:
        self.policy = policy
        self.engine = engine
        self.prompts = prompts
        self.sampling = Sampling(TEMPERATURE, 1.0, 0, min(TOKENS, max_tokens), min(TOKENS, max_tokens))
        self._left: dict[str, dict[str, Tensor]] = {}

    def start(self) -> None:
        """Publish every player as it is now and check each. Raises GuardError."""
        for player in self.prompts:
            self.engine.publish(player)
        for player in self.prompts:
            self.check(player)

    def published(self, player: str) -> None:
        """Check a player after a publish, unless the engine reads the trainer's own tensors. Raises GuardError."""
        if not isinstance(self.engine, HFEngine):
            self.check(player)

    def check(self, player: str) -> Finding:
        """What the comparison finds. Raises GuardError where engine and trainer disagree, with both figures."""
        origins = self.engine.origins(player)
        seeds = [seed_of("canary", index) for index in range(ROWS)] * len(origins)
        (completions,) = self.engine.sample([self.prompts[player]], player, self.sampling, [seeds])
        own_M, others = self._trainer(player, completions), self._others(player, completions)
        tokens = [
            sum(len(row.ids) for row in completions[start : start + ROWS]) for start in range(0, len(seeds), ROWS)
        ]
        said_M = torch.tensor([value for completion in completions for value in completion.logprobs])
        parts = zip(origins, *(M.split(tokens) for M in (said_M, own_M, *others.values())), strict=True)
        findings = [
            self._judge(player, origin, said_M, own_M, dict(zip(others, of_others, strict=True)))
            for origin, said_M, own_M, *of_others in parts
        ]
        told_apart = frozenset.intersection(*(finding.told_apart for finding in findings))
        if _OLDER in told_apart or player not in self._left:
            self._left[player] = self._weights(player)
        return Finding(max(finding.gap for finding in findings), told_apart)

    def _judge(self, player: str, origin: str, said_M: Tensor, own_M: Tensor, others: dict[str, Tensor]) -> Finding:
        """The same of what one origin sampled, from log-probabilities under the weights in question."""
        gap = float((said_M - own_M).abs().mean())
        tolerance = TOLERANCE[_dtype(self.policy, player)]
        hint = "what is saved is untouched; engine.type=hf samples from the adapter in this process"
        told_apart, suspects = set(), []
        for name, other_M in others.items():
            share, error = share_of(said_M - own_M, other_M - own_M)
            if 0.5 - share > SURE * error:
                told_apart.add(name)
            if share - 0.5 > SURE * error:
                suspects.append((float((said_M - other_M).abs().mean()), name))
        if suspects:
            away, name = min(suspects)
            raise GuardError(
                f"player {player}: {origin} samples from {name}: its log-probabilities are {away:.2g} nats per token "
                f"from those, and {gap:.2g} from the adapter's",
                hint,
            )
        if not gap <= tolerance:
            raise GuardError(
                f"player {player}: the log-probabilities of {origin} are {gap:.2g} nats per token from the training "
                f"model's (mean {float(said_M.mean()):.2f} against {float(own_M.mean()):.2f}); {tolerance:g} is the "
                "most that rounding explains",
                f"does it have another base, or another dtype? {hint}",
            )
        return Finding(gap, frozenset(told_apart))

    @torch.no_grad()
    def _trainer(
        self, player: str, completions: list[Completion], *, bare: bool = False, under: str | None = None
    ) -> Tensor:
        """The trainer's log-probabilities of a player's completions, under its weights, the base's or a rival's."""
        # Sound servers sample the same from the same seeds: that is computed once.
        distinct = list(dict.fromkeys(completion.ids for completion in completions))
        rows = [(self.prompts[player].ids, ids) for ids in distinct]
        found_M = self.policy.logprobs(under or player, rows, completions[0].scored_at, bare=bare).float().cpu()
        by_ids = dict(zip(distinct, found_M.split([len(ids) for ids in distinct]), strict=True))
        return torch.cat([by_ids[completion.ids] for completion in completions])

    def _others(self, player: str, completions: list[Completion]) -> dict[str, Tensor]:
        """The trainer's log-probabilities under each set of weights that could be in use by mistake."""
        found = {"the base without its adapter": self._trainer(player, completions, bare=True)}
        seats = self.policy.seats
        for rival in self.prompts:
            if rival != player and seats[rival].model is seats[player].model:
                found[f"player {rival}"] = self._trainer(player, completions, under=rival)
        if player in self._left:
            present = self._weights(player)
            self._put(player, self._left[player])
            try:
                found[_OLDER] = self._trainer(player, completions)
            finally:
                self._put(player, present)
        return found

    def _weights(self, player: str) -> dict[str, Tensor]:
        return {name: tensor.detach().cpu().clone() for name, tensor in self.policy.parameters(player).items()}

    @torch.no_grad()
    def _put(self, player: str, weights: dict[str, Tensor]) -> None:
        for name, parameter in self.policy.parameters(player).items():
            parameter.copy_(weights[name])


def confirm(policy: Policy, engine: Engine, prompts: Mapping[str, Prompt], max_tokens: int) -> None:
    """Check every player, as `Canary.published` does, for what samples without training. Raises GuardError."""
    canary = Canary(policy, engine, prompts, max_tokens)
    for player in prompts:
        canary.published(player)


_OLDER = "an older version of it"


def share_of(residual_M: Tensor, direction_M: Tensor) -> tuple[float, float]:
    """How much of `direction` is in `residual` (0: none, 1: all of it) by least squares, and that figure's standard
    error; infinite where the direction is nil."""
    length = float(direction_M.norm())
    if length == 0.0:
        return 0.0, math.inf
    share = float(residual_M @ direction_M) / length**2
    rest_M = residual_M - share * direction_M
    return share, float(rest_M.norm()) / math.sqrt(max(1, len(rest_M) - 1)) / length


def _dtype(policy: Policy, player: str) -> str:
    """The type of a player's base, as a recipe names it."""
    model = policy.seats[player].model.get_base_model()
    return str(model.dtype).removeprefix("torch.")
