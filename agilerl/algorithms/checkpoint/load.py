"""Loads checkpoints into agents that exist: weights on demand, or all of an agent to resume it.

What lies on disk is the subject of :mod:`agilerl.llm.checkpoint.checkpoint_files`.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig

from agilerl.algorithms.checkpoint.save import decode_arguments, saved_state
from agilerl.algorithms.core.lora_agent import LoRAAgent
from agilerl.checks import require, warn
from agilerl.distributed import ranks_of
from agilerl.llm.checkpoint import lora_merging
from agilerl.llm.checkpoint.checkpoint_files import SavedAdapter, SavedCheckpoint, read_checkpoint
from agilerl.llm.engine.accelerator_config import rank_batch_size
from agilerl.llm.engine.local import LocalEngine
from agilerl.llm.engine.saved_state import restored
from agilerl.llm.shared_base import base_tensors
from agilerl.llm.step_results import SkippedSteps

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SavedAgent:
    """What an agent gets from a checkpoint that was read and fits it."""

    agent: LoRAAgent
    base: dict[str, torch.Tensor]
    """Base weights that differ from the agent's."""
    adapters: dict[str, dict[str, torch.Tensor]]
    """Tensors by role."""
    engine: LocalEngine | None
    """A new engine with the saved optimizer and schedule; None: the agent's own stays."""
    attributes: dict[str, Any] = field(default_factory=dict)

    def restore(self) -> None:
        """Write all of it into the agent."""
        agent, policy = self.agent, self.agent.policy
        live = base_tensors(policy.model)
        if self.base:
            message = (
                "%d base tensors are overwritten from the checkpoint, for all agents on this base"
            )
            logger.warning(message, len(self.base))
        with torch.no_grad():
            for name, tensor in self.base.items():
                live[name].copy_(tensor)
        for role, tensors in self.adapters.items():
            lora_merging.write_adapter(policy, role, tensors)
        if self.engine is not None:
            agent.engine.close()
            agent.engine = self.engine
        agent.lora_config = policy.lora_config
        agent.set_attributes(self.attributes)


def load_into(
    agent: LoRAAgent,
    path: Path,
    *,
    load_optimizer: bool,
    reference_from_actor: bool,
    kept_roles: Collection[str],
    merge: bool,
) -> None:
    """Load a checkpoint's weights, and optimizer if asked, into an agent that exists.

    A checkpoint that is refused leaves the agent as it was.

    Raises:
        FileNotFoundError: If there is no checkpoint, or it lacks a file.
        ValueError: If it is damaged, or does not fit the agent.
    """
    saved = read_checkpoint(path, ranks_of(agent.accelerator), load_optimizer=load_optimizer)
    adapters = adapters_by_role(agent, saved, reference_from_actor, kept_roles)
    merged = _merged_configs(agent, adapters) if merge else {}
    fit(agent, saved, adapters, merged, keep_lr=True).restore()
    if merged or (load_optimizer and saved.optimizer is None):
        agent.reinit_optimizers()
        why = "its LoRA config was merged with another" if merged else "it holds none"
        if load_optimizer:
            warn(f"no optimizer state was loaded from {path}: {why}; the optimizer starts afresh")


def read_saved_agent(agent: LoRAAgent, path: Path) -> SavedAgent:
    """Read a checkpoint that a run is resumed from, for an agent built as the saved one.

    :func:`load_into` leaves an agent its hyperparameters; here everything but the base model comes
    from the checkpoint. Nothing is changed until the result is restored.

    Raises:
        FileNotFoundError: If there is no checkpoint, or it lacks a file.
        DamagedCheckpointError: If a file is damaged.
        ValueError: If it is a checkpoint of an agent of another kind, index or adapter.
    """
    ranks = ranks_of(agent.accelerator)
    saved = read_checkpoint(path, ranks, load_optimizer=True)
    require(
        saved.optimizer is not None,
        f"{path} holds no optimizer state; save it with save_optimizer=True",
    )
    _check_identity(agent, saved)
    attributes = _hyperparameters(agent, saved)
    as_saved = copy.copy(agent)  # its engine is built with the saved learning rates
    as_saved.set_attributes(attributes)
    attributes |= saved_state(saved, agent._history, ranks)
    attributes["skipped_steps"] = SkippedSteps(saved.attributes["bad_steps"], str(path))
    return replace(fit(as_saved, saved, saved.adapters), agent=agent, attributes=attributes)


def _check_identity(agent: LoRAAgent, saved: SavedCheckpoint) -> None:
    attributes, policy, base = saved.attributes, agent.policy, agent.policy.base.fingerprint()
    pairs: dict[str, tuple[Any, Any]] = {
        "algorithm is": (attributes["algo"], agent.algo),
        "index is": (attributes["history"]["index"], agent.index),
        "adapters are": (sorted(saved.adapters), sorted(policy.slots)),
        "base weights are": (attributes["base_fingerprint"], base),
    }
    for what, (theirs, own) in pairs.items():
        require(
            theirs == own,
            f"{saved.path} is a checkpoint of another agent: its {what} {theirs!r}, this agent's "
            f"{own!r}; build the agent as it was built for the checkpoint",
        )
    remedy = "Build the agents with the checkpoint's lora_config"
    for role, adapter in saved.adapters.items():
        lora_merging.check_same_config(policy.lora_configs[role], adapter.config, remedy=remedy)


