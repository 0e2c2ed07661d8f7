"""The arithmetic of LoRA layers: in the base's own precision, keeping nothing that the backward pass can do without."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from peft import PeftModel
from peft.tuners.lora.layer import Linear, LoraLayer
from torch import Tensor
from torch.nn import functional


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
    """Within it the active adapter's matrices are converted once and not at every call. For sampling only: no gradient
    reaches an adapter, and one that is stepped or exchanged meanwhile is not noticed."""
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
    result_MO: Tensor = layer.base_layer(x_MI, *args, **kwargs)
    if not layer.disable_adapters:
        a_RI, b_RO, scale = layer.held or _matrices(layer, result_MO)
        low_MR = functional.linear(x_MI.to(result_MO.dtype), a_RI)
        result_MO.addmm_(low_MR, b_RO, alpha=scale)  # nothing else has seen the result yet
    return result_MO.view(*x_BTI.shape[:-1], -1)


def _matrices(layer: Any, like: Tensor) -> tuple[Tensor, Tensor, float]:
    (name,) = layer.active_adapters
    a_RI, b_OR = layer.lora_A[name].weight.to(like.dtype), layer.lora_B[name].weight.to(like.dtype)
    found = (a_RI, b_OR.t(), layer.scaling[name])
    if layer.held is not None:
        layer.held = found
    return found


def _plain_layers(model: PeftModel) -> Iterator[Any]:
    for layer in model.modules():
        if isinstance(layer, Linear) or (isinstance(layer, LoraLayer) and type(layer).__name__ == "Linear4bit"):
            yield layer
