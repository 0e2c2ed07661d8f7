"""bfloat16 on CPUs without instructions for it: the same numbers, by way of float32."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from agon_cli import wide
from agon_cli.engines.hf import HFEngine
from agon_cli.policy import Policy
from agon_cli.types import Prompt, Sampling
from scripted import make_recipe, write_model

ROWS = [((7, 8, 9), (10, 11, 12, 13)), ((7, 8, 9), (15, 16)), ((7, 14), (15, 16))]


@pytest.fixture
def without(monkeypatch):
    monkeypatch.setattr(wide, "_HAS_BFLOAT16", False)


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


@pytest.mark.parametrize("block", [1, 40, 1 << 22])
@pytest.mark.parametrize("parts", ["base", "base and bias", "base and adapter", "adapter"])
def test_values_and_gradients_are_those_of_float64_rounded_once(monkeypatch, parts, block):
    monkeypatch.setattr(wide, "BLOCK", block)
    x, weight, bias = tensors((2, 5, 8), (12, 8), (12,))
    a, b = tensors((3, 8), (12, 3), dtype=torch.float32)
    given = [
        weight if "base" in parts else None,
        bias if "bias" in parts else None,
        *((a, b) if "adapter" in parts else (None, None)),
    ]
    leaves = [x, *(t for t in given[2:] if t is not None)]
    for leaf in leaves:
        leaf.requires_grad_(True)
    out = wide.linear(x, *given, scale=0.5)
    (seen,) = tensors(out.shape)
    gradients = torch.autograd.grad(out, leaves, seen)

    exact = [None if t is None else t.detach().double().requires_grad_(t.requires_grad) for t in (x, *given)]
    x64, weight64, bias64, a64, b64 = exact
    want = torch.zeros(2, 5, 12, dtype=torch.double)
    if weight64 is not None:
        want = want + functional.linear(x64, weight64, bias64)
    if a64 is not None:
        want = want + 0.5 * (x64 @ a64.t() @ b64.t())
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), want, rtol=2**-8, atol=1e-6)
    right = torch.autograd.grad(want, [t for t in exact if t is not None and t.requires_grad], seen.double())
    for leaf, found, expected in zip(leaves, gradients, right, strict=True):
        assert found.dtype == leaf.dtype
        rounding = 2**-8 if leaf.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(found.double(), expected, rtol=rounding, atol=1e-5)


def make_policy(folder, quantization=None):
    model = {"id": str(write_model(folder / "model")), "dtype": "bfloat16", "quantization": quantization}
    players = {"A": {"noise": 0.3}, "B": {"noise": 0.3}}
    return Policy(make_recipe(folder / "model", model=model, players=players))


def gradients(policy: Policy) -> list[torch.Tensor]:
    policy.logprobs("B", ROWS, 1.0).sum().backward()
    return [parameter.grad for parameter in policy.parameters("B").values()]


@pytest.mark.parametrize("quantization", [None, "nf4"])
def test_a_policy_computes_the_same_by_either_way(tmp_path, monkeypatch, quantization):
    if quantization:
        pytest.importorskip("bitsandbytes")
    found = []
    for has in (True, False):
        monkeypatch.setattr(wide, "_HAS_BFLOAT16", has)
        policy = make_policy(tmp_path, quantization)
        found.append([policy.logprobs("B", ROWS, 1.0).detach(), *gradients(policy)])
    for narrow, broad in zip(*found, strict=True):
        assert narrow.dtype == broad.dtype
        assert (narrow - broad).norm() < 0.15 * broad.norm()  # each of many roundings is 0.4 %
    bare = policy.logprobs("B", ROWS, 1.0, bare=True)
    assert (bare - found[1][0]).abs().max() > 0.1, "the adapter does nothing here, so it was not compared"


def test_a_sample_tells_the_log_probabilities_that_the_trainer_computes(tmp_path, without):
    policy = make_policy(tmp_path)
    engine = HFEngine(policy, 4096)
    prompt = Prompt("", (7, 8, 9), "")
    (row,) = engine.sample([prompt], "B", Sampling(1.0, 1.0, 0, 12, 12), [[1, 2, 3]])
    with torch.no_grad():
        trainer = policy.logprobs("B", [(prompt.ids, completion.ids) for completion in row], 1.0)
    sampled = torch.tensor([value for completion in row for value in completion.logprobs])
    assert (sampled - trainer).abs().mean() < 0.03


def test_float32_and_processors_that_know_bfloat16_are_left_alone(monkeypatch, without):
    assert wide.pays(torch.empty(0, dtype=torch.bfloat16))
    assert not wide.pays(torch.empty(0))
    assert not wide.pays(torch.empty(0, dtype=torch.bfloat16, device="meta"))
    monkeypatch.setattr(wide, "_HAS_BFLOAT16", True)
    assert not wide.pays(torch.empty(0, dtype=torch.bfloat16))
