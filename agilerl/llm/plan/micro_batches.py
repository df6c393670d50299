"""Rows of an optimizer step into micro-batches, by rows or by tokens."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import torch

from agilerl.llm.batch import TrainBatch
from agilerl.llm.config import RowLayout
from agilerl.llm.forward.hidden_states import tokens_run
from agilerl.llm.forward.packed_rows import packed_tokens, row_tokens


def split_by_tokens(
    batch: TrainBatch, rows: torch.Tensor, limit: int, layout: RowLayout
) -> list[torch.Tensor]:
    """Cut rows, in their order, into micro-batches of at most ``limit`` tokens.

    Tokens are those a forward runs, padding counted. A row that has more runs alone.
    """
    if layout == "packed":
        return list(rows.split(_sizes_within(row_tokens(batch, rows), limit)))
    parts = []
    while len(rows):
        sizes = range(1, len(rows) + 1)
        fitting = bisect_right(sizes, limit, key=lambda n: tokens_run(batch, rows[:n], layout))
        part = rows[: max(fitting, 1)]
        parts.append(part)
        rows = rows[len(part) :]
    return parts


def split_evenly_by_tokens(batch: TrainBatch, rows: torch.Tensor, parts: int) -> list[torch.Tensor]:
    """Cut packed rows, in their order, into at most ``parts`` micro-batches of even tokens."""
    if not len(rows):
        return []
    tokens = row_tokens(batch, rows)
    limits = range(packed_tokens(batch, rows) + 1)
    least = bisect_left(limits, True, key=lambda limit: len(_sizes_within(tokens, limit)) <= parts)
    return list(rows.split(_sizes_within(tokens, least)))


def _sizes_within(tokens: Sequence[tuple[int, int, int]], limit: int) -> list[int]:
    """Rows of each micro-batch if each takes as many as ``limit`` tokens allow, at least one."""
    sizes: list[int] = []
    seen: set[int] = set()
    total = 0
    for number, prompt, others in tokens:
        added = others + (0 if number in seen else prompt)
        if sizes and total + added <= limit:
            sizes[-1] += 1
            total += added
        else:
            sizes.append(1)
            total = prompt + others
            seen.clear()
        seen.add(number)
    return sizes


def split_into_micro_batches(
    batch: TrainBatch, rows: torch.Tensor, size: int, layout: RowLayout
) -> list[torch.Tensor]:
    """Cut rows into micro-batches of at most ``size``.

    Rows of similar length side by side need little padding, rows of one prompt share it: the order
    with fewer tokens to run is taken.
    """
    if len(rows) <= size:
        return [rows] if len(rows) else []
    by_prompt = list(rows.split(size))
    by_length = list(rows[batch.lengths[rows].argsort(stable=True)].split(size))

    def cost(micro_batches: Sequence[torch.Tensor]) -> int:
        return sum(tokens_run(batch, part, layout) for part in micro_batches)

    return min(by_prompt, by_length, key=cost)
