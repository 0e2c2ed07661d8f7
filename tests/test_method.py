"""Every method preset, step by step, against the slow reference: roles, reads, rewards, advantages, gradients.

A scripted engine fixes the facts of a step; the reference says what follows from them.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import reference
from agon_cli.policy import Policy
from agon_cli.recipe.presets import PRESETS
from agon_cli.recipe.schema import Recipe
from agon_cli.roles import Pairing, directions, pairing
from agon_cli.rollout import Arena, challenge, draft, play
from agon_cli.types import Group, Problem
from agon_cli.update import accumulate_gradient, make_optimiser, update
from reference import Row
from scripted import Script, ScriptedEngine, arena, knobs, line, make_recipe, problem, script_of, silent, write_model

TRAINED = [name for name, values in PRESETS.items() if values["players"] != "base"]
UNTRAINED = [name for name, values in PRESETS.items() if values["players"] == "base"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


def problems_of(step: int, count: int = 4) -> list[Problem]:
    """Four problems of which each modulo 4 occurs, in an order that changes."""
    order = [(step + i) % 4 for i in range(count)]
    return [problem(4 * ((step + place) % 4) + number) for place, number in enumerate(order)]


def played(arena_: Arena, engine: ScriptedEngine, step: int, script: Script) -> tuple[Pairing, list[Group]]:
    recipe = arena_.recipe
    pair = pairing(step, recipe.cast, recipe.method.roles)
    engine.begin(script, ["draft", "challenge"])
    return pair, play(arena_, pair, problems_of(step), step, silent)


def expected_reads(
    recipe: Recipe, problems: Sequence[Problem], script: Script, facing: list[list[int]], shift: int
) -> list[list[str | None]]:
    """What each challenge must be shown: nothing, its opponent's summary, or that of a draft `shift` problems on."""
    exchange, count = recipe.method.exchange, len(problems)
    reads: list[list[str | None]] = []
    for p in range(count):
        source = problems[(p + shift) % count] if exchange == "shuffled" else problems[p]
        reads.append(
            [None if exchange == "none" else script("draft", source.question, i).fact().summary for i in facing[p]]
        )
    return reads


def shown(group: Group) -> list[list[str] | None]:
    """What the challenges of a group really were shown, taken from the text of their prompts."""
    found: list[list[str] | None] = []
    for rollout in group.rollouts:
        words = rollout.prompt.text.split()
        found.append(words[words.index("rival") + 1 : words.index(":")] if "rival" in words else None)
    return found


def expected(recipe: Recipe, problems: Sequence[Problem], script: Script, challenges: list[Group]) -> list[Any]:
    """The reference's streams, one per problem."""
    k = knobs(recipe)
    count = reference.drafts_per_problem(k)
    drafts = [[script("draft", task.question, i).fact() for i in range(count)] for task in problems]
    if not reference.has_challenges(k):
        return [reference.score(facts, [], [], [], k) for facts in drafts]
    facing = []
    for group in challenges:
        drawn = group.rollouts[0].draft_index if k.opponent == "shared" else None
        facing.append(reference.opponents_of(k, drawn))
    shifts = range(1, len(problems)) if k.exchange == "shuffled" else [0]
    really = [shown(group) for group in challenges]
    fitting = []
    for shift in shifts:
        reads = expected_reads(recipe, problems, script, facing, shift)
        if [[None if text is None else text.split() for text in row] for row in reads] == really:
            fitting.append(reads)
    assert len(fitting) == 1, "what the challenges were shown is not what the method lets them read"
    size = recipe.rollout.group_size
    facts = [[script("challenge", task.question, i).fact() for i in range(size)] for task in problems]
    return [reference.score(drafts[p], facts[p], facing[p], fitting[0][p], k) for p in range(len(problems))]


