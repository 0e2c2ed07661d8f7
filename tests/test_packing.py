"""Weights copied in the order that a processor's kernels read: the same product, and what a sample makes of it."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from peft.tuners.lora.layer import LoraLayer
from torch.nn import functional

from agon_cli import lora, narrow, packing, wide
from agon_cli.engines import lean
from agon_cli.engines.hf import HFEngine
from agon_cli.outline import Outline
from agon_cli.policy import Policy
from agon_cli.types import Prompt, Sampling
from scripted import make_recipe, write_model

needs_library = pytest.mark.skipif(not packing._AVAILABLE, reason="a torch without oneDNN")


@pytest.fixture
def no_layer_is_small(monkeypatch):
    monkeypatch.setattr("agon_cli.lora.SMALL", 0)


def make_policy(folder, tied=False, **sections) -> Policy:
    model = {"id": str(write_model(folder / "model", tied=tied)), "dtype": sections.pop("dtype", "float32")}
    players = {"A": {"noise": 0.3}, "B": {"noise": 0.3}}
    return Policy(make_recipe(folder / "model", model=model, players=players, **sections))


def with_biases(policy: Policy) -> None:
    """Some layers of the base with a bias, others without."""
    made = torch.Generator().manual_seed(1)
    for name, layer in policy.seats["A"].model.named_modules():
        if isinstance(layer, LoraLayer) and not name.endswith("k_proj"):
            layer.base_layer.bias = torch.nn.Parameter(torch.randn(len(layer.base_layer.weight), generator=made))


@needs_library
@pytest.mark.parametrize("rows", [0, 1, 7, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_that_of_float64(rows, dtype):
    made = torch.Generator().manual_seed(rows)
    x_MI, weight_OI = torch.randn(rows, 521, generator=made).to(dtype), torch.randn(601, 521, generator=made)
    result_MO = packing.product(weight_OI)(x_MI)
    assert result_MO.dtype is torch.float32
    torch.testing.assert_close(
        result_MO.double(), functional.linear(x_MI.double(), weight_OI.double()), rtol=0, atol=1e-4
    )
    across_MI = x_MI.t().contiguous().t()
    torch.testing.assert_close(packing.product(weight_OI)(across_MI), result_MO, rtol=0, atol=1e-4)


@needs_library
def test_large_models_and_other_types_and_devices_are_left_alone(monkeypatch):
    like = torch.empty(0)
    assert packing.pays(packing.MOST, packing.TOKENS, like)
    assert not packing.pays(packing.MOST + 1, packing.TOKENS, like)
    assert not packing.pays(1, packing.TOKENS, like.half())
    assert not packing.pays(1, packing.TOKENS, like.to("meta"))
    for has in (True, False):
        monkeypatch.setattr(wide, "_HAS_BFLOAT16", has)
        assert packing.pays(1, packing.TOKENS, like.bfloat16()) is not has
    monkeypatch.setattr(packing, "_AVAILABLE", False)
    assert not packing.pays(1, packing.TOKENS, like)


@needs_library
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(
    ("dtype", "tied", "targets"),
    [
        ("float32", True, "all-linear"),
        ("float32", False, ["q_proj", "up_proj", "lm_head"]),
        ("bfloat16", False, "all-linear"),
    ],
)
def test_a_sample_tells_the_log_probabilities_that_the_trainer_computes(
    tmp_path, monkeypatch, no_layer_is_small, dtype, tied, targets, biased
):
    monkeypatch.setattr(wide, "_HAS_BFLOAT16", False)
    made, product = [], packing.product
    monkeypatch.setattr(packing, "product", lambda weight: made.append(weight.shape) or product(weight))
    policy = make_policy(tmp_path, tied, dtype=dtype, lora={"rank": 4, "alpha": 8.0, "targets": targets})
    if biased:
        with_biases(policy)
    prompt = Prompt("", (7, 8, 9), "")
    before = policy.base_hash("B")
    (row,) = HFEngine(policy, 20).sample([prompt], "B", Sampling(1.0, 1.0, 0, 16, 16), [[1, 2, 3]])
    assert len(made) == 2 * 4 + 1, "four products a layer and the head, once for the three batches of this sample"
    causal = policy.seats["B"].model.get_base_model()
    held = [rows * columns for rows, columns in made]
    assert made[0] == causal.get_input_embeddings().weight.shape, "the head, before the others fill the memory"
    assert lean.copied(causal, 16) == max(sum(held), 2 * held[0])
    assert policy.base_hash("B") == before
    with torch.no_grad():
        trainer = policy.logprobs("B", [(prompt.ids, completion.ids) for completion in row], 1.0)
        bare = policy.logprobs("B", [(prompt.ids, completion.ids) for completion in row], 1.0, bare=True)
    sampled = torch.tensor([value for completion in row for value in completion.logprobs])
    assert (sampled - trainer).abs().mean() < (1e-4 if dtype == "float32" else 0.03)
    assert (sampled - bare).abs().mean() > 0.3, "the adapter does nothing here, so it was not compared"


@needs_library
def test_small_layers_and_unknown_models_are_not_copied(tmp_path, monkeypatch):
    causal = make_policy(tmp_path).seats["A"].model.get_base_model()
    assert lean.copied(causal, 16) == 0, "every layer is small"
    monkeypatch.setattr("agon_cli.lora.SMALL", 0)
    assert lean.copied(causal, 16) > 0
    monkeypatch.setattr(
        causal.get_decoder().config, "layer_types", ["full_attention", "sliding_attention"], raising=False
    )
    assert lean.copied(causal, 16) == 0, "no short cut reads a window, so no copy is of use"
    monkeypatch.undo()
    monkeypatch.setattr("agon_cli.lora.SMALL", 0)
    monkeypatch.setattr(lean, "KNOWN", set())
    assert lean.copied(causal, 16) == 0


@needs_library
def test_of_a_base_of_four_bits_nothing_is_copied_and_nothing_is_planned(tmp_path, monkeypatch, no_layer_is_small):
    pytest.importorskip("bitsandbytes")
    monkeypatch.setattr(wide, "_HAS_BFLOAT16", False)
    folder = write_model(tmp_path / "model")
    recipe = make_recipe(folder, model={"dtype": "bfloat16", "quantization": "nf4"})
    assert lean.copied(Policy(recipe).seats["A"].model.get_base_model(), 16) == 0
    assert Outline(recipe.model, recipe.lora).copied(16) == 0


@needs_library
@pytest.mark.parametrize("tokens", [packing.TOKENS - 1, packing.TOKENS])
def test_short_completions_are_not_worth_a_copy(tmp_path, monkeypatch, no_layer_is_small, tokens):
    made, product = [], packing.product
    monkeypatch.setattr(packing, "product", lambda weight: made.append(1) or product(weight))
    engine = HFEngine(make_policy(tmp_path), 4096)
    engine.sample([Prompt("", (7, 8, 9), "")], "B", Sampling(1.0, 1.0, 0, tokens), [[1]])
    engine.sample([], "B", Sampling(1.0, 1.0, 0, tokens), [])
    assert len(made) == (9 if tokens == packing.TOKENS else 0)


@needs_library
def test_where_memory_does_not_suffice_for_a_copy_a_sample_does_without(tmp_path, monkeypatch, no_layer_is_small):
    made, product, told = [], packing.product, []

    def third_time_unlucky(weight):
        made.append(1)
        if len(made) == 3:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes.")
        return product(weight)

    policy, prompt, sampling = make_policy(tmp_path), Prompt("", (7, 8, 9), ""), Sampling(1.0, 1.0, 0, 16, 16)
    ((wanted,),) = HFEngine(policy, 4096).sample([prompt], "B", sampling, [[1]])
    monkeypatch.setattr(packing, "product", third_time_unlucky)
    engine = HFEngine(policy, 4096, told.append)
    for _ in range(2):
        ((completion,),) = engine.sample([prompt], "B", sampling, [[1]])
        assert completion.ids == wanted.ids
    assert len(made) == 3, "it is not tried again"
    assert [line.partition(":")[0] for line in told] == ["out of memory for a copy of the weights"]
    monkeypatch.setattr(packing, "product", lambda weight: weight.no_such_thing)
    with pytest.raises(AttributeError):
        HFEngine(policy, 4096).sample([prompt], "B", sampling, [[1]])


@needs_library
def test_a_sample_reads_the_adapter_of_its_time_and_of_its_player(tmp_path, no_layer_is_small):
    policy = make_policy(tmp_path)
    engine, prompt, sampling = HFEngine(policy, 4096), Prompt("", (7, 8, 9), ""), Sampling(1.0, 1.0, 0, 16, 16)

    def told(player: str) -> float:
        ((completion,),) = engine.sample([prompt], player, sampling, [[5]])
        with torch.no_grad():
            trainer = policy.logprobs(player, [(prompt.ids, completion.ids)], 1.0)
        torch.testing.assert_close(torch.tensor(completion.logprobs), trainer, rtol=0, atol=1e-4)
        return sum(completion.logprobs)

    first = [told("A"), told("B")]
    assert first[0] != first[1]
    with torch.no_grad():
        for parameter in policy.parameters("A").values():
            parameter.mul_(-0.5)
    assert told("A") != first[0]
    assert told("B") == first[1]


@needs_library
def test_a_copy_goes_with_its_sample_and_not_when_garbage_is_looked_for(tmp_path, monkeypatch, no_layer_is_small):
    made, reorder = [], torch.ops.mkldnn._reorder_linear_weight

    def watched(weight, rows):
        made.append(weakref.ref(found := reorder(weight, rows)))
        return found

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", watched)
    engine = HFEngine(make_policy(tmp_path), 4096)
    gc.collect()
    gc.disable()
    try:
        engine.sample([Prompt("", (7, 8, 9), "")], "B", Sampling(1.0, 1.0, 0, 16, 16), [[1]])
        assert len(made) == 9
        assert [copy() for copy in made] == [None] * 9
    finally:
        gc.enable()


def test_without_the_library_few_rows_are_multiplied_another_way(tmp_path, monkeypatch, no_layer_is_small):
    monkeypatch.setattr(packing, "_AVAILABLE", False)
    monkeypatch.setattr(packing, "product", None)
    asked, linear = [], narrow.linear
    monkeypatch.setattr(narrow, "linear", lambda *args, **kwargs: asked.append(1) or linear(*args, **kwargs))
    policy = make_policy(tmp_path)
    asked.clear()
    HFEngine(policy, 4096).sample([Prompt("", (7, 8, 9), "")], "B", Sampling(1.0, 1.0, 0, 16, 16), [[1]])
    assert len(asked) >= 16


@pytest.mark.parametrize("copied", [False, pytest.param(True, marks=needs_library)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("few", ["small", "large"])
def test_layers_side_by_side_are_what_each_computes(tmp_path, monkeypatch, copied, dtype, few):
    """q, k and v as `joint` computes them, k without a bias, v without an adapter: one row, and several."""
    monkeypatch.setattr("agon_cli.lora.SMALL", 1 << 30 if few == "small" else 0)
    name = str(dtype).removeprefix("torch.")
    policy = make_policy(tmp_path, dtype=name, lora={"rank": 4, "alpha": 8.0, "targets": ["q_proj", "k_proj"]})
    with_biases(policy)
    policy.seats["B"].model.set_adapter(policy.seats["B"].adapter)
    heads = policy.seats["B"].model.get_base_model().get_decoder().layers[0].self_attn
    heads.v_proj.bias = torch.nn.Parameter(torch.ones(len(heads.v_proj.weight)))
    layers = [heads.q_proj, heads.k_proj, heads.v_proj.to(dtype)]
    heads.q_proj.base_layer.to(dtype)  # its bias
    for rows in (1, 5):
        x_MI = torch.randn(rows, heads.q_proj.in_features, generator=torch.Generator().manual_seed(rows)).to(dtype)
        with torch.no_grad():
            found = lora.joint(layers, x_MI, copied)(x_MI)
            wanted = torch.cat([layer(x_MI) for layer in layers], -1)
        close = 1e-5 if dtype is torch.float32 else 0.05
        torch.testing.assert_close(found, wanted, rtol=close, atol=close)
