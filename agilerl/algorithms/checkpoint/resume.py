"""Restores an agent exactly as it was saved, as resumed runs need it.

``load_checkpoint`` leaves an agent its hyperparameters; here everything but the base model comes
from the checkpoint.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from agilerl.algorithms.checkpoint.agent_attributes import (
    decode_arguments,
    encode_arguments,
    saved_generator,
    saved_history,
)
from agilerl.algorithms.checkpoint.save_and_load import restored_engine
from agilerl.algorithms.core.lora_agent import LoRAAgent
from agilerl.checks import require
from agilerl.distributed import ranks_of
from agilerl.llm.checkpoint import lora_merging
from agilerl.llm.checkpoint.checkpoint_files import SavedCheckpoint, read_checkpoint
from agilerl.llm.checkpoint.schema import DamagedCheckpointError
from agilerl.llm.engine.accelerator_config import rank_batch_size
from agilerl.llm.engine.local import LocalEngine

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SavedAgent:
    """A checkpoint that was read and fits the agent."""

    agent: LoRAAgent
    path: Path
    adapters: dict[str, dict[str, torch.Tensor]]
    """Tensors by role."""
    attributes: dict[str, Any]
    """Hyperparameters and history."""
    rng: torch.Generator
    engine: LocalEngine
    """A new engine with the saved optimizer and schedule."""
    skipped_steps: int

    def restore(self) -> None:
        """Set the agent back."""
        agent = self.agent
        for role, tensors in self.adapters.items():
            lora_merging.write_adapter(agent.policy, role, tensors)
        agent.set_attributes(self.attributes)
        agent.rng.set_state(self.rng.get_state())
        agent.engine.close()
        agent.engine = self.engine
        agent.skipped_steps.in_a_row = self.skipped_steps
        agent.skipped_steps.last_checkpoint = str(self.path)
        agent.policy.set_role("actor")


def read_saved_agent(agent: LoRAAgent, path: Path) -> SavedAgent:
    """Read a checkpoint, with its optimizer, for an agent built as the saved one; changes nothing.

    Raises:
        DamagedCheckpointError: If a file is missing or damaged.
        ValueError: If it is a checkpoint of an agent of another kind, index or adapter.
    """
    ranks = ranks_of(agent.accelerator)
    try:
        saved = read_checkpoint(path, ranks, load_optimizer=True)
    except FileNotFoundError as error:
        raise DamagedCheckpointError(str(error)) from error
    require(
        saved.optimizer is not None,
        f"{path} holds no optimizer state; save it with save_optimizer=True",
    )
    _check_identity(agent, saved)
    for role, adapter in saved.adapters.items():
        lora_merging.check_same_config(
            agent.policy.lora_configs[role],
            adapter.config,
            remedy="Build the agents with the checkpoint's lora_config",
        )
    adapters = {
        role: lora_merging.fit_adapter(agent.policy, role, adapter)
        for role, adapter in saved.adapters.items()
    }
    settings = _settings(agent, saved)
    history, rng = saved_history(saved, agent._history), saved_generator(saved, ranks)
    # Last, as from here on there is an engine that would have to be closed.
    own = agent.attributes(settings)
    try:
        agent.set_attributes(settings)
        engine = restored_engine(agent, saved.optimizer)
    finally:
        agent.set_attributes(own)
    return SavedAgent(
        agent=agent,
        path=path,
        adapters=adapters,
        attributes=settings | history,
        rng=rng,
        engine=engine,
        skipped_steps=saved.attributes.get("bad_steps", 0),
    )


def _check_identity(agent: LoRAAgent, saved: SavedCheckpoint) -> None:
    attributes, base = saved.attributes, agent.policy.base.fingerprint()
    pairs: dict[str, tuple[Any, Any]] = {
        "algorithm is": (attributes["algo"], agent.algo),
        "index is": (attributes["history"]["index"], agent.index),
        "adapters are": (sorted(saved.adapters), sorted(agent.policy.slots)),
        # Absent in older checkpoints.
        "base weights are": (attributes.get("base_fingerprint", base), base),
    }
    for what, (theirs, own) in pairs.items():
        require(
            theirs == own,
            f"{saved.path} is a checkpoint of another agent: its {what} {theirs!r}, this agent's "
            f"{own!r}; build the agent as it was built for the checkpoint",
        )


def _settings(agent: LoRAAgent, checkpoint: SavedCheckpoint) -> dict[str, Any]:
    """The saved hyperparameters; says which of the agent's own have no effect."""
    saved = checkpoint.attributes["arguments"]
    own, table = encode_arguments(agent.saved_arguments()), agent.argument_table()
    taken = {name for name in saved.keys() & own.keys() if table[name].resumed}
    differing = [
        f"{name}={saved[name]!r} (not {own[name]!r})"
        for name in sorted(taken - set(agent.hp_config or ()))
        if saved[name] != own[name]
    ]
    if differing:
        logger.warning(
            "Agent %d goes on with the hyperparameters of its checkpoint: %s",
            agent.index,
            ", ".join(differing),
        )
    arguments = decode_arguments(checkpoint, table)
    try:
        rank_batch_size(arguments.get("batch_size", agent.batch_size), agent.accelerator)
    except ValueError as error:
        raise ValueError(
            f"{checkpoint.path} cannot be resumed here: its {error}. Hyperparameters are the "
            "checkpoint's, so use another number of processes"
        ) from error
    return {name: arguments[name] for name in taken}
