"""A key/value cache with its room set aside: a new token is written in place, where transformers' own copies it all."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicLayer


class RoomyLayer(DynamicLayer):
    """One layer's keys and values (B x heads x T x width), views into tensors with room for more tokens. Keys lie
    transposed in memory, as the product with a query wants them."""

    def __init__(self, layer: DynamicLayer, rows: Tensor, room: int) -> None:
        super().__init__()
        self.lazy_initialization(layer.keys, layer.values)
        self.keys, self.values = layer.keys, layer.values
        self.room = room
        self.reorder_cache(rows)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep these rows, in this order; a row may be named more than once."""
        _, heads, length, width = self.keys.shape
        roomy_keys = self.keys.new_empty(len(beam_idx), heads, width, self.room).transpose(2, 3)
        roomy_values = self.values.new_empty(len(beam_idx), heads, self.room, self.values.shape[-1])
        roomy_keys[:, :, :length] = self.keys[beam_idx]
        roomy_values[:, :, :length] = self.values[beam_idx]
        self.roomy_keys, self.roomy_values = roomy_keys, roomy_values
        self.keys, self.values = roomy_keys[:, :, :length], roomy_values[:, :, :length]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Add the new tokens; all keys and values so far."""
        start, end = self.keys.shape[-2], self.keys.shape[-2] + key_states.shape[-2]
        self.roomy_keys[:, :, start:end] = key_states
        self.roomy_values[:, :, start:end] = value_states
        self.keys, self.values = self.roomy_keys[:, :, :end], self.roomy_values[:, :, :end]
        return self.keys, self.values


def make_room(cache: Any, rows: Tensor, room: int) -> None:
    """Repeat a prompt's cache for its completions and set room aside for `room` tokens a row, in every layer that
    keeps all tokens. Layers of other kinds (sliding windows, linear attention) hold little and stay as they are."""
    for index, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer and layer.is_initialized:
            cache.layers[index] = RoomyLayer(layer, rows, room)
        else:
            layer.reorder_cache(rows)
