"""Checks of what users pass to the training functions: every mistake is an immediate error."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agilerl.distributed import Ranks, ranks_of
from agilerl.llm.engine.accelerator_config import check_accelerator

if TYPE_CHECKING:
    from agilerl.training.protocols import Agent, SingleTurnEnv

_AGENT_MEMBERS = (
    "algo",
    "index",
    "fitness",
    "scores",
    "steps",
    "group_size",
    "rollout",
    "get_action",
    "learn",
    "test",
    "sampling_config",
    "set_reference_policy",
    "save_checkpoint",
)
_ENV_MEMBERS = (
    "name",
    "num_epochs",
    "questions",
    "answers",
    "prompt_lengths",
    "reset",
    "step",
    "evaluate",
    "state_dict",
    "load_state_dict",
    "__len__",
)


def check_population(pop: Any) -> None:
    """Check that ``pop`` is a non-empty list of different agents with different indices.

    Raises:
        ValueError: Naming what is wrong with it.
    """
    if not isinstance(pop, list):
        raise ValueError(
            f"pop must be a list of agents, not {type(pop).__name__}: pass [agent] for one agent."
        )
    if not pop:
        raise ValueError("pop is empty: pass a list with at least one agent.")
    for position, agent in enumerate(pop):
        missing = [name for name in _AGENT_MEMBERS if not hasattr(agent, name)]
        if missing:
            raise ValueError(
                f"pop[{position}] is a {type(agent).__name__}, which is no agent (it lacks "
                f"{', '.join(missing)}): pass agents such as GRPO(...)."
            )
    indices = [agent.index for agent in pop]
    if len(set(indices)) < len(indices):
        raise ValueError(
            f"pop holds agents with the same index, {indices}: the index names an agent in logs "
            "and checkpoints. Build them with different index=..., or with population(size)."
        )


def check_environments(
    env: Any, env_fn: Callable[[], Any] | None, population_size: int
) -> Sequence[Any]:
    """One environment per agent: the shared ``env`` repeated, or one from each call of ``env_fn``.

    Returns:
        ``population_size`` environments.

    Raises:
        ValueError: If both or neither are given.
        TypeError: If ``env_fn`` cannot be called or an environment lacks what the loop needs.
    """
    if (env is None) == (env_fn is None):
        given = "neither was" if env is None else "both were"
        raise ValueError(
            f"Exactly one of env and env_fn is needed, {given} given: env is shared by all agents, "
            "env_fn is called once per agent to make one each."
        )
    if env_fn is None:
        _check_env("env", env)
        return [env] * population_size
    if not callable(env_fn):
        raise TypeError(
            f"env_fn={env_fn!r} cannot be called: pass a function without arguments that returns "
            "an environment, or pass the environment itself as env."
        )
    environments = [env_fn() for _ in range(population_size)]
    for made in environments:
        _check_env("env_fn()", made)
    return environments


def check_prompts_fit(agents: Sequence[Agent], envs: Sequence[SingleTurnEnv]) -> None:
    """Check that each agent's context holds every prompt of its environment and one token more.

    A prompt that does not fit would end the run when it is drawn.

    Raises:
        ValueError: If a prompt is too long.
    """
    for agent, env in zip(agents, envs, strict=True):
        lengths, limit = env.prompt_lengths(), agent.sampling_config().max_model_len
        longest, too_long = max(lengths), sum(length >= limit for length in lengths)
        if too_long:
            raise ValueError(
                f"The longest prompt of {env.name} has {longest} tokens, template included, but "
                f"agent {agent.index} has max_model_len={limit}, which has to hold the prompt and "
                f"at least one token of its completion: {too_long} of {len(lengths)} prompts are "
                "too long. Leave them out with a smaller max_context_length of ReasoningGym "
                f"(at most {limit - 1}), or raise max_model_len of the agents."
            )


def check_env_factory(env_factory: Any, env_config: Any) -> None:
    """Check that environments can be made.

    Raises:
        TypeError: If they cannot.
    """
    if not callable(env_factory):
        raise TypeError(
            f"env_factory={env_factory!r} cannot be called: pass a function that returns a new "
            "multi-turn environment, such as a TokenObservationWrapper."
        )
    if env_config is not None:
        check_type("env_config", env_config, Mapping, "a dict of env_factory's arguments or None")


def fit_context(env: Any, agents: Sequence[Agent]) -> None:
    """Give a multi-turn environment the agents' lengths where it has none; check those it has.

    Raises:
        ValueError: If its rows could get longer than an agent's context, or an agent's answers
            longer than its rows.
    """
    configs = [agent.sampling_config() for agent in agents]
    limit = min(config.max_model_len for config in configs)
    answers = [config.max_new_tokens for config in configs if config.max_new_tokens is not None]
    if not hasattr(env, "max_model_len"):
        return
    if env.max_model_len is None:
        env.max_model_len = limit
    if getattr(env, "max_output_tokens", None) is None and len(answers) == len(configs):
        env.max_output_tokens = max(answers)
    own, room = env.max_model_len, getattr(env, "max_output_tokens", None) or 1
    if own > limit:
        raise ValueError(
            f"env_factory made an environment with max_model_len={own}, but an agent has "
            f"max_model_len={limit}: give both the same, or leave the environment's at None."
        )
    for config in configs:
        most = config.max_new_tokens
        if config.max_model_len > own and (most is None or most > room):
            raise ValueError(
                f"env_factory made an environment with max_model_len={own} that keeps {room} "
                f"tokens free for an answer, but an agent with max_model_len="
                f"{config.max_model_len} may answer with up to {most or 'as many'} tokens "
                "(max_output_tokens): give all the same max_model_len, or the environment the "
                "agents' largest max_output_tokens."
            )


def training_ranks(accelerator: Any, agents: Sequence[Agent]) -> Ranks:
    """The processes that train together: the accelerator's, which has to be that of the agents.

    Raises:
        TypeError: If it is no accelerator.
        ValueError: If agents and training function have different accelerators.
    """
    check_accelerator("accelerator", accelerator)
    of_agents = [getattr(agent, "accelerator", None) for agent in agents]
    if any(own is not (accelerator or of_agents[0]) for own in of_agents):
        raise ValueError(
            "accelerator is not the one that the agents were built with: pass the same object to "
            "the agents, the environment and the training function."
        )
    return ranks_of(accelerator or of_agents[0])


def check_shares(envs: Sequence[Any], ranks: Ranks) -> None:
    """Check that environments hand out this process's share of the data.

    Raises:
        ValueError: If one was built without the accelerator: every process would train on the same.
    """
    for env in envs:
        if getattr(env, "num_processes", ranks.world_size) != ranks.world_size:
            raise ValueError(
                f"{env.name} deals its rows out to {env.num_processes} processes, but "
                f"{ranks.world_size} train together: pass the accelerator to the environment too."
            )


def share_of(name: str, count: int, ranks: Ranks) -> int:
    """One process's share of a number that counts over all of them.

    Raises:
        ValueError: If it does not divide.
    """
    if count % ranks.world_size:
        raise ValueError(
            f"{name}={count} counts over all {ranks.world_size} processes, so it must be a "
            f"multiple of {ranks.world_size}."
        )
    return count // ranks.world_size


def check_selection(tournament: Any, mutation: Any, evo_steps: int | None) -> None:
    """Check the three arguments of evolution, which only work together.

    Raises:
        ValueError: If some but not all are given.
        NotImplementedError: If all are given.
    """
    trio = {"tournament": tournament, "mutation": mutation, "evo_steps": evo_steps}
    given = [name for name, value in trio.items() if value is not None]
    missing = [name for name, value in trio.items() if value is None]
    if given and missing:
        raise ValueError(
            f"Evolution needs tournament, mutation and evo_steps together: {' and '.join(given)} "
            f"given, {' and '.join(missing)} missing. Give all three, or none to train without it."
        )
    if given:
        raise NotImplementedError(
            "tournament, mutation and evo_steps are not supported yet: leave all three out, the "
            "agents of pop are then trained side by side."
        )


def check_count(name: str, value: Any) -> None:
    """Check that ``value`` is an int of at least 1.

    Raises:
        TypeError: Not an int.
        ValueError: Below 1.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name}={value!r} must be an int of at least 1.")
    if value < 1:
        raise ValueError(f"{name}={value!r} must be at least 1.")


