"""Log-probabilities, loss, micro-batches and the sampler's draw against naive statements of the same thing."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

import reference
from agon_cli import forward
from agon_cli.batching import by_token_budget
from agon_cli.engines.sampling import draw, uniforms
from agon_cli.losses import PolicyBatch, policy_gradient_loss, token_logprobs
from agon_cli.policy import Policy
from agon_cli.recipe.schema import Optim
from agon_cli.types import Completion, Group, Prompt, Rollout, Sampling, Verdict
from agon_cli.update import accumulate_gradient, token_weights
from reference import Row
from scripted import knobs, make_recipe, problem, write_model

ONE = 1.0 - 2.0**-24
"""The largest number below 1 that the sampler's stream can hold."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def policy(folder):
    """Player B of this policy has every adapter tensor away from zero."""
    return Policy(make_recipe(folder))


def rollout(ids: tuple[int, ...], prompt: tuple[int, ...], advantage: float, status: str = "correct") -> Rollout:
    completion = Completion(ids, tuple(-1.0 for _ in ids), "stop", "")
    return Rollout(Prompt("", prompt), completion, None, Verdict(status), 1, advantage=advantage)


def mixture(count: int, seed: int, masked: int = 0) -> list[Rollout]:
    """Rows of very different lengths, some without advantage, the last `masked` ungradable."""
    dice = random.Random(seed)
    rows = []
    for index in range(count):
        prompt = tuple(dice.randrange(3, 60) for _ in range(dice.randrange(1, 20)))
        ids = tuple(dice.randrange(3, 60) for _ in range(dice.randrange(1, 25)))
        advantage = 0.0 if index % 5 == 4 else dice.uniform(-2, 2)
        rows.append(rollout(ids, prompt, advantage))
    for index in range(count - masked, count):
        rows[index] = replace(rows[index], verdict=Verdict("grader_error"), advantage=0.0)
    return rows


def gradients(policy: Policy, rows: list[Rollout], optim: Optim, temperature: float = 0.7) -> dict[str, torch.Tensor]:
    parameters = policy.parameters("B")
    for parameter in parameters.values():
        parameter.requires_grad_(True)
        parameter.grad = None
    accumulate_gradient(policy, "B", [Group(problem(1), "B", "draft", tuple(rows))], optim, temperature)
    found = {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in parameters.items()}
    for parameter in parameters.values():
        parameter.grad = None
    return found


