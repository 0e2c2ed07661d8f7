"""Linear layers with an adapter: values and gradients are PEFT's own, whichever way they are computed."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from agon_cli import lora


class Two(nn.Module):
    """A layer of either size, with a bias and without."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(24, width)
        self.second = nn.Linear(width, 7, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def adapted(width: int) -> nn.Module:
    torch.manual_seed(width)
    config = LoraConfig(r=4, lora_alpha=6, target_modules=["first", "second"])
    model = get_peft_model(Two(width), config, adapter_name="player")
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.3)
    return model


def run(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    out = model(x)
    out.square().sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in model.parameters() if p.requires_grad)]


@pytest.mark.parametrize("summed", [True, False])
@pytest.mark.parametrize("shape", [(1, 24), (3, 5, 24)])
def test_values_and_gradients_are_those_of_peft(monkeypatch, summed, shape):
    monkeypatch.setattr(lora, "SMALL", 24 * 16 if summed else 0)
    theirs = adapted(16)
    own = copy.deepcopy(theirs)
    lora.take_over(own)
    used = []
    apply = lora._OneProduct.apply
    monkeypatch.setattr(lora._OneProduct, "apply", lambda *args: used.append(0) or apply(*args))
    x = torch.randn(shape)
    found, wanted = run(own, x), run(theirs, x)
    assert len(used) == 2 * summed
    assert len(found) == 6
    for ours, plain in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)
    with own.disable_adapter(), theirs.disable_adapter():
        torch.testing.assert_close(own(x), theirs(x), rtol=1e-5, atol=1e-6)
    assert len(used) == 2 * summed


def test_a_first_layer_s_input_needs_no_gradient():
    own = adapted(16)
    lora.take_over(own)
    own(torch.randn(3, 24)).sum().backward()
    assert all(p.grad.abs().max() > 0 for p in own.parameters() if p.requires_grad)


def test_the_base_is_not_touched():
    own = adapted(16)
    before = {name: p.clone() for name, p in own.named_parameters() if "lora_" not in name}
    lora.take_over(own)
    run(own, torch.randn(2, 24))
    after = {name: p for name, p in own.named_parameters() if "lora_" not in name}
    assert all(torch.equal(before[name], after[name]) and after[name].grad is None for name in before)
