"""One step's play: draft, summarise, challenge, verify, reward, advantages. The same for every method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from agon_cli.advantages import group_advantages
from agon_cli.prompts import Renderer
from agon_cli.ranks import ALONE, Ranks
from agon_cli.recipe.schema import Recipe
from agon_cli.rewards import challenge_reward, plain_reward
from agon_cli.roles import Pairing
from agon_cli.summaries import Reading, leaks, read, withhold
from agon_cli.types import Completion, Engine, Group, Problem, Prompt, Role, Rollout, Sampling, seed_of
from agon_cli.verifiers import Verifier, judge

Phase = Callable[[str], None]


@dataclass(frozen=True)
class Arena:
    """What play needs: who samples, how each player's prompts are written, who grades, and the recipe."""

    recipe: Recipe
    engine: Engine
    renderers: dict[str, Renderer]
    verifier: Verifier
    greedy: bool = False
    """Take the likeliest token at every place; the recipe's temperature and top-p then change nothing."""
    ranks: Ranks = ALONE
    """The processes that share a step's problems."""

    @property
    def sampling(self) -> Sampling:
        """The recipe's sampling values."""
        rollout = self.recipe.rollout
        return Sampling(rollout.temperature, rollout.top_p, 1 if self.greedy else 0, rollout.max_tokens)


def play(arena: Arena, pair: Pairing, problems: Sequence[Problem], step: int, phase: Phase) -> list[Group]:
    """All groups of one step, rewarded: the drafter's plain stream, then the challenger's rival stream where the method
    has one. Every rank plays its share of the problems and gets the groups of all."""
    size = arena.recipe.rollout.group_size
    alone = arena.recipe.method.opponent == "none"
    mine = arena.ranks.mine(problems)
    phase("draft")
    drafts = draft(arena, pair.drafter, mine, 2 * size if alone else size, f"step {step}", phase)
    if alone:
        return gathered(arena.ranks, [reward_all(arena, drafts, [])], phase)
    phase("challenge")
    method = arena.recipe.method
    challenges = challenge(arena, pair.challenger, drafts, method.exchange, method.opponent, f"step {step}", phase)
    rewarded = reward_all(arena, drafts, challenges)
    return gathered(arena.ranks, [rewarded[: len(drafts)], rewarded[len(drafts) :]], phase)


def gathered(ranks: Ranks, streams: Sequence[Sequence[Group]], phase: Phase) -> list[Group]:
    """The groups of all ranks, stream after stream, each in the order of the step's problems."""
    if ranks.size > 1:
        phase("gather")
    by_problem = ranks.whole(list(zip(*streams, strict=True)))
    return [group for stream in zip(*by_problem, strict=True) for group in stream]


def draft(arena: Arena, player: str, problems: Sequence[Problem], count: int, when: str, phase: Phase) -> list[Group]:
    """`count` graded drafts of every problem, not yet rewarded. `when` is part of every seed."""
    prompts = [arena.renderers[player].plain(problem) for problem in problems]
    seeds = [_seeds(arena, when, player, "draft", problem, count) for problem in problems]
    completions = arena.engine.sample(prompts, player, arena.sampling, seeds)
    phase("verify")
    return _graded(arena, player, "draft", problems, [[p] * count for p in prompts], completions)


def challenge(
    arena: Arena, player: str, drafts: Sequence[Group], exchange: str, opponent: str, when: str, phase: Phase
) -> list[Group]:
    """One graded challenge per draft, not yet rewarded: it reads what `exchange` lets it read, or the plain prompt
    where that has no summary."""
    problems = [group.problem for group in drafts]
    seed = arena.recipe.seed
    facing = [opponents(group, opponent, seed_of(seed, when, "opponent", group.problem.id)) for group in drafts]
    shift = seed_of(seed, when, "shuffle")
    pool, places = drafts, list(range(len(drafts)))
    if exchange == "shuffled":  # what is read may have been drafted by another rank
        pool, places = arena.ranks.whole(drafts), [arena.ranks.place(p) for p in places]
    renderer = arena.renderers[player]
    summaries = [[summary_shown(pool, places[p], i, exchange, shift) for i in facing[p]] for p in range(len(drafts))]
    shown = [[None if summary is None else renderer.shown(summary) for summary in row] for row in summaries]
    prompts = [
        [renderer.plain(problem) if text is None else renderer.rival(problem, text) for text in shown[p]]
        for p, problem in enumerate(problems)
    ]
    seeds = [
        _seeds(arena, when, player, "challenge", problem, len(row))
        for problem, row in zip(problems, prompts, strict=True)
    ]
    flat = arena.engine.sample(
        [prompt for row in prompts for prompt in row], player, arena.sampling, [[seed] for row in seeds for seed in row]
    )
    answers = iter(flat)
    completions = [[next(answers)[0] for _ in row] for row in prompts]
    phase("verify")
    graded = _graded(arena, player, "challenge", problems, prompts, completions)
    return [
        replace(group, rollouts=tuple(
            replace(rollout, draft_index=facing[p][i], read_summary=text)
            for i, (rollout, text) in enumerate(zip(group.rollouts, shown[p], strict=True))
        ))
        for p, group in enumerate(graded)
    ]  # fmt: skip