def check_groups(
    recipe: Recipe, pair: Pairing, problems: Sequence[Problem], script: Script, groups: list[Group]
) -> None:
    drafts = [group for group in groups if group.role == "draft"]
    challenges = [group for group in groups if group.role == "challenge"]
    assert [group.problem for group in drafts] == list(problems)
    assert {group.player for group in drafts} == {pair.drafter}
    assert len(challenges) == (len(problems) if recipe.method.opponent != "none" else 0)
    assert {group.player for group in challenges} <= {pair.challenger}
    spent = sum(len(group.rollouts) for group in groups)
    assert spent == 2 * recipe.rollout.group_size * len(problems), "every method spends 2N rollouts on a problem"
    streams = expected(recipe, problems, script, challenges)
    for p, stream in enumerate(streams):
        check_group(drafts[p], stream.drafts)
        if challenges:
            assert challenges[p].problem == problems[p]
            check_group(challenges[p], stream.challenges)


def check_group(group: Group, scored: Sequence[reference.Scored]) -> None:
    assert len(group.rollouts) == len(scored)
    for rollout, want in zip(group.rollouts, scored, strict=True):
        assert rollout.verdict.correct == want.fact.correct
        assert rollout.verdict.masked == want.fact.masked
        assert rollout.format == want.fact.format
        assert (rollout.summary or "").split() == (want.fact.summary or "").split()
        assert (rollout.summary is None) == (want.fact.summary is None)
        assert rollout.draft_index == want.opponent
        assert rollout.reward == pytest.approx(want.reward, abs=1e-12)
        assert rollout.advantage == pytest.approx(want.advantage, abs=1e-12)


def rows_of(player: str, groups: Sequence[Group]) -> list[Row]:
    """A player's step as the reference's loss takes it."""
    return [
        Row(rollout.prompt.ids, rollout.completion.ids, rollout.advantage, rollout.verdict.masked)
        for group in groups
        if group.player == player
        for rollout in group.rollouts
    ]


def gradient(policy: Policy, player: str, groups: Sequence[Group], recipe: Recipe) -> tuple[float, dict[str, Any]]:
    """What the product computes, with nothing left behind."""
    parameters = policy.parameters(player)
    for parameter in parameters.values():
        parameter.requires_grad_(True)
        parameter.grad = None
    own = [group for group in groups if group.player == player]
    loss, _, _ = accumulate_gradient(policy, player, own, recipe.optim, recipe.rollout.temperature)
    found = {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in parameters.items()}
    for parameter in parameters.values():
        parameter.grad = None
    return loss, found


def check_gradient(policy: Policy, player: str, groups: Sequence[Group], recipe: Recipe) -> float:
    seat = policy.seats[player]
    want_loss, want = reference.loss_and_gradient(seat.model, seat.adapter, rows_of(player, groups), knobs(recipe))
    loss, found = gradient(policy, player, groups, recipe)
    assert loss == pytest.approx(want_loss, abs=1e-6)
    assert found.keys() == want.keys()
    largest = max(float(value.abs().max()) for value in want.values())
    for name in want:
        assert (found[name] - want[name]).abs().max() <= 1e-6, name
    return largest


def snapshot(policy: Policy) -> dict[str, torch.Tensor]:
    """Every tensor of every model, frozen and trainable."""
    return {
        f"{player}/{name}": tensor.detach().clone()
        for player, seat in policy.seats.items()
        for name, tensor in seat.model.named_parameters()
    }


def train_step(policy: Policy, recipe: Recipe, pair: Pairing, groups: list[Group], optimisers: dict[str, Any]) -> None:
    """Update as the loop does, and hold that only the player whose turn it is moves."""
    for player in dict.fromkeys(pair):
        before = snapshot(policy)
        own = [group for group in groups if group.player == player]
        done = update(
            policy, player, own, optimisers[player], recipe.optim, recipe.rollout.temperature, recipe.optim.lr
        )
        after = snapshot(policy)
        moved = {name for name in before if not torch.equal(before[name], after[name])}
        mine = f".{policy.seats[player].adapter}."
        assert all(mine in name for name in moved)
        assert bool(moved) == done.applied
        for other, seat in policy.seats.items():
            assert all(p.grad is None for p in seat.model.parameters()), f"{other} keeps a gradient"


