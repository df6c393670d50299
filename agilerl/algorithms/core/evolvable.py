"""EvolvableAlgorithm: an agent's identity, history and what evolution may read and change."""

from __future__ import annotations

import copy
import inspect
import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

import torch

from agilerl.algorithms.core.registry import (
    HyperparameterConfig,
    NetworkGroup,
    OptimizerConfig,
    next_multiple,
    with_magnitude,
)
from agilerl.checks import COUNT, InstanceOf
from agilerl.distributed import ranks_of


class EvolvableAlgorithm:
    """Base of all agents: a member of a population.

    Args:
        index: Place in the population.
        hp_config: What mutation may change; None: nothing.

    Attributes:
        fitness: Mean evaluation reward, one per evaluation.
        scores: Mean training reward, one per ``learn``.
        steps: Cumulative steps, one entry per evaluation of a training function, as ``fitness``.
        total_steps: Cumulative steps so far.
        mut: Name of the last mutation, None before any.
    """

    algo: str
    # Attributes that clones copy by value; all else is built from the constructor's arguments.
    _history: tuple[str, ...] = (
        "fitness",
        "scores",
        "steps",
        "total_steps",
        "mut",
        "reference_update_tracker",
    )
    # Objects that drive the agent: neither hyperparameters nor history.
    _runtime_attributes: tuple[str, ...] = ()

    def __init__(self, index: int, hp_config: HyperparameterConfig | None) -> None:
        self.index = index
        self.mut: Any = None
        self.algo = type(self).__name__
        self.hp_config = hp_config
        self.fitness: list[float] = []
        self.scores: list[float] = []
        self.steps: list[int] = []
        self.total_steps = 0
        self.reference_update_tracker = 0
        self._mutation_hooks: list[Callable[[], Any]] = []
        self._network_groups: list[NetworkGroup] = []
        self._optimizer_configs: list[OptimizerConfig] = []

    def register_network_group(self, group: NetworkGroup) -> None:
        """Declare a network by attribute name."""
        self._network_groups.append(group)

    def register_optimizer(self, config: OptimizerConfig) -> None:
        """Declare an optimizer by attribute name."""
        self._optimizer_configs.append(config)

    def register_mutation_hook(self, hook: Callable[[], Any]) -> None:
        """Have ``hook()`` called after every mutation of this agent."""
        self._mutation_hooks.append(hook)

    def mutation_hook(self) -> None:
        """Call the registered hooks."""
        for hook in self._mutation_hooks:
            hook()

    def get_lr_names(self) -> list[str]:
        """Attributes that hold learning rates."""
        return [config.lr for config in self._optimizer_configs]

    def evolvable_attributes(self, networks_only: bool = False) -> dict[str, Any]:
        """Networks, and unless ``networks_only`` the optimizers, by attribute name."""
        names = self._evolvable_names(networks_only)
        return {name: getattr(self, name) for name in names}

    def _evolvable_names(self, networks_only: bool = False) -> list[str]:
        networks = [group.eval_network for group in self._network_groups]
        return networks + [config.name for config in self._optimizer_configs if not networks_only]

    def get_policy(self) -> Any:
        """The network that acts."""
        (name,) = (group.eval_network for group in self._network_groups if group.policy)
        return self.evolvable_attributes(networks_only=True)[name]

    @classmethod
    def argument_names(cls) -> list[str]:
        """Names of the constructor's arguments."""
        return list(inspect.signature(cls).parameters)

    @staticmethod
    def inspect_attributes(
        agent: EvolvableAlgorithm, input_args_only: bool = False
    ) -> dict[str, Any]:
        """Attributes of an agent, without networks, optimizers and what drives them.

        Args:
            agent: The agent.
            input_args_only: Only those that are constructor arguments.
        """
        if input_args_only:
            # Arguments may share a name with a property, as ``optimizer`` does.
            own = vars(agent)
            return {name: own[name] for name in agent.argument_names() if name in own}
        hidden = {*agent._evolvable_names(), *agent._runtime_attributes}
        return {
            name: value
            for name, value in vars(agent).items()
            if not name.startswith("_") and name not in hidden
        }

    @staticmethod
    def copy_attributes(agent: EvolvableAlgorithm, clone: EvolvableAlgorithm) -> EvolvableAlgorithm:
        """Copy history and hyperparameters of ``agent`` onto ``clone``, and return it."""
        clone.set_attributes(copy.deepcopy(agent.attributes(agent._history)))
        clone.set_attributes(agent.attributes(agent.hp_config or ()))
        return clone

    def attributes(self, names: Iterable[str]) -> dict[str, Any]:
        """The values of some attributes, by name."""
        own = vars(self)
        return {name: own[name] for name in names}

    def set_attributes(self, values: Mapping[str, Any]) -> None:
        """Set some attributes, by name."""
        vars(self).update(values)

    @classmethod
    def population(
        cls,
        size: int,
        observation_space: Any = None,
        action_space: Any = None,
        wrapper_cls: type | None = None,
        wrapper_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> list[Self]:
        """Create ``size`` agents with indices 0 to ``size - 1``.

        Args:
            size: Members.
            observation_space: Ignored: language models observe token ids.
            action_space: Ignored likewise.
            wrapper_cls: Wraps every agent, as ``wrapper_cls(agent, **wrapper_kwargs)``.
            wrapper_kwargs: For the wrapper.
            **kwargs: Constructor arguments. Hyperparameters in ``hp_config`` are drawn within
                their limits for each agent, a batch size as a multiple of the number of
                processes. With ``use_vllm`` the members share one engine, and
                ``vllm_config.max_loras`` is raised to ``size`` where it is smaller.
        """
        COUNT("size", size)
        kwargs = cls.members_arguments(size, kwargs)
        search = kwargs.get("hp_config")
        InstanceOf(HyperparameterConfig, "a HyperparameterConfig")("hp_config", search)
        rng = random.Random(kwargs.get("seed", 42))
        processes = ranks_of(kwargs.get("accelerator")).world_size
        agents: list[Any] = []
        for index in range(size):
            drawn = {name: row.sample(rng) for name, row in (search or {}).items()}
            if search and "batch_size" in drawn:
                drawn["batch_size"] = next_multiple(
                    drawn["batch_size"], processes, search["batch_size"]
                )
            drawn = {name: with_magnitude(kwargs.get(name), value) for name, value in drawn.items()}
            agent: Any = cls(**{**kwargs, **drawn, "index": index})
            agents.append(
                agent if wrapper_cls is None else wrapper_cls(agent, **(wrapper_kwargs or {}))
            )
        return agents

    @classmethod
    def members_arguments(cls, size: int, given: dict[str, Any]) -> dict[str, Any]:
        """The constructor arguments of each of ``size`` members, from those :meth:`population` got.

        Args:
            size: Members.
            given: The arguments; not changed.
        """
        return given

    @staticmethod
    def get_state_dim(observation_space: Any) -> tuple[Any, ...]:
        """Input size of a network on a Gymnasium space (or a sequence or dict of them)."""
        return _space_dim(observation_space)

    @staticmethod
    def get_action_dim(action_space: Any) -> tuple[Any, ...]:
        """Output size of a network on a Gymnasium space (or a sequence or dict of them)."""
        return _space_dim(action_space)

    def preprocess_observation(self, observation: Any) -> Any:
        """Observations are token ids already: returned as they are."""
        return observation

    def to_device(self, *experiences: Any) -> tuple[Any, ...]:
        """Move tensors, and those inside lists, tuples and dicts, to the agent's device."""
        return tuple(_move(item, self.device) for item in experiences)

    device: Any = "cpu"


def _move(item: Any, device: Any) -> Any:
    if isinstance(item, torch.Tensor):
        return item.to(device)
    if isinstance(item, dict):
        return {key: _move(value, device) for key, value in item.items()}
    if isinstance(item, list | tuple):
        return type(item)(_move(value, device) for value in item)
    return item


def _space_dim(space: Any) -> tuple[Any, ...]:
    """Read a Gymnasium space by its public attributes, so that gymnasium need not be installed."""
    match space:
        case [*spaces] | object(spaces=[*spaces]):
            return tuple(_space_dim(part) for part in spaces)
        case dict(spaces) | object(spaces=dict(spaces)):
            return tuple(_space_dim(part) for part in spaces.values())
        case object(nvec=sizes):
            return (int(sum(sizes)),)
        case object(n=n):
            return (int(n),)
        case object(shape=tuple(shape)):
            return shape
    raise TypeError(f"{space!r} is not a Gymnasium space")
