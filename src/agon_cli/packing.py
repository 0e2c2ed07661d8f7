"""Products with a copy of the weights in the order in which oneDNN's kernels read them, on CPUs.

A decoding step reads every weight once, and in that order a core reads them faster than by rows (docs/lab-log.md). The
copy is of float32 and lives for one sample, so that a whole model's is only made where it is small.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from agon_cli import wide

MOST = 1 << 28
"""Most weights that are copied: 1 GiB."""
SIZES = (4, 8, 16, 32, 64, 128)
"""Rows of a product: fewer are filled up with zeros, more are split."""
ROWS = 32
"""That one of them for which weights are put in order."""
TOKENS = 16
"""Shortest caps on completions for which making a copy takes less time than it saves (docs/lab-log.md)."""
_PLAIN = ([0, 0], [1, 1], [1, 1], 1)
"""Padding, stride, dilation and groups of a convolution."""


def pays(weights: int, tokens: int, like: Tensor) -> bool:
    """Whether completions of up to so many tokens are sampled faster from a copy of so many weights, by tensors of this
    type on this device: of float32, and of bfloat16 where products of that are computed in float32 (`wide`)."""
    in_float32 = like.dtype is torch.float32 and like.device.type == "cpu"
    return _AVAILABLE and weights <= MOST and tokens >= TOKENS and (in_float32 or wide.pays(like))


def product(weight_OI: Tensor) -> Callable[[Tensor], Tensor]:
    """A function that computes x W' (M x O, float32) from x (M x I) and a copy of a float32 W.

    It is written as a convolution of M places by a kernel of one: that way the library is faster than by its own
    linear layers.
    """
    outputs, inputs = weight_OI.shape
    sizes = _sizes(outputs, inputs, torch.get_num_threads())
    kept = _reordered(weight_OI, ROWS)

    def of_few(x_MI: Tensor) -> Tensor:
        rows = len(x_MI)
        filled = next(size for size in sizes if size >= rows)
        x_MI = x_MI.float()
        if filled > rows:
            x_MI = functional.pad(x_MI, (0, 0, 0, filled - rows))
        places = x_MI.view(1, 1, filled, inputs).permute(0, 3, 1, 2)
        result: Tensor = torch.ops.mkldnn._convolution_pointwise(places, kept, None, *_PLAIN, "none", [], "")
        return result.permute(0, 2, 3, 1).reshape(filled, outputs)[:rows]

    def compute(x_MI: Tensor) -> Tensor:
        most = sizes[-1]
        return of_few(x_MI) if len(x_MI) <= most else torch.cat([of_few(part_MI) for part_MI in x_MI.split(most)])

    return compute


@lru_cache
def _sizes(outputs: int, inputs: int, threads: int) -> tuple[int, ...]:
    """Those of `SIZES` for which the library reads weights of this shape in the order in which they are kept. For other
    numbers of rows it would reorder all of them in every call, which takes a hundred times as long as the product."""
    weight_OI = torch.zeros(outputs, inputs)
    orders = {size: _order(_reordered(weight_OI, size)) for size in SIZES}
    return tuple(size for size in SIZES if orders[size] == orders[ROWS])


def _reordered(weight_OI: Tensor, rows: int) -> Tensor:
    kernel = weight_OI[:, :, None, None].contiguous(memory_format=torch.channels_last)
    kept: Tensor = torch.ops.mkldnn._reorder_convolution_weight(kernel, *_PLAIN, [1, weight_OI.shape[1], 1, rows])
    return kept


def _order(kept: Tensor) -> bytes:
    return bytes(torch.ops.mkldnn._get_mkldnn_serialized_md(kept).tolist())


def _available() -> bool:
    try:
        identity = product(torch.eye(4))(torch.ones(2, 4))
    except (AttributeError, RuntimeError):  # a torch without that library, or with another interface to it
        return False
    return bool((identity == 1.0).all())


_AVAILABLE = _available()
