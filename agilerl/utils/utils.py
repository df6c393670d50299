"""Save an agent; make a population from a table of hyperparameters."""

from __future__ import annotations

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
    init_hp: Mapping[str, Any] | None = None,
    hp_config: HyperparameterConfig | None = None,
    population_size: int = 1,
    **arguments: Any,
) -> list[GRPO]:
    """Make agents that share one base model.

    Args:
        algo: ``"GRPO"``, ``"GSPO"`` or ``"CISPO"``, in any letter case.
        init_hp: Constructor arguments by name, in any letter case: ``{"BATCH_SIZE": 16}``.
        hp_config: Hyperparameters that evolution may mutate; each agent starts with values drawn
            between their limits.
        population_size: Number of agents.
        **arguments: Further constructor arguments, such as ``actor_network`` and ``pad_token_id``.

    Returns:
        The agents, with indices 0 to ``population_size - 1``.

    Raises:
        ValueError: For an unknown algorithm or key, or an argument given twice.
    """
    name = str(algo).upper()
    require(name in ALGORITHMS, f"algo is {algo!r}; it must be one of {', '.join(ALGORITHMS)}")
    cls = ALGORITHMS[name]
    given = dict(arguments)
    for key, value in (init_hp or {}).items():
        argument = str(key).lower()
        require(
            argument not in given,
            f"init_hp holds {key!r}, but {argument} is given already; leave one out",
        )
        given[argument] = value
    allowed = set(cls.argument_names()) - {"hp_config", "index"}
    unknown = sorted(given.keys() - allowed)
    require(
        not unknown,
        f"{cls.__name__} takes no {', '.join(map(repr, unknown))}; init_hp and arguments must be "
        f"among {', '.join(sorted(allowed))}",
    )
    return cls.population(population_size, hp_config=hp_config, **given)
