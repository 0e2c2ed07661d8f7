"""Products of bfloat16 on CPUs without instructions for them: computed in float32, several times as fast, and rounded
once at the end. Weights stay as they are; only a block of them is ever held in float32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

BLOCK = 1 << 22
"""Weights converted at once."""


def pays(x: Tensor) -> bool:
    """Whether products of this tensor's type are computed faster in float32 on its device."""
    return x.dtype is torch.bfloat16 and x.device.type == "cpu" and not _HAS_BFLOAT16


@contextmanager
def left_out(there: bool = True) -> Iterator[None]:
    """Within it nothing pays, as on a device that knows bfloat16; with `there` False it changes nothing."""
    global _HAS_BFLOAT16
    before, _HAS_BFLOAT16 = _HAS_BFLOAT16, _HAS_BFLOAT16 or there
    try:
        yield
    finally:
        _HAS_BFLOAT16 = before


def linear(
    x_MI: Tensor,
    weight_OI: Tensor | None,
    bias_O: Tensor | None = None,
    a_RI: Tensor | None = None,
    b_OR: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """x W' + bias + scale (x A') B', M x O in x's type; without W or without A and B, what is left of it. Gradients
    reach x, A and B: W and bias are frozen. More dimensions than two may stand for M."""
    result_MO: Tensor = _Product.apply(x_MI.reshape(-1, x_MI.shape[-1]), weight_OI, bias_O, a_RI, b_OR, scale)
    return result_MO.view(*x_MI.shape[:-1], -1)


class _Product(torch.autograd.Function):
    """Keeps its inputs for the backward pass, in their own types, and x A'."""

    @staticmethod
    def forward(
        ctx: Any, x_MI: Tensor, weight_OI: Tensor | None, bias_O: Tensor | None, a_RI: Tensor | None,
        b_OR: Tensor | None, scale: float,
    ) -> Tensor:  # fmt: skip
        wide_MI = x_MI.float()
        low_MR = None
        if weight_OI is None:
            assert b_OR is not None
            out_MO = wide_MI.new_zeros(len(x_MI), len(b_OR))
        else:
            out_MO = wide_MI.new_empty(len(x_MI), len(weight_OI))
            for rows in _blocks(weight_OI):
                torch.mm(wide_MI, weight_OI[rows].float().t(), out=out_MO[:, rows])
        if bias_O is not None:
            out_MO.add_(bias_O)
        if a_RI is not None and b_OR is not None:
            low_MR = functional.linear(wide_MI, a_RI.float())
            out_MO.addmm_(low_MR, b_OR.float().t(), alpha=scale)
        ctx.save_for_backward(x_MI, weight_OI, a_RI, b_OR, low_MR)
        ctx.scale = scale
        return out_MO.to(x_MI.dtype)

    @staticmethod
    def backward(ctx: Any, grad_MO: Tensor) -> tuple[Tensor | None, ...]:
        x_MI, weight_OI, a_RI, b_OR, low_MR = ctx.saved_tensors
        wide_MO = grad_MO.float()
        grad_MI, grad_a_RI, grad_b_OR = None, None, None
        if ctx.needs_input_grad[0]:
            grad_MI = wide_MO.new_zeros(x_MI.shape)
            if weight_OI is not None:
                for rows in _blocks(weight_OI):
                    grad_MI.addmm_(wide_MO[:, rows], weight_OI[rows].float())
        if a_RI is not None:
            grad_low_MR = torch.mm(wide_MO, b_OR.float()).mul_(ctx.scale)
            if grad_MI is not None:
                grad_MI.addmm_(grad_low_MR, a_RI.float())
            grad_a_RI = torch.mm(grad_low_MR.t(), x_MI.float()).to(a_RI.dtype)
            grad_b_OR = torch.mm(wide_MO.t(), low_MR).mul_(ctx.scale).to(b_OR.dtype)
        grad_x_MI = None if grad_MI is None else grad_MI.to(x_MI.dtype)
        return grad_x_MI, None, None, grad_a_RI, grad_b_OR, None


def _blocks(weight_OI: Tensor) -> list[slice]:
    outputs, inputs = weight_OI.shape
    size = max(1, BLOCK // inputs)
    return [slice(start, min(start + size, outputs)) for start in range(0, outputs, size)]


def _has_bfloat16() -> bool:
    try:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):  # a torch without that library
        return False


_HAS_BFLOAT16 = _has_bfloat16()
