"""Keys and values of the rows generated last, for prompts that continue them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import torch

from agilerl.llm.generation.kv_cache.growing_cache import (
    GrowingCache,
    GrowingLayer,
    LayerTensors,
    empty_buffer,
)


class CachedRow(NamedTuple):
    """Where the keys and values of a row are."""

    block: int
    row: int
    start: int
    """Column of its first token."""
    length: int
    """Its tokens that have keys and values, in consecutive columns."""


class _BlockRows(NamedTuple):
    """What one block contributes to a new cache."""

    block: int
    targets: torch.Tensor
    """``(n,)`` rows of the new cache."""
    rows: torch.Tensor
    """``(n,)`` rows of the block that they continue."""
    columns: torch.Tensor
    """``(n, width)`` columns of the block; any column where the new cache has padding."""


class PrefixCache:
    """Keys and values by token ids.

    Rows are stored in blocks: those that left the batch together share tensors.
    """

    def __init__(self) -> None:
        self._blocks: list[list[LayerTensors | None]] = []
        self._rows: dict[bytes, CachedRow] = {}
        self._sorted: list[bytes] = []
        self._prefix_of: dict[bytes, bytes | None] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def add(
        self,
        layers: Sequence[LayerTensors],
        token_ids: Sequence[torch.Tensor],
        starts: Sequence[int],
        adapters: Sequence[int],
    ) -> None:
        """Store one block.

        Args:
            layers: Per layer, keys and values ``(n, heads, columns, head size)``, contiguous.
            token_ids: Per row, the 1-D ids that have keys and values.
            starts: Per row, the column of its first token.
            adapters: Per row, the number of the adapter that it ran with.
        """
        rows = zip(token_ids, starts, adapters, strict=True)
        for row, (ids, start, adapter) in enumerate(rows):
            key = row_key(ids, adapter)
            self._rows[key] = CachedRow(len(self._blocks), row, start, len(ids))
        self._blocks.append(list(layers))
        self._sorted = sorted(self._rows)
        self._prefix_of = _longest_prefixes(self._sorted)

    def find(self, prompt: torch.Tensor, adapter: int) -> CachedRow | None:
        """The longest row of an adapter that is a proper prefix of the 1-D ``prompt``."""
        ids = row_key(prompt, adapter)
        index = bisect_left(self._sorted, ids)
        # Whatever sorts between a prefix of the prompt and the prompt starts with that prefix too.
        row = self._sorted[index - 1] if index else None
        while row is not None and not ids.startswith(row):
            row = self._prefix_of[row]
        return None if row is None else self._rows[row]

    def take(self, rows: Sequence[CachedRow], lengths: Sequence[int], room: int) -> GrowingCache:
        """Build the cache that prompts of these ``lengths`` continue, and clear this one.

        Prompts are right-aligned in ``max(lengths)`` columns. The last of these, as many as the
        prompt with most new tokens needs, are left to be run for every prompt, so that none has a
        gap between old and new columns: sliding windows count columns.

        Args:
            rows: Per prompt, the row it continues.
            lengths: Tokens of each prompt.
            room: Columns to allocate behind the prompts.
        """
        new_columns = max(length - row.length for row, length in zip(rows, lengths, strict=True))
        width = max(lengths) - new_columns
        device = next(pair for pair in self._blocks[0] if pair is not None)[0].device
        sources = _group_by_block(rows, lengths, width, device)
        layers = []
        for number in range(len(self._blocks[0])):
            pairs = [block[number] for block in self._blocks]
            keys, values = (
                _gather(
                    [pair[i] for pair in pairs if pair is not None], sources, new_columns + room
                )
                for i in (0, 1)
            )
            layers.append(GrowingLayer(room, (keys, values), width))
            # Freed layer by layer, so that the old and the new cache never exist both in full.
            for block in self._blocks:
                block[number] = None
        self.clear()
        return GrowingCache(room, layers)

    def clear(self) -> None:
        """Drop all rows."""
        self._blocks, self._rows = [], {}
        self._sorted, self._prefix_of = [], {}


def row_key(ids: torch.Tensor, adapter: int) -> bytes:
    """A dictionary key of token ids under an adapter; a prefix of ids is a prefix of the key."""
    return adapter.to_bytes(8) + ids.numpy().tobytes()


def _longest_prefixes(rows: Sequence[bytes]) -> dict[bytes, bytes | None]:
    """For each of some sorted rows, the longest other one that it starts with."""
    longest: dict[bytes, bytes | None] = {}
    nested: list[bytes] = []
    for row in rows:
        while nested and not row.startswith(nested[-1]):
            nested.pop()
        longest[row] = nested[-1] if nested else None
        nested.append(row)
    return longest


def _group_by_block(
    rows: Sequence[CachedRow], lengths: Sequence[int], width: int, device: torch.device
) -> list[_BlockRows]:
    """Which rows and columns of which block go where in a cache of ``width`` columns."""
    # Token t of a prompt belongs in column max(lengths) - length + t.
    first_token = torch.tensor(lengths)[:, None] - max(lengths)
    token = (first_token + torch.arange(width)).clamp(min=0)
    columns = token + torch.tensor([row.start for row in rows])[:, None]
    row_in_block = torch.tensor([row.row for row in rows])
    blocks = torch.tensor([row.block for row in rows])
    groups = []
    for block in blocks.unique().tolist():
        targets = (blocks == block).nonzero().squeeze(1)
        indices = (targets, row_in_block[targets], columns[targets])
        groups.append(_BlockRows(block, *(index.to(device) for index in indices)))
    return groups


def _gather(
    blocks: Sequence[torch.Tensor], sources: Sequence[_BlockRows], room: int
) -> torch.Tensor:
    """``(N, heads, width + room, head size)``, its first columns copied from the blocks."""
    width = sources[0].columns.shape[1]
    gathered = empty_buffer(blocks[0], sum(len(source.rows) for source in sources), width + room)
    for source in sources:
        block = blocks[source.block]
        _, heads, columns, size = block.shape
        head = torch.arange(heads, device=block.device)
        line = (source.rows[:, None, None] * heads + head[:, None]) * columns
        line = line + source.columns[:, None]
        lines = block.view(-1, size).index_select(0, line.view(-1))
        gathered[source.targets, :, :width] = lines.view(len(source.rows), heads, width, size)
    return gathered
