"""A finished run put on stage again, and what it can be made to play beyond its own evaluation.

Every arm is drawn by the `draft` and `challenge` of training. Votes, proposers and claims have luck of their own;
placebos face the very drafts and the luck of the evaluation, so that what is read is all that differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agon_cli.compare.arms import Evaluated
from agon_cli.compare.spending import at_budget, classes, grown, joined, kept, room_for, voted
from agon_cli.errors import UsageError
from agon_cli.evaluate import cascade_rows, direction, rows_of
from agon_cli.manifest import read_manifest
from agon_cli.prompts import Renderer
from agon_cli.rollout import Arena, challenge, draft
from agon_cli.tiny.world import Equation, claims_hit
from agon_cli.types import Group, Problem

if TYPE_CHECKING:
    from agon_cli.assemble import World

Row = dict[str, Any]


@dataclass(frozen=True)
class Stage:
    """Players ready to answer the problems of the test split."""

    arena: Arena
    problems: Sequence[Problem]
    arm: str
    """The direction that was chosen, or the player."""
    samples: int
    """Completions of a problem in the run's own evaluation; further ones count on from there."""
    step: int

    @property
    def drafter(self) -> str:
        """Who drafts, or answers alone."""
        return direction(self.arm).drafter

    @property
    def solver(self) -> str:
        """Who answers after reading: of a player alone, itself."""
        return direction(self.arm).challenger or self.drafter

    def place(self, arm: str, mode: str) -> Row:
        """What the rows of an arm begin with."""
        return {"step": self.step, "split": "test", "arm": arm, "mode": mode}


@contextmanager
def on_stage(run: Path, evaluated: Evaluated) -> Iterator[Stage]:
    """The run at its newest checkpoint, with its own recipe. Raises UsageError where that is not the step of its last
    evaluation, or where its base, problems or prompts are no longer those it was trained on."""
    from agon_cli.assemble import assemble
    from agon_cli.players import take_seats
    from agon_cli.session import entrant

    who = entrant(str(run), [], None)
    if who.step != evaluated.step:
        raise UsageError(
            f"{run} was last evaluated at step {evaluated.step}, but its newest checkpoint is of step {who.step}",
            "let `agon train` finish the run",
        )
    world = assemble(who.recipe)
    try:
        _check_inputs(run, world)
        take_seats(world.policy, world.arena, world.telling_prompts(), who.seats)
        samples = evaluated.deployed().tally.samples
        yield Stage(world.arena, world.splits.test, evaluated.chosen, samples, who.step)
    finally:
        world.close()


def _check_inputs(run: Path, world: World) -> None:
    known, hashes = read_manifest(run)["hashes"], world.hashes()
    present = {"prompts": hashes["prompts"]}
    present |= {f"{group}.{name}": value for group in ("base", "data") for name, value in hashes[group].items()}
    changed = sorted(name for name, value in present.items() if known.get(name, value) != value)
    if changed:
        raise UsageError(f"{run}: not what this run was trained on: {', '.join(changed)}", "put back what has changed")


def vote(stage: Stage, budget: float) -> list[Row]:
    """A player's samples and, for every k up to the budget, their majority by the verifier's own equality: arms
    `vote@1`, `vote@2`, … and `vote`, which spends the budget."""
    drawn: list[list[Row]] = [[] for _ in stage.problems]
    equal = stage.arena.verifier.equal

    def rows_at(k: int) -> list[Row]:
        for samples, group in zip(drawn, _drafts(stage, "vote", k - 1), strict=True):
            row = rows_of(group, stage.place(group.player, "single"))[0]
            samples.append(row | {"sample": stage.samples + k - 1})
        place = stage.place(f"vote@{k}", "vote")
        return [voted(samples, classes(samples, equal)) | place for samples in drawn]

    points = grown(budget, rows_at)
    return [*_flat(drawn), *_flat(points), *_spending(stage, "vote", points, budget)]


