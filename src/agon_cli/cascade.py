"""The deployed pair: one player drafts, the other answers after reading the draft's summary.

Both stages are the very `draft` and `challenge` of training, with one completion a problem.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agon_cli import engines, verifiers
from agon_cli.assemble import renderers_of
from agon_cli.canary import confirm
from agon_cli.errors import UsageError
from agon_cli.evaluate import arms, choose, direction
from agon_cli.players import Found, could_be_base, find, recipe_of, take_seat, with_players
from agon_cli.policy import Policy
from agon_cli.questions import UNGRADED
from agon_cli.recipe import Recipe, from_resolved, load
from agon_cli.recipe.engine import VLLM
from agon_cli.roles import Pairing
from agon_cli.rollout import Arena, Phase, challenge, draft
from agon_cli.runlog import find_run, read
from agon_cli.summaries import Reading
from agon_cli.types import Problem, Rollout, Verdict
from agon_cli.verifiers import Verifier

CHUNK = 64
"""Problems answered at a time, so that a long batch shows results as it goes."""
_ASKED = Problem("canary", "What is 2 + 2?", "4")


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
        """What the exchange did, as said above."""
        if self.problem.meta == UNGRADED:
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
        graded = iter(self.inner.grade([item for item in items if item[0].meta != UNGRADED]))
        return [
            Verdict("wrong", answer, "no gold answer") if problem.meta == UNGRADED else next(graded)
            for problem, answer in items
        ]

    def close(self) -> None:
        self.inner.close()


class Cascade:
    """A drafter and a solver, loaded and ready to answer. They share a base where they can."""

    def __init__(self, drafter: Found, solver: Found, settings: Settings) -> None:
        self.seats = {"drafter": drafter, "solver": solver}
        contexts = {name: settings.context(found) for name, found in self.seats.items()}
        loras = [found.lora for found in self.seats.values() if found.lora is not None]
        together = contexts["drafter"] == contexts["solver"] and all(lora == loras[0] for lora in loras)
        crews = [self.seats] if together else [{name: found} for name, found in self.seats.items()]
        self._policies: dict[str, Policy] = {}
        self._arenas: dict[str, Arena] = {}
        self.tell: Callable[[str], None] = lambda text: None
        """Hears of waits while answers are made. Not before: a crew's engine would tell of the other crew's server."""
        self._open = ExitStack()
        try:
            for crew in crews:
                recipe = _sharing(settings.apply(contexts[next(iter(crew))], crew), len(crews))
                self._load(crew, recipe, settings.greedy)
        except BaseException:
            self.close()
            raise

    def _load(self, crew: dict[str, Found], recipe: Recipe, greedy: bool) -> None:
        """Players of one recipe, on one engine that samples from their adapters."""
        policy = Policy(recipe)
        for name, found in crew.items():
            take_seat(policy, name, found)
        renderers = renderers_of(recipe, policy)
        verifier = _GradesWithGold(verifiers.make(recipe))
        self._open.callback(verifier.close)
        engine = engines.make(recipe, policy, tell=lambda text: self.tell(text))
        self._open.callback(engine.close)
        confirm(policy, engine, {name: renderers[name].plain(_ASKED) for name in crew}, recipe.rollout.max_tokens)
        self._policies |= dict.fromkeys(crew, policy)
        self._arenas |= dict.fromkeys(crew, Arena(recipe, engine, renderers, verifier, greedy))

    def describe(self) -> dict[str, Any]:
        """Who plays, and every value that shapes a sample, by seat."""
        found = {}
        for name, arena in self._arenas.items():
            place, seat = arena.sampling, self.seats[name]
            found[name] = {
                "player": seat.label, "run": str(seat.run) if seat.run else None, "step": seat.step,
                "base": seat.model.id, "adapter": str(seat.adapter) if seat.adapter else None,
                "temperature": place.temperature, "top_p": place.top_p, "top_k": place.top_k,
                "max_tokens": place.max_tokens, "summary_tokens": arena.recipe.summary.max_tokens,
                "seed": arena.recipe.seed,
            }  # fmt: skip
        return found

    def check(self, problems: Iterable[Problem]) -> None:
        """Raises UsageError for a gold answer that this verifier cannot use, and for a problem whose prompts and
        completion could outgrow a player's context."""
        problems = list(problems)
        kinds = {arena.recipe.verifier.type for arena in self._arenas.values()} & {"code", "reasoning_gym"}
        if kinds and any(problem.meta != UNGRADED for problem in problems):
            raise UsageError(
                f"the verifier {kinds.pop()!r} grades against more than a gold answer",
                "leave out gold answers, or name a --recipe with another verifier",
            )
        for name, arena in self._arenas.items():
            limit = self._policies[name].seats[name].context
            if limit is None:
                continue
            for problem in problems:
                room = limit - arena.recipe.rollout.max_tokens
                if arena.renderers[name].widest(problem) > room:
                    raise UsageError(
                        f"the problem that begins {problem.question[:40]!r} leaves the {name} no room: its prompt can "
                        f"take more than {room} of the model's {limit} tokens",
                        "shorten the problem, or lower rollout.max_tokens or summary.max_tokens in a --recipe",
                    )

    def unknown(self, problems: Iterable[Problem]) -> Iterator[str]:
        """A sentence for each problem with words that a player's tokenizer does not know: the player cannot read
        them."""
        for problem in problems:
            players: dict[tuple[str, ...], list[str]] = {}
            for name, arena in self._arenas.items():
                words = tuple(arena.renderers[name].unknown(problem.question))
                players.setdefault(words, []).append(self.seats[name].label)
            for words, labels in players.items():
                if words:
                    who = " and ".join(f"player {label}" for label in dict.fromkeys(labels))
                    few = ", ".join(word[:20] for word in words[:5]) + (", …" if len(words) > 5 else "")
                    yield (
                        f"the problem that begins {problem.question[:40]!r}: {len(words)} of its "
                        f"{len(problem.question.split())} words are unknown to the tokenizer of {who}: {few}"
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
        """Stop the verifiers and the engines."""
        self._open.close()


def _sharing(recipe: Recipe, engines: int) -> Recipe:
    """The recipe of one of several engines, which divide what vLLM may take of a GPU."""
    if not isinstance(recipe.engine, VLLM):
        return recipe
    share = recipe.engine.model_copy(update={"memory": recipe.engine.memory / engines})
    return recipe.model_copy(update={"engine": share})


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


def open_cascade(
    drafter: str | None,
    solver: str | None,
    run: Path | None,
    recipe: str | None,
    seed: int,
    temperature: float | None,
    greedy: bool,
) -> Cascade:
    """The cascade as the command line asks for it: players of `run`, else of the newest one, or any that `find` finds.

    Raises UsageError for players that cannot be found, UnreachableError for a base that cannot be loaded.
    """  # fmt: skip
    home = _run_or_none(run, needed=drafter is None or solver is None)
    given = None if recipe is None else load(recipe)
    fallback = recipe_of(home) if home is not None else None
    names = pick_seats(home, drafter, solver)
    first, last = (find(name, home, given or fallback) for name in names)
    return Cascade(first, last, Settings(given, fallback, seed, temperature, greedy))


def _run_or_none(run: Path | None, needed: bool) -> Path | None:
    try:
        return find_run(run)
    except UsageError:
        if run is not None or needed:
            raise
        return None


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
    cast = recipe_of(run).cast
    for name in (drafter, solver):
        if name is not None and name not in cast and not Path(name).expanduser().exists() and not could_be_base(name):
            raise UsageError(f"{name!r} is no player of {run}", f"its players are {', '.join(cast)}")
    dev = [arm for arm in arms(read(run, "evals")) if arm["split"] == "dev"]
    latest = [arm for arm in dev if arm["mode"] == "cascade" and arm["step"] == dev[-1]["step"]]
    best = choose([arm for arm in latest if _seats(direction(arm["arm"]), drafter, solver)])
    if best is not None:
        return direction(best)
    raise UsageError(
        f"{run} has no dev evaluation of a cascade" + (" with that player" if latest else "") + " to choose from",
        f"give both --drafter and --solver (its players are {', '.join(cast)}), or another run with --run",
    )


def _seats(pair: Pairing, drafter: str | None, solver: str | None) -> bool:
    return drafter in (None, pair.drafter) and solver in (None, pair.challenger)


def record(exchange: Exchange, pair: Cascade) -> dict[str, Any]:
    """The exchange as JSON values."""
    graded = exchange.outcome is not None
    return {
        "problem": exchange.problem.question,
        "gold": exchange.problem.gold if graded else None,
        "drafter": pair.seats["drafter"].label,
        "solver": pair.seats["solver"].label,
        "draft": _stage(exchange.draft, graded),
        "summary": exchange.final.read_summary,
        "final": _stage(exchange.final, graded),
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
