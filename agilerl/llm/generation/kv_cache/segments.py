"""Parts of rows in blocks of keys and values, and copying them to the columns of a new block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Segment(NamedTuple):
    """Successive tokens of a row, whose keys and values are in consecutive columns of a block."""

    block: int
    row: int
    start: int
    """Column of the first token."""
    length: int
    """Tokens; may be 0."""


class Source(NamedTuple):
    """What one block contributes to a new one."""

    block: int
    targets: torch.Tensor
    """``(n,)`` rows of the new block."""
    rows: torch.Tensor
    """``(n,)`` rows of this block."""
    columns: torch.Tensor
    """``(n, width)`` columns of this block, one for each of the new block."""
    begun: torch.Tensor
    """``(n, width)`` bool, False on the columns before a segment's first token."""


def sources_of(
    segments: Sequence[Segment], firsts: Sequence[int], width: int, device: torch.device
) -> list[Source]:
    """Where the segments go in a block of as many rows and ``width`` columns.

    Columns beside a segment get keys and values of its first or last token, which are finite at
    least. Segments without tokens go nowhere.

    Args:
        segments: Of each row of the new block.
        firsts: The column of their first token.
        width: Columns of the new block.
        device: Of the blocks.
    """
    token = torch.arange(width) - torch.tensor(firsts)[:, None]
    last = torch.tensor([segment.length - 1 for segment in segments])[:, None]
    columns = token.clamp(min=0).minimum(last)
    columns += torch.tensor([segment.start for segment in segments])[:, None]
    rows = torch.tensor([segment.row for segment in segments])
    blocks = torch.tensor([segment.block for segment in segments])
    present = last[:, 0] >= 0
    sources = []
    for block in blocks[present].unique().tolist():
        targets = ((blocks == block) & present).nonzero().squeeze(1)
        indices = (targets, rows[targets], columns[targets], token[targets] >= 0)
        sources.append(Source(block, *(index.to(device) for index in indices)))
    return sources


def copy_segments(
    target: torch.Tensor,
    blocks: Sequence[torch.Tensor],
    sources: Sequence[Source],
    *,
    behind: bool = False,
) -> None:
    """Fill the first columns of ``target``.

    Args:
        target: ``(N, heads, >= width, head size)``.
        blocks: ``(n, heads, columns, head size)``, contiguous.
        sources: What goes where.
        behind: Leave the columns before the segments as they are.
    """
    for source in sources:
        block = blocks[source.block]
        _, heads, columns, size = block.shape
        head = torch.arange(heads, device=block.device)
        line = (source.rows[:, None, None] * heads + head[:, None]) * columns
        line = line + source.columns[:, None]
        lines = block.view(-1, size).index_select(0, line.view(-1))
        rows, width = source.columns.shape
        lines = lines.view(rows, heads, width, size)
        if behind:
            before = target[source.targets, :, :width]
            lines = torch.where(source.begun[:, None, :, None], lines, before)
        target[source.targets, :, :width] = lines
