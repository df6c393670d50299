"""Callbacks to use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agilerl.checks import COUNT, InstanceOf, Number, require
from agilerl.training.callbacks.protocol import Callback, Columns, RunProgress

_TEXT = InstanceOf(str, "the name of a column", optional=False)


def _highest(rows: Sequence[Columns], metric: str) -> float:
    """The highest value of a column among the agents; minus infinity if all are NaN.

    Raises:
        ValueError: If the rows have no such column.
    """
    for row in rows:
        require(
            metric in row,
            f"metric={metric!r} is no column of an evaluation: choose one of {sorted(row)}",
        )
    return max((row[metric] for row in rows if row[metric] == row[metric]), default=-float("inf"))


class EarlyStopping(Callback):
    """Ends a run that no longer gets better.

    The best agent of every evaluation counts. What was counted survives resuming; a run that is
    resumed after it was ended does not go on, unless ``patience`` was raised.

    Args:
        patience: Evaluations in a row without a new best value after which the run ends.
        min_delta: A value is a new best only if it is more than this above the old one.
        metric: A column of evaluations, such as ``"fitness/hard"`` or ``"pass@8"``; more is better.

    Raises:
        ValueError: For a value out of range.
        TypeError: For a value of the wrong type.
    """

    def __init__(
        self, patience: int = 5, *, min_delta: float = 0.0, metric: str = "fitness"
    ) -> None:
        COUNT("patience", patience)
        Number(0)("min_delta", min_delta)
        _TEXT("metric", metric)
        self.patience, self.min_delta, self.metric = patience, min_delta, metric
        self._best: float | None = None
        self._waited = 0
        self._resumed = False

    def on_start(self, progress: RunProgress) -> None:
        """End a resumed run that it had ended; of another run, nothing counts."""
        if not self._resumed:
            self._best, self._waited = None, 0
        self._resumed = False
        self._check(progress)

    def on_evaluation(self, progress: RunProgress) -> None:
        """Compare with the best value so far."""
        value = _highest(progress.rows, self.metric)
        if self._best is None or value > self._best + self.min_delta:
            self._best, self._waited = value, 0
        else:
            self._waited += 1
        self._check(progress)

    def state_dict(self) -> dict[str, Any]:
        """The best value, and the evaluations since."""
        return {"best": self._best, "waited": self._waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take them over."""
        self._best, self._waited, self._resumed = state["best"], state["waited"], True

    def _check(self, progress: RunProgress) -> None:
        if self._waited >= self.patience:
            progress.stop(
                f"{self.metric} has not risen above {self._best:.4g} for {self._waited} evaluations"
            )


class StopAtFitness(Callback):
    """Ends a run as soon as an agent is good enough.

    Args:
        value: That its column has to reach.
        metric: A column of evaluations.

    Raises:
        TypeError: For a value of the wrong type.
    """

    def __init__(self, value: float, *, metric: str = "fitness") -> None:
        Number(-float("inf"))("value", value)
        _TEXT("metric", metric)
        self.value, self.metric = value, metric
        self._reached: float | None = None
        self._resumed = False

    def on_start(self, progress: RunProgress) -> None:
        """End a resumed run that had reached the value; of another run, it does not count."""
        if not self._resumed:
            self._reached = None
        self._resumed = False
        self._check(progress)

    def on_evaluation(self, progress: RunProgress) -> None:
        """Look at the best agent."""
        self._reached = _highest(progress.rows, self.metric)
        self._check(progress)

    def state_dict(self) -> dict[str, Any]:
        """The value at the last evaluation."""
        return {"reached": self._reached}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take it over."""
        self._reached, self._resumed = state["reached"], True

    def _check(self, progress: RunProgress) -> None:
        if self._reached is not None and self._reached >= self.value:
            progress.stop(f"{self.metric} has reached {self._reached:.4g}")


class PrintMetrics(Callback):
    """Prints a line per agent, where a progress bar shows too little.

    Args:
        columns: What to print; what an iteration does not have is left out.
        every: Iterations from one line to the next; evaluations are always printed.

    Raises:
        ValueError: For a value out of range.
        TypeError: For a value of the wrong type.
    """

    def __init__(
        self,
        columns: Sequence[str] = ("reward_mean", "mean_kl", "completion_length"),
        *,
        every: int = 1,
    ) -> None:
        InstanceOf((list, tuple), "a list of names of columns", optional=False)("columns", columns)
        COUNT("every", every)
        self.columns, self.every = tuple(columns), every

    def on_iteration(self, progress: RunProgress) -> None:
        """Print the columns."""
        if progress.iteration % self.every == 0:
            self._print(progress, self.columns)

    def on_evaluation(self, progress: RunProgress) -> None:
        """Print the fitness, and other columns that an evaluation has."""
        names = [name for row in progress.rows for name in row if name.startswith("fitness/")]
        names += [name for row in progress.rows for name in row if "@" in name]
        self._print(progress, ["fitness", *dict.fromkeys(names)])

    def _print(self, progress: RunProgress, columns: Sequence[str]) -> None:
        for row in progress.rows:
            shown = [f"{name} {row[name]:.4g}" for name in columns if name in row]
            if shown:
                where = f"iteration {progress.iteration}, agent {row['agent']:.0f}"
                progress.say(f"{where}: {', '.join(shown)}")


class HyperparameterSchedule(Callback):
    """Sets a hyperparameter of all agents before every iteration.

    Args:
        name: One that may change while an agent trains, such as ``"temperature"`` or ``"beta"``.
        schedule: From the number of an iteration, 1 for the first, to its value.

    Raises:
        TypeError: For a value of the wrong type.
        ValueError: When a run starts, if the hyperparameter cannot change while an agent trains, or
            evolves too (``hp_config``).
    """

    def __init__(self, name: str, schedule: Callable[[int], Any]) -> None:
        InstanceOf(str, "the name of a hyperparameter", optional=False)("name", name)
        require(
            callable(schedule),
            f"schedule is {schedule!r}; pass a function from an iteration's number to a value",
            TypeError,
        )
        self.name, self._schedule = name, schedule

    def on_start(self, progress: RunProgress) -> None:
        """Set the value of the next iteration."""
        self._set(progress)

    def on_iteration(self, progress: RunProgress) -> None:
        """Set the value of the next iteration."""
        self._set(progress)

    def _set(self, progress: RunProgress) -> None:
        value = self._schedule(progress.iteration + 1)
        for agent in progress.agents:
            table = agent.argument_table()
            changeable = sorted(name for name, row in table.items() if row.mutable)
            require(
                self.name in changeable,
                f"name={self.name!r} cannot change while {agent.algo} trains: choose one of "
                f"{', '.join(changeable)}",
            )
            require(
                self.name not in (agent.hp_config or ()),
                f"name={self.name!r} is in the hp_config of agent {agent.index}, so that evolution "
                "would change it, too: leave it out of one of them",
            )
            table[self.name].check(self.name, value)
            agent.set_attributes({self.name: value})


def linear(start: float, end: float, iterations: int) -> Callable[[int], float]:
    """A schedule from ``start``, in iteration 1, to ``end``, ``iterations`` later and from then on.

    Raises:
        ValueError: If ``iterations`` is less than 1.
    """
    COUNT("iterations", iterations)

    def value(iteration: int) -> float:
        done = min((iteration - 1) / iterations, 1.0)
        return start + (end - start) * done

    return value
