"""Keys and values of rows that share prompts: those of a prompt are kept once, not once per row.

A decoding step attends to them with the queries of all rows of the prompt in one product, so that
they are read once as well.
"""

from __future__ import annotations

from typing import cast

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


class SharedPrefixLayer(GrowingLayer):
    """Keys and values of one layer: of the prompts, and of the rows what comes after them.

    What the rows' buffers hold behind the columns in use is finite.

    Args:
        room: Most columns by which the rows' own grow.
        prompts: Keys and values ``(P, heads, columns, head size)`` of the prompts.
        rows: N.
    """

    def __init__(self, room: int, prompts: LayerTensors, rows: int) -> None:
        first = min(room, _SHORT_BLOCK)
        keys, values = (empty_buffer(tensor, rows, first).zero_() for tensor in prompts)
        super().__init__(room, (keys, values))
        self.prompt_keys, self.prompt_values = prompts

    def _columns_for(self, end: int) -> int:
        # One of the columns is for the token that is being added.
        return end - 1 + (min(self.room, _SHORT_BLOCK) if end < _SHORT else self.room)

    def _grown(self, buffer: torch.Tensor, end: int) -> torch.Tensor:
        grown = super()._grown(buffer, end)
        grown[:, :, self.length :].zero_()
        return grown

    def get_seq_length(self) -> int:
        """Columns in use, those of the prompts included."""
        return self.prompt_keys.shape[-2] + self.length


class SharedPrefixCache(GrowingCache):
    """The cache of rows that share prompts; what ``update`` returns are the rows' own columns.

    For single queries within
    :func:`~agilerl.llm.generation.single_token.attention.single_query_attention`.

    Args:
        cache: Of the prompts, which takes over its tensors.
        prompt_of_row: ``(N,)`` long.
        room: Columns by which the rows' own grow.
    """

    def __init__(self, cache: GrowingCache, prompt_of_row: torch.Tensor, room: int) -> None:
        prompts = [layer.columns_in_use() for layer in cache.growing_layers]
        self.groups = PromptGroups(prompt_of_row, len(prompts[0][0]))
        rows = len(prompt_of_row)
        # Layers of a forward are given the same mask.
        self._mask: torch.Tensor | None = None
        self._visible, self._bias = 0, torch.empty(0)
        super().__init__(room, [SharedPrefixLayer(room, pair, rows) for pair in prompts])

    def select(self, rows: torch.Tensor) -> None:
        """Keep these rows only."""
        prompt_of_row, prompts = self.groups.prompt_of_row[rows], self.groups.prompts
        needed = prompt_of_row.unique()
        layers = self.shared_layers
        if len(needed) <= _NEEDED_SHARE * prompts:
            for layer in layers:
                layer.prompt_keys = layer.prompt_keys.index_select(0, needed)
                layer.prompt_values = layer.prompt_values.index_select(0, needed)
            prompt_of_row, prompts = torch.searchsorted(needed, prompt_of_row), len(needed)
        self.groups = PromptGroups(prompt_of_row, prompts)
        super().select(rows)

    @property
    def shared_layers(self) -> list[SharedPrefixLayer]:
        """Its layers."""
        return cast("list[SharedPrefixLayer]", self.layers)

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
