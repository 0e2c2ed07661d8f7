"""RMS norms of a frozen base, forward and backward in a third of the operations, keeping one tensor instead of three.

transformers writes them as a chain of operations, of which automatic differentiation keeps every result. Between small
layers that chain takes as long as the layers do.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

KNOWN = {"LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm"}
"""Those that compute x / rms(x) in float32, round it to the type of x, and then multiply by the weight."""


def take_over(model: nn.Module) -> None:
    """Compute every norm of a known kind by `forward` below. Their weights are taken to be frozen."""
    for module in model.modules():
        if type(module).__name__ in KNOWN:
            module.forward = partial(forward, module)


def forward(norm: Any, x: Tensor) -> Tensor:
    """x / sqrt(mean(x^2) + epsilon) * weight, over the last dimension, in the type of x."""
    result: Tensor = _Norm.apply(x, norm.weight, norm.variance_epsilon)
    return result


class _Norm(torch.autograd.Function):
    """With r = 1 / sqrt(mean(x^2) + epsilon) and h = r w g, the gradient of x is h - x r^2 mean(h x)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_H: Tensor, epsilon: float) -> Tensor:
        wide = x.float()
        ratio = torch.linalg.vecdot(wide, wide).div_(x.shape[-1]).add_(epsilon).rsqrt_().unsqueeze(-1)
        ctx.save_for_backward(x, weight_H, ratio)
        out: Tensor = (wide * ratio).to(x.dtype) * weight_H
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        x, weight_H, ratio = ctx.saved_tensors
        wide, inner = x.float(), (grads[0] * weight_H).float().mul_(ratio)
        share = torch.linalg.vecdot(inner, wide).unsqueeze(-1).mul_(ratio).mul_(ratio).div_(-x.shape[-1])
        return inner.addcmul_(wide, share).to(x.dtype), None, None
