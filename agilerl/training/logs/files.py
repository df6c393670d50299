"""The two files that a run appends to, and how a resumed run takes over those of an earlier one."""

from __future__ import annotations

import csv
import io
import json
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TextIO, TypeVar

from agilerl.training.experience import Sample
from agilerl.training.logs.line_file import LineFile
from agilerl.training.protocols import Row

logger = logging.getLogger(__name__)

T = TypeVar("T")

METRICS_FILE = "metrics.csv"
COMPLETIONS_FILE = "completions.jsonl"
FIRST_COLUMNS = (
    "iteration",
    "agent",
    "steps",
    "wall_seconds",
    "reward_mean",
    "reward_std",
    "accuracy",
    "fitness",
    "eval_accuracy",
    "tokens_per_second",
    "generation_seconds",
    "environment_seconds",
    "learning_seconds",
    "evaluation_seconds",
)
"""Columns every ``metrics.csv`` starts with; those that ``learn`` reports follow."""


class _LineLog(ABC, Generic[T]):
    """A line per record, written at once.

    Records that cannot be written are kept and written with the next one that can.
    """

    def __init__(self, path: Path) -> None:
        self._file = LineFile(path)
        self._waiting: list[T] = []

    @abstractmethod
    def _lines(self, records: Sequence[T]) -> Sequence[str]:
        """Records as lines of the file, which is made fit for them."""

    def sync(self) -> None:
        """Write what waits, and flush the file to disk.

        Raises:
            OSError: If that is not possible now.
        """
        self._write_waiting()
        self._file.sync()

    def close(self, failed: bool = False) -> None:
        """Close the file.

        Raises:
            OSError: If records waited, and still cannot be written.
        """
        try:
            self._write_waiting()
        finally:
            self._file.close()

    def _write_waiting(self) -> None:
        lines = self._lines(self._waiting)  # first, as it may swap the file
        self._file.append(lines)
        self._waiting.clear()


class MetricsCsv(_LineLog[Row]):
    """One CSV line per row.

    A row with new columns makes the file be written anew with a wider header and swapped in whole,
    so a kill at any instant costs at most the line being written.

    Args:
        path: The file; rows are appended to one that exists.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.columns = list(FIRST_COLUMNS)
        exists = path.exists()
        if exists:
            with path.open(newline="", encoding="utf-8") as existing:
                self.columns = list(csv.DictReader(existing).fieldnames or FIRST_COLUMNS)
        super().__init__(path)
        if not exists:
            self._file.append([self._line(dict(zip(self.columns, self.columns, strict=True)))])

    @property
    def rows(self) -> int:
        """Rows in the file, without those that wait."""
        return self._file.lines - 1

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

        _replace(self.path, write)
        narrow, self._file = self._file, LineFile(self.path)
        narrow.close()
        self.columns = columns


class CompletionsFile(_LineLog[str]):
    """Sample completions, one JSON object per line.

    Args:
        path: The file; lines are appended to one that exists.
    """

    @property
    def lines(self) -> int:
        """Lines in the file, without those that wait."""
        return self._file.lines

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
            self._waiting.append(json.dumps(record, ensure_ascii=False, default=str) + "\n")
        self._write_waiting()

    def _lines(self, records: Sequence[str]) -> Sequence[str]:
        return records


def take_over_logs(source: Path, target: Path, state: dict[str, Any]) -> None:
    """Give a resumed run the rows and samples up to its checkpoint.

    Later ones, and lines that a kill left incomplete, are left out: the run repeats them.

    Args:
        source: Run directory of the checkpoint.
        target: Run directory of the resumed run; may be the same.
        state: The checkpoint's state.
    """
    iteration = int(state["iteration"])
    # Rows whose evaluation is still due are left out: they are written again, with it.
    repeated = state["unevaluated_rows"]
    rows_until = iteration - (repeated is not None)
    rows = int(state["log"]["metrics_rows"]) - len(repeated or [])
    takings: list[tuple[str, Callable[[Path, Path, int], int], int, int]] = [
        (METRICS_FILE, _copy_rows, rows_until, rows),
        (COMPLETIONS_FILE, _copy_samples, iteration, int(state["log"]["samples"])),
    ]
    for name, copy, until, noted in takings:
        if not (source / name).exists():
            logger.warning("%s is missing: %s starts afresh", source / name, target / name)
            continue
        kept = copy(source / name, target / name, until)
        missing = noted - kept
        if missing > 0:
            logger.warning(
                "%s lacks %d lines up to iteration %d that were there when the checkpoint was "
                "written",
                source / name,
                missing,
                until,
            )


def _copy_rows(source: Path, target: Path, until: int) -> int:
    with source.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        columns = list(reader.fieldnames or FIRST_COLUMNS)
        kept = [row for row in reader if _whole(row) and _within(row, until)]

    def write(file: TextIO) -> None:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(kept)

    _replace(target, write)
    return len(kept)


def _copy_samples(source: Path, target: Path, until: int) -> int:
    # A line that a kill cut in two may end within a character.
    with source.open(encoding="utf-8", errors="replace") as file:
        kept = [line for line in file if _within(_parsed(line), until)]
    _replace(target, lambda file: file.writelines(kept))
    return len(kept)


def _whole(row: dict[Any, Any]) -> bool:
    """Whether a row has as many cells as there are columns."""
    return None not in row and None not in row.values()


def _parsed(line: str) -> Any:
    try:
        return json.loads(line) if line.endswith("\n") else None
    except ValueError:
        return None


def _within(record: Any, until: int) -> bool:
    try:
        return int(record["iteration"]) <= until
    except (TypeError, KeyError, ValueError):
        return False


def _replace(path: Path, write: Callable[[TextIO], Any]) -> None:
    """Swap in a file written anew, whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("w", newline="", encoding="utf-8") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