def furthest(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def reference_gradient(policy: Policy, rows: list[Rollout], recipe) -> dict[str, torch.Tensor]:
    seat = policy.seats["B"]
    said = [Row(r.prompt.ids, r.completion.ids, r.advantage, r.verdict.masked) for r in rows]
    return reference.loss_and_gradient(seat.model, seat.adapter, said, knobs(recipe))[1]


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("chunk", [1, 3, 7, 64])
def test_chunked_logprobs_equal_a_log_softmax_over_the_whole_vocabulary(chunk, trained):
    torch.manual_seed(0)
    hidden = torch.randn(23, 16, requires_grad=True)
    weight = torch.randn(50, 16, requires_grad=trained)
    targets = torch.randint(50, (23,))
    found = token_logprobs(hidden, targets, lambda h: h @ weight.T, 0.6, chunk * 50)
    want = torch.log_softmax(hidden @ weight.T / 0.6, dim=-1)[torch.arange(23), targets]
    torch.testing.assert_close(found, want, rtol=0, atol=1e-5)
    coefficients = torch.randn(23)
    learns = [hidden, weight] if trained else [hidden]
    naive = torch.autograd.grad((want * coefficients).sum(), learns)
    (found * coefficients).sum().backward()
    for ours, plain in zip(learns, naive, strict=True):
        torch.testing.assert_close(ours.grad, plain, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(token_logprobs(hidden, targets, lambda h: h @ weight.T, 0.6, chunk * 50), found)


def test_an_adapter_on_the_head_alone_is_trained():
    weight = torch.randn(50, 16, requires_grad=True)
    token_logprobs(torch.randn(5, 16), torch.arange(5), lambda h: h @ weight.T, 1.0).sum().backward()
    assert weight.grad is not None
    assert weight.grad.abs().max() > 0


def test_no_more_logits_exist_at_once_than_was_said():
    rows = []

    def head(hidden):
        rows.append(len(hidden))
        return hidden.repeat(1, 25)

    hidden = torch.randn(90, 4, requires_grad=True)
    token_logprobs(hidden, torch.zeros(90, dtype=torch.long), head, 1.0, 2000).sum().backward()
    assert rows == [1, 20, 20, 20, 20, 10], "the logits of a frozen head are computed once"


def test_a_head_behind_a_soft_cap_passes_its_slope():
    torch.manual_seed(2)
    hidden, weight = torch.randn(9, 8, requires_grad=True), torch.randn(30, 8)
    targets = torch.randint(30, (9,))

    def head(hidden):
        return torch.tanh(hidden @ weight.T / 3) * 3

    want = torch.log_softmax(head(hidden), dim=-1)[torch.arange(9), targets]
    (naive,) = torch.autograd.grad(want.sum(), hidden)
    token_logprobs(hidden, targets, head, 1.0, 60).sum().backward()
    torch.testing.assert_close(hidden.grad, naive, rtol=1e-5, atol=1e-5)


def test_logprobs_of_huge_logits_are_finite_and_normalised():
    hidden = torch.tensor([[3e4], [-3e4]])
    weight = torch.tensor([[1.0], [0.5], [-1.0]])
    for target, want in ((0, [0.0, -6e4]), (2, [-6e4, 0.0])):
        found = token_logprobs(hidden, torch.full((2,), target), lambda h: h @ weight.T, 1.0)
        torch.testing.assert_close(found, torch.tensor(want))


def test_logprobs_of_half_precision_logits_are_taken_in_float32():
    torch.manual_seed(1)
    logits = (torch.randn(5, 40) * 8).bfloat16()
    targets = torch.randint(40, (5,))
    found = token_logprobs(logits, targets, lambda h: h.clone(), 0.9)
    assert found.dtype == torch.float32
    want = torch.log_softmax(logits.double() / 0.9, dim=-1)[torch.arange(5), targets]
    torch.testing.assert_close(found.double(), want, rtol=0, atol=1e-5)


def test_no_tokens_give_no_logprobs():
    assert token_logprobs(torch.zeros(0, 4), torch.zeros(0, dtype=torch.long), lambda h: h, 1.0).shape == (0,)


def test_policy_logprobs_of_padded_rows_equal_each_row_alone(policy):
    rows = [(r.prompt.ids, r.completion.ids) for r in mixture(9, seed=3)]
    with torch.no_grad():
        together = policy.logprobs("B", rows, 0.8)
        alone = torch.cat([policy.logprobs("B", [row], 0.8) for row in rows])
        seat = policy.seats["B"]
        seat.model.set_adapter(seat.adapter)
        naive = torch.cat([reference.row_logprobs(seat.model, Row(*row, 0.0), 0.8) for row in rows])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)
    torch.testing.assert_close(together.double(), naive, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kl", [0.0, 0.2])
@pytest.mark.parametrize("denominator", ["token", "sequence"])
def test_micro_batches_padding_and_order_change_no_gradient(policy, folder, denominator, kl):
    recipe = make_recipe(folder, optim={"denominator": denominator, "kl": kl})
    rows = mixture(12, seed=4, masked=2)
    want = reference_gradient(policy, rows, recipe)
    assert max(float(value.abs().max()) for value in want.values()) > 1e-3
    for budget in (1, 30, 44, 45, 100, 333, 100_000):
        optim = recipe.optim.model_copy(update={"micro_batch_tokens": budget})
        assert furthest(gradients(policy, rows, optim), want) < 1e-6, budget
    for seed in range(3):
        shuffled = random.Random(seed).sample(rows, len(rows))
        assert furthest(gradients(policy, shuffled, recipe.optim), want) < 1e-6


def test_a_float16_base_keeps_the_small_gradients_of_a_large_step(folder):
    """One over two million tokens is below what float16 can hold."""
    rows = [*mixture(12, seed=5), rollout((9,) * 2_000_000, (4,), 0.0)]
    found = {}
    for dtype in ("float32", "float16"):
        recipe = make_recipe(folder, model={"dtype": dtype})
        found[dtype] = torch.cat([g.flatten() for g in gradients(Policy(recipe), rows, recipe.optim).values()])
    assert torch.cosine_similarity(found["float32"], found["float16"], dim=0) > 0.99


def test_rows_split_over_groups_share_one_denominator(policy, folder):
    recipe = make_recipe(folder)
    rows = mixture(8, seed=5)
    want = gradients(policy, rows, recipe.optim)
    parameters = policy.parameters("B")
    for parameter in parameters.values():
        parameter.grad = None
    groups = [Group(problem(i), "B", "draft", tuple(rows[2 * i : 2 * i + 2])) for i in range(4)]
    accumulate_gradient(policy, "B", groups, recipe.optim, 0.7)
    found = {name: p.grad.clone() for name, p in parameters.items()}
    for parameter in parameters.values():
        parameter.grad = None
    assert furthest(found, want) < 1e-6


@pytest.mark.parametrize("kl", [0.0, 0.2])
@pytest.mark.parametrize("denominator", ["token", "sequence"])
def test_a_masked_row_changes_neither_numerator_nor_denominator(policy, folder, denominator, kl):
    recipe = make_recipe(folder, optim={"denominator": denominator, "kl": kl})
    rows = mixture(6, seed=6)
    fault = replace(rollout(tuple(range(5, 29)), (4, 5), 0.0), verdict=Verdict("grader_error"))
    with_mask = gradients(policy, [*rows[:3], fault, *rows[3:]], recipe.optim)
    assert furthest(with_mask, gradients(policy, rows, recipe.optim)) < 1e-7
    plain = replace(fault, verdict=Verdict("wrong"))
    assert furthest(gradients(policy, [*rows, plain], recipe.optim), with_mask) > 1e-4, "an unmasked row does count"


def test_a_row_without_advantage_still_counts_in_the_denominator(policy, folder):
    recipe = make_recipe(folder)
    rows = [rollout((7, 8, 9), (4, 5), 1.0), rollout((7, 8, 9), (4, 5), -1.0)]
    silent = rollout((20, 21, 22, 23, 24, 25), (4, 5), 0.0)
    alone = gradients(policy, rows[:1], recipe.optim)
    diluted = gradients(policy, [rows[0], silent], recipe.optim)
    for name in alone:
        torch.testing.assert_close(diluted[name], alone[name] / 3, rtol=1e-4, atol=1e-6)


def test_token_weights_by_hand():
    rows = [rollout((1,) * 2, (4,), 1.0), rollout((1,) * 6, (4,), 1.0), rollout((1,) * 50, (4,), 0.0, "grader_error")]
    assert token_weights(rows, "token")[:2] == [1 / 8, 1 / 8]
    assert token_weights(rows, "sequence")[:2] == [1 / 4, 1 / 12]


def test_the_loss_is_minus_the_weighted_advantage_and_its_gradient_the_policy_gradient():
    logprobs = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    batch = PolicyBatch(logprobs, torch.tensor([2.0, -1.0, 0.5]), torch.tensor([0.25, 0.5, 0.25]))
    loss, sums = policy_gradient_loss(batch)
    assert float(loss) == pytest.approx(-(0.5 - 0.5 + 0.125))
    assert sums == {}
    loss.backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([-0.5, 0.5, -0.125]))


@given(st.lists(st.tuples(st.floats(-8, 0), st.floats(-8, 0)), min_size=1, max_size=6), st.floats(0.01, 2))
@settings(max_examples=60, deadline=None)
def test_the_kl_term_is_the_k3_estimate_and_never_negative(pairs, kl):
    policy_lp = torch.tensor([p for p, _ in pairs], dtype=torch.float64, requires_grad=True)
    base_lp = torch.tensor([q for _, q in pairs], dtype=torch.float64)
    count = len(pairs)
    weights = torch.full((count,), 1 / count, dtype=torch.float64)
    batch = PolicyBatch(policy_lp, torch.zeros(count, dtype=torch.float64), weights, base_lp)
    loss, sums = policy_gradient_loss(batch, kl)
    k3 = sum(math.exp(q - p) - (q - p) - 1 for p, q in pairs) / count
    assert sums["kl"] == pytest.approx(k3, abs=1e-9)
    assert sums["kl"] >= 0
    assert float(loss.detach()) == pytest.approx(kl * k3, abs=1e-9)
    loss.backward()
    want = torch.tensor([kl * (p - q) / count for p, q in pairs], dtype=torch.float64)
    torch.testing.assert_close(policy_lp.grad, want)


@given(st.lists(st.integers(1, 60), max_size=30), st.integers(1, 200))
@settings(max_examples=200, deadline=None)
def test_batches_hold_every_row_once_within_the_budget(lengths, budget):
    batches = by_token_budget(lengths, budget)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        widest = max(lengths[index] for index in batch)
        assert len(batch) == 1 or len(batch) * widest <= budget


@pytest.mark.parametrize(
    ("top_p", "top_k"), [(1.0, 0), (0.9, 0), (0.5, 0), (0.05, 0), (1.0, 3), (1.0, 1000), (0.8, 4), (0.95, 1)]
)
def test_draws_follow_the_nucleus_and_report_the_whole_distribution(top_p, top_k):
    torch.manual_seed(2)
    logits = torch.randn(1, 20) * 2
    temperature = 0.8
    sampling = Sampling(temperature, top_p, top_k, 1)
    logprobs = torch.log_softmax(logits[0].double() / temperature, dim=-1)
    probabilities = logprobs.exp().tolist()
    allowed = reference.nucleus(probabilities, top_p, top_k)
    count = 20_000
    draws = uniforms([11], count)[0]
    tokens, reported = draw(logits.expand(count, -1), draws, sampling)
    torch.testing.assert_close(reported.double(), logprobs[tokens], rtol=0, atol=1e-5)
    assert set(tokens.tolist()) <= allowed
    mass = sum(probabilities[i] for i in allowed)
    kept = sorted(allowed)
    expected = [count * probabilities[i] / mass for i in kept]
    found = [int((tokens == i).sum()) for i in kept]
    if len(kept) > 1:
        likely = [i for i, size in enumerate(expected) if size >= 5]
        rest = count - sum(expected[i] for i in likely), count - sum(found[i] for i in likely)
        tail = [rest] if rest[0] > 1e-6 else []
        want = [expected[i] for i in likely] + [pair[0] for pair in tail]
        got = [found[i] for i in likely] + [pair[1] for pair in tail]
        assert chisquare(got, want).pvalue > 1e-3


@given(st.integers(0, 10_000), st.floats(0.01, 1.0), st.integers(2, 40))
@settings(max_examples=150, deadline=None)
def test_every_uniform_number_gives_an_allowed_token(seed, top_p, width):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, width, generator=generator) * 4
    probabilities = torch.softmax(logits[0], dim=-1)
    # A token within rounding of the cut may fall either way.
    slack = reference.nucleus(probabilities.double().tolist(), min(1.0, top_p + 1e-5), 0)
    for number in (0.0, 0.37, ONE):
        token, logprob = draw(logits, torch.tensor([number], dtype=torch.float32), Sampling(1.0, top_p, 0, 1))
        assert int(token) in slack
        assert torch.isfinite(logprob).all()


