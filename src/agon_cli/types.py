"""The values that travel through a run: problem, prompt, completion, verdict, rollout, group.

Dimension letters used on tensor names throughout: P problems, N rollouts of a problem, B rows of a batch, T tokens,
V vocabulary, H hidden width.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Role = Literal["draft", "challenge"]
Status = Literal["correct", "wrong", "unreadable", "timeout", "grader_error"]
FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Problem:
    """One task with a gradable answer. `gold` is never shown to a model; `meta` is what else a verifier needs."""

    id: str
    question: str
    gold: str
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Prompt:
    """A rendered prompt: its text, its token ids, and `prefill`, the part the template wrote for the assistant."""

    text: str
    ids: tuple[int, ...]
    prefill: str = ""

    @property
    def hash(self) -> str:
        """Sixteen hex digits that identify the token ids."""
        return hashlib.sha256(",".join(map(str, self.ids)).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Sampling:
    """Every field that shapes a sample, all explicit: a model's own generation config never applies."""

    temperature: float
    top_p: float
    top_k: int
    """0 keeps the whole vocabulary."""
    max_tokens: int
    min_tokens: int = 0
    """Stop tokens are suppressed before this many tokens (benchmarks force a length with it)."""


@dataclass(frozen=True)
class Completion:
    """What an engine sampled. `ids` keeps the stop token; `logprobs` (nats, one per id) are of the sampler's own policy
    at the temperature `scored_at`, before top-p, top-k or a minimum length cut it; `text` leaves the stop token out."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    text: str
    scored_at: float = 1.0


@dataclass(frozen=True)
class Verdict:
    """A verifier's judgement of one completion, with the answer it read."""

    status: Status
    extracted: str | None = None
    detail: str = ""

    @property
    def correct(self) -> bool:
        """Whether the answer is right."""
        return self.status == "correct"

    @property
    def masked(self) -> bool:
        """True when the grader itself failed: the completion leaves its group, the loss and every rate."""
        return self.status == "grader_error"


@dataclass(frozen=True)
class Rollout:
    """One completion with all that was decided about it. `summary` is None when the completion has none."""

    prompt: Prompt
    completion: Completion
    summary: str | None
    verdict: Verdict
    format: int
    draft_index: int | None = None
    """For a challenge: index of the opponent draft within the problem's group; None where there is none."""
    read_summary: str | None = None
    """For a challenge: the text it was shown; None when it saw the plain prompt."""
    leaked: bool = False
    """True when the final answer can still be read off `summary`."""
    reward: float = 0.0
    advantage: float = 0.0


@dataclass(frozen=True)
class Group:
    """The N rollouts that share one problem, one player and one role: the unit advantages are normalised over."""

    problem: Problem
    player: str
    role: Role
    rollouts: tuple[Rollout, ...]


class Engine(Protocol):
    """Samples completions of a player and takes its newest weights when told to."""

    def sample(
        self, prompts: Sequence[Prompt], player: str, sampling: Sampling, seeds: Sequence[Sequence[int]]
    ) -> list[list[Completion]]:
        """For prompt p, one completion per seed in `seeds[p]`, in order."""
        ...

    def publish(self, player: str) -> None:
        """Use the player's present weights from the next sample on."""
        ...

    def origins(self, player: str) -> Sequence[str]:
        """What samples for the player, in words. Where it is several things, the completions of a sample are shared out
        evenly among them, neighbours together."""
        ...

    def rest(self) -> None:
        """No sample is wanted for a while: give back what memory can be given back."""
        ...

    def close(self) -> None:
        """Give everything back. Safe to call twice."""
        ...


def seed_of(*parts: object) -> int:
    """A 63-bit seed from the hash of its parts, so that no two draws of a run share a stream by arithmetic accident."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
