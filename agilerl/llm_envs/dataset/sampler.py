"""The order in which training takes the rows of a dataset."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from agilerl.checks import require


class TrainingBatchSampler:
    """Batches of dataset rows, reshuffled every epoch: a pure function of seed, epoch and offset.

    torch's samplers are iterated; this one stays at a batch until :meth:`advance`, so that its
    state names the first batch that is not trained on yet.

    With several processes a batch has ``batch_size`` rows for each, assigned round-robin; every row
    occurs once in an epoch. The last batch of an epoch may be short, but has a row for every
    process: fewer remaining rows than processes are added to the batch before.

    An epoch to which rows were appended after it had begun (see :func:`with_appended_rows`) has
    several segments, one after the other: the rows that it began with, in the order and batches
    that they would have had anyway, and those appended each time, shuffled by themselves. The next
    epoch shuffles all rows together.

    Args:
        rows: Rows of the training split.
        batch_size: Rows per batch and process.
        seed: 0 or more.
        rank: This process.
        num_replicas: Number of processes.

    Raises:
        ValueError: Fewer rows than processes.
    """

    def __init__(
        self, rows: int, batch_size: int, seed: int, rank: int = 0, num_replicas: int = 1
    ) -> None:
        require(
            rows >= num_replicas,
            f"train_dataset has {rows} rows for {num_replicas} processes; every process needs at "
            "least one, so add rows or use fewer processes",
        )
        self.rows = rows
        self.batch_size = batch_size
        self.seed = seed
        self.rank = rank
        self.num_replicas = num_replicas
        self.epoch = 0
        """Completed passes."""
        self.offset = 0
        """Rows of all processes that are done in this epoch."""
        self._segments: tuple[int, ...] = (rows,)
        """Sizes of the segments of this epoch."""

    def current(self) -> list[int]:
        """The rows of the present batch that are this process's share."""
        return self.upcoming(1)[0]

    def upcoming(self, count: int) -> list[list[int]]:
        """This process's share of the present batch and those after it, ``count`` in all."""
        epoch, offset, batches = self.epoch, self.offset, []
        for _ in range(count):
            order = _order(self._segments_of(epoch), self.seed, epoch)
            end = self._end(epoch, offset)
            batches.append(order[offset + self.rank : end : self.num_replicas].tolist())
            epoch, offset = self._after(epoch, offset)
        return batches

    def advance(self) -> None:
        """Go to the next batch."""
        epoch, offset = self._after(self.epoch, self.offset)
        self._segments = self._segments_of(epoch)
        self.epoch, self.offset = epoch, offset

    def set_epoch(self, epoch: int) -> None:
        """Go to the first batch of an epoch."""
        self.epoch, self.offset, self._segments = epoch, 0, (self.rows,)

    def state_dict(self) -> dict[str, Any]:
        """The position and what it depends on, JSON-compatible; the same in every process."""
        state: dict[str, Any] = {
            "seed": self.seed, "epoch": self.epoch, "offset": self.offset, "rows": self.rows
        }  # fmt: skip
        return state if len(self._segments) == 1 else {**state, "segments": [*self._segments]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the seed and the position of ``state``.

        Raises:
            ValueError: Not a state of this class, or of another number of rows.
        """
        expected = ["epoch", "offset", "rows", "seed"]
        require(
            sorted({*state} - {"segments"}) == expected,
            f"state has the keys {sorted(state)}, expected {expected}; pass what state_dict() "
            "returned",
        )
        require(
            state["rows"] == self.rows,
            f"state was saved with rows={state['rows']}, this environment has {self.rows}, so the "
            "same position has other rows here; resume with the same train_dataset and "
            "max_context_length",
        )
        self.seed, self.epoch, self.offset = state["seed"], state["epoch"], state["offset"]
        self._segments = tuple(state.get("segments", (self.rows,)))

    def _segments_of(self, epoch: int) -> tuple[int, ...]:
        return self._segments if epoch == self.epoch else (self.rows,)

    def _end(self, epoch: int, offset: int) -> int:
        """Where the batch of all processes ends that begins at an offset."""
        least, end = self.num_replicas, offset + self.batch_size * self.num_replicas
        # A batch does not reach into the next segment, unless one of the two had not a row for
        # every process then.
        stop = next(
            stop
            for stop in itertools.accumulate(self._segments_of(epoch))
            if stop == self.rows or (stop - offset >= least and self.rows - stop >= least)
        )
        return end if stop - end >= least else stop

    def _after(self, epoch: int, offset: int) -> tuple[int, int]:
        """Epoch and offset of the next batch."""
        end = self._end(epoch, offset)
        return (epoch, end) if end < self.rows else (epoch + 1, 0)


def with_appended_rows(state: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """The state of a :class:`TrainingBatchSampler` at the same place, of more rows.

    An epoch that has not begun shuffles all of them together.

    Args:
        state: What ``state_dict()`` gave.
        rows: All rows, the appended ones included; those of ``state`` are the first.
    """
    appended = rows - state["rows"]
    if appended == 0:
        return dict(state)
    grown = {**state, "rows": rows}
    if state["offset"] > 0:
        grown["segments"] = [*state.get("segments", [state["rows"]]), appended]
    return grown


@lru_cache(maxsize=2)
def _order(segments: tuple[int, ...], seed: int, epoch: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Every row once, segment by segment."""
    parts, start = [np.random.default_rng((seed, epoch)).permutation(segments[0])], segments[0]
    for size in segments[1:]:
        parts.append(start + np.random.default_rng((seed, epoch, start)).permutation(size))
        start += size
    return np.concatenate(parts)
