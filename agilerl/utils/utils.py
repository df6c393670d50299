"""Save an agent; make a population from a table of hyperparameters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agilerl.algorithms import CISPO, GRPO, GSPO
from agilerl.algorithms.core import LLMAlgorithm
from agilerl.algorithms.core.registry import HyperparameterConfig

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
        TypeError: If ``agent`` is none.
        FileExistsError: If ``path`` holds something that is not a checkpoint.
    """
    if not isinstance(agent, LLMAlgorithm):
        raise TypeError(
            f"agent is of type {type(agent).__name__}; it must be a GRPO, GSPO or CISPO agent"
        )
    agent.save_checkpoint(path, lora_only=lora_only, save_optimizer=save_optimizer)


def create_population(
    algo: str,
    init_hp: Mapping[str, Any] | None = None,
    hp_config: HyperparameterConfig | None = None,
    population_size: int = 1,
    **arguments: Any,
) -> list[GRPO]:
    """Make agents that share one base model.

    Args:
        algo: ``"GRPO"``, ``"GSPO"`` or ``"CISPO"``, in any letter case.
        init_hp: Constructor arguments by name, in any letter case: ``{"BATCH_SIZE": 16}``.
        hp_config: Hyperparameters to mutate; each agent starts with values drawn within limits.
        population_size: Agents.
        **arguments: Further constructor arguments, such as ``actor_network`` and ``pad_token_id``.

    Returns:
        The agents, with indices 0 to ``population_size - 1``.

    Raises:
        ValueError: For an unknown algorithm or key, or an argument given twice.
    """
    cls = ALGORITHMS.get(algo.upper()) if isinstance(algo, str) else None
    if cls is None:
        raise ValueError(f"algo is {algo!r}; it must be one of {', '.join(ALGORITHMS)}")
    given = dict(arguments)
    for key, value in (init_hp or {}).items():
        name = str(key).lower()
        if name in given:
            raise ValueError(f"init_hp holds {key!r}, but {name} is given already; leave one out")
        given[name] = value
    allowed = set(cls.argument_names()) - {"hp_config", "index"}
    unknown = sorted(given.keys() - allowed)
    if unknown:
        raise ValueError(
            f"{cls.__name__} takes no {', '.join(map(repr, unknown))}; init_hp and arguments "
            f"must be among {', '.join(sorted(allowed))}"
        )
    return cls.population(population_size, hp_config=hp_config, **given)
