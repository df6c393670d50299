"""Mutation of hyperparameters."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any, Protocol

from agilerl.algorithms.core.registry import (
    RLParameter,
    magnitude,
    next_multiple,
    with_magnitude,
)
from agilerl.checks import FLAG, Number, require
from agilerl.distributed import ranks_of

Change = Callable[[float], float]

_PROBABILITY = Number(0, 1)
_NETWORK_MUTATIONS = ("architecture", "new_layer_prob", "parameters", "activation")


class Mutation(Protocol):
    """What the training functions ask of a mutation."""

    mutate_elite: bool
    """Whether the best agent is mutated like any other."""
    only_replaced: bool
    """Whether only agents that were just replaced are mutated."""

    def mutate(self, agent: Any, rng: random.Random) -> None:
        """Mutate one agent; all that is drawn comes from ``rng``."""
        ...


class Mutations:
    """Changes one hyperparameter of an agent, or none.

    Which of an agent's hyperparameters may change, and within which limits, is its ``hp_config``.
    What was changed is in ``agent.mut``.

    Args:
        no_mutation: Relative probability that an agent stays as it is.
        architecture: 0; an adapter's architecture is that of its base.
        new_layer_prob: 0 likewise.
        parameters: 0 likewise.
        activation: 0 likewise.
        rl_hp: Relative probability that one of its hyperparameters changes.
        mutation_sd: Has no effect on hyperparameters.
        activation_selection: Likewise.
        mutate_elite: Whether the best agent is mutated like any other.
        rand_seed: Of :meth:`mutation`; None: another one every time. It has no effect in the
            training functions, which draw from a stream of each generation's own.
        device: Has no effect: agents know theirs.
        accelerator: Likewise.

    Raises:
        TypeError: A value of the wrong type.
        ValueError: A value out of range; a mutation of networks.
    """

    only_replaced = False

    def __init__(  # noqa: PLR0913, PLR0917  the contract's arguments
        self,
        no_mutation: float,
        architecture: float,
        new_layer_prob: float,
        parameters: float,
        activation: float,
        rl_hp: float,
        mutation_sd: float = 0.1,
        activation_selection: list[str] | None = None,
        mutate_elite: bool = True,
        rand_seed: int | None = None,
        device: Any = "cpu",
        accelerator: Any = None,
    ) -> None:
        given = dict(locals())
        for name in ("no_mutation", *_NETWORK_MUTATIONS, "rl_hp"):
            _PROBABILITY(name, given[name])
        for name in _NETWORK_MUTATIONS:
            require(
                given[name] == 0,
                f"{name} is {given[name]}; it must be 0, because agents that finetune a language "
                "model have no network of their own to mutate; use rl_hp",
            )
        require(
            no_mutation + rl_hp > 0, "no_mutation and rl_hp are both 0; one of them must be above"
        )
        FLAG("mutate_elite", mutate_elite)
        Number(0, integer=True, optional=True)("rand_seed", rand_seed)
        self.no_mutation, self.rl_hp, self.mutate_elite = no_mutation, rl_hp, mutate_elite
        self.mutation_sd, self.activation_selection = mutation_sd, activation_selection
        self.rand_seed, self.device, self.accelerator = rand_seed, device, accelerator
        self._rng = random.Random(rand_seed)

    def mutation(self, population: list[Any], pre_training_mut: bool = False) -> list[Any]:
        """Mutate every agent of a population, for loops of your own.

        Args:
            population: Agents, changed in place. Without ``mutate_elite`` that with the highest
                last fitness stays as it is.
            pre_training_mut: Mutate each for certain, to spread a population before it trains.

        Returns:
            The population.
        """
        fitness = [agent.fitness[-1] if agent.fitness else -math.inf for agent in population]
        elite = None if self.mutate_elite else fitness.index(max(fitness))
        for place, agent in enumerate(population):
            if pre_training_mut:
                mutate_one(agent, self._rng)
            elif place != elite:
                self.mutate(agent, self._rng)
        return population

    def mutate(self, agent: Any, rng: random.Random) -> None:
        """Mutate one agent; all that is drawn comes from ``rng``."""
        if rng.random() * (self.no_mutation + self.rl_hp) < self.no_mutation:
            agent.mut = None
        else:
            mutate_one(agent, rng)


class PerturbOrResample:
    """Changes every hyperparameter of agents that were just replaced: by a step, or drawn anew.

    The exploring half of Population Based Training (Jaderberg et al., 2017, section 4.1.1).

    Args:
        resample_probability: That a hyperparameter is drawn anew within its limits.

    Raises:
        ValueError: A value out of range.
    """

    only_replaced = True
    mutate_elite = False

    def __init__(self, resample_probability: float = 0.25) -> None:
        _PROBABILITY("resample_probability", resample_probability)
        self.resample_probability = resample_probability

    def mutate(self, agent: Any, rng: random.Random) -> None:
        """Mutate one agent; all that is drawn comes from ``rng``."""
        changes = []
        for name, parameter in (agent.hp_config or {}).items():
            if rng.random() < self.resample_probability:
                changes.append(set_hyperparameter(agent, name, parameter, parameter.sample(rng)))
            else:
                changes.append(_step(agent, name, parameter, rng))
        agent.mut = "; ".join(filter(None, changes)) or None
        agent.mutation_hook()


def mutate_one(agent: Any, rng: random.Random) -> None:
    """Shrink or grow one of an agent's hyperparameters; one without any stays as it is."""
    agent.mut = None
    if agent.hp_config:
        name, parameter = agent.hp_config.sample(rng)
        agent.mut = _step(agent, name, parameter, rng)
        agent.mutation_hook()


def _step(agent: Any, name: str, parameter: RLParameter, rng: random.Random) -> str | None:
    (value,) = agent.attributes((name,)).values()
    return set_hyperparameter(agent, name, parameter, parameter.mutate(magnitude(value), rng))


def set_hyperparameter(agent: Any, name: str, parameter: RLParameter, value: float) -> str | None:
    """Give a hyperparameter a value, or a valid one beside it; returns what was changed, in words.

    None where that is the value it had. A band keeps its proportions. A batch size stays a multiple
    of the number of processes.
    """
    (old,) = agent.attributes((name,)).values()
    note, processes = "", ranks_of(agent.accelerator).world_size
    if name == "batch_size" and value % processes:
        value = next_multiple(value, processes, parameter, old)
        note = f" (a multiple of {processes} processes)"
    new = with_magnitude(old, value)
    if new == old:
        return None
    agent.argument_table()[name].check(name, new)
    agent.set_attributes({name: new})
    return f"{name} {value_text(old)} -> {value_text(new)}{note}"


def value_text(value: Any) -> str:
    """A hyperparameter or a fitness as it is shown; of floats four digits."""
    if isinstance(value, tuple | list):
        return f"({', '.join(map(value_text, value))})"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
