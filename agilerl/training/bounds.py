"""When a run ends, and the clock that tells how long it has taken."""

from __future__ import annotations

import time

from agilerl.distributed import Ranks
from agilerl.training.options import TrainingOptions
from agilerl.training.population import Population


class Bounds:
    """The bounds of a run. Its time begins when this is made.

    Args:
        population: Who trains.
        options: With ``max_steps``, ``num_epochs`` and ``max_wall_seconds``.
        ranks: The processes, which all must ask together; the clock of rank 0 counts.
    """

    def __init__(self, population: Population, options: TrainingOptions, ranks: Ranks) -> None:
        self._population, self._options, self._ranks = population, options, ranks
        self._started = time.perf_counter()

    @property
    def wall_seconds(self) -> float:
        """Seconds that the run has taken, the time before it was resumed included."""
        return time.perf_counter() - self._started

    @wall_seconds.setter
    def wall_seconds(self, seconds: float) -> None:
        self._started = time.perf_counter() - seconds

    def reached(self) -> bool:
        """Whether time is up, or an agent at ``max_steps``, or the data at ``num_epochs``."""
        steps, epochs = self._options.max_steps, self._options.num_epochs
        seconds = self._options.max_wall_seconds
        if seconds is not None and self._ranks.gather(self.wall_seconds)[0] >= seconds:
            return True
        return any(
            (steps is not None and member.consumed >= steps)
            or (epochs is not None and self._population.passes(member) >= epochs)
            for member in self._population
        )
