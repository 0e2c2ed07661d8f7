"""The arithmetic of LoRA layers: in the base's own precision, keeping little for the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora.layer import Linear, LoraLayer
from torch import Tensor
from torch.nn import functional

from agon_cli import narrow, packing, wide

SMALL = 1 << 15
"""Weights of a float32 layer up to which W + s B A is formed: one product with it takes less time than three, and as
good as no memory. The base is not touched."""


def take_over(model: PeftModel) -> None:
    """Compute every linear LoRA layer of a model by `forward` below instead of PEFT's own.

    PEFT widens each layer's input and output to the adapter's float32, which in training is most of the memory and in
    sampling most of the time. Adapters stay float32 where they are kept and stepped.
    """
    for layer in _plain_layers(model):
        layer.held = None
        layer.forward = partial(forward, layer)


@contextmanager
def held(model: PeftModel) -> Iterator[None]:
    """Within it the active adapter's matrices are converted once and not at every call, small layers' aside. For
    sampling only: no gradient reaches an adapter, and one that is stepped or exchanged meanwhile is not noticed."""
    layers = list(_plain_layers(model))
    for layer in layers:
        layer.held = ()
    try:
        yield
    finally:
        for layer in layers:
            layer.held = None


def forward(layer: Any, x_BTI: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """x W' + s (x A') B', in the type of x W'."""
    x_MI = x_BTI.reshape(-1, x_BTI.shape[-1])
    if wide.pays(x_MI):
        return _wide(layer, x_MI).view(*x_BTI.shape[:-1], -1)  # the same, several times as fast
    if _is_small(layer) and not layer.disable_adapters:
        base = layer.base_layer
        summed_MO: Tensor = _OneProduct.apply(x_MI, base.weight, base.bias, *_adapter(layer))
        return summed_MO.view(*x_BTI.shape[:-1], -1)
    result_MO: Tensor = layer.base_layer(x_MI, *args, **kwargs)
    if not layer.disable_adapters:
        a_RI, b_RO, scale = layer.held or _matrices(layer, result_MO)
        low_MR = functional.linear(x_MI.to(result_MO.dtype), a_RI)
        result_MO.addmm_(low_MR, b_RO, alpha=scale)  # nothing else has seen the result yet
    return result_MO.view(*x_BTI.shape[:-1], -1)


class _OneProduct(torch.autograd.Function):
    """x (W + s B A)' + bias. Gradients reach x through the sum, and A and B as if each had been multiplied by itself:
    W and bias are frozen."""

    @staticmethod
    def forward(
        ctx: Any, x_MI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, a_RI: Tensor, b_OR: Tensor, scale: float
    ) -> Tensor:
        sum_OI = _sum(weight_OI, a_RI, b_OR, scale)
        ctx.save_for_backward(x_MI, sum_OI, a_RI, b_OR)
        ctx.scale = scale
        return functional.linear(x_MI, sum_OI, bias_O)

    @staticmethod
    def backward(ctx: Any, grad_MO: Tensor) -> tuple[Tensor | None, ...]:
        x_MI, sum_OI, a_RI, b_OR = ctx.saved_tensors
        grad_MI = torch.mm(grad_MO, sum_OI) if ctx.needs_input_grad[0] else None
        grad_b_OR = torch.mm(grad_MO.t(), functional.linear(x_MI, a_RI)).mul_(ctx.scale)
        grad_a_RI = torch.mm(torch.mm(grad_MO, b_OR).t(), x_MI).mul_(ctx.scale)
        return grad_MI, None, None, grad_a_RI, grad_b_OR, None


def joint(layers: Sequence[Any], like: Tensor, packed: bool = False) -> Callable[[Tensor], Tensor]:
    """A function that computes what several linear layers, LoRA or plain, make of one input (M x I) of the type of
    `like`: side by side, M x the sum of their outputs, with one product for all their A matrices. For sampling only: it
    holds the active adapter's values of now.

    `packed` has it copy weights, of `plain` layers: in that copy W + s B A is formed, and all layers are one product.
    """
    if small(layers):
        return _side_by_side(layers)
    if packed:
        return _packed(layers)
    if wide.pays(like):
        return lambda x_MI: _beside([_wide(layer, x_MI) for layer in layers])
    bases = [_base(layer) for layer in layers]
    places = [
        place for place, layer in enumerate(layers) if isinstance(layer, LoraLayer) and not layer.disable_adapters
    ]
    matrices = [_converted(layers[place], like.dtype) for place in places]
    if not matrices:
        return lambda x_MI: _beside([base(x_MI) for base in bases])
    a_IR = torch.cat([a_RI for a_RI, _, _ in matrices]).t()
    ends = list(accumulate(len(a_RI) for a_RI, _, _ in matrices))
    pairs = [
        (place, slice(end - len(a_RI), end), b_RO, scale)
        for place, end, (a_RI, b_RO, scale) in zip(places, ends, matrices, strict=True)
    ]

    def compute(x_MI: Tensor) -> Tensor:
        results = [base(x_MI) for base in bases]
        low_MR = torch.mm(x_MI, a_IR)
        for place, columns, b_RO, scale in pairs:
            results[place].addmm_(low_MR[:, columns], b_RO, alpha=scale)
        return _beside(results)

    return compute


def _beside(results: list[Tensor]) -> Tensor:
    return results[0] if len(results) == 1 else torch.cat(results, -1)


def small(layers: Sequence[Any]) -> bool:
    """Whether `joint` forms the sum of these layers' weights in any case."""
    return all(map(_is_small, layers))


