"""One generation: selection and mutation of the population that a training function trains."""

from __future__ import annotations

import copy
import math
import random
from typing import TYPE_CHECKING, Any

from agilerl.hpo.mutation import Mutation
from agilerl.hpo.selection import Selection, best_of
from agilerl.training.population import Population

if TYPE_CHECKING:
    from agilerl.training.logs.run_log import RunLog
    from agilerl.training.options import TrainingOptions


class Evolution:
    """Makes the generations of a run, where its options ask for any.

    Args:
        population: Who trains.
        options: Say how, and how often.
        log: Where lineages go.
    """

    def __init__(self, population: Population, options: TrainingOptions, log: RunLog) -> None:
        self._population, self._options, self._log = population, options, log

    def is_due(self, iteration: int) -> bool:
        """Whether a generation follows this iteration."""
        every = self._options.evo_steps
        return every is not None and iteration % every == 0

    def evolve(self, iteration: int) -> bool:
        """Make the next generation if it is time for one; the members have been evaluated."""
        population, selection, mutation = (
            self._population,
            self._options.tournament,
            self._options.mutation,
        )
        made = population.generations[-1:]
        if made and made[0]["iteration"] == iteration:
            return False  # before the checkpoint that the run was resumed from
        if selection is None or mutation is None or not self.is_due(iteration):
            return False
        seed = population.seed if selection.rand_seed is None else selection.rand_seed
        next_generation(population, selection, mutation, iteration, seed)
        self._log.write_lineage(population.generations)
        self._log.show_generation(population.generations)
        return True


def next_generation(
    population: Population, selection: Selection, mutation: Mutation, iteration: int, seed: int
) -> None:
    """Replace agents by clones of better ones and mutate them; on all ranks alike.

    Random numbers come from a stream of this generation's own, so that a run that is resumed before
    it repeats it.

    Args:
        population: Evaluated members.
        selection: Who continues where.
        mutation: What changes then.
        iteration: The one that has just ended.
        seed: Of the run.
    """
    rng = random.Random(f"{seed} {iteration}")
    members = list(population)
    agents: list[Any] = [member.agent for member in members]
    scores = [selection.score(agent) for agent in agents]
    parents, best = selection.parents(scores, rng), best_of(scores)
    before = [copy.copy(member) for member in members]  # their lineages
    scored = [hyperparameters(agent) for agent in agents]
    clones = {
        place: agents[parent].clone(index=agents[place].index)
        for place, parent in enumerate(parents)
        if parent != place
    }
    for place, clone in clones.items():
        # Its own stream goes on: a clone's would begin again.
        clone.rng.set_state(agents[place].rng.get_state())
        population.replace(members[place], clone, before[parents[place]], iteration)
        agents[place].clean_up()
        agents[place] = clone
    for place, agent in enumerate(agents):
        elite = place == parents[place] == best and not mutation.mutate_elite
        if elite or (mutation.only_replaced and place not in clones):
            agent.mut = None
        else:
            mutation.mutate(agent, rng)
    population.generations.append(
        {
            "iteration": iteration,
            "members": [
                {
                    "agent": agent.index,
                    "parent": agents[parent].index,
                    "fitness": scores[place] if math.isfinite(scores[place]) else None,
                    "scored_hyperparameters": scored[place],
                    "mutation": agent.mut,
                    "hyperparameters": hyperparameters(agent),
                }
                for place, (agent, parent) in enumerate(zip(agents, parents, strict=True))
            ],
        }
    )


def hyperparameters(agent: Any) -> dict[str, Any]:
    """Those that may be mutated, as they are now."""
    values: dict[str, Any] = agent.attributes(agent.hp_config or ())
    return values
