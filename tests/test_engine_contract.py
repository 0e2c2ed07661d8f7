"""What every engine must do. An engine is a name in ENGINES with a way to build it; that is all the tests know.

`vllm` and `server` are the real vLLM, in a virtual environment of its own: `make test-vllm`.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from transformers import AutoModelForCausalLM, Qwen3Config, SmolLM3Config
from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

import vllm_server
from agon_cli import engines
from agon_cli.engines.hf import HFEngine
from agon_cli.policy import Policy
from agon_cli.types import Completion, Engine, Prompt, Sampling
from scripted import make_recipe, tokenizer, write_model


class Shared:
    """One engine for every test: a vLLM that is ready is not started again. `budget` means nothing to it."""

    def __init__(self, folder: Path, engine: dict[str, Any]) -> None:
        recipe = make_recipe(folder, engine=engine)
        self.policy = Policy(recipe)
        self.engine = engines.make(recipe, self.policy)

    def __call__(self, budget: int) -> Engine:
        return self.engine


@functools.cache
def shared(name: str) -> Shared:
    folder = vllm_server.model()
    if name == "vllm":
        return Shared(folder, {"type": "vllm"})
    return Shared(folder, {"type": "server", "urls": [vllm_server.running().url], "timeout": 120.0})


REAL = pytest.mark.vllm
ENGINES = ["hf", pytest.param("vllm", marks=REAL), pytest.param("server", marks=REAL)]
TOK = tokenizer()
EOS, END = TOK.convert_tokens_to_ids("<eos>"), TOK.convert_tokens_to_ids("<|end|>")
SAMPLING = Sampling(temperature=1.6, top_p=1.0, top_k=0, max_tokens=20)
PLAYERS = ["A", "B"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=ENGINES)
def bench(request, folder) -> tuple[Policy, Callable[[int], Engine]]:
    if request.param == "hf":
        policy = Policy(make_recipe(folder))
        return policy, lambda budget: HFEngine(policy, budget)
    return shared(request.param).policy, shared(request.param)


@pytest.fixture
def fresh(folder, bench) -> Iterator[tuple[Policy, Engine]]:
    """A policy that a test may change."""
    policy, make = bench
    if not isinstance(make, Shared):
        policy = Policy(make_recipe(folder))
        yield policy, HFEngine(policy, 4096)
        return
    kept = {name: {k: p.detach().clone() for k, p in policy.parameters(name).items()} for name in PLAYERS}
    yield policy, make.engine
    for name in PLAYERS:
        with torch.no_grad():
            for key, parameter in policy.parameters(name).items():
                parameter.copy_(kept[name][key])
        make.engine.publish(name)


def prompt(words: str) -> Prompt:
    return Prompt(words, tuple(TOK(words, add_special_tokens=False)["input_ids"]))


PROMPTS = [
    prompt("<|user|> solve q3 : <|end|> <|assistant|>"),
    prompt("q1"),
    prompt("<|user|> solve q3 rival D q3 x1 w4 w5 w6 w7 1 2 3 4 5 : <|end|> <|assistant|>"),
    prompt("solve q9 w1 : <think> w3"),
]
SEEDS = [[11, 12, 13], [21], [31, 32], [41, 42, 43, 44]]


def flat(completions: list[list[Completion]]) -> list[Completion]:
    return [completion for row in completions for completion in row]


def ids(completions: list[list[Completion]]) -> list[list[tuple[int, ...]]]:
    return [[completion.ids for completion in row] for row in completions]


@pytest.mark.parametrize("player", PLAYERS)
@pytest.mark.parametrize("top_p", [1.0, 0.7])
def test_logprobs_are_the_trainers_on_the_untruncated_distribution(bench, player, top_p):
    policy, make = bench
    sampling = replace(SAMPLING, top_p=top_p)
    found = make(4096).sample(PROMPTS, player, sampling, SEEDS)
    rows = [(PROMPTS[p].ids, c.ids) for p, row in enumerate(found) for c in row]
    with torch.no_grad():
        trainer = policy.logprobs(player, rows, flat(found)[0].scored_at)
    sampled = torch.tensor([value for c in flat(found) for value in c.logprobs])
    assert len(sampled) > 50
    assert (trainer - sampled).abs().max() < 1e-4


def test_there_is_one_completion_per_seed_in_order(bench):
    _, make = bench
    engine = make(4096)
    found = engine.sample(PROMPTS, "B", SAMPLING, SEEDS)
    assert [len(row) for row in found] == [3, 1, 2, 4]
    for p, row in enumerate(SEEDS):
        for i, seed in enumerate(row):
            (alone,) = flat(engine.sample([PROMPTS[p]], "B", SAMPLING, [[seed]]))
            assert found[p][i].ids == alone.ids
            assert found[p][i].logprobs == pytest.approx(alone.logprobs, abs=1e-4)
            assert (found[p][i].finish_reason, found[p][i].text) == (alone.finish_reason, alone.text)


def test_a_prompt_may_ask_for_nothing(bench):
    _, make = bench
    engine = make(4096)
    found = engine.sample(PROMPTS, "A", SAMPLING, [[11], [], [31], []])
    assert [len(row) for row in found] == [1, 0, 1, 0]
    assert found[2][0].ids == flat(engine.sample(PROMPTS[2:3], "A", SAMPLING, [[31]]))[0].ids
    assert engine.sample([], "A", SAMPLING, []) == []


@pytest.mark.parametrize("budget", [1, 40, 90, 200, 1_000_000])
def test_neither_batch_size_nor_padding_nor_order_changes_a_row(bench, budget):
    _, make = bench
    want = ids(make(4096).sample(PROMPTS, "B", SAMPLING, SEEDS))
    assert ids(make(budget).sample(PROMPTS, "B", SAMPLING, SEEDS)) == want
    assert ids(make(budget).sample(PROMPTS[::-1], "B", SAMPLING, SEEDS[::-1])) == want[::-1]


def test_the_same_prompt_twice_is_two_prompts(bench):
    _, make = bench
    twice = [PROMPTS[0], PROMPTS[2], PROMPTS[0]]
    found = ids(make(4096).sample(twice, "B", SAMPLING, [[1, 2], [3], [1, 4]]))
    assert found[0][0] == found[2][0]
    assert found[0][1] != found[2][1]


def test_seeds_make_the_difference_and_the_global_generator_none(bench):
    _, make = bench
    engine = make(4096)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = flat(engine.sample(PROMPTS[:1], "A", SAMPLING, [list(range(40))]))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    again = flat(engine.sample(PROMPTS[:1], "A", SAMPLING, [list(range(40))]))
    assert [c.ids for c in first] == [c.ids for c in again]
    assert len({c.ids for c in first}) > 35


def test_the_stop_token_stays_and_the_finish_reason_says_how_it_ended(bench):
    policy, make = bench
    assert set(policy.seats["A"].stop_ids) == {EOS, END}, "the model's second stop token counts too"
    found = flat(make(1 << 20).sample(PROMPTS[:1], "A", SAMPLING, [list(range(300))]))
    ended = Counter(c.ids[-1] for c in found if c.finish_reason == "stop")
    assert ended.keys() == {EOS, END}
    assert any(c.finish_reason == "length" for c in found)
    for completion in found:
        stops = [place for place, token in enumerate(completion.ids) if token in (EOS, END)]
        assert len(completion.logprobs) == len(completion.ids)
        if completion.finish_reason == "stop":
            assert stops == [len(completion.ids) - 1]
            assert completion.text == TOK.decode(completion.ids[:-1])
        else:
            assert stops == []
            assert len(completion.ids) == SAMPLING.max_tokens
            assert completion.text == TOK.decode(completion.ids)


def test_a_stop_on_the_last_allowed_token_is_a_stop(bench):
    _, make = bench
    engine = make(1 << 20)
    long = flat(engine.sample(PROMPTS[:1], "A", SAMPLING, [list(range(200))]))
    seed, stopped = next((s, c) for s, c in enumerate(long) if c.finish_reason == "stop" and len(c.ids) > 2)
    exact = replace(SAMPLING, max_tokens=len(stopped.ids))
    (same,) = flat(engine.sample(PROMPTS[:1], "A", exact, [[seed]]))
    assert (same.ids, same.finish_reason, same.text) == (stopped.ids, "stop", stopped.text)
    (cut,) = flat(engine.sample(PROMPTS[:1], "A", replace(exact, max_tokens=len(stopped.ids) - 1), [[seed]]))
    assert (cut.ids, cut.finish_reason) == (stopped.ids[:-1], "length")


@pytest.mark.parametrize("tokens", [1, 7, 20])
def test_no_stop_before_the_minimum(bench, tokens):
    _, make = bench
    sampling = replace(SAMPLING, min_tokens=tokens)
    found = flat(make(1 << 20).sample(PROMPTS[:1], "A", sampling, [list(range(100))]))
    for completion in found:
        assert len(completion.ids) >= tokens
        assert not {EOS, END} & set(completion.ids[:tokens])
    if tokens < 20:
        assert any(completion.ids[-1] in (EOS, END) for completion in found)


def test_no_habit_of_the_models_own_generation_config_reaches_a_sample(bench):
    """That config asks for top-k 3, temperature 0.3 and a repetition penalty; token frequencies show none of it."""
    policy, make = bench
    count = 3000
    sampling = replace(SAMPLING, max_tokens=1)
    found = flat(make(1 << 20).sample(PROMPTS[2:3], "B", sampling, [list(range(count))]))
    width = len(TOK)
    with torch.no_grad():
        rows = [(PROMPTS[2].ids, (token,)) for token in range(width)]
        probabilities = policy.logprobs("B", rows, sampling.temperature).double().exp()
    seen = Counter(completion.ids[0] for completion in found)
    likely = [token for token in range(width) if probabilities[token] * count >= 5]
    rest = 1.0 - sum(float(probabilities[token]) for token in likely)
    want = [float(probabilities[token]) for token in likely] + [rest]
    got = [seen[token] for token in likely]
    got.append(count - sum(got))
    assert len(likely) > 5
    assert chisquare(got, [count * share / sum(want) for share in want]).pvalue > 1e-3


def test_a_players_weights_are_its_own_and_the_newest(fresh):
    policy, engine = fresh
    before = {name: ids(engine.sample(PROMPTS, name, SAMPLING, SEEDS)) for name in PLAYERS}
    assert before["A"] != before["B"], "B starts from noise"
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters("B").values():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    engine.publish("B")
    after = {name: ids(engine.sample(PROMPTS, name, SAMPLING, SEEDS)) for name in PLAYERS}
    assert after["A"] == before["A"]
    assert after["B"] != before["B"]
    rows = [(PROMPTS[0].ids, after["B"][0][0])]
    (completion,) = flat(engine.sample(PROMPTS[:1], "B", SAMPLING, [[SEEDS[0][0]]]))
    with torch.no_grad():
        trainer = policy.logprobs("B", rows, completion.scored_at)
    assert (trainer - torch.tensor(completion.logprobs)).abs().max() < 1e-4, "the sampler has the published weights"


def test_what_was_computed_under_older_weights_is_not_used_again(fresh):
    """The same prompt before and after a publish: cached keys and values of the older adapter would show."""
    policy, engine = fresh
    for _ in range(3):
        with torch.no_grad():
            for parameter in policy.parameters("B").values():
                parameter.mul_(1.3)
        engine.publish("B")
        found = flat(engine.sample(PROMPTS[2:3], "B", SAMPLING, [[1, 2, 3, 4]]))
        with torch.no_grad():
            trainer = policy.logprobs("B", [(PROMPTS[2].ids, c.ids) for c in found], found[0].scored_at)
        assert (trainer - torch.tensor([v for c in found for v in c.logprobs])).abs().max() < 1e-4


def test_an_engine_samples_after_a_rest_as_before(bench):
    _, make = bench
    engine = make(4096)
    before = ids(engine.sample(PROMPTS, "B", SAMPLING, SEEDS))
    engine.rest()
    engine.rest()
    assert ids(engine.sample(PROMPTS, "B", SAMPLING, SEEDS)) == before


def test_an_untrained_first_player_is_the_base(fresh):
    policy, engine = fresh
    found = engine.sample(PROMPTS, "A", SAMPLING, SEEDS)
    rows = [(PROMPTS[p].ids, c.ids) for p, row in enumerate(found) for c in row]
    with torch.no_grad():
        base = policy.logprobs("A", rows, flat(found)[0].scored_at, bare=True)
    assert (base - torch.tensor([v for c in flat(found) for v in c.logprobs])).abs().max() < 1e-4


def test_an_unknown_player_is_refused(bench):
    _, make = bench
    engine = make(4096)
    with pytest.raises(KeyError):
        engine.sample(PROMPTS[:1], "C", SAMPLING, [[1]])
    with pytest.raises(KeyError):
        engine.publish("C")


def test_sampling_leaves_weights_and_gradients_alone(fresh):
    policy, engine = fresh
    seat: Any = policy.seats["A"]
    before = {name: tensor.detach().clone() for name, tensor in seat.model.named_parameters()}
    for player in ("A", "B", "A"):
        engine.sample(PROMPTS, player, SAMPLING, SEEDS)
        engine.publish(player)
    assert all(torch.equal(before[name], tensor) for name, tensor in seat.model.named_parameters())
    assert all(tensor.grad is None for tensor in seat.model.parameters())


def test_a_base_with_dropout_samples_and_trains_without_it(tmp_path):
    """A ratio of two different dropout masks is no ratio of policies."""
    recipe = make_recipe(write_model(tmp_path / "model", dropout=0.5))
    policy = Policy(recipe)
    found = HFEngine(policy, 4096).sample(PROMPTS, "B", SAMPLING, SEEDS)
    rows = [(PROMPTS[p].ids, c.ids) for p, row in enumerate(found) for c in row]
    trainer = policy.logprobs("B", rows, SAMPLING.temperature).detach()
    assert torch.equal(trainer, policy.logprobs("B", rows, SAMPLING.temperature).detach())
    assert (trainer - torch.tensor([v for c in flat(found) for v in c.logprobs])).abs().max() < 1e-4


COMMON: dict[str, Any] = {
    "vocab_size": len(TOK), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.3,
    "bos_token_id": None, "eos_token_id": EOS, "pad_token_id": TOK.pad_token_id,
}  # fmt: skip
FAMILIES: dict[str, Callable[[], Any]] = {
    "Qwen3": lambda: Qwen3Config(**COMMON, head_dim=16),
    "SmolLM3": lambda: SmolLM3Config(**COMMON),
    "Qwen3.5, linear attention": lambda: Qwen3_5TextConfig(
        **COMMON, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
        linear_value_head_dim=8,
    ),
    "Gemma 4, shared and sliding caches, soft cap": lambda: Gemma4TextConfig(
        **COMMON | {"num_hidden_layers": 6}, head_dim=16, global_head_dim=16, hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=len(TOK), num_kv_shared_layers=2, sliding_window=6,
        layer_types=["sliding_attention", "full_attention"] * 3, final_logit_softcapping=30.0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_that_a_recipe_names_is_sampled_as_it_is_trained(tmp_path, family):
    """Caches differ by family: rows are repeated, padded and dropped in each kind of them."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(FAMILIES[family]()).save_pretrained(tmp_path)
    TOK.save_pretrained(tmp_path)
    policy = Policy(make_recipe(tmp_path, players={"A": {}, "B": {"noise": 0.2}}))
    found = HFEngine(policy, 4096).sample(PROMPTS, "B", SAMPLING, SEEDS)
    rows = [(PROMPTS[p].ids, c.ids) for p, row in enumerate(found) for c in row]
    assert len({len(ids) for _, ids in rows}) > 1, "some rows end before others"
    trainer = policy.logprobs("B", rows, SAMPLING.temperature)
    assert (trainer - torch.tensor([v for c in flat(found) for v in c.logprobs])).abs().max() < 1e-4
    trainer.sum().backward()
    reached = [p for p in policy.parameters("B").values() if p.grad is not None and p.grad.abs().max() > 0]
    assert len(reached) >= 0.8 * len(policy.parameters("B"))


