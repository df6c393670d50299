"""Rows of a batch in groups: by prompt, or by adapter."""

from __future__ import annotations

import torch


class RowGroups:
    """Which rows belong to which group, and their order by group.

    Groups are padded to the size of the largest, or, where that takes too many places, one follows
    the other.

    Args:
        group_of_row: ``(N,)`` long, below ``count``.
        count: Number of groups.
        most_padding: Most places of padded groups over rows; None: they are padded anyway.
    """

    def __init__(
        self, group_of_row: torch.Tensor, count: int, most_padding: float | None = None
    ) -> None:
        sizes = torch.bincount(group_of_row, minlength=count)
        rows = len(group_of_row)
        self.size = int(sizes.max())
        """Rows of the largest group."""
        self.sizes: list[int] | None = None
        """Of each group; None where they are padded."""
        before = sizes.cumsum(0) - sizes
        starts, places = torch.arange(count, device=before.device) * self.size, count * self.size
        if most_padding is not None and places > most_padding * rows:
            starts, places, self.sizes = before, rows, sizes.tolist()
        order = group_of_row.argsort(stable=True)
        numbers = torch.arange(rows, device=order.device)
        place = torch.empty_like(order)
        place[order] = (starts - before)[group_of_row[order]] + numbers
        # None: the rows are in order and there is no padding.
        self._place: torch.Tensor | None = place
        self._row = order.new_zeros(places)
        self._row[place] = numbers
        if places == rows and bool((place == numbers).all()):
            self._place = None

    def gathered(self, rows: torch.Tensor) -> torch.Tensor:
        """``(N, ...)`` in the order of the groups; what is over in these is arbitrary."""
        return rows if self._place is None else rows[self._row]

    def returned(self, grouped: torch.Tensor) -> torch.Tensor:
        """The reverse of :meth:`gathered`."""
        return grouped if self._place is None else grouped[self._place]
