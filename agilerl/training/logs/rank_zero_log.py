"""What rank 0 writes while a run goes: metrics, sample completions, trackers, progress bar."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agilerl.training.collectors.experience import Experience, Sample
from agilerl.training.logs.completion_tables import (
    evaluation_table,
    print_table,
    training_table,
)
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
from agilerl.training.logs.run_log import RunLog
from agilerl.training.logs.terminal import is_printed_by_logging
from agilerl.training.options import TrainingOptions
from agilerl.training.population import Best, Population
from agilerl.training.protocols import Agent, Row
from agilerl.training.trackers.protocol import (
    CompletionTable,
    RunStatus,
    TrackedRun,
    Tracker,
    series_of_agent,
    series_of_best,
)
from agilerl.training.trackers.tensorboard import TensorBoardTracker
from agilerl.training.trackers.tracker_set import TrackerSet
from agilerl.training.trackers.wandb import WandbTracker
from agilerl.typing import Evaluation

logger = logging.getLogger(__name__)


class RankZeroLog(RunLog):
    """Everything one run writes into ``directory`` while it goes, opened together.

    A full disk does not end the run: what cannot be written is reported once, waits, and is tried
    again with the next row.

    Args:
        population: Of whom.
        directory: The run's folder, without files of another run.
        name: Name of the run in TensorBoard and W&B.
        options: What was asked for: trackers, tables, a progress bar.
        config: What the trackers show as the configuration.
        total: Steps per agent of the whole run, None when unknown.
        resumed: State of the checkpoint that the run is resumed from, if any.
        logged: See :attr:`TrackedRun.logged`.

    Raises:
        Exception: What a tracker raises that cannot start.
    """

    def __init__(
        self,
        population: Population,
        directory: Path,
        name: str,
        options: TrainingOptions,
        config: Mapping[str, Any],
        total: int | None,
        resumed: Mapping[str, Any] | None = None,
        logged: Mapping[str, int] | None = None,
    ) -> None:
        left_out = () if population.evaluates else EVALUATION_COLUMNS
        columns = [name for name in FIRST_COLUMNS if name not in left_out]
        self._metrics = MetricsCsv(directory / METRICS_FILE, columns)
        self._completions = CompletionsFile(directory / COMPLETIONS_FILE)
        self._lineage = LineageFile(directory / LINEAGE_FILE)
        self._failing: set[object] = set()
        self._options = options
        done, after, noted = 0, None, {}
        if resumed is not None:
            done = max(agent["steps_of_run"] for agent in resumed["agents"])
            after, noted = resumed["iteration"], resumed["log"].get("trackers", {})
        tracked = TrackedRun(name, directory, config, after, logged=logged or {})
        self._trackers = TrackerSet(_trackers(options, directory, name), tracked, noted)
        self._bar = ProgressBar(total, enabled=options.verbose, done=done, unit=population.unit)
        self._verbose = options.verbose

    def write_rows(self, rows: Sequence[Row], consumed: int, best: Best | None = None) -> None:
        """Write one iteration: a row per agent."""
        values: dict[str, float] = {}
        for row in rows:
            self._try(self._metrics, self._metrics.write, row)
            values |= series_of_agent(row)
        if best is not None and any("fitness" in row for row in rows):
            values |= series_of_best(best)
        if rows:
            self._trackers.write(int(rows[0]["iteration"]), values)
        self._bar.update(consumed, rows)

    def write_samples(self, iteration: int, agent: int, samples: Iterable[Sample]) -> None:
        """Append sample completions to ``completions.jsonl``."""
        self._try(self._completions, self._completions.write, iteration, agent, samples)

    def show_training(self, agent: Agent, iteration: int, experience: Experience) -> None:
        """Print and track a table of the completions of a training batch, if one is due."""
        every = self._options.completions_interval
        if every is not None and iteration % every == 0:
            samples, group_size = experience.samples, experience.rewards.shape[1]
            shown = self._options.completions_shown
            self._show(
                iteration,
                training_table(
                    f"{agent.algo} agent {agent.index}",
                    *(agent.index, iteration, samples, group_size, shown),
                ),
            )

    def show_evaluation(self, agent: Agent, iteration: int, evaluation: Evaluation) -> None:
        """Print and track a table of the answers of an evaluation, if tables are asked for."""
        if self._options.completions_interval is not None:
            name, shown = f"{agent.algo} agent {agent.index}", self._options.completions_shown
            self._show(iteration, evaluation_table(name, agent.index, iteration, evaluation, shown))

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
        """How much has been written, and what finds the trackers' runs; JSON-compatible."""
        return {
            "metrics_rows": self._metrics.rows,
            "samples": self._completions.lines,
            "trackers": self._trackers.run_ids,
        }

    def say(self, message: str) -> None:
        """Print a line to the user."""
        self._bar.say(message)

    def report(self, source: logging.Logger, message: str, level: int = logging.INFO) -> None:
        """Log a message, and print it unless a handler of the log does so."""
        source.log(level, message)
        if not is_printed_by_logging(source, level):
            self.say(message)

    def close(self, status: RunStatus) -> None:
        """Close all, and tell the trackers how the run ended."""
        self._bar.close()
        self._try(self._completions, self._completions.close)
        self._try(self._lineage, self._lineage.sync)
        self._try(self._metrics, self._metrics.close)
        self._trackers.close(status)
        if self._failing or self._trackers.waits:
            logger.error("The run has ended, and metrics or samples that waited for room are lost")

    def _show(self, iteration: int, table: CompletionTable) -> None:
        if table.rows:
            print_table(table, self.say)
            self._trackers.write_completions(iteration, table)

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


def _trackers(options: TrainingOptions, directory: Path, name: str) -> dict[str, Tracker]:
    """Those of a run, by a key that stays the same when it is resumed."""
    trackers: dict[str, Tracker] = {}
    if options.tensorboard:
        parent = options.tensorboard_log_dir
        log_dir = directory / "tensorboard" if parent is None else Path(parent) / name
        trackers["tensorboard"] = TensorBoardTracker(log_dir)
    if options.wb:
        trackers["wandb"] = WandbTracker(options.wandb_kwargs, options.wandb_api_key)
    given = {f"{type(each).__name__} {i}": each for i, each in enumerate(options.trackers or ())}
    return trackers | given