@pytest.mark.parametrize("preset", TRAINED)
def test_steps_of_every_trained_method_equal_the_reference(preset, folder):
    recipe = make_recipe(folder, preset)
    policy = Policy(recipe)
    board, engine = arena(recipe, policy)
    base = policy.base_hash("A")
    optimisers = {name: make_optimiser(policy.parameters(name), recipe.optim) for name in recipe.cast}
    sizes, players = [], set()
    for step in range(4):
        script = script_of(step, recipe.rollout.group_size)
        pair, groups = played(board, engine, step, script)
        assert tuple(pair) == reference.who(step, recipe.cast, recipe.method.roles)
        check_groups(recipe, pair, problems_of(step), script, groups)
        for player in {group.player for group in groups}:
            sizes.append(check_gradient(policy, player, groups, recipe))
            players.add(player)
        train_step(policy, recipe, pair, groups, optimisers)
    assert policy.base_hash("A") == base
    assert players == set(recipe.cast)
    assert min(sizes) > 1e-3, "gradients this small would agree by being nothing"


@pytest.mark.parametrize("preset", UNTRAINED)
def test_untrained_methods_score_alike_but_take_no_step(preset, folder):
    recipe = make_recipe(folder, preset)
    assert recipe.training_steps == 0
    policy = Policy(recipe)
    assert all(not tensor.any() for name, tensor in policy.parameters("A").items() if "lora_B" in name)
    board, engine = arena(recipe, policy)
    script = script_of(0, recipe.rollout.group_size)
    pair, groups = played(board, engine, 0, script)
    check_groups(recipe, pair, problems_of(0), script, groups)


KNOBS = {
    "bonus weight": {"bonus": 2.5},
    "bonus zero": {"bonus": 0.0},
    "no format term": {"format_weight": 0.0},
    "bonus without summary": {"bonus_needs_summary": False},
    "tie-break": {"tie_break": 0.25, "bonus": 0.3},
    "shared and read": {"opponent": "shared"},
    "shared margin, hidden": {"exchange": "none", "opponent": "shared", "reward": "margin"},
    "margin, weighted": {"reward": "margin", "bonus": 0.7, "tie_break": 0.5},
    "margin without summary": {"reward": "margin", "bonus_needs_summary": False},
    "shuffled margin": {"exchange": "shuffled", "reward": "margin"},
    "hidden but per rollout": {"exchange": "none"},
    "fixed and cooperative": {"roles": "fixed", "reward": "cooperative"},
}


@pytest.mark.parametrize("name", KNOBS)
def test_rewards_under_each_knob_equal_the_reference(name, folder):
    recipe = make_recipe(folder, KNOBS[name], rollout={"group_size": 8})
    policy = Policy(recipe)
    board, engine = arena(recipe, policy)
    for step in range(6):
        script = script_of(step, 8)
        pair, groups = played(board, engine, step, script)
        check_groups(recipe, pair, problems_of(step), script, groups)


OPTIMS = {
    "sequence": {"denominator": "sequence"},
    "kl": {"kl": 0.3},
    "sequence and kl": {"denominator": "sequence", "kl": 0.1},
    "one row at a time": {"micro_batch_tokens": 1},
    "all at once": {"micro_batch_tokens": 100_000},
}


@pytest.mark.parametrize("preset", ["agon", "self_refine", "grpo"])
@pytest.mark.parametrize("name", OPTIMS)
def test_gradients_under_each_loss_setting_equal_the_reference(name, preset, folder):
    recipe = make_recipe(folder, preset, optim=OPTIMS[name])
    policy = Policy(recipe)
    # Away from the start, so that every tensor has a gradient and the KL term is not zero.
    for player in recipe.cast:
        nudge(policy, player, 0.01)
    board, engine = arena(recipe, policy)
    optimisers = {player: make_optimiser(policy.parameters(player), recipe.optim) for player in recipe.cast}
    for step in range(2):
        script = script_of(step, 4)
        pair, groups = played(board, engine, step, script)
        for player in dict.fromkeys(pair):
            assert check_gradient(policy, player, groups, recipe) > 1e-3
        train_step(policy, recipe, pair, groups, optimisers)


def nudge(policy: Policy, player: str, size: float) -> None:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in policy.parameters(player).values():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * size)


