"""The cache of prompts that continue stored rows.

The last columns, as many as the prompt with most new tokens needs, are left to be run for every
prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from agilerl.llm.generation.kv_cache.growing_cache import (
    GrowingCache,
    GrowingLayer,
    LayerTensors,
    empty_buffer,
)
from agilerl.llm.generation.kv_cache.segments import Segment, copy_segments, sources_of
from agilerl.llm.generation.kv_cache.shared_prefix import (
    SharedPrefixCache,
    SharedPrefixLayer,
    own_columns,
)

Block = list[LayerTensors]
"""Per layer, keys and values ``(n, heads, columns, head size)``."""


class CachedRow(NamedTuple):
    """Where the keys and values of a row are."""

    prompt: Segment
    """Those that other rows may have too; all of a row that shared none."""
    own: Segment | None = None
    """What comes after them; None: the row shared none."""

    @property
    def length(self) -> int:
        """Tokens that have keys and values."""
        return self.prompt.length + (0 if self.own is None else self.own.length)

    @property
    def parts(self) -> tuple[Segment, Segment]:
        """What may be shared and what comes after it, which may be nothing."""
        return self.prompt, self.prompt._replace(length=0) if self.own is None else self.own


def whole_cache(
    blocks: Sequence[Block], rows: Sequence[CachedRow], lengths: Sequence[int], room: int
) -> GrowingCache:
    """A cache of rows with all their tokens, right-aligned in ``max(lengths)`` columns.

    None has a gap between old and new columns: sliding windows count columns.

    Args:
        blocks: With the rows; they lose their tensors.
        rows: Per prompt, the row it continues.
        lengths: Tokens of each prompt.
        room: Columns to allocate behind the prompts, and by which the cache grows.
    """
    columns, device = max(lengths), _keys(blocks).device
    width = columns - _new_columns(rows, lengths)
    parts = [row.parts for row in rows]
    firsts = [columns - length for length in lengths]
    ends = [first + prompt.length for first, (prompt, _) in zip(firsts, parts, strict=True)]
    prompts = sources_of([prompt for prompt, _ in parts], firsts, width, device)
    own = sources_of([part for _, part in parts], ends, width, device)

    def gathered(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        target = empty_buffer(tensors[0], len(rows), columns + room)
        copy_segments(target, tensors, prompts)
        copy_segments(target, tensors, own, behind=True)
        return target

    layers = [
        GrowingLayer(room, (gathered(keys), gathered(values)), width)
        for keys, values in _layer_by_layer(blocks)
    ]
    return GrowingCache(room, layers)


def shared_cache(
    blocks: Sequence[Block], rows: Sequence[CachedRow], lengths: Sequence[int], room: int
) -> SharedPrefixCache:
    """A cache of rows with what they share kept once, and the rest in columns of their own.

    Both are right-aligned, so that there may be hidden columns in between.

    Args:
        blocks: With the rows; they lose their tensors.
        rows: Per prompt, the row it continues, all of them with a part of their own.
        lengths: Tokens of each prompt.
        room: Columns by which the rows' own grow.
    """
    parts = [row.parts for row in rows]
    prompts = sorted({prompt for prompt, _ in parts})
    number = {prompt: n for n, prompt in enumerate(prompts)}
    of_row = torch.tensor([number[prompt] for prompt, _ in parts], device=_keys(blocks).device)
    gathered_prompts = _gathered_prompts(blocks, prompts)
    own = [length - prompt.length for length, (prompt, _) in zip(lengths, parts, strict=True)]
    columns = max(own)
    width = columns - _new_columns(rows, lengths)
    firsts = [columns - count for count in own]
    sources = sources_of([part for _, part in parts], firsts, width, of_row.device)
    # A row without a source is all padding.
    filled = width if all(part.length for _, part in parts) else 0

    def gathered_own(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        target = empty_buffer(tensors[0], len(rows), own_columns(columns + 1, room))
        target[:, :, filled:].zero_()
        copy_segments(target, tensors, sources)
        return target

    layers = [
        SharedPrefixLayer(
            room,
            (gathered_prompts(keys), gathered_prompts(values)),
            (gathered_own(keys), gathered_own(values)),
            width,
        )
        for keys, values in _layer_by_layer(blocks)
    ]
    return SharedPrefixCache(room, layers, of_row, [prompt.length for prompt in prompts])


def _gathered_prompts(
    blocks: Sequence[Block], prompts: Sequence[Segment]
) -> Callable[[Sequence[torch.Tensor]], torch.Tensor]:
    """What puts prompts together, right-aligned; a block of just these is taken as it is."""
    columns, first = max(prompt.length for prompt in prompts), prompts[0].block
    count, _, block_columns, _ = _keys(blocks, first).shape
    ends = [(prompt.block, prompt.row, prompt.start + prompt.length) for prompt in prompts]
    if columns == block_columns and ends == [(first, row, columns) for row in range(count)]:
        return lambda tensors: tensors[first]
    firsts = [columns - prompt.length for prompt in prompts]
    sources = sources_of(prompts, firsts, columns, _keys(blocks, first).device)

    def gathered(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        target = empty_buffer(tensors[0], len(prompts), columns)
        copy_segments(target, tensors, sources)
        return target

    return gathered


def _new_columns(rows: Sequence[CachedRow], lengths: Sequence[int]) -> int:
    return max(length - row.length for row, length in zip(rows, lengths, strict=True))


def _keys(blocks: Sequence[Block], block: int = 0) -> torch.Tensor:
    """A block's keys of the first layer."""
    return blocks[block][0][0]


def _layer_by_layer(
    blocks: Sequence[Block],
) -> Iterator[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Keys and values of all blocks.

    They are taken out of these, so that only one layer's exist both here and in a new cache.
    """
    while blocks[0]:
        pairs = [block.pop(0) for block in blocks]
        yield [keys for keys, _ in pairs], [values for _, values in pairs]
        del pairs
