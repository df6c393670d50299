"""What a run writes while it goes: metrics, sample completions, trackers, progress bar."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from agilerl.training.experience import Sample
from agilerl.training.logs.files import (
    COMPLETIONS_FILE,
    EVALUATION_COLUMNS,
    FIRST_COLUMNS,
    LINEAGE_FILE,
    METRICS_FILE,
    CompletionsFile,
    LineageFile,
    MetricsCsv,
)
from agilerl.training.logs.generation_table import generation_table
from agilerl.training.logs.progress_bar import ProgressBar
from agilerl.training.logs.sinks import (
    TensorBoardSink,
    WandbSink,
    series_of_agent,
    series_of_best,
)
from agilerl.training.options import TrainingOptions
from agilerl.training.population import Best
from agilerl.training.protocols import Row

logger = logging.getLogger(__name__)


class Tracker(Protocol):
    """Shows series of values over iterations."""

    def write(self, iteration: int, values: Mapping[str, float]) -> None:
        """Take values by name of the series, so that they outlive a kill right after."""

    def close(self, failed: bool) -> None:
        """End; ``failed`` says that the run crashed."""


class RunLog:
    """Everything one run writes into ``directory`` while it goes, opened together.

    A full disk does not end the run: what cannot be written is reported once, waits, and is tried
    again with the next row.

    Args:
        directory: The run's folder, without files of another run.
        name: Name of the run in TensorBoard and W&B.
        options: Which of the trackers were asked for.
        config: What the trackers show as the configuration.
        total: Steps per agent of the whole run, None when unknown.
        resumed: State of the checkpoint that the run is resumed from, if any.
        evaluates: Whether there are evaluations to write of.
    """

    def __init__(
        self,
        directory: Path,
        name: str,
        options: TrainingOptions,
        config: Mapping[str, Any],
        total: int | None,
        resumed: Mapping[str, Any] | None = None,
        evaluates: bool = True,
    ) -> None:
        left_out = () if evaluates else EVALUATION_COLUMNS
        columns = [name for name in FIRST_COLUMNS if name not in left_out]
        self._metrics = MetricsCsv(directory / METRICS_FILE, columns)
        self._completions = CompletionsFile(directory / COMPLETIONS_FILE)
        self._lineage = LineageFile(directory / LINEAGE_FILE)
        self._trackers: list[Tracker] = []
        self._wandb: WandbSink | None = None
        self._failing: set[object] = set()
        if options.tensorboard:
            parent = options.tensorboard_log_dir
            log_dir = directory / "tensorboard" if parent is None else Path(parent) / name
            # The iterations that are repeated replace those after the checkpoint.
            self._trackers.append(
                TensorBoardSink(log_dir, None if resumed is None else resumed["iteration"] + 1)
            )
        if options.wb:
            self._wandb = WandbSink(
                name,
                directory,
                config,
                options.wandb_kwargs,
                options.wandb_api_key,
                run_id=None if resumed is None else resumed["log"]["wandb_run_id"],
            )
            self._trackers.append(self._wandb)
        done = 0
        if resumed is not None:
            done = max(agent["steps_of_run"] for agent in resumed["agents"])
        self._bar = ProgressBar(total, enabled=options.verbose, done=done)
        self._verbose = options.verbose

    def write_rows(self, rows: Sequence[Row], consumed: int, best: Best | None = None) -> None:
        """Write one iteration: a row per agent.

        Args:
            rows: One per agent.
            consumed: Steps per agent so far, for the progress bar.
            best: The highest fitness so far; trackers show it where the iteration was evaluated.
        """
        for row in rows:
            self._try(self._metrics, self._metrics.write, row)
            self._track(row, series_of_agent(row))
        if best is not None and any("fitness" in row for row in rows):
            self._track(rows[0], series_of_best(best))
        self._bar.update(consumed, rows)

    def write_samples(self, iteration: int, agent: int, samples: Iterable[Sample]) -> None:
        """Append sample completions to ``completions.jsonl``."""
        self._try(self._completions, self._completions.write, iteration, agent, samples)

    def write_lineage(self, generations: Sequence[Mapping[str, Any]]) -> None:
        """Write who descends from whom; see :class:`LineageFile`."""
        self._try(self._lineage, self._lineage.write, generations)

    def show_generation(self, generations: Sequence[Mapping[str, Any]]) -> None:
        """Print the last generation as a table, unless the run is to be silent."""
        if self._verbose:
            self.say(generation_table(len(generations), generations[-1]))

    def sync(self) -> None:
        """Flush the files to disk, before a checkpoint that counts their lines."""
        for file in (self._metrics, self._completions, self._lineage):
            self._try(file, file.sync)

    def state_dict(self) -> dict[str, Any]:
        """How much has been written, and the W&B run; JSON-compatible."""
        return {
            "metrics_rows": self._metrics.rows,
            "samples": self._completions.lines,
            "wandb_run_id": None if self._wandb is None else self._wandb.run_id,
        }

    def say(self, message: str) -> None:
        """Print a line to the user."""
        self._bar.say(message)

    def close(self, failed: bool = False) -> None:
        """Close all; ``failed`` marks the W&B run as crashed."""
        self._bar.close()
        self._try(self._completions, self._completions.close)
        self._try(self._lineage, self._lineage.sync)
        self._try(self._metrics, self._metrics.close)
        for tracker in self._trackers:
            self._try(tracker, tracker.close, failed)
        if self._failing:
            logger.error("The run has ended, and metrics or samples that waited for room are lost")

    def _track(self, row: Row, values: Mapping[str, float]) -> None:
        for tracker in self._trackers:
            self._try(tracker, tracker.write, int(row["iteration"]), values)

    def _try(self, target: object, write: Callable[..., None], *arguments: Any) -> None:
        """Call a method of ``target`` that may find no room, and say so once until it does."""
        try:
            write(*arguments)
        except OSError as error:
            if target not in self._failing:
                logger.error(
                    "Metrics or samples cannot be written: %r. Training continues, and they are "
                    "written once there is room",
                    error,
                )
            self._failing.add(target)
        else:
            self._failing.discard(target)


class NoLog(RunLog):
    """The log of processes other than rank 0: writes nothing."""

    def __init__(self) -> None:
        self._bar = ProgressBar(None, enabled=False)

    def write_rows(self, rows: Sequence[Row], consumed: int, best: Best | None = None) -> None:
        """Do nothing."""

    def write_samples(self, iteration: int, agent: int, samples: Iterable[Sample]) -> None:
        """Do nothing."""

    def write_lineage(self, generations: Sequence[Mapping[str, Any]]) -> None:
        """Do nothing."""

    def show_generation(self, generations: Sequence[Mapping[str, Any]]) -> None:
        """Do nothing."""

    def sync(self) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Empty: rank 0 has it."""
        return {}

    def say(self, message: str) -> None:
        """Do nothing; rank 0 prints it."""

    def close(self, failed: bool = False) -> None:
        """Do nothing."""
