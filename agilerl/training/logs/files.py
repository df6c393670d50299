"""The files that a run writes while it goes.

See :class:`agilerl.training.logs.rank_zero_log.RankZeroLog`.
"""

from __future__ import annotations

import csv
import io
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TextIO, TypeVar

from agilerl.training.collectors.experience import Sample
from agilerl.training.protocols import Row

T = TypeVar("T")

METRICS_FILE = "metrics.csv"
COMPLETIONS_FILE = "completions.jsonl"
LINEAGE_FILE = "lineage.json"
FIRST_COLUMNS = (
    "iteration",
    "agent",
    "steps",
    "wall_seconds",
    "reward_mean",
    "reward_std",
    "accuracy",
    "failed_completions",
    "truncated_share",
    "fitness",
    "eval_accuracy",
    "tokens_per_second",
    "generation_seconds",
    "environment_seconds",
    "learning_seconds",
    "evaluation_seconds",
)
"""Columns every ``metrics.csv`` starts with; those that ``learn`` reports follow."""
EVALUATION_COLUMNS = ("fitness", "eval_accuracy", "evaluation_seconds")
"""Those of them that a run without evaluations does not have."""


class _LineLog(ABC, Generic[T]):
    """A file that grows by a line per record, each written at once and past any buffer.

    Records that cannot be written wait, and are written with the next one that can. The file holds
    whole lines only, also on a disk that fills up meanwhile.

    Args:
        path: The file; lines are appended to one that exists.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting: list[T] = []
        self._open()

    @abstractmethod
    def _lines(self, records: Sequence[T]) -> Sequence[str]:
        """Records as lines of the file, which is made fit for them."""

    def sync(self) -> None:
        """Write what waits, and flush the file to disk.

        Raises:
            OSError: If that is not possible now.
        """
        self._write_waiting()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file.

        Raises:
            OSError: If records waited, and still cannot be written.
        """
        try:
            self._write_waiting()
        finally:
            self._file.close()

    def _open(self) -> None:
        self._file = self.path.open("ab", buffering=0)
        self._end = self.path.stat().st_size
        with self.path.open("rb") as existing:
            self.lines = sum(1 for _ in existing)
        """Lines in the file, without those that wait."""

    def _write_waiting(self) -> None:
        lines = self._lines(self._waiting)  # first, as it may swap the file
        self._append(lines)
        self._waiting.clear()

    def _append(self, lines: Sequence[str]) -> None:
        """Append lines, which end with a line break: all of them, or none and an OSError."""
        # A lone surrogate, which UTF-8 cannot hold, becomes its JSON escape.
        data = "".join(lines).encode("utf-8", "backslashreplace")
        written = 0
        try:
            while written < len(data):  # the last bytes that fit are no error yet
                written += self._file.write(data[written:])
        except OSError:
            self._file.truncate(self._end)
            raise
        self._end += len(data)
        self.lines += len(lines)


class MetricsCsv(_LineLog[Row]):
    """One CSV line per row.

    A row with new columns makes the file be written anew with a wider header and swapped in whole,
    so a kill at any instant costs at most the line being written.

    Args:
        path: The file; rows are appended to one that exists.
        columns: The first ones of a new file.
    """

    def __init__(self, path: Path, columns: Sequence[str] = FIRST_COLUMNS) -> None:
        self.columns = list(columns)
        exists = path.exists()
        if exists:
            with path.open(newline="", encoding="utf-8") as existing:
                self.columns = list(csv.DictReader(existing).fieldnames or FIRST_COLUMNS)
        super().__init__(path)
        if not exists:
            self._append([self._line(dict(zip(self.columns, self.columns, strict=True)))])

    @property
    def rows(self) -> int:
        """Rows in the file, without those that wait."""
        return self.lines - 1

    def write(self, row: Row) -> None:
        """Append one row; columns it lacks stay empty.

        Raises:
            OSError: If that is not possible now.
        """
        self._waiting.append(row)
        self._write_waiting()

    def _lines(self, records: Sequence[Row]) -> list[str]:
        names = dict.fromkeys(name for row in records for name in row)
        new_columns = [name for name in names if name not in self.columns]
        if new_columns:
            self._widen(new_columns)
        return [self._line(row) for row in records]

    def _line(self, row: Mapping[str, Any]) -> str:
        text = io.StringIO(newline="")
        csv.DictWriter(text, self.columns).writerow(row)
        return text.getvalue()

    def _widen(self, new_columns: Sequence[str]) -> None:
        columns = [*self.columns, *new_columns]
        with self.path.open(newline="", encoding="utf-8") as current:
            rows = list(csv.DictReader(current))

        def write(file: TextIO) -> None:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(rows)

        replace_file(self.path, write)
        old_file = self._file
        self._open()
        old_file.close()
        self.columns = columns


class CompletionsFile(_LineLog[str]):
    """Sample completions, one JSON object per line.

    Args:
        path: The file; lines are appended to one that exists.
    """

    def write(self, iteration: int, agent: int, samples: Iterable[Sample]) -> None:
        """Append the samples.

        Raises:
            OSError: If that is not possible now.
        """
        for sample in samples:
            record = {
                "iteration": iteration,
                "agent": agent,
                "question": sample.question,
                "completion": sample.completion,
                "answer": sample.answer,
                "reward": sample.reward,
            }
            if sample.rewards:
                record["rewards"] = sample.rewards
            if sample.failure is not None:
                record["failure"] = sample.failure
            if sample.truncated:
                record["truncated"] = True
            self._waiting.append(json.dumps(record, ensure_ascii=False, default=str) + "\n")
        self._write_waiting()

    def _lines(self, records: Sequence[str]) -> Sequence[str]:
        return records


class LineageFile:
    """``lineage.json``: who descends from whom, what was mutated, and every fitness.

    What cannot be written waits, and is written with the next generation or by :meth:`sync`.

    Args:
        path: The file, which is written anew with every generation.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting = ""

    def write(self, generations: Sequence[Mapping[str, Any]]) -> None:
        """Write all generations so far.

        Raises:
            OSError: If that is not possible now.
        """
        lineage = {"generations": generations}
        self._waiting = json.dumps(lineage, indent=2, ensure_ascii=False) + "\n"
        self.sync()

    def sync(self) -> None:
        """Write what waits.

        Raises:
            OSError: If that is not possible now.
        """
        if self._waiting:
            replace_file(self.path, lambda file: file.write(self._waiting))
            self._waiting = ""


def replace_file(path: Path, write: Callable[[TextIO], Any]) -> None:
    """Swap in a file written anew, whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("w", newline="", encoding="utf-8", errors="backslashreplace") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
