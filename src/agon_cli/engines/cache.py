"""A key/value cache with its room set aside: a new token is written in place, where transformers' own copies it all."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicLayer


class RoomyLayer(DynamicLayer):
    """One layer's keys and values (B x heads x T x width), views into tensors with room for some more tokens.

    The room grows by half whenever it is full: little is copied, and tokens of different heads lie no further apart
    than they must, which a CPU's caches notice.
    """

    keys: Tensor
    values: Tensor

    def __init__(self, layer: DynamicLayer, rows: Tensor | None, most: int) -> None:
        super().__init__()
        self.lazy_initialization(layer.keys, layer.values)
        self.most = most
        self._move(*((layer.keys, layer.values) if rows is None else (layer.keys[rows], layer.values[rows])))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep these rows, in this order; a row may be named more than once."""
        self._move(self.keys[beam_idx], self.values[beam_idx])

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Add the new tokens; all keys and values so far."""
        start, new = self.keys.shape[-2], key_states.shape[-2]
        if start + new > self.roomy_keys.shape[-2]:
            self._move(self.keys, self.values)
        self.roomy_keys.narrow(2, start, new).copy_(key_states)
        self.roomy_values.narrow(2, start, new).copy_(value_states)
        self.keys, self.values = self.roomy_keys.narrow(2, 0, start + new), self.roomy_values.narrow(2, 0, start + new)
        return self.keys, self.values

    def _move(self, keys: Tensor, values: Tensor) -> None:
        length = keys.shape[-2]
        room = min(self.most, length + max(8, length // 2))
        self.roomy_keys, self.roomy_values = (
            held.new_empty(*held.shape[:2], room, held.shape[-1]) for held in (keys, values)
        )
        self.keys, self.values = self.roomy_keys[:, :, :length], self.roomy_values[:, :, :length]
        self.keys.copy_(keys)
        self.values.copy_(values)


def make_room(cache: Any, rows: Tensor, most: int) -> None:
    """Repeat a prompt's cache for its completions and set room aside, for `most` tokens a row in the end, in every
    layer that keeps all tokens. Layers of other kinds (sliding windows, linear attention) hold little and stay."""
    one_each = rows.tolist() == list(range(len(rows)))  # and no prompt is without a completion
    for index, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer and layer.is_initialized:
            cache.layers[index] = RoomyLayer(layer, None if one_each else rows, most)
        else:
            layer.reorder_cache(rows)
