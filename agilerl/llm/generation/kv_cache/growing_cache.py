"""Keys and values of a batch, in buffers that grow by blocks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from transformers.cache_utils import Cache, DynamicLayer

# Tokens by which a layer grows when it is full.
CACHE_BLOCK = 64

LayerTensors = tuple[torch.Tensor, torch.Tensor]


class GrowingLayer(DynamicLayer):
    """Keys and values of one layer in preallocated buffers, into which new columns are written.

    Args:
        room: Columns allocated beyond those in use whenever the buffers are reallocated.
        buffers: Keys and values ``(N, heads, columns, head size)``; None: allocated at the first
            update.
        length: Columns of them that are in use.
    """

    def __init__(
        self, room: int = CACHE_BLOCK, buffers: LayerTensors | None = None, length: int = 0
    ) -> None:
        super().__init__()
        self.room, self.length = room, length
        if buffers is not None:
            self._set_buffers(*buffers)

    def _set_buffers(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.key_buffer, self.value_buffer = keys, values
        # dtype and device are read off these. Views of the buffers would keep outgrown ones alive.
        self.keys, self.values = keys.new_empty(0), values.new_empty(0)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> LayerTensors:
        """Append columns; returns keys and values of all in use, as views of the buffers."""
        end = self.length + key_states.shape[-2]
        if not self.is_initialized:
            self._set_buffers(
                empty_buffer(key_states, len(key_states), end + self.room),
                empty_buffer(value_states, len(value_states), end + self.room),
            )
        elif end > self.key_buffer.shape[-2]:
            self._set_buffers(
                self._grown(self.key_buffer, end), self._grown(self.value_buffer, end)
            )
        self.key_buffer[:, :, self.length : end] = key_states
        self.value_buffer[:, :, self.length : end] = value_states
        self.length = end
        return self.columns_in_use()

    def _columns_for(self, end: int) -> int:
        """How many columns to allocate when ``end`` are needed."""
        return end + self.room

    def _grown(self, buffer: torch.Tensor, end: int) -> torch.Tensor:
        """A copy of a buffer with columns for ``end`` and more."""
        grown = empty_buffer(buffer, len(buffer), self._columns_for(end))
        grown[:, :, : self.length] = buffer[:, :, : self.length]
        return grown

    def get_seq_length(self) -> int:
        """Columns in use."""
        return self.length

    def select(self, rows: torch.Tensor) -> None:
        """Replace the rows by these (a long index, repetitions allowed)."""
        self._set_buffers(
            self.key_buffer.index_select(0, rows), self.value_buffer.index_select(0, rows)
        )

    def columns_in_use(self) -> LayerTensors:
        """Keys and values of all rows, as views of the buffers."""
        return self.key_buffer[:, :, : self.length], self.value_buffer[:, :, : self.length]

    def copy_of(self, rows: torch.Tensor) -> LayerTensors:
        """Copies of the keys and values of some rows, columns in use only."""
        keys, values = self.columns_in_use()
        return keys.index_select(0, rows), values.index_select(0, rows)


def empty_buffer(like: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """An uninitialised ``(rows, heads, columns, head size)``."""
    return like.new_empty(rows, like.shape[1], columns, like.shape[3])


class GrowingCache(Cache):
    """Keys and values of all layers of a model.

    Args:
        room: Columns by which the layers grow.
        layers: Those with columns in use; None: it begins empty.
    """

    def __init__(self, room: int, layers: Sequence[GrowingLayer] | None = None) -> None:
        if layers is None:
            super().__init__(layer_class_to_replicate=cast(Any, partial(GrowingLayer, room)))
        else:
            super().__init__(layers=[*layers])

    @property
    def growing_layers(self) -> list[GrowingLayer]:
        """Its layers."""
        return cast("list[GrowingLayer]", self.layers)

    def select(self, rows: torch.Tensor) -> None:
        """Replace the rows by these (a long index, repetitions allowed)."""
        for layer in self.growing_layers:
            layer.select(rows)
