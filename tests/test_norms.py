"""RMS norms of a frozen base: the values and gradients of transformers' own modules, in fewer operations."""

from __future__ import annotations

import copy
import importlib

import pytest
import torch
from torch import nn

from agon_cli import norms
from agon_cli.policy import Policy
from scripted import make_recipe, write_model

MODULES = {"LlamaRMSNorm": "llama", "MistralRMSNorm": "mistral", "Qwen2RMSNorm": "qwen2", "Qwen3RMSNorm": "qwen3"}


def make(kind: str) -> nn.Module:
    module = importlib.import_module(f"transformers.models.{MODULES[kind]}.modeling_{MODULES[kind]}")
    norm = getattr(module, kind)(48, eps=1e-5)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(-2, 3, 48))
    return norm.requires_grad_(False)


def run(norm: nn.Module, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.clone().requires_grad_()
    out = norm(x)
    (out * weight).sum().backward()
    return out.detach(), x.grad


def test_all_known_kinds_are_tested():
    assert set(MODULES) == norms.KNOWN


@pytest.mark.parametrize("kind", sorted(MODULES))
@pytest.mark.parametrize("shape", [(1, 48), (3, 5, 48), (2, 4, 3, 48)])
def test_values_and_gradients_are_those_of_transformers_in_float64(kind, shape):
    made = torch.Generator().manual_seed(len(shape))
    x, weight = torch.randn(shape, generator=made) * 3, torch.randn(shape, generator=made)
    own = make(kind)
    norms.take_over(nn.Sequential(own))
    found, gradient = run(own, x, weight)
    wide = x.double().requires_grad_()
    wanted = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * own.weight.double()
    (wanted * weight).sum().backward()
    torch.testing.assert_close(found.double(), wanted.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient.double(), wide.grad, rtol=1e-5, atol=1e-5)
    assert found.dtype is gradient.dtype is torch.float32


@pytest.mark.parametrize("kind", sorted(MODULES))
def test_in_bfloat16_it_rounds_where_transformers_does(kind):
    theirs = make(kind).bfloat16()
    own = copy.deepcopy(theirs)
    norms.take_over(nn.Sequential(own))
    x, weight = torch.randn(64, 48).bfloat16(), torch.randn(64, 48).bfloat16()
    (found, gradient), (wanted, slope) = run(own, x, weight), run(theirs, x, weight)
    assert found.dtype is gradient.dtype is torch.bfloat16
    assert (found == wanted).float().mean() > 0.98  # the sum of squares may round the other way
    torch.testing.assert_close(found, wanted, rtol=0.01, atol=0.01)
    assert (gradient - slope).float().norm() < 0.01 * slope.float().norm()


def test_a_row_of_zeros_has_finite_gradients():
    norm = make("LlamaRMSNorm")
    norms.take_over(nn.Sequential(norm))
    found, gradient = run(norm, torch.zeros(2, 48), torch.ones(2, 48))
    assert found.isfinite().all()
    assert gradient.isfinite().all()


def test_others_are_left_alone():
    from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm  # multiplies by 1 + weight

    model = nn.Sequential(Gemma2RMSNorm(48), nn.RMSNorm(48), nn.LayerNorm(48))
    norms.take_over(model)
    assert not any("forward" in vars(module) for module in model)


def test_a_policy_computes_by_it(tmp_path, monkeypatch):
    used = []
    own = norms.forward
    monkeypatch.setattr(norms, "forward", lambda norm, x: used.append(0) or own(norm, x))
    policy = Policy(make_recipe(write_model(tmp_path / "model")))
    used.clear()
    policy.logprobs("A", [((3, 4), (5, 6))], 1.0)
    assert len(used) == 2 * 2 + 1
