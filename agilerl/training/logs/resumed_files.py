"""How a resumed run takes over the files of the run that it continues."""

from __future__ import annotations

import csv
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from agilerl.training.logs.files import (
    COMPLETIONS_FILE,
    FIRST_COLUMNS,
    METRICS_FILE,
    replace_file,
)

logger = logging.getLogger(__name__)


def take_over_logs(source: Path, target: Path, state: dict[str, Any]) -> dict[str, int]:
    """Give a resumed run the rows and samples up to its checkpoint.

    Later ones, and lines that a kill left incomplete, are left out: the run repeats them.

    Args:
        source: Run directory of the checkpoint.
        target: Run directory of the resumed run; may be the same.
        state: The checkpoint's state.

    Returns:
        What the run had shown before, also after the checkpoint; see
        :attr:`~agilerl.training.trackers.protocol.TrackedRun.logged`.
    """
    shown = _last_iterations(source / METRICS_FILE)  # first: the target may be the same
    iteration = int(state["iteration"])
    # Rows whose evaluation is still due are left out: they are written again, with it.
    repeated = state["unevaluated_rows"]
    rows_until = iteration - (repeated is not None)
    rows = int(state["log"]["metrics_rows"]) - len(repeated or [])
    files: list[tuple[str, Callable[[Path, Path, int], int], int, int]] = [
        (METRICS_FILE, _copy_rows, rows_until, rows),
        (COMPLETIONS_FILE, _copy_samples, iteration, int(state["log"]["samples"])),
    ]
    for name, copy, until, noted in files:
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
    return shown


def _last_iterations(metrics: Path) -> dict[str, int]:
    """The last iteration of each series that a tracker was given with the rows of a file."""
    last: dict[str, int] = {}
    if not metrics.exists():
        return last
    with metrics.open(newline="", encoding="utf-8") as file:
        for row in filter(_whole, csv.DictReader(file)):
            iteration, agent = int(row["iteration"]), f"agent_{row['agent']}"
            cells = {name for name, cell in row.items() if cell}
            series = [f"{agent}/{name}" for name in cells - {"iteration", "agent"}]
            if "reward_mean" in cells:
                series.append(f"completions/{agent}/training")
            if "fitness" in cells:
                series += ["best/fitness", "best/agent", f"completions/{agent}/evaluation"]
            last |= dict.fromkeys(series, iteration)
    return last


def _copy_rows(source: Path, target: Path, until: int) -> int:
    with source.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        columns = list(reader.fieldnames or FIRST_COLUMNS)
        kept = [row for row in reader if _whole(row) and _within(row, until)]

    def write(file: TextIO) -> None:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(kept)

    replace_file(target, write)
    return len(kept)


def _copy_samples(source: Path, target: Path, until: int) -> int:
    # A line that a kill cut in two may end within a character.
    with source.open(encoding="utf-8", errors="replace") as file:
        kept = [line for line in file if _within(_parsed(line), until)]
    replace_file(target, lambda file: file.writelines(kept))
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
