"""A stream of rows, pass after pass."""

from __future__ import annotations

import copy
import itertools
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from agilerl.checks import require
from agilerl.llm_envs.dataset.rows import TABLE_FORMATS

if TYPE_CHECKING:
    from datasets import IterableDataset

_HEAD = 8


class Stream:
    """A ``datasets.IterableDataset``, pass after pass; several environments may share one.

    Args:
        name: What messages call it.
        dataset: What the user passed.

    Raises:
        ValueError: No rows.
    """

    def __init__(self, name: str, dataset: IterableDataset) -> None:
        self.name, self._dataset = name, dataset
        self._has_states = not _has_shuffle_buffer(dataset)
        first = self.rows(0)
        self.head = first.peek(_HEAD)
        """The first rows."""
        require(bool(self.head), f"{name} has no rows; pass at least one question")
        # Used for the first pass: what it has read, such as a shuffle buffer, is read only once.
        self._first: StreamIterator | None = first
        seen = dict.fromkeys(column for row in self.head for column in row)
        self.column_names = list(dataset.column_names or seen)
        """Of a stream that does not say: those of its first rows."""

    def first_rows(self) -> StreamIterator:
        """The rows of the first pass."""
        first, self._first = self._first, None
        return self.rows(0) if first is None else first

    def rows(self, epoch: int, state: Mapping[str, Any] | None = None) -> StreamIterator:
        """The rows of a pass, from its start or from a state on."""
        dataset = _separate(self._dataset)
        dataset.set_epoch(epoch)
        dataset.load_state_dict({} if state is None else dict(state))
        return StreamIterator(dataset, self._has_states)


class StreamIterator:
    """The rows of one pass.

    Args:
        dataset: Iterated by this object alone.
        has_states: Whether its state is enough to go on.
    """

    def __init__(self, dataset: IterableDataset, has_states: bool) -> None:
        self._dataset, self._has_states = dataset, has_states
        self._rows: Any = iter(dataset)
        self._peeked: deque[dict[str, Any]] = deque()
        # What an iteration has open is gone already when the interpreter ends it at last.
        weakref.finalize(self, self._rows.close)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        return self._peeked.popleft() if self._peeked else next(self._rows)

    def peek(self, count: int) -> list[dict[str, Any]]:
        """The next rows, which stay the next ones."""
        self._peeked += itertools.islice(self._rows, max(count - len(self._peeked), 0))
        return list(itertools.islice(self._peeked, count))

    def state_dict(self) -> dict[str, Any] | None:
        """The dataset's state after the row that came last; None where it is not that."""
        known = self._has_states and not self._peeked
        return self._dataset.state_dict() if known else None


def _separate(dataset: IterableDataset) -> IterableDataset:
    """The same rows as dicts, with an epoch and a position of their own.

    ``copy.copy`` would share both, and ``copy.deepcopy`` fails on what cannot be pickled, such as a
    client with a lock that a generator was given.
    """
    formatting = dataset._formatting
    separate = dataset.with_format(None if formatting is None else formatting.format_type)
    if formatting is None or formatting.format_type in TABLE_FORMATS:
        separate._formatting = None
    separate._ex_iterable = _separate_position(dataset._ex_iterable)
    return separate


def _separate_position(iterable: Any) -> Any:
    """A copy of an iterable and of those that it reads from; each notes where it is."""
    copied = copy.copy(iterable)
    for name, part in vars(iterable).items():
        if name == "ex_iterable":
            setattr(copied, name, _separate_position(part))
        elif name == "ex_iterables":
            setattr(copied, name, [_separate_position(each) for each in part])
    return copied


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