@pytest.mark.parametrize("top_p", [1.0, 0.9])
@pytest.mark.parametrize("number", [0.0, 0.5, ONE, 1.0])
def test_tokens_without_mass_are_never_drawn(top_p, number):
    """Forbidden tokens stand at both ends, where rounding of the cumulative sum would land."""
    logits = torch.full((1, 700), float("-inf"))
    logits[0, 300:303] = torch.tensor([0.0, 1.0, 2.0])
    token, logprob = draw(logits, torch.tensor([number]), Sampling(1.0, top_p, 0, 1))
    assert 300 <= int(token) < 303
    assert math.isfinite(float(logprob))


def test_a_flat_distribution_over_a_large_vocabulary_keeps_its_whole_nucleus():
    """More than the few hundred likeliest tokens are needed to hold the mass."""
    width = 5000
    logits = torch.zeros(1, width)
    logits[0, ::2] = 0.5
    count = 4000
    tokens, _ = draw(logits.expand(count, -1), uniforms([3], count)[0], Sampling(1.0, 0.9, 0, 1))
    allowed = reference.nucleus(torch.softmax(logits[0].double(), dim=-1).tolist(), 0.9, 0)
    heavy = float((tokens % 2 == 0).double().mean())
    even = math.exp(0.5) / (math.exp(0.5) + 1)
    assert heavy == pytest.approx(even / 0.9, abs=0.03)
    assert len(set(tokens.tolist())) > 2000
    assert len(allowed) > 4000


