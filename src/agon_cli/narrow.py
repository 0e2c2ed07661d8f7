"""Products of few rows with a large matrix in float32 on CPUs, which is what one decoding step consists of.

There the weights have to be read once, and reading them bounds the time; the library's kernels for `x W'` come nowhere
near that. They do better when the same product is written `(W x')'`, or as one of x with each of many parts of W: which
is the faster depends on the rows (docs/lab-log.md).
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from agon_cli import wide

ROWS = 128
"""Most rows for which another way is faster."""
FEW = 4
"""Most rows for which that is `(W x')'`."""
OUTPUTS = 256
"""Fewest outputs of a part of the weights."""
WEIGHTS = 1 << 18
"""Fewest weights: smaller matrices stay in a core's cache, and keep the library's order of summing."""


def pays(x_MI: Tensor, weight_OI: Tensor) -> bool:
    """Whether `linear` takes another way than the library's."""
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
    count = 1 if len(x_MI) <= FEW else parts(len(weight_OI))
    if count == 1:
        result_MO = torch.mm(weight_OI, x_MI.t()).t().contiguous()  # what follows reads rows
    else:
        weight_POI = weight_OI.unflatten(0, (count, -1))
        result_PMO = torch.bmm(x_MI.expand(count, -1, -1), weight_POI.transpose(1, 2))
        result_MO = result_PMO.transpose(0, 1).flatten(1)
    return result_MO if bias_O is None else result_MO + bias_O


@lru_cache
def parts(outputs: int) -> int:
    """The largest number of equal parts of at least `OUTPUTS` outputs each; 1 where there is none."""
    return next((count for count in range(outputs // OUTPUTS, 1, -1) if outputs % count == 0), 1)
