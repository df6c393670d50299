"""The random numbers behind a call of ``generate``, by row and position."""

from __future__ import annotations

import torch

# Positions drawn at a time, so that memory follows what is generated and not what would be allowed.
BLOCK = 256


class Uniforms:
    """One number in [0, 1) per row and position, drawn a block of positions at a time.

    A number depends on ``rng``'s state at construction, its row, its position and ``positions``
    alone, not on the rows that are run together, nor on how far. Nor does the state that ``rng``
    is left in.

    Args:
        rows: How many rows there are.
        positions: The longest row's.
        rng: Gives the first block and, where there are more, the seed of the others.
    """

    def __init__(self, rows: int, positions: int, rng: torch.Generator) -> None:
        self._rows = rows
        self._first = torch.rand(rows, min(positions, BLOCK), generator=rng)
        self._seed = 0
        if positions > BLOCK:
            self._seed = int(torch.randint(2**31, (), generator=rng))

    def block(self, number: int, rows: list[int]) -> torch.Tensor:
        """Positions from ``number * BLOCK`` on, of some rows: ``(n, <= BLOCK)``."""
        if number == 0:
            return self._first[rows]
        rng = torch.Generator().manual_seed(self._seed + number)
        return torch.rand(self._rows, BLOCK, generator=rng)[rows]
