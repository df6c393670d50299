"""What a run writes while it goes: metrics, sample completions, trackers, progress bar."""

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
from agilerl.training.logs.terminal import is_printed_by_logging
from agilerl.training.options import TrainingOptions
from agilerl.training.population import Best
from agilerl.training.protocols import Agent, Row
from agilerl.training.trackers.protocol import (
    CompletionTable,
    TrackedRun,
    Tracker,
    TrackerWaits,
    series_of_agent,
    series_of_best,
)
from agilerl.training.trackers.tensorboard import TensorBoardTracker
from agilerl.training.trackers.wandb import WandbTracker
from agilerl.typing import Evaluation

logger = logging.getLogger(__name__)


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
        self._failing: set[object] = set()
        self._options = options
        self._trackers = _trackers(options, directory, name)
        noted = {} if resumed is None else resumed["log"].get("trackers", {})
        for key, tracker in self._trackers.items():
            after = None if resumed is None else resumed["iteration"]
            tracker.start(TrackedRun(name, directory, config, after, noted.get(key)))
        self._run_ids = {key: tracker.run_id for key, tracker in self._trackers.items()}
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
            self._track("write", int(row["iteration"]), series_of_agent(row))
        if best is not None and any("fitness" in row for row in rows):
            self._track("write", int(rows[0]["iteration"]), series_of_best(best))
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
        """How much has been written, and the W&B run; JSON-compatible."""
        return {
            "metrics_rows": self._metrics.rows,
            "samples": self._completions.lines,
            "trackers": self._run_ids,
        }

    def say(self, message: str) -> None:
        """Print a line to the user."""
        self._bar.say(message)

    def report(self, source: logging.Logger, message: str, level: int = logging.INFO) -> None:
        """Log a message, and print it unless a handler of the log does so."""
        source.log(level, message)
        if not is_printed_by_logging(source, level):
            self.say(message)

    def close(self, failed: bool = False) -> None:
        """Close all; ``failed`` marks the W&B run as crashed."""
        self._bar.close()
        self._try(self._completions, self._completions.close)
        self._try(self._lineage, self._lineage.sync)
        self._try(self._metrics, self._metrics.close)
        self._track("close", failed)
        if self._failing:
            logger.error("The run has ended, and metrics or samples that waited for room are lost")

    def _show(self, iteration: int, table: CompletionTable) -> None:
        if table.rows:
            print_table(table, self.say)
            self._track("write_completions", iteration, table)

    def _track(self, method: str, *arguments: Any) -> None:
        """Call a method of every tracker; those that fail are named and dropped."""
        for key, tracker in list(self._trackers.items()):
            try:
                self._try(tracker, getattr(tracker, method), *arguments)
            except Exception as error:  # noqa: BLE001 - a tracker must not cost the run
                del self._trackers[key]
                self._failing.discard(tracker)
                logger.error(
                    "%s has failed in %s() and gets nothing more of this run, which goes on: "
                    "%s: %s",
                    *(type(tracker).__name__, method, type(error).__name__, error),
                )

    def _try(self, target: object, write: Callable[..., None], *arguments: Any) -> None:
        """Call a method of ``target`` that may find no room, and say so once until it does."""
        try:
            write(*arguments)
        except OSError as error:
            if target in self._trackers.values() and not isinstance(error, TrackerWaits):
                raise
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


class NoLog(RunLog):
    """The log of processes other than rank 0: writes nothing."""

    def __init__(self) -> None:
        self._bar = ProgressBar(None, enabled=False)

    def write_rows(self, rows: Sequence[Row], consumed: int, best: Best | None = None) -> None:
        """Do nothing."""

    def write_samples(self, iteration: int, agent: int, samples: Iterable[Sample]) -> None:
        """Do nothing."""

    def show_training(self, agent: Agent, iteration: int, experience: Experience) -> None:
        """Do nothing."""

    def show_evaluation(self, agent: Agent, iteration: int, evaluation: Evaluation) -> None:
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

    def report(self, source: logging.Logger, message: str, level: int = logging.INFO) -> None:
        """Do nothing; rank 0 does it."""

    def close(self, failed: bool = False) -> None:
        """Do nothing."""
