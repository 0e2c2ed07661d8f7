"""Products of few rows with a large matrix in float32 on CPUs, which is what one decoding step consists of.

There the weights have to be read once, and reading them bounds the time; the library's kernels for `x W'` read them at
a third to four fifths of the speed of the same product written `(W x')'` (docs/lab-log.md).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from agon_cli import wide

ROWS = 16
"""Most rows for which the other order is about as fast for a layer, and still faster for a vocabulary."""
WEIGHTS = 1 << 18
"""Fewest weights: smaller matrices stay in a core's cache, and keep the library's order of summing."""


def pays(x_MI: Tensor, weight_OI: Tensor) -> bool:
    """Whether `linear` takes the other order."""
    return (
        x_MI.dtype is torch.float32
        and x_MI.device.type == "cpu"
        and x_MI.dim() == 2
        and len(x_MI) <= ROWS
        and weight_OI.numel() >= WEIGHTS
    )


def linear(x_MI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """x W' + bias, M x O, in the way that is fastest for this type and these many rows on this device."""
    if wide.pays(x_MI):
        return wide.linear(x_MI, weight_OI, bias_O)
    if not pays(x_MI, weight_OI):
        return functional.linear(x_MI, weight_OI, bias_O)
    result_MO = torch.mm(weight_OI, x_MI.t()).t().contiguous()  # what follows reads rows
    return result_MO if bias_O is None else result_MO + bias_O
