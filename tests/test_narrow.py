"""Few rows times a large float32 matrix: the same product in another order, or in parts."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from agon_cli import narrow, packing
from agon_cli.engines.hf import HFEngine
from agon_cli.policy import Policy
from agon_cli.types import Prompt, Sampling
from scripted import make_recipe, write_model

SIZES = {601: 1, 1024: 4, 1100: 4}
"""Outputs of a layer, and of how many parts its product consists: 601 is a prime number, 1100 is 4 x 275."""


@pytest.mark.parametrize("rows", [0, 1, narrow.FEW, narrow.FEW + 1, narrow.ROWS, narrow.ROWS + 1])
@pytest.mark.parametrize("outputs", SIZES)
@pytest.mark.parametrize("bias", [True, False])
def test_a_product_is_that_of_float64(rows, outputs, bias):
    made = torch.Generator().manual_seed(rows)
    x_MI, weight_OI = torch.randn(rows, 521, generator=made), torch.randn(outputs, 521, generator=made)
    bias_O = torch.randn(outputs, generator=made) if bias else None
    assert weight_OI.numel() >= narrow.WEIGHTS
    result_MO = narrow.linear(x_MI, weight_OI, bias_O)
    wanted_MO = functional.linear(x_MI.double(), weight_OI.double(), None if bias_O is None else bias_O.double())
    assert result_MO.dtype is torch.float32
    assert result_MO.is_contiguous()
    torch.testing.assert_close(result_MO.double(), wanted_MO, rtol=0, atol=1e-4)


@pytest.mark.parametrize("outputs", [1, 255, 511, 512, 601, 1024, 1100, 1536, 2560, 32003, 49152, 151936])
def test_parts_are_equal_and_as_many_as_their_size_allows(outputs):
    count = narrow.parts(outputs)
    assert outputs % count == 0
    assert count == 1 or outputs // count >= narrow.OUTPUTS
    more = range(count + 1, outputs // narrow.OUTPUTS + 1)
    assert not any(outputs % larger == 0 for larger in more)
    assert SIZES.get(outputs, count) == count


@pytest.mark.parametrize("rows", [2, narrow.FEW + 1])
def test_a_gradient_passes(rows):
    made = torch.Generator().manual_seed(rows)
    x_MI = torch.randn(rows, 512, generator=made).requires_grad_()
    weight_OI = torch.randn(1024, 512, generator=made)
    narrow.linear(x_MI, weight_OI, None).sum().backward()
    torch.testing.assert_close(x_MI.grad.double(), weight_OI.double().sum(0).expand(rows, -1), rtol=0, atol=1e-4)


def test_small_many_other_and_elsewhere_are_left_alone():
    large = torch.empty(1024, narrow.WEIGHTS // 1024)
    x = torch.empty(narrow.ROWS, large.shape[1])
    assert narrow.pays(x, large)
    assert not narrow.pays(x, large[1:])
    assert not narrow.pays(torch.empty(narrow.ROWS + 1, large.shape[1]), large)
    assert not narrow.pays(x.bfloat16(), large.bfloat16())
    assert not narrow.pays(x.to("meta"), large)
    assert not narrow.pays(x[None], large)


@pytest.fixture
def counted_anew():
    narrow.parts.cache_clear()
    yield
    narrow.parts.cache_clear()


@pytest.mark.parametrize("few", [0, 4])
@pytest.mark.parametrize("tied", [True, False])
def test_a_sample_tells_the_log_probabilities_that_the_trainer_computes(tmp_path, monkeypatch, counted_anew, tied, few):
    monkeypatch.setattr(packing, "_AVAILABLE", False)  # else weights are copied, and no product is of few rows
    monkeypatch.setattr(narrow, "WEIGHTS", 1)
    monkeypatch.setattr(narrow, "FEW", few)
    monkeypatch.setattr(narrow, "OUTPUTS", 4)
    monkeypatch.setattr("agon_cli.lora.SMALL", 0)  # else the sum of all weights is formed, and no product is left
    asked, pays = [], narrow.pays
    monkeypatch.setattr(narrow, "pays", lambda x, weight: asked.append(pays(x, weight)) or asked[-1])
    model = {"id": str(write_model(tmp_path / "model", tied=tied)), "dtype": "float32"}
    players = {"A": {"noise": 0.3}, "B": {"noise": 0.3}}
    policy = Policy(make_recipe(tmp_path / "model", model=model, players=players))
    prompt = Prompt("", (7, 8, 9), "")
    asked.clear()
    (row,) = HFEngine(policy, 4096).sample([prompt], "B", Sampling(1.0, 1.0, 0, 12, 12), [[1, 2, 3]])
    assert sum(asked) == 11 * 2 * 7 + 12  # a step's layers, and every head
    with torch.no_grad():
        trainer = policy.logprobs("B", [(prompt.ids, completion.ids) for completion in row], 1.0)
    sampled = torch.tensor([value for completion in row for value in completion.logprobs])
    assert (sampled - trainer).abs().max() < 1e-4
