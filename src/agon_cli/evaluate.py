"""pass@1 of each player alone and of the cascade in every direction, on problems nobody trained on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from agon_cli.clock import Clock
from agon_cli.errors import GradingError, UsageError
from agon_cli.memory import peak_bytes
from agon_cli.metrics import check_grading, copied
from agon_cli.roles import Pairing, directions
from agon_cli.runlog import read
from agon_cli.stats import interval
from agon_cli.tally import Place, Tally, rates, share, tallies
from agon_cli.types import Group, Problem

if TYPE_CHECKING:
    from agon_cli.rollout import Arena, Phase

Row = dict[str, Any]


class Evaluation(NamedTuple):
    """`rows` for evals.jsonl, one per problem, arm and sample; `spent` for inference.jsonl, one per arm."""

    rows: list[Row]
    spent: list[Row]


def evaluate(
    arena: Arena, problems: Sequence[Problem], split: str, step: int, mode: str, samples: int, phase: Phase
) -> Evaluation:
    """Every arm's answers, which `arms` turns into figures, and what they took.

    An arm is a player alone or, in mode `cascade`, also a direction. A player's drafts are its completions of the solo
    arm, so every direction from it starts from the same ones; seeds name the split and not the step, so that successive
    evaluations face the same luck. Every rank evaluates its share of the problems and gets the rows of all; what it
    spent is told of its own share.
    """
    from agon_cli.rollout import challenge, draft  # loads torch, which reading figures out of rows does not need

    recipe, when = arena.recipe, f"eval {split}"
    phase("evaluate")
    mine = arena.ranks.mine(problems)
    place = {"step": step, "split": split}
    drafts: dict[str, list[Group]] = {}
    spent = []
    for name in recipe.cast:
        clock = Clock()
        clock("answer")
        drafts[name] = draft(arena, name, mine, samples, when, clock)
        spent.append(_spent(clock, drafts[name], place | {"arm": name}))
    took = {row["arm"]: sum(row["seconds"].values()) for row in spent}
    by_arm = [
        [rows_of(group, place | {"arm": name, "mode": "single"}) for group in groups] for name, groups in drafts.items()
    ]
    if mode == "cascade":
        # A method that trains without exchange is still deployed as a cascade that reads; only the control reads amiss.
        exchange = "shuffled" if recipe.method.exchange == "shuffled" else "rival"
        for pair in directions(recipe.cast):
            first, arm = drafts[pair.drafter], place | {"arm": f"{pair.drafter}>{pair.challenger}"}
            clock = Clock()
            clock("answer")
            finals = challenge(arena, pair.challenger, first, exchange, "per_rollout", when, clock)
            clock.seconds["draft"] = took[pair.drafter]
            spent.append(_spent(clock, finals, arm))
            rows = [cascade_rows(arena, *both, arm | {"mode": "cascade"}) for both in zip(first, finals, strict=True)]
            by_arm.append(rows)
    by_problem = arena.ranks.whole(list(zip(*by_arm, strict=True)))
    return Evaluation([row for arm in zip(*by_problem, strict=True) for rows in arm for row in rows], spent)


def _spent(clock: Clock, groups: Sequence[Group], place: Row) -> Row:
    """What an arm's completions took: seconds by phase, grading included, and the most memory in use by then."""
    clock("")
    completions = sum(len(group.rollouts) for group in groups)
    return place | {"completions": completions, "seconds": clock.seconds, "peak_bytes": peak_bytes()}