def proposers(stage: Stage, budget: float) -> list[Row]:
    """One more completion reads k drafts of the same player, for every k up to the budget: arms `proposers@1`, … and
    `proposers`, which spends the budget."""
    drafts: list[list[Group]] = []
    player = stage.solver
    renderer, most = stage.arena.renderers[player], stage.arena.recipe.rollout.max_prompt_tokens
    bare = [len(renderer.rival(problem, "").ids) for problem in stage.problems]

    def rows_at(k: int) -> list[Row]:
        drafts.append(_drafts(stage, "proposers", k - 1))
        room = room_for(k, renderer, bare, most)
        wide = Renderer(renderer.tokenizer, renderer.prompts, room)
        arena = replace(stage.arena, renderers={**stage.arena.renderers, player: wide})
        several = list(zip(*drafts, strict=True))
        read = [_read(groups, joined(_summaries(groups), renderer, room)) for groups in several]
        finals = challenge(arena, player, read, "rival", "per_rollout", f"proposers test {k}", _quiet)
        return [
            rows_of(final, stage.place(f"proposers@{k}", "proposers"))[0]
            | {"draft_tokens": sum(len(group.rollouts[0].completion.ids) for group in groups), "k": k}
            for groups, final in zip(several, finals, strict=True)
        ]

    points = grown(budget, rows_at)
    return [*_flat(points), *_spending(stage, "proposers", points, budget)]


def shuffled(stage: Stage, _: float) -> list[Row]:
    """The cascade, its solver shown a draft of another problem."""
    return _placebo(stage, "shuffled")


def empty(stage: Stage, _: float) -> list[Row]:
    """The cascade, its solver shown nothing: it gets the plain prompt."""
    return _placebo(stage, "none")


def _placebo(stage: Stage, exchange: str) -> list[Row]:
    drafts = draft(stage.arena, stage.drafter, stage.problems, stage.samples, "eval test", _quiet)
    finals = challenge(stage.arena, stage.solver, drafts, exchange, "per_rollout", "eval test", _quiet)
    place = stage.place(stage.arm, "cascade")
    return _flat(cascade_rows(stage.arena, *both, place) for both in zip(drafts, finals, strict=True))


def claim(stage: Stage, _: float) -> list[Row]:
    """Two samples of a player of the tiny world: the first whose summary claims a hit, else the first."""
    groups = draft(stage.arena, stage.drafter, stage.problems, 2, "claim test", _quiet)
    place = stage.place("claim", "claim")
    return [kept(rows_of(group, place), _claiming(group)) for group in groups]


def _claiming(group: Group) -> int:
    equation = Equation(*(group.problem.meta[name] for name in ("target", "factor", "shift")))
    claims = [place for place, r in enumerate(group.rollouts) if claims_hit(r.summary, equation)]
    return claims[0] if claims else 0


PLAYED: dict[str, Callable[[Stage, float], list[Row]]] = {
    "vote": vote, "proposers": proposers, "shuffled": shuffled, "empty": empty, "claim": claim,
}  # fmt: skip


def _drafts(stage: Stage, purpose: str, index: int) -> list[Group]:
    """One further draft of every problem."""
    return draft(stage.arena, stage.drafter, stage.problems, 1, f"{purpose} test {index}", _quiet)


def _summaries(groups: Sequence[Group]) -> list[str]:
    return [group.rollouts[0].summary for group in groups if group.rollouts[0].summary is not None]


def _read(groups: Sequence[Group], summary: str | None) -> Group:
    """A group of one draft that has the summary of all."""
    return replace(groups[0], rollouts=(replace(groups[0].rollouts[0], summary=summary),))


def _spending(stage: Stage, arm: str, points: Sequence[list[Row]], budget: float) -> list[Row]:
    return [row | {"arm": arm} for row in at_budget(points, budget)]


def _flat(nested: Any) -> list[Row]:
    return [row for rows in nested for row in rows]


def _quiet(_: str) -> None:
    """What a stage does within an arm is of no interest here."""