def test_three_players_take_turns_and_the_idle_one_stays(folder):
    recipe = make_recipe(folder, players={"A": {}, "B": {"noise": 0.05}, "C": {"noise": 0.02}})
    policy = Policy(recipe)
    board, engine = arena(recipe, policy)
    optimisers = {name: make_optimiser(policy.parameters(name), recipe.optim) for name in recipe.cast}
    pairs = []
    for step in range(6):
        script = script_of(step, 4)
        pair, groups = played(board, engine, step, script)
        check_groups(recipe, pair, problems_of(step), script, groups)
        for player in pair:
            assert check_gradient(policy, player, groups, recipe) > 1e-3
        (idle,) = set(recipe.cast) - set(pair)
        before = {name: p.detach().clone() for name, p in policy.parameters(idle).items()}
        train_step(policy, recipe, pair, groups, optimisers)
        assert all(torch.equal(before[name], p) for name, p in policy.parameters(idle).items())
        pairs.append(pair)
    assert sorted(pairs) == sorted(directions(recipe.cast)), "a round holds every ordered pair once"


def test_players_on_bases_of_their_own_equal_the_reference(folder, tmp_path):
    other = write_model(tmp_path / "other", seed=9, tied=True, layers=1)
    players = {"A": {}, "B": {"noise": 0.05, "model": {"id": str(other), "dtype": "float32"}}}
    recipe = make_recipe(folder, players=players)
    policy = Policy(recipe)
    assert policy.seats["A"].model is not policy.seats["B"].model
    bases = {name: policy.base_hash(name) for name in recipe.cast}
    assert bases["A"] != bases["B"]
    board, engine = arena(recipe, policy)
    optimisers = {name: make_optimiser(policy.parameters(name), recipe.optim) for name in recipe.cast}
    for step in range(3):
        script = script_of(step, 4)
        pair, groups = played(board, engine, step, script)
        check_groups(recipe, pair, problems_of(step), script, groups)
        for player in pair:
            assert check_gradient(policy, player, groups, recipe) > 1e-3
        train_step(policy, recipe, pair, groups, optimisers)
    assert {name: policy.base_hash(name) for name in recipe.cast} == bases


def test_prompts_are_the_recipes_words_in_the_models_template(folder):
    recipe = make_recipe(folder)
    policy = Policy(recipe)
    board, engine = arena(recipe, policy)
    script = script_of(0, 4)
    _, groups = played(board, engine, 0, script)
    tok = policy.seats["A"].tokenizer
    plain = rival = 0
    for group in groups:
        for i, rollout in enumerate(group.rollouts):
            summary = None if group.role == "draft" else script("draft", group.problem.question, i).summary
            said = f" rival {summary}" if summary else ""
            turns = [{"role": "user", "content": f"solve {group.problem.question}{said} :"}]
            whole = tok.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
            assert rollout.prompt.ids == tuple(tok(whole, add_special_tokens=False)["input_ids"])
            plain, rival = plain + (not said), rival + bool(said)
    assert plain > 16, "no challenge without a summary was met"
    assert rival > 0


def test_seeds_name_the_completion_and_never_the_batch(folder):
    recipe = make_recipe(folder)
    policy = Policy(recipe)
    board, engine = arena(recipe, policy)

    def seeds(step: int, numbers: Sequence[int]) -> dict[tuple[str, str, str, int], int]:
        engine.begin(script_of(step, 4), ["draft", "challenge"])
        play(board, pairing(step, recipe.cast, "rotate"), [problem(n) for n in numbers], step, silent)
        return {(role, player, question, index): seed for role, player, question, index, _, seed in engine.seen}

    together, reordered, apart = seeds(0, [2, 3, 6, 7]), seeds(0, [7, 2, 6, 3]), seeds(0, [9, 3])
    assert together == reordered
    assert {key: seed for key, seed in together.items() if key[2] == "q3"} == {
        key: seed for key, seed in apart.items() if key[2] == "q3"
    }
    later = seeds(2, [2, 3, 6, 7])
    drawn = [*together.values(), *later.values(), *seeds(1, [2, 3, 6, 7]).values()]
    assert len(set(drawn)) == len(drawn) == 3 * 32
    other = make_recipe(folder, seed=1)
    board = Arena(other, engine, board.renderers, board.verifier)
    assert not set(seeds(0, [2, 3, 6, 7]).values()) & set(drawn)


