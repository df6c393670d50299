"""Keys and values: layers that grow in place, and rows kept for the prompts that continue them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import Cache, DynamicLayer

# Tokens by which a layer grows when it is full.
CACHE_BLOCK = 64

LayerTensors = tuple[torch.Tensor, torch.Tensor]


class GrowingLayer(DynamicLayer):
    """Keys and values in buffers with room to spare: new columns are written in place.

    Args:
        room: Columns to spare whenever the buffers are made anew.
        buffers: Keys and values ``(N, heads, columns, head size)``; None: made at the first update.
        length: Columns of them that are in use.
    """

    def __init__(
        self, room: int = CACHE_BLOCK, buffers: LayerTensors | None = None, length: int = 0
    ) -> None:
        super().__init__()
        self.room, self.length = room, length
        if buffers is not None:
            self._hold(*buffers)

    def _hold(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.key_buffer, self.value_buffer = keys, values
        # dtype and device are read off these. Views of the buffers would keep outgrown ones alive.
        self.keys, self.values = keys.new_empty(0), values.new_empty(0)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> LayerTensors:
        """Write new columns and return all, both as views of the buffers."""
        end = self.length + key_states.shape[-2]
        if not self.is_initialized:
            self._hold(
                _buffer(key_states, len(key_states), end + self.room),
                _buffer(value_states, len(value_states), end + self.room),
            )
        elif end > self.key_buffer.shape[-2]:
            self._hold(self._grown(self.key_buffer, end), self._grown(self.value_buffer, end))
        self.key_buffer[:, :, self.length : end] = key_states
        self.value_buffer[:, :, self.length : end] = value_states
        self.length = end
        return self.key_buffer[:, :, :end], self.value_buffer[:, :, :end]

    def _grown(self, buffer: torch.Tensor, end: int) -> torch.Tensor:
        made = _buffer(buffer, len(buffer), end + self.room)
        made[:, :, : self.length] = buffer[:, :, : self.length]
        return made

    def get_seq_length(self) -> int:
        """Columns in use."""
        return self.length

    def select(self, rows: torch.Tensor) -> None:
        """Go on with these rows (a long index, repetitions allowed)."""
        self._hold(self.key_buffer.index_select(0, rows), self.value_buffer.index_select(0, rows))

    def copy_of(self, rows: torch.Tensor) -> LayerTensors:
        """Keys and values of some rows, without the room."""
        return (
            self.key_buffer[:, :, : self.length].index_select(0, rows),
            self.value_buffer[:, :, : self.length].index_select(0, rows),
        )


def _buffer(like: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """An unwritten ``(rows, heads, columns, head size)``."""
    return like.new_empty(rows, like.shape[1], columns, like.shape[3])


class Place(NamedTuple):
    """Where a kept row is."""

    part: int
    row: int
    start: int
    """Column of its first token."""
    length: int
    """Tokens of it that have keys and values, in consecutive columns."""


class _Picked(NamedTuple):
    """What one part contributes to a new cache."""

    part: int
    targets: torch.Tensor
    """``(n,)`` rows of the new cache."""
    rows: torch.Tensor
    """``(n,)`` rows of the part they continue."""
    columns: torch.Tensor
    """``(n, width)`` columns of the part; any column where the new cache has padding."""


class KeptRows:
    """Keys and values of the rows generated last, for prompts that continue them.

    Rows are kept in parts: those that left the batch together share tensors.
    """

    def __init__(self) -> None:
        self._parts: list[list[LayerTensors | None]] = []
        self._places: dict[bytes, Place] = {}
        self._ordered: list[bytes] = []
        self._shorter: dict[bytes, bytes | None] = {}

    def add(
        self,
        layers: Sequence[LayerTensors],
        token_ids: Sequence[torch.Tensor],
        starts: Sequence[int],
    ) -> None:
        """Keep one part.

        Args:
            layers: Per layer, keys and values ``(n, heads, columns, head size)``, contiguous.
            token_ids: Per row, the 1-D ids that have keys and values.
            starts: Per row, the column of its first token.
        """
        for row, (ids, start) in enumerate(zip(token_ids, starts, strict=True)):
            self._places[id_bytes(ids)] = Place(len(self._parts), row, start, len(ids))
        self._parts.append(list(layers))
        self._ordered = sorted(self._places)
        self._shorter = _longest_prefixes(self._ordered)

    def find(self, prompt: torch.Tensor) -> Place | None:
        """The longest kept row that the 1-D ``prompt`` starts with and goes beyond."""
        whole = id_bytes(prompt)
        before = bisect_left(self._ordered, whole)
        # Whatever sorts between a prefix of the prompt and the prompt starts with that prefix too.
        row = self._ordered[before - 1] if before else None
        while row is not None and not whole.startswith(row):
            row = self._shorter[row]
        return None if row is None else self._places[row]

    def take(self, places: Sequence[Place], lengths: Sequence[int], room: int) -> Cache:
        """Make the cache that prompts of these ``lengths`` continue; nothing is kept afterwards.

        Prompts are right-aligned in ``max(lengths)`` columns. The last of them, as many as the
        prompt with most new tokens needs, are left to be run for every row, so that no row has a
        hole between old and new columns: sliding windows count columns.

        Args:
            places: Per prompt, what it continues.
            lengths: Tokens of each prompt.
            room: Columns to spare behind the prompts.
        """
        block = max(length - place.length for place, length in zip(places, lengths, strict=True))
        width = max(lengths) - block
        device = next(pair for pair in self._parts[0] if pair is not None)[0].device
        picked = _pick(places, lengths, width, device)
        layers = []
        for number in range(len(self._parts[0])):
            pairs = [part[number] for part in self._parts]
            keys, values = (
                _gather([pair[i] for pair in pairs if pair is not None], picked, block + room)
                for i in (0, 1)
            )
            layers.append(GrowingLayer(room, (keys, values), width))
            # Layer by layer, so that old and new are never both whole.
            for part in self._parts:
                part[number] = None
        self.clear()
        return Cache(layers=layers)

    def clear(self) -> None:
        """Keep nothing any more."""
        self._parts, self._places = [], {}
        self._ordered, self._shorter = [], {}


def id_bytes(ids: torch.Tensor) -> bytes:
    """Token ids as a dictionary key; a prefix of ids is a prefix of bytes."""
    return ids.numpy().tobytes()


def _longest_prefixes(ordered: Sequence[bytes]) -> dict[bytes, bytes | None]:
    """For each of some sorted rows, the longest other one that it starts with."""
    longest: dict[bytes, bytes | None] = {}
    nested: list[bytes] = []
    for row in ordered:
        while nested and not row.startswith(nested[-1]):
            nested.pop()
        longest[row] = nested[-1] if nested else None
        nested.append(row)
    return longest


def _pick(
    places: Sequence[Place], lengths: Sequence[int], width: int, device: torch.device
) -> list[_Picked]:
    """Which rows and columns of which part go where in a cache of ``width`` columns."""
    # Token t of a prompt is to be in column max(lengths) - length + t.
    first_token = torch.tensor(lengths)[:, None] - max(lengths)
    token = (first_token + torch.arange(width)).clamp(min=0)
    columns = token + torch.tensor([place.start for place in places])[:, None]
    rows = torch.tensor([place.row for place in places])
    parts = torch.tensor([place.part for place in places])
    picked = []
    for part in parts.unique().tolist():
        targets = (parts == part).nonzero().squeeze(1)
        picked.append(
            _Picked(part, targets.to(device), rows[targets].to(device), columns[targets].to(device))
        )
    return picked


def _gather(parts: Sequence[torch.Tensor], picked: Sequence[_Picked], room: int) -> torch.Tensor:
    """``(N, heads, width + room, head size)``, its first columns filled from the parts."""
    width = picked[0].columns.shape[1]
    made = _buffer(parts[0], sum(len(pick.rows) for pick in picked), width + room)
    for pick in picked:
        source = parts[pick.part]
        _, heads, columns, size = source.shape
        head = torch.arange(heads, device=source.device)
        line = (pick.rows[:, None, None] * heads + head[:, None]) * columns + pick.columns[:, None]
        lines = source.view(-1, size).index_select(0, line.view(-1))
        made[pick.targets, :, :width] = lines.view(len(pick.rows), heads, width, size)
    return made
