"""Keys and values of the rows generated last, for prompts that continue them."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

import torch

from agilerl.llm.generation.kv_cache.continued_rows import (
    Block,
    CachedRow,
    shared_cache,
    whole_cache,
)
from agilerl.llm.generation.kv_cache.growing_cache import GrowingCache, LayerTensors
from agilerl.llm.generation.kv_cache.segments import Segment
from agilerl.llm.generation.kv_cache.shared_prefix import CachedPrompts

# Rows go on sharing prompts while that saves more than this share of the keys and values. Where it
# saves less, attending to prompts and to own columns takes longer than attending to copies.
LEAST_SAVED = 0.25
# Groups of rows are padded to the largest; where that takes more places per row, none are shared.
MOST_PLACES = 2.0


class PrefixCache:
    """Keys and values by token ids.

    They are stored in blocks: of rows that left the batch together, and of the prompts that rows
    of several blocks share.
    """

    def __init__(self) -> None:
        self._blocks: list[Block] = []
        self._rows: dict[bytes, CachedRow] = {}
        self._sorted: list[bytes] = []
        self._prefix_of: dict[bytes, bytes | None] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def add_prompts(self, prompts: CachedPrompts) -> list[Segment]:
        """Store prompts; returns where the one of each row is, for :meth:`add`."""
        columns = prompts.layers[0][0].shape[2]
        segments = [
            Segment(len(self._blocks), number, columns - length, length)
            for number, length in enumerate(prompts.lengths)
        ]
        self._blocks.append(list(prompts.layers))
        return [segments[number] for number in prompts.of_row]

    def add(
        self,
        layers: Sequence[LayerTensors],
        token_ids: Sequence[torch.Tensor],
        starts: Sequence[int],
        adapters: Sequence[int],
        prompts: Sequence[Segment] | None = None,
    ) -> None:
        """Store one block.

        Args:
            layers: Per layer, keys and values ``(n, heads, columns, head size)``, contiguous.
            token_ids: Per row, the 1-D ids that have keys and values.
            starts: Per row, the column of its first token in ``layers``.
            adapters: Per row, the number of the adapter that it ran with.
            prompts: Per row, its first tokens, if ``layers`` hold only what comes after them.
        """
        block = len(self._blocks)
        rows = zip(token_ids, starts, adapters, strict=True)
        for row, (ids, start, adapter) in enumerate(rows):
            if prompts is None:
                cached = CachedRow(Segment(block, row, start, len(ids)))
            else:
                own = Segment(block, row, start, len(ids) - prompts[row].length)
                cached = CachedRow(prompts[row], own)
            self._rows[row_key(ids, adapter)] = cached
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

    def take(
        self, rows: Sequence[CachedRow], lengths: Sequence[int], room: int, *, share: bool
    ) -> GrowingCache:
        """Build the cache that prompts of these ``lengths`` continue, and clear this one.

        Args:
            rows: Per prompt, the row it continues.
            lengths: Tokens of each prompt.
            room: Columns to allocate behind the prompts, and by which it grows.
            share: Whether rows may go on sharing their first tokens, in a
                :class:`SharedPrefixCache`. Between these and the others there may then be hidden
                columns, which sliding windows would count. Otherwise, and where sharing does not
                pay, each row has all its tokens in consecutive columns.
        """
        build = shared_cache if share and _sharing_pays(rows, lengths) else whole_cache
        blocks = self._blocks
        self.clear()
        return build(blocks, rows, lengths, room)

    def clear(self) -> None:
        """Drop all rows."""
        self._blocks, self._rows = [], {}
        self._sorted, self._prefix_of = [], {}


def _sharing_pays(rows: Sequence[CachedRow], lengths: Sequence[int]) -> bool:
    """Whether rows share prompts, in groups of like size, and that saves enough columns.

    Args:
        rows: Per prompt, the row it continues.
        lengths: Tokens of each prompt.
    """
    if any(row.own is None for row in rows):
        return False
    groups = Counter(row.prompt for row in rows)
    own = max(length - row.prompt.length for row, length in zip(rows, lengths, strict=True))
    shared = len(groups) * max(prompt.length for prompt in groups) + len(rows) * own
    return len(groups) * max(groups.values()) <= MOST_PLACES * len(rows) and shared < (
        1 - LEAST_SAVED
    ) * len(rows) * max(lengths)


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
