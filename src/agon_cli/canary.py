"""Does the engine sample from the weights that are being trained? Asked at the start and after every publish.

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
    been found to come from, and was not."""

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
        seeds = [seed_of("canary", index) for index in range(ROWS)]
        (completions,) = self.engine.sample([self.prompts[player]], player, self.sampling, [seeds])
        said_M = torch.tensor([value for completion in completions for value in completion.logprobs])
        own_M = self._trainer(player, completions)
        gap = float((said_M - own_M).abs().mean())
        tolerance = TOLERANCE[_dtype(self.policy, player)]
        hint = "the last checkpoint is untouched; a new run with engine.type=hf samples from what is trained"
        others = self._others(player, completions)
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
                f"player {player}: the engine samples from {name}: its log-probabilities are {away:.2g} nats per token "
                f"from those, and {gap:.2g} from the trained weights'",
                hint,
            )
        if not gap <= tolerance:
            raise GuardError(
                f"player {player}: the engine's log-probabilities are {gap:.2g} nats per token from the trainer's "
                f"(mean {float(said_M.mean()):.2f} against {float(own_M.mean()):.2f}); {tolerance:g} is the most that "
                "rounding explains",
                f"does the engine have another base, or another dtype? {hint}",
            )
        if _OLDER in told_apart or player not in self._left:
            self._left[player] = self._weights(player)
        return Finding(gap, frozenset(told_apart))

    @torch.no_grad()
    def _trainer(
        self, player: str, completions: list[Completion], *, bare: bool = False, under: str | None = None
    ) -> Tensor:
        """The trainer's log-probabilities of a player's completions, under its weights, the base's or a rival's."""
        rows = [(self.prompts[player].ids, completion.ids) for completion in completions]
        return self.policy.logprobs(under or player, rows, completions[0].scored_at, bare=bare).float().cpu()

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
