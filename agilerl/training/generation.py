"""One generation: selection and mutation of the population that a training function trains."""

from __future__ import annotations

import copy
import math
import random
from typing import Any

from agilerl.hpo.mutation import Mutation
from agilerl.hpo.selection import Selection, best_of
from agilerl.training.population import Population


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