def plain(layers: Sequence[Any]) -> bool:
    """Whether these layers' bases keep their weights as they are used."""
    return all(map(_is_plain, layers))


def count(layers: Sequence[Any]) -> int:
    """How many weights these layers have, adapters aside."""
    return sum(getattr(layer, "base_layer", layer).weight.numel() for layer in layers)


def _is_plain(layer: Any) -> bool:
    return type(getattr(layer, "base_layer", layer)) is torch.nn.Linear


def _is_small(layer: Any) -> bool:
    """Whether a layer, LoRA or plain, is one whose sum of weights is formed."""
    base = getattr(layer, "base_layer", layer)
    return _is_plain(layer) and base.weight.dtype is torch.float32 and base.weight.numel() <= SMALL


def _summed(layer: Any) -> tuple[Tensor, Tensor | None]:
    """W + s B A, and the bias."""
    base = getattr(layer, "base_layer", layer)
    if base is layer or layer.disable_adapters:
        return base.weight, base.bias
    return _sum(base.weight, *_adapter(layer)), base.bias


def _sum(weight_OI: Tensor, a_RI: Tensor, b_OR: Tensor, scale: float) -> Tensor:
    return torch.addmm(weight_OI.float(), b_OR, a_RI, alpha=scale)


def _side_by_side(layers: Sequence[Any]) -> Callable[[Tensor], Tensor]:
    """All layers in one product."""
    sums = [_summed(layer) for layer in layers]
    if any(bias is not None for _, bias in sums) and len(sums) > 1:
        return lambda x_MI: _beside([functional.linear(x_MI, *weights) for weights in sums])
    weight_OI, bias = torch.cat([weight for weight, _ in sums]), sums[0][1]
    return lambda x_MI: functional.linear(x_MI, weight_OI, bias)


def _packed(layers: Sequence[Any]) -> Callable[[Tensor], Tensor]:
    """All layers in one product of float32, rounded once to the type of its input."""
    sums = [_summed(layer) for layer in layers]
    weights = [weight_OI.float() for weight_OI, _ in sums]
    compute = packing.product(torch.cat(weights) if len(weights) > 1 else weights[0])
    if all(bias is None for _, bias in sums):
        return lambda x_MI: compute(x_MI).to(x_MI.dtype)
    bias_O = torch.cat([weight_OI.new_zeros(len(weight_OI)) if bias is None else bias for weight_OI, bias in sums])
    return lambda x_MI: compute(x_MI).add_(bias_O).to(x_MI.dtype)


def _base(layer: Any) -> Callable[[Tensor], Tensor]:
    """What computes x W', without a module's call where it adds nothing."""
    base = layer.base_layer if isinstance(layer, LoraLayer) else layer
    if type(base) is not torch.nn.Linear:
        return base  # type: ignore[no-any-return]
    return partial(narrow.linear, weight_OI=base.weight, bias_O=base.bias)


def _wide(layer: Any, x_MI: Tensor) -> Tensor:
    base = getattr(layer, "base_layer", layer)
    adapter: tuple[Any, ...] = ()
    if base is not layer and not layer.disable_adapters:
        adapter = _adapter(layer)
    if type(base) is torch.nn.Linear:
        return wide.linear(x_MI, base.weight, base.bias, *adapter)
    result_MO: Tensor = base(x_MI)  # four bits
    return result_MO.add_(wide.linear(x_MI, None, None, *adapter)) if adapter else result_MO


def _matrices(layer: Any, like: Tensor) -> tuple[Tensor, Tensor, float]:
    found = _converted(layer, like.dtype)
    if layer.held is not None:
        layer.held = found
    return found


def _converted(layer: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor, float]:
    a_RI, b_OR, scale = _adapter(layer)
    return a_RI.to(dtype), b_OR.to(dtype).t(), scale


def _adapter(layer: Any) -> tuple[Tensor, Tensor, float]:
    """A, B and s of the active adapter, the one that there is."""
    (name,) = layer.active_adapters
    return layer.lora_A[name].weight, layer.lora_B[name].weight, layer.scaling[name]


def _plain_layers(model: PeftModel) -> Iterator[Any]:
    for layer in model.modules():
        if isinstance(layer, Linear) or (isinstance(layer, LoraLayer) and type(layer).__name__ == "Linear4bit"):
            yield layer
