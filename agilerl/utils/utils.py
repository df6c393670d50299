"""Save an agent; make a population from a table of hyperparameters."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agilerl.algorithms import CISPO, GRPO, GSPO
from agilerl.algorithms.core import LLMAlgorithm
from agilerl.algorithms.core.registry import HyperparameterConfig
from agilerl.checks import require

ALGORITHMS: dict[str, type[GRPO]] = {"GRPO": GRPO, "GSPO": GSPO, "CISPO": CISPO}


def save_llm_checkpoint(
    agent: LLMAlgorithm, path: str | Path, lora_only: bool = True, save_optimizer: bool = True
) -> None:
    """Write an agent's checkpoint directory.

    ``agent.load_checkpoint(path)`` and ``type(agent).load(path)`` read it, and
    ``PeftModel.from_pretrained(base_model, f"{path}/actor")`` gives the trained policy.

    Args:
        agent: The agent.
        path: The directory; an earlier checkpoint there is replaced.
        lora_only: Save adapters only; False: the full actor.
        save_optimizer: Also save optimizer and schedule.

    Raises:
        TypeError: If ``agent`` is not an agent.
        FileExistsError: If ``path`` holds something that is not a checkpoint.
    """
    require(
        isinstance(agent, LLMAlgorithm),
        f"agent is of type {type(agent).__name__}; it must be a GRPO, GSPO or CISPO agent",
        TypeError,
    )
    agent.save_checkpoint(path, lora_only=lora_only, save_optimizer=save_optimizer)


def create_population(
    algo: str,
    net_config: None = None,
    INIT_HP: Mapping[str, Any] | None = None,
    hp_config: HyperparameterConfig | None = None,
    population_size: int | None = None,
    **arguments: Any,
) -> list[GRPO]:
    """Make agents that share one base model.

    Args:
        algo: ``"GRPO"``, ``"GSPO"`` or ``"CISPO"``, in any letter case.
        net_config: None: the network is the base model.
        INIT_HP: Constructor arguments by name, in any letter case, and ``POP_SIZE``:
            ``{"POP_SIZE": 4, "BATCH_SIZE": 16, "LR": 1e-4}``.
        hp_config: Hyperparameters that evolution may mutate; each agent starts with values drawn
            between their limits.
        population_size: Number of agents; None: ``POP_SIZE``, or 1.
        **arguments: Further constructor arguments, such as ``actor_network`` and ``pad_token_id``.

    Returns:
        The agents, with indices 0 to ``population_size - 1``.

    Raises:
        ValueError: For an unknown algorithm or key, or an argument given twice.
    """
    name = str(algo).upper()
    require(name in ALGORITHMS, f"algo is {algo!r}; it must be one of {', '.join(ALGORITHMS)}")
    require(
        net_config is None,
        f"net_config is {net_config!r}; it must be None: the network is the base model",
    )
    cls = ALGORITHMS[name]
    allowed = {*cls.argument_names(), "pop_size"} - {"hp_config", "index"}
    given = dict(arguments)
    for key, value in (INIT_HP or {}).items():
        argument = str(key).lower()
        _check_known(repr(key), argument, allowed, f"INIT_HP of {cls.__name__}")
        require(
            argument not in given,
            f"INIT_HP holds {key!r}, but {argument} is given already; leave one out",
        )
        given[argument] = value
    size = given.pop("pop_size", None)
    require(
        size is None or population_size in (None, size),
        f"INIT_HP says {size} agents, but population_size is {population_size}; leave one out",
    )
    for argument in given:
        _check_known(argument, argument, allowed, cls.__name__)
    members = population_size if size is None else size
    return cls.population(1 if members is None else members, hp_config=hp_config, **given)


def _check_known(shown: str, argument: str, allowed: set[str], where: str) -> None:
    close = difflib.get_close_matches(argument, allowed, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    require(
        argument in allowed,
        f"{where} has no {shown}.{hint} It may hold {', '.join(sorted(allowed))}",
    )
