"""Build what a run needs from its recipe: players, engine, prompts, verifier, problems that fit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agon_cli import data, engines, verifiers
from agon_cli.data import Splits
from agon_cli.errors import UsageError
from agon_cli.families import left_open, perfect
from agon_cli.memory import collect_as_usual, keep_freed_blocks
from agon_cli.policy import Policy
from agon_cli.prompts import Renderer
from agon_cli.ranks import ALONE, Ranks
from agon_cli.recipe.schema import Recipe
from agon_cli.rollout import Arena
from agon_cli.sharding import shard
from agon_cli.summaries import read, withhold
from agon_cli.types import Problem, Prompt
from agon_cli.verifiers import Verifier, judge
from agon_cli.verifiers.code import SAMPLE


@dataclass(frozen=True)
class World:
    """A recipe made real. `dropped` says how many problems of each split had prompts over the length limit."""

    recipe: Recipe
    policy: Policy
    arena: Arena
    splits: Splits
    dropped: dict[str, int]

    def hashes(self) -> dict[str, Any]:
        """What identifies the inputs of a run: base weights by player, problems by split, commits of Hub data sets,
        prompt texts; and whether programs ran unguarded."""
        problems = {name: data.digest(split) for name, split in self.splits.by_name().items()}
        unguarded = not getattr(self.arena.verifier, "isolated", True)
        return {
            **({"programs": "run without a sandbox"} if unguarded else {}),
            "base": self.policy.base_hashes(),
            "data": problems,
            "revisions": {name: commit for name, commit in self.splits.revisions.items() if commit},
            "prompts": _digest(self.recipe.prompts.model_dump(mode="json")),
        }

    def telling_prompts(self) -> dict[str, Prompt]:
        """What each player is asked when its engine is checked: the first training problem."""
        first = self.splits.train[0]
        return {name: renderer.plain(first) for name, renderer in self.arena.renderers.items()}

    def close(self) -> None:
        """End what runs beside this process: grading workers, and the engine's own."""
        try:
            self.arena.engine.close()
        finally:
            self.arena.verifier.close()


def assemble(
    recipe: Recipe,
    ranks: Ranks = ALONE,
    scratch: Path | None = None,
    tell: Callable[[str], None] = lambda text: None,
    sharded: bool = False,
) -> World:
    """Load data, models, verifier and engine, in the order in which a mistake is cheapest to find. `scratch` and `tell`
    are the engine's: where it may write, and to whom it says that it has to wait. `sharded` lays bases over `ranks`."""
    verifier = verifiers.make(recipe)
    try:
        world = _assembled(recipe, verifier, ranks, scratch, tell, sharded)
        collect_as_usual()  # which the command line had put off
        keep_freed_blocks()  # from now on: what loading took was given back
        return world
    except BaseException:
        verifier.close()
        raise


def _assembled(
    recipe: Recipe,
    verifier: Verifier,
    ranks: Ranks,
    scratch: Path | None,
    tell: Callable[[str], None],
    sharded: bool,
) -> World:
    splits = data.load(recipe, verifier)
    policy = Policy(recipe, "cpu" if sharded else None)
    if sharded:
        shard(policy, ranks)
    _check_room(recipe, policy)
    renderers = renderers_of(recipe, policy)
    fitting, dropped = {}, {}
    for name, given in splits.by_name().items():
        kept = tuple(problem for problem in given if _fits(problem, renderers, recipe.rollout.max_prompt_tokens))
        if not kept:
            raise UsageError(
                f"every problem of the {name} split has a prompt over rollout.max_prompt_tokens "
                f"({recipe.rollout.max_prompt_tokens}, with {recipe.summary.max_tokens} reserved for the summary)",
                "raise rollout.max_prompt_tokens or lower summary.max_tokens",
            )
        fitting[name], dropped[name] = kept, len(given) - len(kept)
    _check_full_marks(recipe, renderers, verifier, fitting["train"][0])
    arena = Arena(recipe, engines.make(recipe, policy, scratch, tell), renderers, verifier, ranks=ranks)
    return World(recipe, policy, arena, Splits(**fitting, counts=splits.counts, revisions=splits.revisions), dropped)


def renderers_of(recipe: Recipe, policy: Policy) -> dict[str, Renderer]:
    """Each player's prompt writer, with its own model's tokenizer and template."""
    return {
        name: Renderer(seat.tokenizer, recipe.prompts, recipe.summary.max_tokens) for name, seat in policy.seats.items()
    }


def _check_room(recipe: Recipe, policy: Policy) -> None:
    """The longest prompt with the longest completion must lie within every player's context."""
    needed = recipe.rollout.max_prompt_tokens + recipe.rollout.max_tokens
    for name, seat in policy.seats.items():
        limit = seat.context
        if limit is not None and needed > limit:
            raise UsageError(
                f"player {name}: a prompt and a completion can take {needed} tokens, {seat.base_id} reads {limit}",
                "lower rollout.max_tokens or rollout.max_prompt_tokens",
            )


def _fits(problem: Problem, renderers: dict[str, Renderer], limit: int) -> bool:
    return all(renderer.widest(problem) <= limit for renderer in renderers.values())


def _check_full_marks(recipe: Recipe, renderers: dict[str, Renderer], verifier: Verifier, problem: Problem) -> None:
    """A perfect answer, written as the recipe asks, must get full marks through template, tokenizer, splitter, format
    term, summary and verifier; otherwise a whole run would be paid nothing for doing right. Raises UsageError that says
    where it fails."""
    problem = SAMPLE if recipe.verifier.type == "code" else problem
    for name, renderer in renderers.items():
        lost = _mark_lost(recipe, renderer, verifier, problem)
        if lost:
            raise UsageError(
                f"player {name}: a perfect completion would not get full marks with this template and these markers: "
                f"{lost}",
                "check format.think and format.answer against the model's chat template (prompts.template_args)",
            )


def _mark_lost(recipe: Recipe, renderer: Renderer, verifier: Verifier, problem: Problem) -> str:
    """Why a perfect completion of the problem would not get full marks; empty when it does."""
    fmt, how = recipe.format, recipe.summary.withhold
    for marker in filter(None, (*(fmt.think or ()), *fmt.answer)):
        if not renderer.keeps(marker):
            return f"the tokenizer cannot write the marker {marker!r}"
    prefill = renderer.plain(problem).prefill
    if opened := left_open(prefill, fmt.think):
        return f"the template opens a block of reasoning with {opened!r}, which these markers do not close"
    reading = read(perfect(fmt.think, fmt.answer, prefill, problem.gold), prefill, "stop", fmt)
    if reading.region is None:
        return f"after what the template writes for the assistant, {prefill!r}, its reasoning never ends"
    if not reading.well_formed:
        return f"it fails the format term after what the template writes for the assistant, {prefill!r}"
    if withhold(reading, fmt, how if how.startswith("plan") else "tag", verifier.equal) is None:
        return "nothing of it is left for a rival to read"
    verdict = judge(verifier, [problem], [reading])[0]
    if verdict.correct or verdict.masked:  # a grader at fault is counted, and stops the run, where it grades
        return ""
    return f"its answer is graded {verdict.status} ({verdict.detail})"


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