def opponents(drafts: Group, opponent: str, seed: int) -> list[int]:
    """For every challenge of a problem, the index of the draft it faces."""
    count = len(drafts.rollouts)
    return [seed % count] * count if opponent == "shared" else list(range(count))


def summary_shown(drafts: Sequence[Group], p: int, i: int, exchange: str, shift: int) -> str | None:
    """The summary that a challenge of problem p facing draft i is shown; None for the plain prompt. `shuffled` shows
    draft i of another problem, the same distance away for all problems of the step."""
    if exchange == "none":
        return None
    if exchange == "shuffled":
        if len(drafts) == 1:
            return None  # an evaluation of one problem: there is no other to read about
        p = (p + 1 + shift % (len(drafts) - 1)) % len(drafts)
    return drafts[p].rollouts[i].summary


def _seeds(arena: Arena, when: str, player: str, role: Role, problem: Problem, count: int) -> list[int]:
    return [seed_of(arena.recipe.seed, when, player, role, problem.id, index) for index in range(count)]


def _graded(
    arena: Arena,
    player: str,
    role: Role,
    problems: Sequence[Problem],
    prompts: Sequence[Sequence[Prompt]],
    completions: Sequence[Sequence[Completion]],
) -> list[Group]:
    """Groups of one role with readings, summaries and exactly one verdict per completion."""
    fmt, how, verifier = arena.recipe.format, arena.recipe.summary.withhold, arena.verifier
    readings = [
        [read(c.text, prompt.prefill, c.finish_reason, fmt) for prompt, c in zip(*row, strict=True)]
        for row in zip(prompts, completions, strict=True)
    ]
    asked = [problem for problem, row in zip(problems, readings, strict=True) for _ in row]
    verdicts = iter(judge(verifier, asked, [reading for row in readings for reading in row]))

    def rollout(prompt: Prompt, completion: Completion, reading: Reading) -> Rollout:
        summary = withhold(reading, fmt, how, verifier.equal)
        phi = int(reading.well_formed and summary is not None)
        leaked = leaks(summary, verifier.extract(reading), verifier.equal)
        return Rollout(prompt, completion, summary, next(verdicts), phi, leaked=leaked)

    return [
        Group(problem, player, role, tuple(rollout(*cell) for cell in zip(*row, strict=True)))
        for problem, *row in zip(problems, prompts, completions, readings, strict=True)
    ]


def reward_all(arena: Arena, drafts: Sequence[Group], challenges: Sequence[Group]) -> list[Group]:
    """The groups with rewards and advantages, each group normalised by itself."""
    rewarded = [_with_rewards(group, [_draft_reward(arena.recipe, r) for r in group.rollouts]) for group in drafts]
    for against, group in zip(drafts, challenges, strict=False):
        rewarded.append(_with_rewards(group, [_challenge_reward(arena.recipe, against, r) for r in group.rollouts]))
    return rewarded


def _draft_reward(recipe: Recipe, rollout: Rollout) -> float:
    return plain_reward(float(rollout.verdict.correct), float(rollout.format), recipe.method)


def _challenge_reward(recipe: Recipe, drafts: Group, rollout: Rollout) -> float:
    assert rollout.draft_index is not None
    against, method = drafts.rollouts[rollout.draft_index], recipe.method
    unread = method.exchange != "none" and method.bonus_needs_summary and rollout.read_summary is None
    return challenge_reward(
        float(rollout.verdict.correct), float(against.verdict.correct), float(rollout.format),
        len(rollout.completion.ids), len(against.completion.ids), not (against.verdict.masked or unread), method,
    )  # fmt: skip


def _with_rewards(group: Group, rewards_N: list[float]) -> Group:
    advantages_N = group_advantages(rewards_N, [rollout.verdict.masked for rollout in group.rollouts])
    scored = zip(group.rollouts, rewards_N, advantages_N, strict=True)
    return replace(group, rollouts=tuple(replace(r, reward=reward, advantage=adv) for r, reward, adv in scored))