def is_complete(run: Path, steps: int) -> bool:
    """Whether a run's newest checkpoint is its last step and its evaluations are there, graded as far as they must."""
    from agon_cli.checkpoint import newest

    path, _ = newest(run / "checkpoints")
    if path is None or int(path.name.removeprefix("step-").partition(".")[0]) != steps:
        return False
    verdicts: dict[tuple[int, str], list[str]] = {(0, "test"): [], (steps, "dev"): [], (steps, "test"): []}
    try:
        for row in read(run, "evals"):
            verdicts.setdefault((row["step"], row["split"]), []).append(row["verdict"])
        for found in verdicts.values():
            check_grading(found.count("grader_error"), len(found))
    except (UsageError, GradingError):
        return False  # training again repairs a torn row, and grades anew what could not be graded
    except TypeError as error:
        hint = "put the file back, or discard the run with --fresh"
        raise UsageError(f"{run / 'evals.jsonl'}: a row whose step or split is none", hint) from error
    return all(verdicts.values())


def choose(dev_arms: Sequence[Row]) -> str | None:
    """The cascade direction that did best on the dev split (the first of equals); None where there is no cascade."""
    cascades = [arm for arm in dev_arms if arm["mode"] == "cascade"]
    return best(cascades) if cascades else None


def best(arms: Sequence[Row]) -> str:
    """The arm that did best, the first of equals. Raises ValueError for none."""
    return str(max(arms, key=lambda arm: arm["accuracy"] or 0.0)["arm"])


def direction(name: str) -> Pairing:
    """The players of a direction's name, `A>B`."""
    drafter, _, solver = name.partition(">")
    return Pairing(drafter, solver)


def rows_of(group: Group, place: Row) -> list[Row]:
    """A problem's rows of one stage; `place` says which arm of which evaluation they are."""
    return [
        place | {
            "player": group.player, "problem_id": group.problem.id, "sample": index,
            "stage": "draft" if place["mode"] == "single" else "final",
            "prompt_hash": rollout.prompt.hash, "prompt_tokens": len(rollout.prompt.ids),
            "tokens": len(rollout.completion.ids), "finish_reason": rollout.completion.finish_reason,
            "text": rollout.completion.text, "summary": rollout.summary, "verdict": rollout.verdict.status,
            "extracted": rollout.verdict.extracted, "format": rollout.format,
        }
        for index, rollout in enumerate(group.rollouts)
    ]  # fmt: skip


def cascade_rows(arena: Arena, draft: Group, final: Group, place: Row) -> list[Row]:
    """A problem's rows of the final stage, each with what a reader needs to know of its draft."""
    pairs = zip(draft.rollouts, final.rollouts, strict=True)
    return [
        row | {
            "draft_verdict": a.verdict.status, "draft_tokens": len(a.completion.ids),
            "read": b.read_summary is not None, "copied": copied(a, b, arena.verifier.equal),
        }
        for row, (a, b) in zip(rows_of(final, place), pairs, strict=True)
    ]  # fmt: skip


def arms(rows: Iterable[Row]) -> list[Row]:
    """Figures per step, split and arm, in the order in which they appear in evaluation rows.

    `accuracy` is pass@1 with `low` and `high` its 95 % interval over problems; `tokens` and `prompt_tokens` are means
    of the last stage. A cascade adds `draft_tokens`, `table[draft right?][final right?]` (counts of completions), and
    the rates `fix`, `break` and `copy`. Rows the grader itself failed on are counted in `grader_errors` and left out.
    """
    return [_figures(place, tally) for place, tally in tallies(rows).items()]


def _figures(place: Place, tally: Tally) -> Row:
    low, high = interval(list(tally.scores.values()))
    tokens = tally.tokens
    figures = place._asdict() | {
        "mode": tally.mode,
        "problems": len(tally.scores),
        "accuracy": tally.accuracy,
        "low": low,
        "high": high,
        "truncated": share(tally.truncated, tally.rows),
        "format": share(tally.well_formed, tally.rows - tally.errors),
        "grader_errors": tally.errors,
        "tokens": tokens["answer"],
        "prompt_tokens": tokens["prefill"],
    }
    if tally.mode == "cascade":
        figures |= {"draft_tokens": tokens["draft"], "table": tally.table} | rates([tally])
    return figures
