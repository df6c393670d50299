"""Callbacks that print and that set hyperparameters."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from agilerl.checks import COUNT, InstanceOf, require
from agilerl.training.callbacks.protocol import Callback, RunProgress
from agilerl.training.callbacks.stopping import choices, of_evaluations


class PrintMetrics(Callback):
    """Prints a line per agent, where a progress bar shows too little.

    Args:
        columns: What to print; what an iteration does not have is left out, and named once.
        every: Iterations from one line to the next; evaluations are always printed, with their
            fitness, that of each test set, ``avg@k``, ``pass@k`` and ``maj@k``, and those of
            ``columns`` that only evaluations give.

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
        self._named: set[str] = set()  # that were missing

    def on_start(self, progress: RunProgress) -> None:
        """Forget what another run lacked."""
        self._named.clear()

    def on_iteration(self, progress: RunProgress) -> None:
        """Print the columns."""
        if progress.iteration % self.every == 0:
            own = [name for name in self.columns if not of_evaluations(name)]
            self._name_missing(own, progress)
            self._print(progress, own)

    def on_evaluation(self, progress: RunProgress) -> None:
        """Print the fitness, and other columns that an evaluation has."""
        own = [name for name in self.columns if of_evaluations(name)]
        self._name_missing(own, progress)
        names = [name for row in progress.rows for name in row if name.startswith("fitness/")]
        names += [name for row in progress.rows for name in row if re.fullmatch(r"\w+@\d+", name)]
        self._print(progress, ["fitness", *dict.fromkeys(names + own)])

    def _name_missing(self, columns: Sequence[str], progress: RunProgress) -> None:
        there = {name for row in progress.rows for name in row}
        missing = [name for name in columns if name not in there and name not in self._named]
        if missing:
            self._named.update(missing)
            progress.say(
                f"PrintMetrics: there is no column {', '.join(map(repr, missing))} in iteration "
                f"{progress.iteration}. There are: {', '.join(choices(progress.rows))}"
            )

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
        """Refuse a name; set the first value, with which the first evaluation is made."""
        for agent in progress.agents:
            self._check(agent)
        if progress.iteration == 0:
            self.on_iteration_start(progress)

    def on_iteration_start(self, progress: RunProgress) -> None:
        """Set the value of the iteration."""
        value = self._schedule(progress.iteration + 1)
        for agent in progress.agents:
            self._check(agent)
            agent.argument_table()[self.name].check(self.name, value)
            agent.set_attributes({self.name: value})

    def _check(self, agent: Any) -> None:
        changeable = sorted(name for name, row in agent.argument_table().items() if row.mutable)
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