def test_temperature_sharpens_the_draw_and_the_reported_probability():
    logits = torch.tensor([[0.0, 1.0]])
    for temperature in (0.25, 1.0, 3.0):
        _, logprob = draw(logits, torch.tensor([ONE]), Sampling(temperature, 1.0, 0, 1))
        assert float(logprob) == pytest.approx(-math.log1p(math.exp(-1 / temperature)), abs=1e-6)


def test_uniform_numbers_depend_on_the_row_s_seed_alone():
    together = uniforms([5, 2**63 - 1, 7], 16)
    assert torch.equal(together[1], uniforms([2**63 - 1], 16)[0])
    assert torch.equal(together[:, :4], uniforms([5, 2**63 - 1, 7], 4)), "a longer row starts with the same numbers"
    assert float(together.min()) >= 0
    assert float(together.max()) < 1
    assert len({tuple(row) for row in together.tolist()}) == 3


def test_equally_likely_tokens_are_drawn_alike_whatever_else_is_in_the_batch():
    """Half-precision logits are full of ties; a flat row beside it makes the sampler sort the whole vocabulary."""
    generator = torch.Generator().manual_seed(0)
    row = torch.full((1, 3000), -12.0)
    places = torch.randperm(3000, generator=generator)
    row[0, places[:150]] = 4.0
    row[0, places[150:300]] = 3.5
    draws = uniforms([1], 400)[0]
    sampling = Sampling(1.0, 0.9, 0, 1)
    alone, _ = draw(row.expand(400, -1), draws, sampling)
    mixed, _ = draw(torch.cat([row.expand(400, -1), torch.zeros(1, 3000)]), torch.cat([draws, draws[:1]]), sampling)
    assert torch.equal(alone, mixed[:-1])


