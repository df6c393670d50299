"""Parts of a packed row as operands of one width, which kernels for CPUs take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

# A longer row attends in a call of its own, without copies; calls for shorter ones would take
# longer than their arithmetic.
LONGEST_TOGETHER = 128
# Shorter rows are padded together whatever their lengths are.
SHORTEST_PADDED = 32


def rows_together(*lengths: Sequence[int]) -> Iterator[list[int]]:
    """Which rows to run in one call: those of one shape, or of similar ones if they are short.

    Args:
        lengths: Of each row's operands, such as its queries and its keys. A row whose first one is
            empty is in no call.
    """
    shapes = list(zip(*lengths, strict=True))
    groups: dict[object, list[int]] = {}
    even = len(set(shapes)) == 1
    for row, shape in enumerate(shapes):
        if shape[0]:
            alone = max(shape) > LONGEST_TOGETHER and not even
            key = row if alone else tuple(_size_class(length) for length in shape)
            groups.setdefault(key, []).append(row)
    yield from groups.values()


def _size_class(length: int) -> int:
    """The same for lengths between two powers of two."""
    return max(length - 1, SHORTEST_PADDED - 1).bit_length()


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
