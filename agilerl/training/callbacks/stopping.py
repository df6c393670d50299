"""Callbacks that end a run by a column of its metrics."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from agilerl.checks import COUNT, InstanceOf, Number, require
from agilerl.training.callbacks.protocol import Callback, Columns, RunProgress

_TEXT = InstanceOf(str, "the name of a column", optional=False)


def of_evaluations(column: str) -> bool:
    """Whether only evaluations give the column."""
    return (
        re.match(r"(fitness|eval_accuracy|evaluation_seconds|(avg|pass|maj)@\d+)(/|$)", column)
        is not None
    )


class _BestAgentCallback(Callback):
    """Judges the highest value of a column among the agents, whenever the column is written.

    Args:
        metric: The column.
    """

    def __init__(self, metric: str) -> None:
        _TEXT("metric", metric)
        self.metric = metric
        self._seen = False  # the column, in this call

    def on_start(self, progress: RunProgress) -> None:
        """Refuse a column that will never be written."""
        self._seen = False
        require(
            progress.evaluates or not of_evaluations(self.metric),
            f"metric={self.metric!r} is a column of evaluations, but there is no held-out data to "
            "evaluate on (test_dataset=None): give the environment a test_dataset, or choose a "
            'column of training such as "reward_mean".',
        )

    def on_iteration(self, progress: RunProgress) -> None:
        """Judge a column of training."""
        if not of_evaluations(self.metric):
            self._judge(self._highest(progress.rows), progress)

    def on_evaluation(self, progress: RunProgress) -> None:
        """Judge a column of evaluations."""
        if of_evaluations(self.metric):
            self._judge(self._highest(progress.rows), progress)

    def _judge(self, value: float, progress: RunProgress) -> None:
        raise NotImplementedError

    def _highest(self, rows: Sequence[Columns]) -> float:
        """The highest value; minus infinity where nothing was measured.

        Raises:
            ValueError: If there is no such column.
        """
        values = [row[self.metric] for row in rows if self.metric in row]
        self._seen = self._seen or bool(values)
        kind = "an evaluation" if of_evaluations(self.metric) else "an iteration"
        require(
            self._seen,
            f"metric={self.metric!r} is no column of {kind}: choose one of {choices(rows)}",
        )
        return max((each for each in values if each == each), default=-math.inf)


def choices(rows: Sequence[Columns]) -> list[str]:
    """The columns of these rows that say something of an agent."""
    return sorted({name for row in rows for name in row} - {"iteration", "agent"})


class EarlyStopping(_BestAgentCallback):
    """Ends a run that no longer gets better.

    The best agent of every evaluation counts, or with a column of training that of every iteration.
    What was counted survives resuming; a run that is resumed after it was ended does not go on,
    unless ``patience`` was raised.

    The agents stay as they are at the end, which is not at their best: ``save_elite=True`` keeps
    the best one.

    Args:
        patience: Evaluations (or iterations) in a row without a new best value after which the run
            ends.
        min_delta: A value is a new best only if it is more than this above the old one.
        metric: A column of evaluations, such as ``"fitness/hard"`` or ``"pass@8"``, or of training,
            such as ``"reward_mean"``; more is better.

    Raises:
        ValueError: For a value out of range; when a run starts, for a column of evaluations if
            there are none.
        TypeError: For a value of the wrong type.
    """

    def __init__(
        self, patience: int = 5, *, min_delta: float = 0.0, metric: str = "fitness"
    ) -> None:
        COUNT("patience", patience)
        Number(0)("min_delta", min_delta)
        super().__init__(metric)
        self.patience, self.min_delta = patience, min_delta
        self._best: float | None = None
        self._waited = 0
        self._resumed = False

    def on_start(self, progress: RunProgress) -> None:
        """End a resumed run that it had ended; of another run, nothing counts."""
        super().on_start(progress)
        if not self._resumed:
            self._best, self._waited = None, 0
        self._resumed = False
        self._check(progress)

    def state_dict(self) -> dict[str, Any]:
        """The best value, and the evaluations since."""
        return {"best": self._best, "waited": self._waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take them over."""
        self._best, self._waited, self._resumed = state["best"], state["waited"], True

    def _judge(self, value: float, progress: RunProgress) -> None:
        """Compare with the best value so far."""
        if self._best is None or value > self._best + self.min_delta:
            self._best, self._waited = value, 0
        else:
            self._waited += 1
        self._check(progress)

    def _check(self, progress: RunProgress) -> None:
        if self._waited < self.patience:
            return
        what = "evaluations" if of_evaluations(self.metric) else "iterations"
        if self._best == -math.inf:
            progress.stop(f"{self.metric} has been nan in {self._waited + 1} {what}")
            return
        by = f" by more than {self.min_delta:.4g}" if self.min_delta else ""
        progress.stop(
            f"{self.metric} has not risen{by} above {self._best:.4g} for {self._waited} {what}"
        )


class StopAtFitness(_BestAgentCallback):
    """Ends a run as soon as an agent is good enough.

    Args:
        value: That its column has to reach.
        metric: A column of evaluations, such as ``"pass@8/hard"``, or of training, which is looked
            at after every iteration.

    Raises:
        ValueError: When a run starts, for a column of evaluations if there are none.
        TypeError: For a value of the wrong type.
    """

    def __init__(self, value: float, *, metric: str = "fitness") -> None:
        Number(-math.inf)("value", value)
        super().__init__(metric)
        self.value = value
        self._reached: float | None = None
        self._resumed = False

    def on_start(self, progress: RunProgress) -> None:
        """End a resumed run that had reached the value; of another run, it does not count."""
        super().on_start(progress)
        if not self._resumed:
            self._reached = None
        self._resumed = False
        self._check(progress)

    def state_dict(self) -> dict[str, Any]:
        """The value at the last evaluation."""
        return {"reached": self._reached}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take it over."""
        self._reached, self._resumed = state["reached"], True

    def _judge(self, value: float, progress: RunProgress) -> None:
        """Look at the best agent."""
        self._reached = value
        self._check(progress)

    def _check(self, progress: RunProgress) -> None:
        if self._reached is not None and self._reached >= self.value:
            progress.stop(f"{self.metric} has reached {self._reached:.4g}")
