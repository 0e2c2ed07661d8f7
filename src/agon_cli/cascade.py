"""The deployed pair: one player drafts, the other answers after reading the draft's summary.

Both stages are the very `draft` and `challenge` of training, with one completion a problem.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agon_cli import verifiers
from agon_cli.assemble import renderers_of
from agon_cli.engines.hf import HFEngine
from agon_cli.errors import UsageError
from agon_cli.evaluate import arms, direction
from agon_cli.players import Found, find, recipe_of, take_seat, with_players
from agon_cli.policy import Policy
from agon_cli.recipe import Recipe, from_resolved
from agon_cli.rollout import Arena, Phase, challenge, draft
from agon_cli.runlog import read
from agon_cli.summaries import Reading
from agon_cli.types import Problem, Rollout, Verdict
from agon_cli.verifiers import Verifier

CHUNK = 64
"""Problems answered at a time, so that a long batch shows results as it goes."""
_UNGRADED = {"gold": "none given"}


@dataclass(frozen=True)
class Exchange:
    """One problem's way through the cascade. `outcome` is None without a gold answer, else fix (draft wrong, final
    right), break (draft right, final wrong), right or wrong (both), or grader_error."""

    problem: Problem
    draft: Rollout
    final: Rollout

    @property
    def answer(self) -> str | None:
        """The final answer; None where none could be read."""
        return self.final.verdict.extracted

    @property
    def outcome(self) -> str | None:
        if self.problem.meta == _UNGRADED:
            return None
        if self.draft.verdict.masked or self.final.verdict.masked:
            return "grader_error"
        before, after = self.draft.verdict.correct, self.final.verdict.correct
        return {(False, True): "fix", (True, False): "break"}.get((before, after), "right" if after else "wrong")


class _GradesWithGold:
    """The recipe's verifier for problems with a gold answer; for the others it only reads the answer."""

    def __init__(self, inner: Verifier) -> None:
        self.inner = inner

    def extract(self, reading: Reading) -> str | None:
        return self.inner.extract(reading)

    def equal(self, a: str, b: str) -> bool:
        return self.inner.equal(a, b)

    def grade(self, items: Sequence[tuple[Problem, str]]) -> list[Verdict]:
        graded = iter(self.inner.grade([item for item in items if item[0].meta != _UNGRADED]))
        return [
            Verdict("wrong", answer, "no gold answer") if problem.meta == _UNGRADED else next(graded)
            for problem, answer in items
        ]

    def close(self) -> None:
        self.inner.close()


class Cascade:
    """A drafter and a solver, loaded and ready to answer. They share a base where they can."""

    def __init__(self, drafter: Found, solver: Found, settings: Settings) -> None:
        self.seats = {"drafter": drafter, "solver": solver}
        contexts = {name: settings.context(found) for name, found in self.seats.items()}
        loras = {found.lora for found in self.seats.values() if found.lora is not None}
        together = contexts["drafter"] == contexts["solver"] and len(loras) < 2
        crews = [self.seats] if together else [{name: found} for name, found in self.seats.items()]
        self._policies: dict[str, Policy] = {}
        self._arenas: dict[str, Arena] = {}
        for crew in crews:
            recipe = settings.apply(contexts[next(iter(crew))], crew)
            policy = Policy(recipe)
            for name, found in crew.items():
                take_seat(policy, name, found)
            renderers = renderers_of(recipe, policy)
            verifier = _GradesWithGold(verifiers.make(recipe))
            arena = Arena(recipe, HFEngine(policy, recipe.rollout.batch_tokens), renderers, verifier, settings.greedy)
            self._policies |= dict.fromkeys(crew, policy)
            self._arenas |= dict.fromkeys(crew, arena)

    def check(self, problems: Iterable[Problem]) -> None:
        """Raises UsageError for a problem whose prompts and completion could outgrow a player's context."""
        for name, arena in self._arenas.items():
            config = self._policies[name].seats[name].model.get_base_model().config.get_text_config()
            limit = getattr(config, "max_position_embeddings", None)
            for problem in problems if limit else ():
                room = limit - arena.recipe.rollout.max_tokens
                if arena.renderers[name].widest(problem) > room:
                    raise UsageError(
                        f"the problem that begins {problem.question[:40]!r} leaves the {name} no room: its prompt can take "
                        f"more than {room} of the model's {limit} tokens",
                        "shorten the problem, or lower rollout.max_tokens or summary.max_tokens in a --recipe",
                    )

    def answer(self, problems: Sequence[Problem], phase: Phase) -> Iterator[Exchange]:
        """One exchange per problem, in order, a chunk at a time."""
        for start in range(0, len(problems), CHUNK):
            part = problems[start : start + CHUNK]
            phase("draft")
            drafts = draft(self._arenas["drafter"], "drafter", part, 1, "cascade", phase)
            phase("challenge")
            finals = challenge(self._arenas["solver"], "solver", drafts, "rival", "per_rollout", "cascade", phase)
            for problem, first, last in zip(part, drafts, finals, strict=True):
                yield Exchange(problem, first.rollouts[0], last.rollouts[0])

    def close(self) -> None:
        """Stop the verifiers."""
        for arena in self._arenas.values():
            arena.verifier.close()


