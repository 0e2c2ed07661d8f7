"""One optimiser step, stated slowly and obviously: the twin that the product is measured against.

Plain Python loops over scripted facts, and a naive forward pass of the PEFT model, one row at a time, without padding,
chunks or micro-batches. It shares no code with the package: a formula that is wrong in one place is right in the other.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Knobs:
    """The recipe values that a step depends on."""

    players: str = "all"
    exchange: str = "rival"
    opponent: str = "per_rollout"
    reward: str = "competitive"
    bonus: float = 1.0
    bonus_needs_summary: bool = True
    tie_break: float = 0.0
    format_weight: float = 0.5
    roles: str = "rotate"
    group_size: int = 8
    temperature: float = 1.0
    denominator: str = "token"
    kl: float = 0.0


@dataclass(frozen=True)
class Fact:
    """All that a reward may depend on, about one completion."""

    correct: bool
    format: int
    length: int
    masked: bool = False
    summary: str | None = None


@dataclass(frozen=True)
class Scored:
    """A completion with its opponent, what it read, its reward and its advantage."""

    fact: Fact
    opponent: int | None = None
    read: str | None = None
    reward: float = 0.0
    advantage: float = 0.0


@dataclass(frozen=True)
class Row:
    """One completion of a player's step, as its loss sees it."""

    prompt: Sequence[int]
    completion: Sequence[int]
    advantage: float
    masked: bool = False


@dataclass
class Streams:
    """The drafts and the challenges of one problem."""

    drafts: list[Scored] = field(default_factory=list)
    challenges: list[Scored] = field(default_factory=list)


def who(step: int, names: Sequence[str], roles: str) -> tuple[str, str]:
    """(drafter, challenger) for one player or two; more players are tested by their balance."""
    if len(names) == 1:
        return names[0], names[0]
    assert len(names) == 2
    if roles == "fixed" or step % 2 == 0:
        return names[0], names[1]
    return names[1], names[0]


def has_challenges(knobs: Knobs) -> bool:
    return knobs.opponent != "none"


def drafts_per_problem(knobs: Knobs) -> int:
    """Every method spends 2N rollouts on a problem."""
    return knobs.group_size if has_challenges(knobs) else 2 * knobs.group_size


def reward_of_draft(draft: Fact, knobs: Knobs) -> float:
    reward = knobs.format_weight * draft.format
    if draft.correct:
        reward += 2.0
    return reward


def reward_of_challenge(challenge: Fact, draft: Fact, read: str | None, knobs: Knobs) -> float:
    """The ladder 0 / 2 / 3, the margin, or cooperation; then tie-break and format."""
    c_b = 1.0 if challenge.correct else 0.0
    c_a = 1.0 if draft.correct else 0.0
    reward = 2.0 * c_b

    faces_rival = not draft.masked
    if knobs.bonus_needs_summary and knobs.exchange != "none" and read is None:
        faces_rival = False
    if faces_rival and knobs.reward == "competitive" and c_b == 1.0 and c_a == 0.0:
        reward += knobs.bonus
    if faces_rival and knobs.reward == "margin":
        reward += knobs.bonus * (c_b - c_a)

    if c_b == 1.0 and c_a == 1.0 and challenge.length < draft.length:
        reward += knobs.tie_break
    return reward + knobs.format_weight * challenge.format


def advantages(rewards: Sequence[float], masked: Sequence[bool]) -> list[float]:
    """Population mean and standard deviation over the unmasked; zero for the masked and for groups all equal."""
    kept = [reward for reward, out in zip(rewards, masked, strict=True) if not out]
    if not kept or all(reward == kept[0] for reward in kept):
        return [0.0] * len(rewards)
    mean = sum(kept) / len(kept)
    std = math.sqrt(sum((reward - mean) ** 2 for reward in kept) / len(kept))
    return [0.0 if out else (reward - mean) / std for reward, out in zip(rewards, masked, strict=True)]


