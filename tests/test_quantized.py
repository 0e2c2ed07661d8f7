"""4-bit bases: gradients must be those of the weights the 4 bits stand for, whatever was sampled before."""

from __future__ import annotations

import pytest
import torch

from agon_cli.engines.hf import HFEngine
from agon_cli.policy import Policy
from agon_cli.types import Prompt, Sampling
from scripted import make_recipe, write_model

bitsandbytes = pytest.importorskip("bitsandbytes")
ROWS = [((7, 8, 9), (10, 11, 12, 13)), ((7, 14), (15, 16))]


def gradients(policy: Policy) -> dict[str, torch.Tensor]:
    policy.logprobs("A", ROWS, 1.0).sum().backward()
    found = {name: parameter.grad.clone() for name, parameter in policy.parameters("A").items()}
    for parameter in policy.parameters("A").values():
        parameter.grad = None
    return found


def dequantise(model: torch.nn.Module) -> int:
    """Put ordinary layers with the same weights in the place of the 4-bit ones; how many there were."""
    count = 0
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, bitsandbytes.nn.Linear4bit):
                weight = bitsandbytes.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state).float()
                plain = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
                plain.weight = torch.nn.Parameter(weight, requires_grad=False)
                setattr(parent, name, plain)
                count += 1
    return count


@pytest.fixture
def policy(tmp_path):
    model = {"id": str(write_model(tmp_path / "model")), "dtype": "float32", "quantization": "nf4"}
    players = {"A": {"noise": 0.02}, "B": {"noise": 0.02}}
    return Policy(make_recipe(tmp_path / "model", model=model, players=players))


@pytest.mark.parametrize("completions", [1, 3])
def test_gradients_reach_every_layer_after_sampling(policy, monkeypatch, completions):
    """Sampling is where a 4-bit layer may be repacked for a kernel that has no backward pass."""
    monkeypatch.setattr("agon_cli.lora.SMALL", 0)  # else the plain layers would sum in another order
    seeds = list(range(completions))
    (sampled,) = HFEngine(policy, 4096).sample([Prompt("", (7, 8, 9), "")], "A", Sampling(1.0, 1.0, 0, 6, 6), [seeds])
    assert len(sampled) == completions
    quantised = gradients(policy)
    assert dequantise(policy.seats["A"].model) == 14
    for name, want in gradients(policy).items():
        assert want.norm() > 0
        torch.testing.assert_close(quantised[name], want, rtol=1e-4, atol=1e-6, msg=name)


def test_four_bits_do_change_the_policy(policy):
    quantised = policy.logprobs("A", ROWS, 1.0).detach()
    with torch.no_grad():
        for layer in policy.seats["A"].model.modules():
            if isinstance(layer, bitsandbytes.nn.Linear4bit):
                layer.weight.quant_state.absmax.mul_(1.5)
    assert (policy.logprobs("A", ROWS, 1.0).detach() - quantised).abs().max() > 1e-2