@dataclass(frozen=True)
class Settings:
    """How a cascade samples, and whose prompts it uses: `recipe` where given, else those of the run a player belongs
    to, else `fallback`, else the defaults."""

    recipe: Recipe | None
    fallback: Recipe | None
    seed: int
    temperature: float | None
    greedy: bool

    def context(self, found: Found) -> Recipe:
        """The recipe whose prompts, markers, summary and sampling a player plays by."""
        return self.recipe or found.recipe or self.fallback or _defaults(found)

    def apply(self, context: Recipe, crew: dict[str, Found]) -> Recipe:
        """The context with these players in it."""
        sampling = {} if self.temperature is None else {"temperature": self.temperature}
        return with_players(context, crew, "agon" if len(crew) > 1 else "grpo", rollout=sampling, seed=self.seed)


def _defaults(found: Found) -> Recipe:
    return from_resolved({"model": found.model.model_dump(mode="json"), "data": {"type": "tiny"}})


def pick_seats(run: Path | None, drafter: str | None, solver: str | None) -> tuple[str, str]:
    """Names for both seats; one not given comes from the run's direction that did best on its latest dev evaluation.

    Raises UsageError where there is no such evaluation to choose from.
    """
    if drafter is not None and solver is not None:
        return drafter, solver
    if run is None:
        raise UsageError("there is no run to take players from", "give both --drafter and --solver, or --run")
    recipe = recipe_of(run)
    ranked: list[dict[str, Any]] = [arm for arm in arms(read(run, "evals")) if arm["split"] == "dev"]
    ranked = [arm for arm in ranked if arm["mode"] == "cascade" and arm["step"] == ranked[-1]["step"]]
    ranked.sort(key=lambda arm: -(arm["accuracy"] or 0.0))
    pairs = [direction(arm["arm"]) for arm in ranked]
    for pair in pairs:
        if drafter in (None, pair.drafter) and solver in (None, pair.challenger):
            return pair.drafter, pair.challenger
    raise UsageError(
        f"{run} has no dev evaluation of a cascade" + (" with that player" if pairs else "") + " to choose from",
        f"give both --drafter and --solver; its players are {', '.join(recipe.cast)}",
    )


def one_problem(question: str, gold: str | None) -> Problem:
    """A problem as the command line gives it. Its id, and so its luck, follows from its text."""
    meta = dict(_UNGRADED) if gold is None else {}
    return Problem(hashlib.sha256(question.encode(errors="replace")).hexdigest()[:16], question, gold or "", meta)


def batch_problems(lines: Iterable[bytes], name: str) -> list[Problem]:
    """The problems of a JSONL file: `question` or `problem`, and optionally `gold` or `answer`. Blank lines are skipped.

    Raises UsageError, naming file and line, for anything else.
    """
    found = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            found.append(_row(line, f"{name}:{number}"))
    if not found:
        raise UsageError(f"{name} holds no problem", 'write one JSON object a line, such as {"question": "1 + 1"}')
    return found


def _row(line: bytes, place: str) -> Problem:
    hint = 'write one JSON object a line: {"question": "1 + 1", "gold": "2"}; gold is optional'
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{place}: not JSON: {error}", hint) from None
    if not isinstance(row, dict):
        raise UsageError(f"{place}: not a JSON object", hint)
    question = next((row[key] for key in ("question", "problem") if key in row), None)
    if not isinstance(question, str) or not question.strip():
        raise UsageError(f"{place}: no question: needs text under `question` or `problem`", hint)
    gold = next((row[key] for key in ("gold", "answer") if row.get(key) is not None), None)
    if isinstance(gold, bool) or not isinstance(gold, str | int | float | None):
        raise UsageError(f"{place}: the gold answer must be text or a number", hint)
    return one_problem(question, None if gold is None else str(gold))


def record(exchange: Exchange, drafter: str, solver: str) -> dict[str, Any]:
    """The exchange as JSON values."""
    return {
        "problem": exchange.problem.question,
        "gold": exchange.problem.gold if exchange.outcome is not None else None,
        "drafter": drafter,
        "solver": solver,
        "draft": _stage(exchange.draft, exchange.outcome is not None),
        "summary": exchange.final.read_summary,
        "final": _stage(exchange.final, exchange.outcome is not None),
        "answer": exchange.answer,
        "outcome": exchange.outcome,
    }


def _stage(rollout: Rollout, graded: bool) -> dict[str, Any]:
    return {
        "text": rollout.completion.text,
        "answer": rollout.verdict.extracted,
        "tokens": len(rollout.completion.ids),
        "prompt_tokens": len(rollout.prompt.ids),
        "finish_reason": rollout.completion.finish_reason,
        "verdict": rollout.verdict.status if graded else None,
    }
