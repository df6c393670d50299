"""What the training loop tells while it goes; what becomes of it is up to the process's log."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agilerl.training.collectors.experience import Experience, Sample
from agilerl.training.population import Best
from agilerl.training.protocols import Agent, Row
from agilerl.training.trackers.protocol import RunStatus
from agilerl.typing import Evaluation


class RunLog(ABC):
    """What the loop, the saver and evolution may tell.

    Rank 0 writes it, see :class:`~agilerl.training.logs.rank_zero_log.RankZeroLog`; the other
    processes have :class:`NoLog`.
    """

    @abstractmethod
    def write_rows(self, rows: Sequence[Row], consumed: int, best: Best | None = None) -> None:
        """Write one iteration: a row per agent.

        Args:
            rows: One per agent.
            consumed: Steps per agent so far, for the progress bar.
            best: The highest fitness so far; trackers show it where the iteration was evaluated.
        """

    @abstractmethod
    def write_samples(self, iteration: int, agent: int, samples: Iterable[Sample]) -> None:
        """Append sample completions to ``completions.jsonl``."""

    @abstractmethod
    def show_training(self, agent: Agent, iteration: int, experience: Experience) -> None:
        """Print and track a table of the completions of a training batch, if one is due."""

    @abstractmethod
    def show_evaluation(self, agent: Agent, iteration: int, evaluation: Evaluation) -> None:
        """Print and track a table of the answers of an evaluation, if tables are asked for."""

    @abstractmethod
    def write_lineage(self, generations: Sequence[Mapping[str, Any]]) -> None:
        """Write who descends from whom to ``lineage.json``."""

    @abstractmethod
    def show_generation(self, generations: Sequence[Mapping[str, Any]]) -> None:
        """Print the last generation as a table, unless the run is to be silent."""

    @abstractmethod
    def sync(self) -> None:
        """Flush the files to disk, before a checkpoint that counts their lines."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """How much has been written, and what finds the trackers' runs; JSON-compatible."""

    @abstractmethod
    def say(self, message: str) -> None:
        """Print a line to the user."""

    @abstractmethod
    def report(self, source: logging.Logger, message: str, level: int = logging.INFO) -> None:
        """Log a message, and print it unless a handler of the log does so."""

    @abstractmethod
    def close(self, status: RunStatus) -> None:
        """Close all, and tell the trackers how the run ended."""


class NoLog(RunLog):
    """The log of the processes other than rank 0: nothing."""

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
        """Do nothing."""

    def report(self, source: logging.Logger, message: str, level: int = logging.INFO) -> None:
        """Do nothing."""

    def close(self, status: RunStatus) -> None:
        """Do nothing."""