def score(
    drafts: Sequence[Fact],
    challenges: Sequence[Fact],
    opponents: Sequence[int],
    reads: Sequence[str | None],
    knobs: Knobs,
) -> Streams:
    """Rewards and advantages of one problem; drafts over drafts, challenges over challenges, never one baseline."""
    draft_rewards = [reward_of_draft(draft, knobs) for draft in drafts]
    draft_advantages = advantages(draft_rewards, [draft.masked for draft in drafts])
    challenge_rewards = []
    for challenge, opponent, read in zip(challenges, opponents, reads, strict=True):
        challenge_rewards.append(reward_of_challenge(challenge, drafts[opponent], read, knobs))
    challenge_advantages = advantages(challenge_rewards, [challenge.masked for challenge in challenges])
    out = Streams()
    for fact, reward, advantage in zip(drafts, draft_rewards, draft_advantages, strict=True):
        out.drafts.append(Scored(fact, None, None, reward, advantage))
    for i, fact in enumerate(challenges):
        out.challenges.append(Scored(fact, opponents[i], reads[i], challenge_rewards[i], challenge_advantages[i]))
    return out


def opponents_of(knobs: Knobs, shared: int | None = None) -> list[int]:
    """Challenge i faces draft i, or every challenge faces the one draft that was drawn for the problem."""
    if knobs.opponent == "per_rollout":
        return list(range(knobs.group_size))
    assert knobs.opponent == "shared"
    assert shared is not None
    return [shared] * knobs.group_size


def row_logprobs(model: torch.nn.Module, row: Row, temperature: float) -> torch.Tensor:
    """Log-probabilities (nats) of one row's completion tokens at the temperature, whole vocabulary at once."""
    ids = torch.tensor([list(row.prompt) + list(row.completion)])
    logits = model(input_ids=ids, use_cache=False).logits[0].double() / temperature
    everything = torch.log_softmax(logits, dim=-1)
    first = len(row.prompt)
    picked = [everything[first + t - 1, token] for t, token in enumerate(row.completion)]
    return torch.stack(picked)


def loss_and_gradient(
    model: torch.nn.Module, adapter: str, rows: Sequence[Row], knobs: Knobs
) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of one player's whole step and its gradient for every tensor of that player's adapter.

    The model is copied, so nothing that is done here can be seen by the code under test.
    """
    model = copy.deepcopy(model)
    model.eval()
    model.set_adapter(adapter)
    own = {}
    for name, parameter in model.named_parameters():
        parameter.grad = None
        mine = f".{adapter}." in name
        parameter.requires_grad_(mine)
        if mine:
            own[name] = parameter
    live = [row for row in rows if not row.masked and len(row.completion) > 0]
    if not live:
        return 0.0, {name: torch.zeros_like(parameter) for name, parameter in own.items()}
    tokens_of_step = sum(len(row.completion) for row in live)
    total = torch.zeros((), dtype=torch.float64)
    for row in live:
        logprobs = row_logprobs(model, row, knobs.temperature)
        ratio = torch.exp(logprobs - logprobs.detach())
        terms = -row.advantage * ratio
        if knobs.kl:
            with torch.no_grad(), model.disable_adapter():
                base = row_logprobs(model, row, knobs.temperature)
            gap = base - logprobs
            terms = terms + knobs.kl * ratio * (torch.exp(gap) - gap - 1.0)
        weight = tokens_of_step if knobs.denominator == "token" else len(live) * len(row.completion)
        total = total + terms.sum() / weight
    gradients = torch.autograd.grad(total, list(own.values()), allow_unused=True)
    return float(total.detach()), {
        name: torch.zeros_like(own[name]) if gradient is None else gradient
        for name, gradient in zip(own, gradients, strict=True)
    }


def nucleus(probabilities: Sequence[float], top_p: float, top_k: int) -> set[int]:
    """Token ids that may be drawn: the top_k likeliest, of those the shortest prefix that holds top_p of the whole."""
    order = sorted(range(len(probabilities)), key=lambda i: (-probabilities[i], i))
    if top_k:
        order = order[:top_k]
    if top_p >= 1.0:
        return set(order)
    whole = sum(probabilities[i] for i in order)
    kept: set[int] = set()
    mass = 0.0
    for i in order:
        if kept and mass >= top_p:
            break
        kept.add(i)
        mass += probabilities[i] / whole
    return kept
