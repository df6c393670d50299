"""TensorBoard."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from agilerl.training.trackers.protocol import (
    CompletionTable,
    RunStatus,
    TrackedRun,
    TrackerWaits,
)

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardTracker:
    """Series as TensorBoard's scalars, tables as its texts.

    Values that cannot be written are kept and written with the next one that can. As an error ends
    the thread that TensorBoard writes with, that takes a new event file.

    Args:
        log_dir: Folder of the event files.
    """

    run_id = None

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        self._waiting: list[tuple[int, Mapping[str, float]]] = []
        self._writer: SummaryWriter | None = None

    def start(self, run: TrackedRun) -> None:
        """Open an event file; iterations that are repeated replace those after the checkpoint."""
        self._writer = self._open(None if run.resumed_at is None else run.resumed_at + 1)

    def write(self, iteration: int, values: Mapping[str, float]) -> None:
        """Add and flush an iteration's values.

        Raises:
            TrackerWaits: If there is no room now.
        """
        self._waiting.append((iteration, values))
        self._write_waiting()

    def write_completions(self, iteration: int, table: CompletionTable) -> None:
        """Add a table; one for which there is no room is lost."""
        if self._writer is not None:
            self._writer.add_text(f"completions/{table.name}", table.markdown(), iteration)

    def close(self, status: RunStatus) -> None:
        """Close the event file."""
        if self._waiting:
            self._write_waiting()
        if self._writer is not None:
            self._writer.close()

    def _write_waiting(self) -> None:
        if self._writer is None:
            self._writer = self._open()
        try:
            for iteration, values in self._waiting:
                for tag, value in values.items():
                    self._writer.add_scalar(tag, value, global_step=iteration)
            self._writer.flush()
        except OSError as error:
            broken, self._writer = self._writer, None
            with contextlib.suppress(OSError):
                broken.close()
            raise TrackerWaits(*error.args) from error
        self._waiting.clear()

    def _open(self, first: int | None = None) -> SummaryWriter:
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(log_dir=str(self._log_dir), purge_step=first)