@pytest.mark.parametrize("way", ["shared prompts", "recomputed activations"])
def test_a_prompt_computed_once_or_activations_computed_twice_change_no_gradient(policy, way, monkeypatch):
    """Rows of two prompts of different lengths, one of them long; also a completion of a single token."""
    prompts = [tuple(range(4, 30)), (5, 6, 7)]
    rows = [(prompts[i % 3 == 0], tuple(range(9, 10 + i))) for i in range(7)]
    coefficients = torch.randn(sum(len(ids) for _, ids in rows), generator=torch.Generator().manual_seed(0))

    def gradient(share: float, recompute: bool) -> dict[str, torch.Tensor]:
        monkeypatch.setattr(forward, "WORTH_SHARING", share)
        parameters = policy.parameters("B")
        for parameter in parameters.values():
            parameter.grad = None
        (policy.logprobs("B", rows, 0.8, recompute=recompute) * coefficients).sum().backward()
        return {name: parameter.grad.clone() for name, parameter in parameters.items()}

    passes = []
    decoder = policy.seats["B"].model.get_base_model().get_decoder()
    hook = decoder.register_forward_pre_hook(
        lambda _, args, kwargs: passes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    try:
        plain = gradient(2.0, False)
        other = gradient(0.0, False) if way == "shared prompts" else gradient(2.0, True)
    finally:
        hook.remove()
    assert passes == [(7, 32), (2, 26), (7, 6)] if way == "shared prompts" else [(7, 32)] * 2
    assert furthest(plain, other) < 1e-6 * max(1.0, max(float(g.abs().max()) for g in plain.values()))
    assert max(float(g.abs().max()) for g in plain.values()) > 0.1