def check_seconds(name: str, value: Any) -> None:
    """Check that ``value`` is a positive number.

    Raises:
        TypeError: Not a number.
        ValueError: Not positive, or not finite.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}={value!r} must be a number of seconds.")
    if not 0 < float(value) < math.inf:
        raise ValueError(f"{name}={value!r} must be a positive, finite number of seconds.")


def check_type(name: str, value: Any, kind: type, allowed: str) -> None:
    """Check that ``value`` is a ``kind``; ``allowed`` says in words what it may be.

    Raises:
        TypeError: Of another type.
    """
    if not isinstance(value, kind):
        raise TypeError(f"{name}={value!r} must be {allowed}.")


def check_directory(name: str, value: Any) -> None:
    """Check that ``value`` is None or names a directory, which need not exist.

    Raises:
        TypeError: Neither a str nor a Path.
        ValueError: Empty, or a file.
    """
    if value is None:
        return
    if not isinstance(value, str | os.PathLike):
        raise TypeError(f"{name}={value!r} must be a str or Path.")
    if not str(value):
        raise ValueError(f"{name} is empty: name a directory.")
    path = Path(os.path.expanduser(value))
    if path.exists() and not path.is_dir():
        raise ValueError(f"{name}={str(value)!r} is a file: name a directory.")


def _check_env(name: str, env: Any) -> None:
    missing = [member for member in _ENV_MEMBERS if not hasattr(env, member)]
    if missing:
        raise TypeError(
            f"{name} is a {type(env).__name__}, which lacks {', '.join(missing)}: pass a "
            "ReasoningGym, or an environment with the same interface."
        )