def test_sampling_that_runs_out_of_memory_goes_on_in_smaller_batches_and_gives_the_same(folder):
    policy, told, sizes = Policy(make_recipe(folder)), [], []
    want = ids(HFEngine(policy, 4096).sample(PROMPTS, "B", SAMPLING, SEEDS))

    def before(_: Any, args: Any, kwargs: Any) -> None:
        sizes.append(len(kwargs["input_ids"]) * kwargs["position_ids"].max().item())
        if sizes[-1] > 60:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes.")

    decoder = policy.seats["B"].model.get_base_model().get_decoder()
    hook = decoder.register_forward_pre_hook(before, with_kwargs=True)
    try:
        engine = HFEngine(policy, 400, told.append)
        assert ids(engine.sample(PROMPTS, "B", SAMPLING, SEEDS)) == want
        assert engine.batch_tokens < 400
        assert "out of memory while sampling" in told[0]
        before_that = len(told)
        assert ids(engine.sample(PROMPTS, "B", SAMPLING, SEEDS)) == want
        assert len(told) == before_that
    finally:
        hook.remove()


def test_a_prompt_that_is_asked_twice_is_computed_once(folder):
    policy, rows = Policy(make_recipe(folder)), []
    decoder = policy.seats["B"].model.get_base_model().get_decoder()
    hook = decoder.register_forward_pre_hook(
        lambda _, args, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    try:
        HFEngine(policy, 4096).sample([PROMPTS[0], PROMPTS[2], PROMPTS[0]], "B", SAMPLING, [[1, 2], [3], [1, 4]])
    finally:
        hook.remove()
    assert rows == [2], "later tokens take the short cut"
