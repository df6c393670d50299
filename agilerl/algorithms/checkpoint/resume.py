"""A living agent set back to exactly where a checkpoint was written, as resumed runs need it.

``load_checkpoint`` loads weights into an agent that keeps its hyperparameters; here everything
comes from the checkpoint but the model that the agent sits on.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from agilerl.algorithms.checkpoint.content import DamagedCheckpointError, read_content
from agilerl.algorithms.checkpoint.plain_values import decode_arguments, encode_arguments
from agilerl.algorithms.checkpoint.save_and_load import restored_engine
from agilerl.distributed import ranks_of
from agilerl.llm.checkpoint import lora_merging
from agilerl.llm.engine.accelerator_config import rank_batch_size

if TYPE_CHECKING:
    from agilerl.algorithms.core.llm import LLMAlgorithm
    from agilerl.llm.engine.local import LocalEngine

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SavedAgent:
    """A checkpoint that was read, and found to fit the agent."""

    agent: LLMAlgorithm
    path: Path
    adapters: dict[str, dict[str, torch.Tensor]]
    """Tensors by role."""
    settings: dict[str, Any]
    """Hyperparameters."""
    history: dict[str, Any]
    rng: torch.Generator
    engine: LocalEngine
    """A new engine with the saved optimizer and schedule."""
    bad_steps: int

    def restore(self) -> None:
        """Set the agent back."""
        agent = self.agent
        for role, tensors in self.adapters.items():
            lora_merging.write_adapter(agent.policy, role, tensors)
        for name, value in (self.settings | self.history).items():
            setattr(agent, name, value)
        agent.rng.set_state(self.rng.get_state())
        agent.engine.close()
        agent.engine = self.engine
        agent.skipped_steps.in_a_row = self.bad_steps
        agent.skipped_steps.last_checkpoint = str(self.path)
        agent.policy.set_role("actor")


def read_saved_agent(agent: LLMAlgorithm, path: Path) -> SavedAgent:
    """Read a checkpoint for an agent built like the one it is of; changes nothing yet.

    Args:
        agent: The agent to set back.
        path: A checkpoint with adapters and optimizer, as ``save_checkpoint(path)`` writes it.

    Raises:
        DamagedCheckpointError: If a file is missing or damaged.
        ValueError: If it is a checkpoint of an agent of another kind, index or adapter.
    """
    ranks = ranks_of(agent.accelerator)
    try:
        content = read_content(path, ranks, load_optimizer=True)
    except (ValueError, FileNotFoundError) as error:
        raise DamagedCheckpointError(str(error)) from error
    if content.optimizer is None:
        raise ValueError(f"{path} holds no optimizer state; save it with save_optimizer=True")
    saved, attributes = content.adapters, content.attributes
    _check_identity(agent, path, attributes, set(saved))
    for adapter in saved.values():
        lora_merging.check_same_config(
            agent.policy.lora_config,
            adapter.config,
            remedy="Build the agents with the checkpoint's lora_config",
        )
    adapters = {
        role: lora_merging.fit_adapter(agent.policy, role, adapter.tensors, adapter.config)
        for role, adapter in saved.items()
    }
    settings = _settings(agent, attributes["arguments"])
    try:
        rank_batch_size(settings["batch_size"], agent.accelerator)
    except ValueError as error:
        raise ValueError(
            f"{path} cannot be gone on with here: its {error}. Hyperparameters are the "
            "checkpoint's, so use another number of processes"
        ) from error
    history, rng = content.history(agent._history), content.generator(ranks)
    # Last, as from here on there is an engine that would have to be closed.
    with _having(agent, settings):
        engine = restored_engine(agent, content.optimizer)
    return SavedAgent(
        agent=agent,
        path=path,
        adapters=adapters,
        settings=settings,
        history=history,
        rng=rng,
        engine=engine,
        bad_steps=int(attributes.get("bad_steps", 0)),
    )


def _check_identity(
    agent: LLMAlgorithm, path: Path, attributes: Mapping[str, Any], roles: set[str]
) -> None:
    base = agent.policy.base.fingerprint()
    pairs: dict[str, tuple[Any, Any]] = {
        "algorithm": (attributes["algo"], agent.algo),
        "index": (attributes["history"].get("index"), agent.index),
        "adapters": (sorted(roles), sorted(agent.policy.slots)),
        "base weights": (attributes.get("base_fingerprint", base), base),  # absent in older ones
    }
    for what, (theirs, own) in pairs.items():
        if theirs != own:
            raise ValueError(
                f"{path} is a checkpoint of another agent: its {what} {_is(what)} {theirs!r}, "
                f"this agent's {own!r}; build the agent as it was built for the checkpoint"
            )


def _is(what: str) -> str:
    return "are" if what.endswith("s") else "is"


def _settings(agent: LLMAlgorithm, saved: dict[str, Any]) -> dict[str, Any]:
    """The saved hyperparameters; says which of the agent's own have no effect."""
    own = encode_arguments(agent.saved_arguments())
    resumed = {name for name, row in agent.argument_table().items() if row.resumed}
    mutable = set(agent.hp_config or ())
    differing = [
        f"{name}={saved[name]!r} (not {own[name]!r})"
        for name in (saved.keys() & own.keys() & resumed) - mutable
        if saved[name] != own[name]
    ]
    if differing:
        logger.warning(
            "Agent %d goes on with the hyperparameters of its checkpoint: %s",
            agent.index,
            ", ".join(sorted(differing)),
        )
    return {
        name: value
        for name, value in decode_arguments(saved).items()
        if name in own and name in resumed
    }


@contextlib.contextmanager
def _having(agent: LLMAlgorithm, settings: Mapping[str, Any]) -> Iterator[None]:
    """Within it the agent has other hyperparameters."""
    before = {name: getattr(agent, name) for name in settings}
    try:
        for name, value in settings.items():
            setattr(agent, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(agent, name, value)
