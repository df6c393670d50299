"""What a run writes while it goes: metrics, sample completions, trackers, progress bar."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from agilerl.training.arguments import LoopOptions
from agilerl.training.protocols import Row, Sample
from agilerl.training.trackers import TensorBoardSink, WandbSink

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


class Sink(Protocol):
    """One place that takes rows."""

    def write(self, row: Row) -> None:
        """Take one row, so that it outlives a kill right after."""

    def close(self, failed: bool) -> None:
        """End; ``failed`` says that the run crashed."""


class MetricsCsv:
    """One CSV line per row, flushed at once.

    A row with new columns makes the file be written anew with a wider header and swapped in whole,
    so a kill at any instant costs at most the line being written.

    Args:
        path: The file, which must not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.columns = list(FIRST_COLUMNS)
        self._file = path.open("x", newline="", encoding="utf-8")
        csv.writer(self._file).writerow(self.columns)
        self._file.flush()

    def write(self, row: Row) -> None:
        """Append one row; columns it lacks stay empty."""
        new_columns = [name for name in row if name not in self.columns]
        if new_columns:
            self._widen(new_columns)
        csv.DictWriter(self._file, self.columns).writerow(row)
        self._file.flush()

    def close(self, failed: bool) -> None:
        """Close the file."""
        self._file.close()

    def _widen(self, new_columns: Sequence[str]) -> None:
        self._file.close()
        with self.path.open(newline="", encoding="utf-8") as current:
            rows = list(csv.DictReader(current))
        self.columns.extend(new_columns)
        wider = self.path.with_suffix(".csv.partial")
        with wider.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self.columns)
            writer.writeheader()
            writer.writerows(rows)
            file.flush()
            os.fsync(file.fileno())
        wider.replace(self.path)
        self._file = self.path.open("a", newline="", encoding="utf-8")


class CompletionsFile:
    """Sample completions, one JSON object per line, flushed at once.

    Args:
        path: The file, which must not exist.
    """

    def __init__(self, path: Path) -> None:
        # A lone surrogate, which UTF-8 cannot hold, becomes its JSON escape.
        self._file = path.open("x", encoding="utf-8", errors="backslashreplace")

    def write(self, iteration: int, agent: int, samples: Iterable[Sample]) -> None:
        """Append the samples."""
        for sample in samples:
            record = {
                "iteration": iteration,
                "agent": agent,
                "question": sample.question,
                "completion": sample.completion,
                "answer": sample.answer,
                "reward": sample.reward,
            }
            self._file.write(json.dumps(record, ensure_ascii=False, default=str) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class ProgressBar:
    """Steps per agent, with reward, accuracy, KL, tokens per second and time left.

    Args:
        total: Steps per agent of the whole run, None when unknown.
        enabled: False draws nothing.
    """

    def __init__(self, total: int | None, enabled: bool) -> None:
        # Imported late: in a notebook without ipywidgets the import warns.
        from tqdm.auto import tqdm

        self._bar = tqdm(total=total, disable=not enabled, unit="step", dynamic_ncols=True)
        self._last_fitness: float | None = None

    def update(self, consumed: int, rows: Sequence[Row]) -> None:
        """Show how far the run is and the means of ``rows`` over the agents."""
        self._last_fitness = _mean(rows, "fitness", self._last_fitness)
        shown = {
            "reward": _mean(rows, "reward_mean"),
            "accuracy": _mean(rows, "accuracy"),
            "KL": _mean(rows, "mean_kl"),
            "tokens/s": _mean(rows, "tokens_per_second"),
            "fitness": self._last_fitness,
        }
        texts = {name: f"{value:.3g}" for name, value in shown.items() if value is not None}
        self._bar.set_postfix(texts, refresh=False)
        # The last batch may go past the total, which would make tqdm forget it.
        end = consumed if self._bar.total is None else min(consumed, self._bar.total)
        self._bar.update(end - self._bar.n)

    def say(self, message: str) -> None:
        """Print a line without tearing the bar."""
        self._bar.write(message)

    def close(self) -> None:
        """Leave the bar as it stands."""
        self._bar.close()


class RunLog:
    """Everything one run writes into ``directory`` while it goes, opened together.

    Args:
        directory: The run's folder, without files of an earlier run.
        name: Name of the run in TensorBoard and W&B.
        options: Which of the trackers were asked for.
        config: Facts for the trackers.
        total: Steps per agent of the whole run, None when unknown.
    """

    def __init__(
        self,
        directory: Path,
        name: str,
        options: LoopOptions,
        config: Mapping[str, Any],
        total: int | None,
    ) -> None:
        self._sinks: list[Sink] = [MetricsCsv(directory / "metrics.csv")]
        self._completions = CompletionsFile(directory / "completions.jsonl")
        if options.tensorboard:
            parent = options.tensorboard_log_dir
            log_dir = directory / "tensorboard" if parent is None else Path(parent) / name
            self._sinks.append(TensorBoardSink(log_dir))
        if options.wb:
            self._sinks.append(
                WandbSink(name, directory, config, options.wandb_kwargs, options.wandb_api_key)
            )
        self._bar = ProgressBar(total, enabled=options.verbose)

    def write_rows(self, rows: Sequence[Row], consumed: int) -> None:
        """Write one iteration: a row per agent.

        Args:
            rows: One per agent.
            consumed: Steps per agent so far, for the progress bar.
        """
        for row in rows:
            for sink in self._sinks:
                sink.write(row)
        self._bar.update(consumed, rows)

    def write_samples(self, iteration: int, agent: int, samples: Iterable[Sample]) -> None:
        """Append sample completions to ``completions.jsonl``."""
        self._completions.write(iteration, agent, samples)

    def say(self, message: str) -> None:
        """Print a line to the user."""
        self._bar.say(message)

    def close(self, failed: bool = False) -> None:
        """Close all; ``failed`` marks the W&B run as crashed."""
        self._bar.close()
        self._completions.close()
        for sink in self._sinks:
            sink.close(failed)


def _mean(rows: Sequence[Row], name: str, default: float | None = None) -> float | None:
    values = [row[name] for row in rows if name in row]
    return sum(values) / len(values) if values else default
