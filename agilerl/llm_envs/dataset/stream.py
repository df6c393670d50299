"""A stream of rows, pass after pass."""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from agilerl.checks import require

if TYPE_CHECKING:
    from datasets import IterableDataset

_HEAD = 8


class Stream:
    """A ``datasets.IterableDataset``, pass after pass.

    Args:
        name: What messages call it.
        dataset: What the user passed. A copy is iterated: several environments may share one.

    Raises:
        ValueError: No rows.
    """

    def __init__(self, name: str, dataset: IterableDataset) -> None:
        self.name, self._dataset = name, copy.deepcopy(dataset)
        self._iterations: list[Any] = []
        # What an iteration has open is gone already when the interpreter ends it at last.
        weakref.finalize(self, _close, self._iterations)
        self.head = list(itertools.islice(self.rows(0), _HEAD))
        """The first rows."""
        require(bool(self.head), f"{name} has no rows; pass at least one question")
        seen = dict.fromkeys(column for row in self.head for column in row)
        self.column_names = list(dataset.column_names or seen)
        """Of a stream that does not say: those of its first rows."""
        self.has_states = not _has_shuffle_buffer(dataset)
        """Whether :meth:`state_dict` is enough to go on."""

    def rows(self, epoch: int, state: Mapping[str, Any] | None = None) -> Iterator[dict[str, Any]]:
        """The rows of a pass, from its start or from a state on; ends any other iteration."""
        self._dataset.set_epoch(epoch)
        self._dataset.load_state_dict({} if state is None else dict(state))
        rows = iter(self._dataset)
        self._iterations[:] = [rows]
        return rows

    def state_dict(self) -> dict[str, Any]:
        """Where the iteration is, as the dataset notes it."""
        return self._dataset.state_dict()


def _close(iterations: list[Any]) -> None:
    for rows in iterations:
        rows.close()


def _has_shuffle_buffer(dataset: IterableDataset) -> bool:
    """Whether rows wait in a buffer, which the state of a dataset leaves out."""
    from datasets.iterable_dataset import BufferShuffledExamplesIterable

    waiting: list[Any] = [dataset._ex_iterable]
    while waiting:
        each = waiting.pop()
        if isinstance(each, BufferShuffledExamplesIterable):
            return True
        waiting += [part for name, part in vars(each).items() if name == "ex_iterable"]
        waiting += vars(each).get("ex_iterables", [])
    return False
