"""Keys and values of rows that share prompts: those of a prompt are kept once, not once per row.

A decoding step attends to them with the queries of all rows of the prompt in one product, so that
they are read once as well. Where several tokens of a row are run at once, as at the start of a
turn, a layer's prompts are copied to the rows for as long as it attends to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from agilerl.llm.generation.kv_cache.growing_cache import (
    GrowingCache,
    GrowingLayer,
    LayerTensors,
    empty_buffer,
)
from agilerl.llm.generation.row_groups import RowGroups

# Columns by which the rows' own keys and values grow, up to a number of them. Attention goes over
# whole buffers: on a CPU their memory is read several times as fast as that of parts of them.
_SHORT_BLOCK, _SHORT = 16, 256
# Prompts whose rows have all left are dropped once at most this share of them is needed.
_NEEDED_SHARE = 0.5


class PromptGroups:
    """Which rows continue which prompt.

    Args:
        prompt_of_row: ``(N,)`` long.
        prompts: Number of prompts, P.
    """

    def __init__(self, prompt_of_row: torch.Tensor, prompts: int) -> None:
        self.prompt_of_row, self.prompts = prompt_of_row, prompts
        self._groups = RowGroups(prompt_of_row, prompts)
        self.size = self._groups.size
        """Rows of the prompt that has most, G."""

    def grouped(self, rows: torch.Tensor) -> torch.Tensor:
        """``(N, heads, r, d)`` of the rows as ``(P, heads, G·r, d)``; what is over is arbitrary."""
        rows = self._groups.gathered(rows)
        _, heads, queries, size = rows.shape
        grouped = rows.view(self.prompts, self.size, heads, queries, size).transpose(1, 2)
        return grouped.reshape(self.prompts, heads, self.size * queries, size)

    def ungrouped(self, grouped: torch.Tensor, queries: int) -> torch.Tensor:
        """The reverse of :meth:`grouped`, with ``r`` queries per row."""
        _, heads, _, size = grouped.shape
        rows = grouped.view(self.prompts, heads, self.size, queries, size).transpose(1, 2)
        return self._groups.returned(rows.reshape(-1, heads, queries, size))


class CachedPrompts(NamedTuple):
    """Prompts of a cache, and which row continues which."""

    layers: list[LayerTensors]
    """Per layer, keys and values ``(P, heads, columns, head size)``, contiguous; a prompt ends in
    the last column."""
    lengths: list[int]
    """Tokens of each prompt."""
    of_row: list[int]
    """The prompt of each row."""


class SharedPrefixLayer(GrowingLayer):
    """Keys and values of one layer: of the prompts, and of the rows what comes after them.

    What the rows' buffers hold behind the columns in use is finite.

    Args:
        room: Most columns by which the rows' own grow.
        prompts: Keys and values ``(P, heads, columns, head size)`` of the prompts.
        own: Those of the rows, ``(N, heads, columns, head size)``.
        length: Columns of the rows that are in use.
    """

    def __init__(
        self, room: int, prompts: LayerTensors, own: LayerTensors, length: int = 0
    ) -> None:
        super().__init__(room, own, length)
        self.prompt_keys, self.prompt_values = prompts

    def _columns_for(self, end: int) -> int:
        return own_columns(end, self.room)

    def _grown(self, buffer: torch.Tensor, end: int) -> torch.Tensor:
        grown = super()._grown(buffer, end)
        grown[:, :, self.length :].zero_()
        return grown

    def get_seq_length(self) -> int:
        """Columns in use, those of the prompts included."""
        return self.prompt_keys.shape[-2] + self.length


def own_columns(end: int, room: int) -> int:
    """Columns to allocate for rows that need ``end`` of their own; ``room``: most to add."""
    # One of the columns is for the token that is being added.
    return end - 1 + (min(room, _SHORT_BLOCK) if end < _SHORT else room)


class SharedPrefixCache(GrowingCache):
    """The cache of rows that share prompts.

    Single queries must be run within
    :func:`~agilerl.llm.generation.single_token.attention.single_query_attention`: what ``update``
    returns to them are the rows' own columns. Several queries per row get those of the prompts as
    well, as from any other cache.

    Args:
        room: Columns by which the rows' own grow.
        layers: With the prompts.
        prompt_of_row: ``(N,)`` long.
        prompt_lengths: Tokens of each prompt; they end in the last column of the prompts.
    """

    def __init__(
        self,
        room: int,
        layers: Sequence[SharedPrefixLayer],
        prompt_of_row: torch.Tensor,
        prompt_lengths: Sequence[int],
    ) -> None:
        self.groups = PromptGroups(prompt_of_row, len(prompt_lengths))
        self.prompt_lengths = torch.tensor(prompt_lengths, device=prompt_of_row.device)
        # Layers of a forward are given the same mask.
        self._mask: torch.Tensor | None = None
        self._visible, self._bias = 0, torch.empty(0)
        self._whole: LayerTensors | None = None
        self._keeps_prompts = False
        super().__init__(room, layers)

    @classmethod
    def of_prompts(
        cls,
        cache: GrowingCache,
        prompt_of_row: torch.Tensor,
        prompt_lengths: Sequence[int],
        room: int,
    ) -> SharedPrefixCache:
        """Make one of a cache with the prompts, right-aligned; takes over tensors without room."""
        layers, first = [], own_columns(1, room)
        for layer in cache.growing_layers:
            keys, values = (tensor.contiguous() for tensor in layer.columns_in_use())
            own = [empty_buffer(keys, len(prompt_of_row), first).zero_() for keys in (keys, values)]
            layers.append(SharedPrefixLayer(room, (keys, values), (own[0], own[1])))
        return cls(room, layers, prompt_of_row, prompt_lengths)

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> LayerTensors:
        """Append columns to a layer; returns what its attention goes over."""
        own = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if key_states.shape[-2] == 1:
            return own
        layer = self.shared_layers[layer_idx]
        return self._whole_rows((layer.prompt_keys, layer.prompt_values), own)

    def _whole_rows(self, prompts: LayerTensors, own: LayerTensors) -> LayerTensors:
        """Copies of the prompts for the rows, and behind them the rows' own columns.

        Layers take turns with the memory: that is faster than memory of its own for each.
        """
        prompt, (rows, heads, columns, size) = prompts[0].shape[2], own[0].shape
        shape = rows, heads, prompt + columns, size
        if self._whole is None or self._whole[0].shape != shape:
            self._whole = own[0].new_empty(shape), own[1].new_empty(*shape[:3], own[1].shape[3])
        for whole, first, last in zip(self._whole, prompts, own, strict=True):
            index = self.groups.prompt_of_row
            torch.index_select(first, 0, index, out=whole[:, :, :prompt])
            whole[:, :, prompt:] = last
        return self._whole

    def end_prefill(self) -> None:
        """Free the copies of prompts that several queries per row attended to."""
        self._whole = None

    def select(self, rows: torch.Tensor) -> None:
        """Replace the rows by these (a long index, repetitions allowed)."""
        prompt_of_row, prompts = self.groups.prompt_of_row[rows], self.groups.prompts
        needed = prompt_of_row.unique()
        layers = self.shared_layers
        if len(needed) <= _NEEDED_SHARE * prompts and not self._keeps_prompts:
            for layer in layers:
                layer.prompt_keys = layer.prompt_keys.index_select(0, needed)
                layer.prompt_values = layer.prompt_values.index_select(0, needed)
            self.prompt_lengths = self.prompt_lengths[needed]
            prompt_of_row, prompts = torch.searchsorted(needed, prompt_of_row), len(needed)
        self.groups = PromptGroups(prompt_of_row, prompts)
        super().select(rows)

    @property
    def shared_layers(self) -> list[SharedPrefixLayer]:
        """Its layers."""
        return cast("list[SharedPrefixLayer]", self.layers)

    def keep_prompts(self) -> CachedPrompts:
        """The prompts, not copied; from now on none is dropped, which would only copy the rest."""
        self._keeps_prompts = True
        layers = [(layer.prompt_keys, layer.prompt_values) for layer in self.shared_layers]
        of_row = self.groups.prompt_of_row.tolist()
        return CachedPrompts(layers, self.prompt_lengths.tolist(), of_row)

    def lengths_of_rows(self) -> torch.Tensor:
        """``(N,)`` tokens of each row's prompt."""
        return self.prompt_lengths[self.groups.prompt_of_row]

    def prompt_mask(self) -> torch.Tensor:
        """``(N, L)`` bool over the prompts' columns, False on padding."""
        columns = self.shared_layers[0].prompt_keys.shape[-2]
        column = torch.arange(columns, device=self.prompt_lengths.device)
        return column >= columns - self.lengths_of_rows()[:, None]

    def scores(self, module: nn.Module, queries: torch.Tensor) -> torch.Tensor:
        """Products of queries ``(N, heads, r, d)`` with the prompts' keys, ``(N, heads, r, L)``.

        ``module`` is the attention of a layer.
        """
        products = self.groups.grouped(queries) @ self._of(module).prompt_keys.transpose(-1, -2)
        return self.groups.ungrouped(products, queries.shape[2])

    def attended(self, module: nn.Module, weights: torch.Tensor) -> torch.Tensor:
        """The prompts' values weighed by ``(N, heads, r, L)``, as ``(N, heads, r, d)``."""
        values = self.groups.grouped(weights) @ self._of(module).prompt_values
        return self.groups.ungrouped(values, weights.shape[2])

    def bias(self, mask: torch.Tensor | None, visible: int, scores: torch.Tensor) -> torch.Tensor:
        """What hides columns in ``(N, heads, r, L)`` scores when added: ``(N or 1, 1, 1, L)``.

        Args:
            mask: ``(N, 1, 1, >= visible)`` bool, False on columns to hide; None: on none of these.
            visible: Columns in use; what is behind them is hidden.
            scores: Give L, dtype and device.
        """
        columns = scores.shape[-1]
        known = mask is not None and mask is self._mask and visible == self._visible
        if known and self._bias.shape[-1] == columns:
            return self._bias
        rows = 1 if mask is None else len(mask)
        bias = scores.new_full((rows, 1, 1, columns), -torch.inf)
        seen = bias[..., :visible]
        seen.zero_() if mask is None else seen.masked_fill_(mask[..., :visible], 0.0)
        self._mask, self._visible, self._bias = mask, visible, bias
        return bias

    def own_buffers(self, module: nn.Module) -> LayerTensors:
        """The rows' own keys and values, and what is allocated behind them."""
        layer = self._of(module)
        return layer.key_buffer, layer.value_buffer

    def _of(self, module: nn.Module) -> SharedPrefixLayer:
        return self.shared_layers[cast(int, module.layer_idx)]
