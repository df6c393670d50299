"""What two ranks run with several agents on one base."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from agents_and_batches import SETTINGS, every_weight, make_agent, weights
from cases_checkpoints import setting_of
from cases_learn import mine
from held_tensors import tensors_held

from agilerl.algorithms import GRPO
from agilerl.algorithms.core.registry import HyperparameterConfig, RLParameter
from agilerl.hpo import Mutations, TournamentSelection
from agilerl.hpo.mutation import set_hyperparameter
from agilerl.testing import tiny_model
from agilerl.training.generation import next_generation
from agilerl.training.population import Population

RATES = (1e-3, 2e-3, 3e-3)


def population(accelerator: Any) -> dict[str, Any]:
    """Three agents train in turn; one is replaced by a clone that loads another's checkpoint."""
    model = tiny_model(hidden_size=32, layers=1)
    agents = [
        make_agent(accelerator, actor_network=model, index=index, lr=rate)
        for index, rate in enumerate(RATES)
    ]
    learned, others_moved = [], []
    for agent in agents:
        others = [other for other in agents if other is not agent]
        before = [every_weight(other) for other in others]
        mine(accelerator).learned_by(agent)
        learned.append(weights(agent))
        others_moved += [
            not every_weight(other).equal(start)
            for other, start in zip(others, before, strict=True)
        ]
    path = Path(sys.argv[1]) / f"population-{setting_of(accelerator)}"
    first, parent, best = agents
    best.save_checkpoint(path)
    first.clean_up()
    clone = parent.clone(index=0)
    start = every_weight(parent)
    clone.load_checkpoint(path, load_optimizer=True)
    clone.lr = best.lr
    for agent in (clone, best):
        mine(accelerator, seed=1).learned_by(agent)
    others_moved.append(not every_weight(parent).equal(start))
    return {
        "learned": learned,
        "others_moved": others_moved,
        "clone": every_weight(clone),
        "best": every_weight(best),
    }


def evolution(accelerator: Any) -> dict[str, Any]:
    """Three generations of three agents, each after a step."""
    search = HyperparameterConfig(
        lr=RLParameter(1e-4, 1e-2), batch_size=RLParameter(2, 9, dtype=int)
    )
    model = tiny_model(hidden_size=32, layers=1)
    agents = [
        make_agent(accelerator, actor_network=model, index=index, lr=rate, hp_config=search)
        for index, rate in enumerate(RATES)
    ]
    collector: Any = SimpleNamespace(num_epochs=0)
    population = Population(agents, [collector] * 3)
    selection = TournamentSelection(2, elitism=True, population_size=3)
    mutation = Mutations(0.2, 0, 0, 0, 0, 0.8)
    engines = weakref.WeakSet(agent.engine for agent in agents)
    adapters, held = [], []
    for iteration in range(1, 4):
        for agent in agents:
            mine(accelerator, seed=iteration).learned_by(agent)
            # As on all ranks, which gather their rewards.
            agent.fitness.append(float(every_weight(agent).double().sum()))
        next_generation(population, selection, mutation, iteration, seed=5)
        engines.update(agent.engine for agent in agents)
        adapters.append(len(agent.policy.model.peft_config))
        gc.collect()
        held.append(tensors_held())
    return {
        "adapters": adapters,
        "tensors_held": held,
        "engines": len(engines),
        "weights": [every_weight(agent) for agent in agents],
        "generations": population.generations,
        "batch_sizes": [agent.batch_size for agent in agents],
    }


MUTATED: dict[str, float] = {
    "lr": 5e-3,
    "beta": 0.2,
    "clip_coef": 1e-4,
    "batch_size": 3,
    "micro_batch_size_per_gpu": 1,
    "update_epochs": 3,
    "temperature": 0.5,
    "max_grad_norm": 1e-3,
    "adv_clip_range": 0.3,
}
"""Moves to these values; that of the batch size is no multiple of two processes."""


def drawn_batch_sizes(accelerator: Any) -> list[int]:
    """Those of a population's members."""
    search = HyperparameterConfig(batch_size=RLParameter(1, 9, dtype=int))
    model = tiny_model(hidden_size=32, layers=1)
    given = {"actor_network": model, "accelerator": accelerator, "hp_config": search}
    members = GRPO.population(4, **(SETTINGS | given))
    sizes = [member.batch_size for member in members]
    for member in members:
        member.clean_up()
    return sizes


def mutations(accelerator: Any) -> dict[str, Any]:
    """Between two steps one hyperparameter is mutated; then again in another agent."""
    first = make_agent(
        accelerator, adv_clip_range=10.0, micro_batch_size_per_gpu=2, update_epochs=2
    )
    mine(accelerator).learned_by(first)
    found: dict[str, Any] = {"drawn": drawn_batch_sizes(accelerator)}
    for name, value in {"nothing": 0.0, **MUTATED}.items():
        mutated = first.clone()
        if name != "nothing":
            limits = RLParameter(value, value, dtype=type(value))
            set_hyperparameter(mutated, name, limits, value)
        built = mutated.clone()  # by the constructor, with the value
        for agent in (mutated, built):
            mine(accelerator, seed=1).learned_by(agent)
        found[name] = weights(mutated), weights(built)
        mutated.clean_up()
        built.clean_up()
    return found


POPULATION_CASES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "population": population,
    "evolution": evolution,
    "mutations": mutations,
}
