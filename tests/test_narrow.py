"""Few rows times a large float32 matrix: the other order of the same product."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from agon_cli import narrow
from agon_cli.engines.hf import HFEngine
from agon_cli.policy import Policy
from agon_cli.types import Prompt, Sampling
from scripted import make_recipe, write_model


@pytest.mark.parametrize("rows", [0, 1, 3, narrow.ROWS, narrow.ROWS + 1])
@pytest.mark.parametrize("bias", [True, False])
def test_a_product_is_that_of_float64(rows, bias):
    made = torch.Generator().manual_seed(rows)
    x_MI, weight_OI = torch.randn(rows, 521, generator=made), torch.randn(601, 521, generator=made)
    bias_O = torch.randn(601, generator=made) if bias else None
    assert weight_OI.numel() >= narrow.WEIGHTS
    result_MO = narrow.linear(x_MI, weight_OI, bias_O)
    wanted_MO = functional.linear(x_MI.double(), weight_OI.double(), None if bias_O is None else bias_O.double())
    assert result_MO.dtype is torch.float32
    assert result_MO.is_contiguous()
    torch.testing.assert_close(result_MO.double(), wanted_MO, rtol=0, atol=1e-4)


def test_a_gradient_passes():
    x_MI = torch.randn(2, 600, requires_grad=True)
    weight_OI = torch.randn(600, 600)
    narrow.linear(x_MI, weight_OI, None).sum().backward()
    torch.testing.assert_close(x_MI.grad, weight_OI.sum(0).expand(2, -1), rtol=0, atol=1e-4)


def test_small_many_other_and_elsewhere_are_left_alone():
    large = torch.empty(1024, narrow.WEIGHTS // 1024)
    x = torch.empty(narrow.ROWS, large.shape[1])
    assert narrow.pays(x, large)
    assert not narrow.pays(x, large[1:])
    assert not narrow.pays(torch.empty(narrow.ROWS + 1, large.shape[1]), large)
    assert not narrow.pays(x.bfloat16(), large.bfloat16())
    assert not narrow.pays(x.to("meta"), large)
    assert not narrow.pays(x[None], large)


@pytest.mark.parametrize("tied", [True, False])
def test_a_sample_tells_the_log_probabilities_that_the_trainer_computes(tmp_path, monkeypatch, tied):
    monkeypatch.setattr(narrow, "WEIGHTS", 1)
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