def test_one_player_in_both_roles_draws_apart(folder):
    recipe = make_recipe(folder, "self_refine")
    board, engine = arena(recipe, Policy(recipe))
    played(board, engine, 0, script_of(0, 4))
    assert len({entry[5] for entry in engine.seen}) == len(engine.seen) == 32


def test_a_group_does_not_depend_on_its_batch(folder):
    recipe = make_recipe(folder, "competition_only")
    board, engine = arena(recipe, Policy(recipe))

    def groups_of(numbers: Sequence[int]) -> dict[tuple[str, str], Group]:
        engine.begin(script_of(3, 4), ["draft", "challenge"])
        found = play(board, pairing(3, recipe.cast, "rotate"), [problem(n) for n in numbers], 3, silent)
        return {(group.problem.id, group.role): group for group in found}

    many, few = groups_of([1, 2, 3, 6, 7]), groups_of([7, 2])
    assert few == {key: many[key] for key in few}


def test_the_shared_opponent_is_drawn_per_problem_and_step(folder):
    recipe = make_recipe(folder, "competition_only", rollout={"group_size": 8})
    board, engine = arena(recipe, Policy(recipe))
    drawn = []
    for step in range(8):
        _, groups = played(board, engine, step, script_of(step, 8))
        for group in groups[4:]:
            (index,) = {rollout.draft_index for rollout in group.rollouts}
            drawn.append(index)
    assert set(drawn) == set(range(8)), "32 draws from eight drafts miss none of them (chance of a miss 0.1)"


def test_a_shuffled_challenge_never_reads_its_own_problem(folder):
    recipe = make_recipe(folder, "shuffled")
    board, engine = arena(recipe, Policy(recipe))
    distances = set()
    for step in range(12):
        pair, groups = played(board, engine, step, script_of(step, 4))
        check_groups(recipe, pair, problems_of(step), script_of(step, 4), groups)
        order = [group.problem.question for group in groups[:4]]
        for p, group in enumerate(groups[4:]):
            for words in shown(group):
                if words is not None:
                    assert words[1] != group.problem.question
                    distances.add((order.index(words[1]) - p) % 4)
    assert distances == {1, 2, 3}, "the other problem is not always the same neighbour"


def test_a_shuffled_evaluation_of_one_problem_shows_the_plain_prompt(folder):
    recipe = make_recipe(folder, "shuffled")
    board, engine = arena(recipe, Policy(recipe))
    engine.begin(script_of(0, 1), ["draft", "challenge"])
    drafts = draft(board, "A", [problem(1)], 1, "eval dev", silent)
    finals = challenge(board, "B", drafts, "shuffled", "per_rollout", "eval dev", silent)
    assert shown(finals[0]) == [None]


def test_what_a_challenge_read_is_the_summary_as_it_was_cut(folder):
    recipe = make_recipe(folder, summary={"max_tokens": 1})
    board, engine = arena(recipe, Policy(recipe))
    engine.begin(script_of(0, 4), ["draft", "challenge"])
    drafts = draft(board, "A", problems_of(0), 4, "step 0", silent)
    finals = challenge(board, "B", drafts, "rival", "per_rollout", "step 0", silent)
    pairs = [pair for d, f in zip(drafts, finals, strict=True) for pair in zip(d.rollouts, f.rollouts, strict=True)]
    cut = [(a, b) for a, b in pairs if a.summary is not None and len(a.summary.split()) > 1]
    assert cut
    assert all(b.read_summary in b.prompt.text and b.read_summary != a.summary for a, b in cut)


def scripted_rows(draft_kind: str, challenge_kind: str, folder: Any, method: dict[str, Any]) -> tuple[Group, Group]:
    """One problem whose drafts and challenges are all of one kind, except a truncated last one of each."""
    recipe = make_recipe(folder, method)
    board, engine = arena(recipe, Policy(recipe))

    def say(role: str, question: str, index: int) -> Any:
        kind = "truncated" if index == 3 else draft_kind if role == "draft" else challenge_kind
        fill = 9 if role == "draft" else 2
        return line(kind, f"{'D' if role == 'draft' else 'C'} {question} x{index}", str(int(question[1:]) % 11), fill)

    engine.begin(say, ["draft", "challenge"])
    drafts, challenges = play(board, pairing(0, recipe.cast, "rotate"), [problem(5)], 0, silent)
    return drafts, challenges


