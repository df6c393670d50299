"""Parts of a packed row as operands of one width, which kernels for CPUs take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

# How many times the arithmetic of a row may become by padding, so that it shares a call: calls for
# short rows would take longer than their arithmetic.
MOST_PADDING, MOST_PADDING_SHORT = 1.3, 4.0
SHORT = 128
# Rows up to this length run together whatever their lengths are.
NEGLIGIBLE = 32


def rows_together(queries: Sequence[int], keys: Sequence[int]) -> list[list[int]]:
    """Which rows attend in one call, padded to the longest of them.

    Args:
        queries: Of each row; a row without any is in no call.
        keys: Of each row.
    """
    shapes = list(zip(queries, keys, strict=True))
    rows = [row for row, shape in enumerate(shapes) if shape[0]]
    groups: list[list[int]] = []
    widths, least = (0, 0), 0
    for row in sorted(rows, key=lambda row: shapes[row], reverse=True):
        own = shapes[row]
        wider = max(own[0], widths[0]), max(own[1], widths[1])
        smaller = min(math.prod(own), least)
        if groups and _may_be_padded(smaller, wider):
            groups[-1].append(row)
            widths, least = wider, smaller
        else:
            groups.append([row])
            widths, least = own, math.prod(own)
    return [sorted(group) for group in groups]


def _may_be_padded(products: int, widths: tuple[int, int]) -> bool:
    """Whether a row of so many products of a query and a key may run padded to these widths."""
    most = MOST_PADDING_SHORT if max(widths) <= SHORT else MOST_PADDING
    return max(widths) <= NEGLIGIBLE or math.prod(widths) <= most * products


@dataclass(frozen=True)
class PaddedRows:
    """Some rows of a packed row as ``(R, W)``, right-padded.

    Rows that begin at ``[0, 5]`` with lengths ``[3, 1]``::

        slots    [0, 1, 2, 5, 5, 5]
        padding  [F, F, F, F, T, T]
        tokens   [0, 1, 2, 5]
        filled   [0, 1, 2, 3]

    Consecutive rows of one length are a view: of the slice ``view``.
    """

    rows: int
    width: int
    view: slice | None = None
    slots: torch.Tensor | None = None
    """``(R·W,)`` long: packed place of the token in each slot; in padding, the row's first."""
    padding: torch.Tensor | None = None
    """``(R·W,)`` bool; None: no row is padded."""
    tokens: torch.Tensor | None = None
    """``(n,)`` long: packed places of the rows' tokens."""
    filled: torch.Tensor | None = None
    """``(n,)`` long: their slots."""

    @classmethod
    def of(cls, starts: Sequence[int], lengths: Sequence[int], device: torch.device) -> PaddedRows:
        """The rows that begin at these places and have these lengths."""
        rows, width = len(starts), max(lengths)
        even = all(length == width for length in lengths)
        if even and list(starts) == [starts[0] + row * width for row in range(rows)]:
            return cls(rows, width, slice(starts[0], starts[0] + rows * width))
        place = torch.arange(width, device=device)
        first = torch.tensor(starts, device=device)[:, None]
        padding = place >= torch.tensor(lengths, device=device)[:, None]
        slots = torch.where(padding, first, first + place).flatten()
        if even:
            return cls(rows, width, slots=slots, tokens=slots)

        def joined(starts: Sequence[int]) -> torch.Tensor:
            each = zip(starts, lengths, strict=True)
            return torch.cat([torch.arange(s, s + n, device=device) for s, n in each])

        filled = joined(range(0, rows * width, width))
        return cls(rows, width, None, slots, padding.flatten(), joined(starts), filled)

    def take(self, values: torch.Tensor, fill: float | None = None) -> torch.Tensor:
        """``(N, ...)`` to ``(R, W, ...)``; padding is ``fill``, or any token where it is None."""
        made = values[self.view] if self.slots is None else values.index_select(0, self.slots)
        if fill is not None and self.padding is not None:
            made.view(len(made), -1).masked_fill_(self.padding[:, None], fill)
        return made.view(self.rows, self.width, *values.shape[1:])

    def put(self, values: torch.Tensor, rows: torch.Tensor, *, add: bool = False) -> None:
        """Set the rows' tokens in ``(N, ...)`` to ``(R, W, ...)``, or add that to them."""
        made = rows.flatten(0, 1)
        if self.tokens is None:
            target = values[self.view]
            target.add_(made) if add else target.copy_(made)
            return
        if self.filled is not None:
            made = made.index_select(0, self.filled)
        write = values.index_add_ if add else values.index_copy_
        write(0, self.tokens, made)