def _hyperparameters(agent: LoRAAgent, saved: SavedCheckpoint) -> dict[str, Any]:
    """Those that were saved; says which of the agent's own have no effect."""
    table = agent.argument_table()
    theirs = {n: v for n, v in decode_arguments(saved, table).items() if table[n].resumed}
    own, mutated = agent.attributes(theirs), agent.hp_config or ()
    differing = ", ".join(
        f"{name}={value!r} (not {own[name]!r})"
        for name, value in sorted(theirs.items())
        if value != own[name] and name not in mutated
    )
    if differing:
        logger.warning("agent %d takes from its checkpoint: %s", agent.index, differing)
    try:
        rank_batch_size(theirs.get("batch_size", agent.batch_size), agent.accelerator)
    except ValueError as error:
        raise ValueError(
            f"{saved.path} cannot be resumed here: its {error}. Hyperparameters are the "
            "checkpoint's, so use another number of processes"
        ) from error
    return theirs


def fit(
    agent: LoRAAgent,
    saved: SavedCheckpoint,
    adapters: dict[str, SavedAdapter],
    merged: dict[str, LoraConfig] | None = None,
    *,
    keep_lr: bool = False,
) -> SavedAgent:
    """Fit a checkpoint to an agent; whatever may be refused is refused here.

    Args:
        agent: Left as it is, but for new adapters where configs were merged.
        saved: The checkpoint, with its optimizer if that is to be restored.
        adapters: Those of it that the agent gets, by role.
        merged: LoRA configs of the roles that get a new adapter; the optimizer is not restored.
        keep_lr: Keep the agent's learning rates; False: take the checkpoint's.

    Raises:
        ValueError: If the checkpoint does not fit the agent, which is then as it was.
    """
    policy, engine = agent.policy, None
    base = _changed_base(agent, saved)
    for role, adapter in adapters.items() if not merged else ():
        lora_merging.check_same_config(policy.lora_configs[role], adapter.config)
    with policy.replace_adapters(merged or {}, agent.seed):
        fitted = {r: lora_merging.fit_adapter(policy, r, a) for r, a in adapters.items()}
        if saved.optimizer is not None and not merged:
            engine = restored(agent._build_engine(), saved.optimizer, keep_lr)
    return SavedAgent(agent, base, fitted, engine)


def adapters_by_role(
    agent: LoRAAgent,
    saved: SavedCheckpoint,
    reference_from_actor: bool = False,
    kept_roles: Collection[str] = (),
) -> dict[str, SavedAdapter]:
    """Which of the saved adapters each of the agent's roles gets."""
    policy, has_reference = agent.policy, "reference" in saved.adapters
    source = {r: r for r in policy.roles if r in saved.adapters and r not in kept_roles}
    if "reference" in policy.roles and (reference_from_actor or not has_reference):
        source["reference"] = "actor"
    elif "reference" not in policy.roles and (reference_from_actor or has_reference):
        without = "with use_separate_reference_adapter=False it stays the base model"
        _warn(agent, "no reference was loaded from %s: %s", saved.path, without)
    return {
        role: lora_merging.with_live_targets(policy, role, saved.adapters[name])
        for role, name in source.items()
    }


def _merged_configs(agent: LoRAAgent, adapters: dict[str, SavedAdapter]) -> dict[str, LoraConfig]:
    """For roles whose saved adapter has another LoRA config: one that holds what both do."""
    merged: dict[str, LoraConfig] = {}
    for role, adapter in adapters.items():
        owner = "actor" if role == "reference" else role  # it may become a copy of the actor
        live = merged.get(owner, agent.policy.lora_configs[owner])
        if lora_merging.differing_fields(live, adapter.config):
            merged[owner] = lora_merging.merge_configs(live, adapter.config)
    if "actor" in merged and "reference" in agent.policy.roles:
        merged["reference"] = merged["actor"]
    return merged


def _changed_base(agent: LoRAAgent, saved: SavedCheckpoint) -> dict[str, torch.Tensor]:
    """The tensors of the base that the checkpoint has other values of; all ranks together."""
    base, attributes = agent.policy.base, saved.attributes
    if saved.base is None:
        # A PEFT directory has no fingerprint.
        if attributes and attributes["base_fingerprint"] != base.fingerprint():
            message = "the adapters of %s were trained on other base weights (of %r) than are here"
            _warn(agent, message, saved.path, attributes["base_name"])
        return {}
    with base.whole():
        live = base_tensors(agent.policy.model)
        check_same_shapes(live, saved.base)
        pairs = {name: (tensor.cpu(), saved.base[name]) for name, tensor in live.items()}
        changed = {n: b for n, (a, b) in pairs.items() if not torch.equal(a, b.to(a.dtype))}
    require(
        not changed or base.partition is None,
        f"the checkpoint's base weights differ from the agent's ({sorted(changed)[:4]}), and with "
        "ZeRO stage 3 these cannot be overwritten; make the agent with load(path), which takes "
        "the base from the checkpoint",
    )
    return changed


def check_same_shapes(live: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError if two bases differ in names or shapes of tensors."""
    shapes = [{n: tuple(t.shape) for n, t in tensors.items()} for tensors in (saved, live)]
    theirs, own = (sorted(a.items() - b.items())[:4] for a, b in (shapes, shapes[::-1]))
    require(
        shapes[0] == shapes[1],
        "the checkpoint's base model is another one than the agent's: of tensors and shapes, it "
        f"has {theirs} where the agent's has {own}",
    )


def _warn(agent: LoRAAgent, message: str, *args: Any) -> None:
    if ranks_of(agent.accelerator).rank == 0:
        logger.warning(message, *args)
