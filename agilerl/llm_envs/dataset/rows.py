"""The rows of a split, whatever they are kept in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from agilerl.checks import require, shorten

if TYPE_CHECKING:
    from datasets import Dataset

_KINDS = (
    "a datasets.Dataset (build one with Dataset.from_list([...]) or Dataset.from_pandas(...), or "
    "pass one split of a DatasetDict, such as splits['train']) or a list of dicts"
)
_STREAM = ", or a stream: IterableDataset.from_generator(...)"


TABLE_FORMATS = ("arrow", "pandas", "polars")
"""Formats in which rows are no dicts; values then come as Python objects."""


class Rows(Protocol):
    """Rows that are all there."""

    @property
    def column_names(self) -> list[str]:
        """Names of the columns, in order."""

    def __len__(self) -> int:
        """Number of rows."""

    def take(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """The rows of these numbers."""

    def select_columns(self, columns: Sequence[str]) -> Rows:
        """The same rows with fewer columns."""


class DatasetRows:
    """Rows of a ``datasets.Dataset``; a column is read when its rows are taken.

    Args:
        dataset: The dataset.
    """

    def __init__(self, dataset: Dataset) -> None:
        tables = dataset.format["type"] in TABLE_FORMATS
        self._dataset = dataset.with_format(None) if tables else dataset

    @property
    def column_names(self) -> list[str]:
        """See :class:`Rows`."""
        return list(self._dataset.column_names)

    def __len__(self) -> int:
        return len(self._dataset)

    def take(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """See :class:`Rows`."""
        columns = self._dataset[list(rows)]
        return [
            dict(zip(columns, values, strict=True))
            for values in zip(*columns.values(), strict=True)
        ]

    def select_columns(self, columns: Sequence[str]) -> DatasetRows:
        """See :class:`Rows`."""
        return DatasetRows(self._dataset.select_columns(list(columns)))


class ListRows:
    """Rows of a list of dicts, which stay the user's own objects.

    Args:
        rows: The list.
        columns: Keys of the dicts; a row that lacks one has None there.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
        self._rows, self._columns = rows, columns

    @property
    def column_names(self) -> list[str]:
        """See :class:`Rows`."""
        return list(self._columns)

    def __len__(self) -> int:
        return len(self._rows)

    def take(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """See :class:`Rows`."""
        return [{name: self._rows[row].get(name) for name in self._columns} for row in rows]

    def select_columns(self, columns: Sequence[str]) -> ListRows:
        """See :class:`Rows`."""
        return ListRows(self._rows, list(columns))


def read_rows(name: str, dataset: Any) -> Rows:
    """The rows of what the user passed.

    Args:
        name: What messages call it: ``train_dataset`` or ``test_dataset``.
        dataset: What the user passed.

    Raises:
        TypeError: Neither a ``datasets.Dataset`` nor a list of dicts.
        ValueError: No rows.
    """
    from datasets import Dataset, IterableDataset

    rows: Rows
    if isinstance(dataset, Dataset):
        rows = DatasetRows(dataset)
    else:
        require(
            not isinstance(dataset, IterableDataset),
            f"{name} is a stream; every evaluation scores the same rows, so pass a list of rows "
            "that training skips: train_dataset=stream.skip(500), test_dataset="
            "list(stream.take(500))",
            TypeError,
        )
        require(
            isinstance(dataset, list | tuple),
            f"{name} is of type {type(dataset).__name__}; it must be {_KINDS}"
            f"{_STREAM if name == 'train_dataset' else ''}",
            TypeError,
        )
        for number, row in enumerate(dataset):
            require(
                isinstance(row, Mapping) and all(isinstance(key, str) for key in row),
                f"{name}[{number}] is {shorten(row)}; each row must be a dict by column, such as "
                '{"question": "2+2?", "answer": "4"}',
                TypeError,
            )
        # Not a set: the order of columns has to be the same in every process.
        rows = ListRows(list(dataset), list(dict.fromkeys(key for row in dataset for key in row)))
    require(len(rows) > 0, f"{name} has no rows; pass at least one question")
    return rows
