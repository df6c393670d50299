"""What selections have in common: the score of an agent, and new populations of clones."""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from agilerl.checks import COUNT, Number, require


class Selection(ABC):
    """Decides, of each place in a population, whose agent continues there.

    Args:
        population_size: Members.
        eval_loop: Evaluations whose mean is an agent's score, counted from the last.
        rand_seed: Of :meth:`select`; None: another one every time. The training functions draw from
            a stream of each generation's own.

    Raises:
        ValueError: A value out of range.
    """

    def __init__(self, population_size: int, eval_loop: int, rand_seed: int | None) -> None:
        COUNT("population_size", population_size)
        COUNT("eval_loop", eval_loop)
        Number(0, integer=True, optional=True)("rand_seed", rand_seed)
        self.population_size, self.eval_loop, self.rand_seed = population_size, eval_loop, rand_seed
        self._rng = random.Random(rand_seed)

    @abstractmethod
    def parents(self, scores: Sequence[float], rng: random.Random) -> list[int]:
        """For each place, the number of the member whose agent continues there.

        Args:
            scores: Of the members.
            rng: All that is drawn comes from it.
        """

    def score(self, agent: Any) -> float:
        """The mean of an agent's last evaluations; minus infinity if that is no number.

        Raises:
            ValueError: It was never evaluated.
        """
        require(
            bool(agent.fitness),
            f"agent {agent.index} was never evaluated; call its test before a selection",
        )
        recent = agent.fitness[-self.eval_loop :]
        mean = math.fsum(recent) / len(recent)
        return -math.inf if math.isnan(mean) else mean

    def select(self, population: list[Any]) -> tuple[Any, list[Any]]:
        """A new population, for loops of your own; the training functions do this themselves.

        Members whose agent does not continue at its own place are replaced by clones of those that
        do, under the same index, and cleaned up.

        Args:
            population: Evaluated agents.

        Returns:
            The best agent of the new population, and that population.

        Raises:
            ValueError: If it has another size, or holds an agent that was never evaluated.
        """
        self.check_size(len(population))
        scores = [self.score(agent) for agent in population]
        parents = self.parents(scores, self._rng)
        selected = [
            agent if parent == place else population[parent].clone(index=agent.index)
            for place, (agent, parent) in enumerate(zip(population, parents, strict=True))
        ]
        for place, parent in enumerate(parents):
            if parent != place:
                population[place].clean_up()
        best = max(parents, key=scores.__getitem__)
        return selected[parents.index(best)], selected

    def check_size(self, size: int) -> None:
        """Raise ValueError for a population of another size."""
        require(
            size == self.population_size,
            f"population_size is {self.population_size}, but the population has {size} members",
        )


def best_of(scores: Sequence[float]) -> int:
    """The first of the members with the highest score."""
    return max(range(len(scores)), key=scores.__getitem__)
