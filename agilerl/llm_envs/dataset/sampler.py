"""The order in which training takes the rows of a dataset."""

from __future__ import annotations

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

    def current(self) -> list[int]:
        """The rows of the present batch that are this process's share."""
        return self.upcoming(1)[0]

    def upcoming(self, count: int) -> list[list[int]]:
        """This process's share of the present batch and those after it, ``count`` in all."""
        epoch, offset, batches = self.epoch, self.offset, []
        for _ in range(count):
            permutation, end = _permutation(self.rows, self.seed, epoch), self._end(offset)
            batches.append(permutation[offset + self.rank : end : self.num_replicas].tolist())
            epoch, offset = self._after(epoch, offset)
        return batches

    def advance(self) -> None:
        """Go to the next batch."""
        self.epoch, self.offset = self._after(self.epoch, self.offset)

    def set_epoch(self, epoch: int) -> None:
        """Go to the first batch of an epoch."""
        self.epoch, self.offset = epoch, 0

    def state_dict(self) -> dict[str, int]:
        """The position and what it depends on, JSON-compatible; the same in every process."""
        return {
            "seed": self.seed, "epoch": self.epoch, "offset": self.offset, "rows": self.rows
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Take the seed and the position of ``state``.

        Raises:
            ValueError: Not a state of this class, or of another number of rows.
        """
        expected = sorted(self.state_dict())
        require(
            sorted(state) == expected,
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

    def _end(self, offset: int) -> int:
        """Where the batch of all processes ends that begins at an offset."""
        end = offset + self.batch_size * self.num_replicas
        return end if self.rows - end >= self.num_replicas else self.rows

    def _after(self, epoch: int, offset: int) -> tuple[int, int]:
        """Epoch and offset of the next batch."""
        end = self._end(offset)
        return (epoch, end) if end < self.rows else (epoch + 1, 0)


@lru_cache(maxsize=2)
def _permutation(rows: int, seed: int, epoch: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.random.default_rng((seed, epoch)).permutation(rows)
