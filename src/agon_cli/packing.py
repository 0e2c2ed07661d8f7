"""Products with a copy of the weights in the order in which oneDNN's kernels read them, on CPUs.

A decoding step reads every weight once, and in that order a core reads them faster than by rows (docs/lab-log.md). The
copy is of float32 and lives for one sample, so that a whole model's is only made where it is small.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from agon_cli import wide

MOST = 1 << 28
"""Most weights that are copied: 1 GiB."""
TOKENS = 16
"""Shortest caps on completions for which making a copy takes less time than it saves (docs/lab-log.md)."""


def pays(weights: int, tokens: int, like: Tensor) -> bool:
    """Whether completions of up to so many tokens are sampled faster from a copy of so many weights, by tensors of this
    type on this device: of float32, and of bfloat16 where products of that are computed in float32 (`wide`)."""
    in_float32 = like.dtype is torch.float32 and like.device.type == "cpu"
    return _AVAILABLE and weights <= MOST and tokens >= TOKENS and (in_float32 or wide.pays(like))


def product(weight_OI: Tensor) -> Callable[[Tensor], Tensor]:
    """A function that computes x W' (M x O, float32) from x (M x I) and a copy of a float32 W."""
    kept = torch.ops.mkldnn._reorder_linear_weight(weight_OI, None)

    def compute(x_MI: Tensor) -> Tensor:
        result_MO: Tensor = torch.ops.mkldnn._linear_pointwise(x_MI.float(), kept, None, "none", [], "")
        return result_MO

    return compute


def _available() -> bool:
    try:
        identity = product(torch.eye(4))(torch.ones(2, 4))
    except (AttributeError, RuntimeError):  # a torch without that library, or with another interface to it
        return False
    return bool((identity == 1.0).all())


_AVAILABLE = _available()
