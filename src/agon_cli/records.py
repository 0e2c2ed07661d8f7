"""The rows a step leaves in the run folder. rollouts.jsonl alone suffices to recompute every reward and advantage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agon_cli.metrics import Equal, bonus_metrics, exchange_metrics, grader_errors, stream_metrics
from agon_cli.recipe.schema import Recipe
from agon_cli.roles import Pairing
from agon_cli.types import Group
from agon_cli.update import Update

Row = dict[str, Any]


def rollout_rows(recipe: Recipe, step: int, groups: Sequence[Group]) -> list[Row]:
    """One row per completion. `rule` holds the reward's settings, `read` whether a challenge was shown a summary."""
    method = recipe.method
    keys = ("reward", "bonus", "tie_break", "format_weight")
    # Without any exchange there is no summary to miss, so a missing one cannot cost the rival term.
    needs_summary = method.bonus_needs_summary and method.exchange != "none"
    rule = {key: getattr(method, key) for key in keys} | {"bonus_needs_summary": needs_summary}
    return [
        {
            "step": step, "problem_id": group.problem.id, "player": group.player, "role": group.role, "index": index,
            "draft_index": r.draft_index, "read": r.read_summary is not None, "prompt_hash": r.prompt.hash,
            "text": r.completion.text, "summary": r.summary, "finish_reason": r.completion.finish_reason,
            "tokens": len(r.completion.ids), "verdict": r.verdict.status, "extracted": r.verdict.extracted,
            "format": r.format, "reward": r.reward, "advantage": r.advantage, "masked": r.verdict.masked, "rule": rule,
        }
        for group in groups
        for index, r in enumerate(group.rollouts)
    ]  # fmt: skip


def step_metrics(
    step: int,
    pair: Pairing,
    groups: Sequence[Group],
    updates: dict[str, Update],
    seconds: dict[str, float],
    equal: Equal,
) -> Row:
    """The step's metrics row. Each player has its update and, under the name of the role it played, its stream."""
    drafts = [group for group in groups if group.role == "draft"]
    challenges = [group for group in groups if group.role == "challenge"]
    players: dict[str, Row] = {
        name: {
            "lr": done.lr, "loss": done.loss, "grad_norm": done.grad_norm, "kl": done.kl, "sampler_gap": done.gap,
            "updated": done.applied,
        }
        for name, done in updates.items()
    }  # fmt: skip
    players[pair.drafter]["draft"] = stream_metrics(drafts)
    if challenges:
        streams = stream_metrics(challenges) | exchange_metrics(drafts, challenges, equal)
        players[pair.challenger]["challenge"] = streams | bonus_metrics(drafts, challenges)
    every = [rollout for group in groups for rollout in group.rollouts]
    errors, completions = grader_errors(groups)
    return {
        "step": step,
        "roles": {"draft": pair.drafter, "challenge": pair.challenger if challenges else None},
        "players": players,
        "completions": completions,
        "grader_errors": errors,
        "tokens": {
            "sampled": sum(len(r.completion.ids) for r in every),
            "prompt": sum(len(r.prompt.ids) for r in every),
        },
        "seconds": seconds,
    }


def telling_sample(groups: Sequence[Group]) -> Row | None:
    """One exchange worth a look: a fix if the step has one, else a break, else any challenge, else a draft."""
    drafts = {group.problem.id: group for group in groups if group.role == "draft"}
    pairs = [
        (group.problem, drafts[group.problem.id].rollouts[r.draft_index], r)
        for group in groups
        if group.role == "challenge"
        for r in group.rollouts
        if r.draft_index is not None
    ]
    if not pairs:
        group = groups[0]
        rollout = group.rollouts[0]
        return {"problem": group.problem.question, "gold": group.problem.gold, "draft": rollout.completion.text,
                "draft_verdict": rollout.verdict.status}  # fmt: skip
    # False sorts first: fixes, then breaks, then the rest.
    problem, a, b = min(
        pairs,
        key=lambda pair: (
            not (pair[2].verdict.correct and not pair[1].verdict.correct),
            not (pair[1].verdict.correct and not pair[2].verdict.correct),
        ),
    )
    return {
        "problem": problem.question, "gold": problem.gold, "draft": a.completion.text, "summary": b.read_summary,
        "challenge": b.completion.text, "draft_verdict": a.verdict.status, "challenge_verdict": b.verdict.status,
    }  # fmt: skip