LADDER = [
    # draft, challenge, method, reward of the challenge, by the method's own numbers
    ("wrong", "wrong", {}, 0.5),
    ("right", "right", {}, 2.5),
    ("wrong", "right", {}, 3.5),
    ("right", "wrong", {}, 0.5),
    ("wrong", "right", {"preset": "coop"}, 2.5),
    ("unreadable", "right", {}, 3.5),
    ("slow", "right", {}, 3.5),
    ("fault", "right", {}, 2.5),
    ("fault", "right", {"preset": "margin"}, 2.5),
    ("fault", "right", {"bonus_needs_summary": False}, 2.5),
    ("truncated", "right", {}, 2.5),
    ("truncated", "right", {"bonus_needs_summary": False}, 3.5),
    ("unclosed", "right", {}, 2.5),
    ("empty_wrong", "right", {}, 2.5),
    ("truncated", "right", {"preset": "competition_only", "opponent": "per_rollout"}, 3.5),
    ("right", "wrong", {"preset": "margin"}, -0.5),
    ("right", "right", {"preset": "margin"}, 2.5),
    ("wrong", "right", {"preset": "margin"}, 3.5),
    ("truncated", "right", {"preset": "margin"}, 2.5),
    ("right", "right", {"preset": "agon_short"}, 2.75),
    ("empty", "right", {"preset": "agon_short"}, 2.75),
    ("empty", "right", {"preset": "margin"}, 2.5),
    ("wrong", "right", {"preset": "agon_short"}, 3.5),
    ("fault", "right", {"preset": "agon_short"}, 2.5),
    ("right", "right_not_last", {}, 2.0),
    ("wrong", "right_two_tags", {}, 3.0),
    ("wrong", "two_blocks", {}, 3.0),
    ("wrong", "unclosed", {}, 0.0),
    ("wrong", "slow", {}, 0.5),
    ("wrong", "right", {"bonus": 0.4, "format_weight": 0.2}, 2.6),
]


@pytest.mark.parametrize(("draft_kind", "challenge_kind", "method", "reward"), LADDER)
def test_the_ladder_in_plain_numbers(draft_kind, challenge_kind, method, reward, folder):
    _, challenges = scripted_rows(draft_kind, challenge_kind, folder, method)
    assert [r.reward for r in challenges.rollouts[:3]] == pytest.approx([reward] * 3, abs=1e-12)


def test_a_drafter_is_never_paid_for_misleading(folder):
    for challenge_kind in ("right", "wrong", "fault"):
        drafts, _ = scripted_rows("wrong", challenge_kind, folder, {"preset": "margin", "bonus": 5.0})
        assert [r.reward for r in drafts.rollouts] == [0.5, 0.5, 0.5, 0.0]


def test_updates_from_other_states_of_requires_grad(folder):
    """Whatever was sampled, disabled or switched before, the player whose turn it is moves and no other does."""
    recipe = make_recipe(folder, optim={"kl": 0.1})
    policy = Policy(recipe)
    board, engine = arena(recipe, policy)
    optimisers = {name: make_optimiser(policy.parameters(name), recipe.optim) for name in recipe.cast}
    pair, groups = played(board, engine, 0, script_of(0, 4))
    rows = [((4, 5, 6), (7, 8))]
    for disturb in ("A", "B"):
        with torch.no_grad():
            policy.logprobs(disturb, rows, 1.0, bare=True)
        for player in policy.seats:
            for parameter in policy.parameters(player).values():
                parameter.requires_grad_(False)
        check_gradient(policy, "A", groups, recipe)
        train_step(policy, recipe, pair, groups, optimisers)


def test_the_reference_is_untouched_by_the_product(folder):
    """The reference copies the model, so it must leave no trace in the one under test."""
    recipe = make_recipe(folder)
    policy = Policy(recipe)
    seat = policy.seats["A"]
    state = copy.deepcopy([(n, p.requires_grad, p.grad) for n, p in seat.model.named_parameters()])
    reference.loss_and_gradient(seat.model, seat.adapter, [Row((4, 5), (6, 7), 1.0)], knobs(recipe))
    assert state == [(n, p.requires_grad, p.grad) for n, p in seat.model.named_parameters()]
