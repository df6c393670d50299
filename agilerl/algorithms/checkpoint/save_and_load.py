"""Save agents, and load checkpoints into agents that exist.

What lies on disk is the subject of :mod:`agilerl.llm.checkpoint.checkpoint_files`.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig

from agilerl.algorithms.checkpoint.agent_attributes import encode_arguments, encode_value
from agilerl.algorithms.core.lora_agent import LoRAAgent
from agilerl.checks import require, warn
from agilerl.distributed import ranks_of
from agilerl.llm.checkpoint import lora_merging
from agilerl.llm.checkpoint.base_weights import changed_tensors, overwrite_base, without_adapter
from agilerl.llm.checkpoint.checkpoint_files import (
    SavedAdapter,
    SavedCheckpoint,
    read_checkpoint,
    write_checkpoint,
)
from agilerl.llm.engine.local import LocalEngine
from agilerl.llm.policy import Policy

logger = logging.getLogger(__name__)


def save(agent: LoRAAgent, path: Path, *, lora_only: bool, save_optimizer: bool) -> None:
    """Write a checkpoint; all ranks together."""
    ranks, model = ranks_of(agent.accelerator), agent.policy.base.model
    state = agent.rng.get_state()
    history = agent.attributes(("index", *agent._history))
    attributes = {
        "algo": agent.algo,
        "arguments": encode_arguments(agent.saved_arguments()),
        "history": {name: encode_value(value, name) for name, value in history.items()},
        "rng_state": state,
        "rng_states": ranks.gather(state),
        "bad_steps": agent.skipped_steps.in_a_row,
        "base_name": agent.model_name or model.name_or_path or None,
        "base_dtype": encode_value(model.dtype, "base_dtype"),
        "base_fingerprint": agent.policy.base.fingerprint(),
    }
    write_checkpoint(
        path,
        attributes,
        agent.policy,
        agent.engine,
        ranks,
        lora_only=lora_only,
        save_optimizer=save_optimizer,
    )
    agent.skipped_steps.last_checkpoint = str(path)


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
    merged = load_saved(
        agent,
        saved,
        load_optimizer=load_optimizer,
        reference_from_actor=reference_from_actor,
        kept_roles=kept_roles,
        merge=merge,
        keep_lr=True,
    )
    if load_optimizer and (merged or saved.optimizer is None):
        reason = "its LoRA config was merged with another" if merged else "it holds none"
        warn(
            f"no optimizer state was loaded from {saved.path}: {reason}; the optimizer starts "
            "afresh"
        )


def load_saved(
    agent: LoRAAgent,
    saved: SavedCheckpoint,
    *,
    load_optimizer: bool,
    reference_from_actor: bool = False,
    kept_roles: Collection[str] = (),
    merge: bool = False,
    keep_lr: bool = False,
) -> bool:
    """Load weights, and optimizer if asked, of a checkpoint that was read.

    Returns:
        Whether LoRA configs were merged; then, or without a saved state, the optimizer is new.

    Raises:
        ValueError: If the checkpoint does not fit the agent, which is then as it was.
    """
    policy = agent.policy
    adapters = _adapters_by_role(agent, saved, reference_from_actor, kept_roles)
    changed = _changed_base(agent, saved)
    merged = _merged_configs(policy, adapters, merge)
    engine = None
    # All that may be refused is refused in here, before the first weight is written.
    with contextlib.ExitStack() as stack:
        if merged:
            stack.enter_context(lora_merging.fresh_adapters(policy, merged, agent.seed))
        fitted = {r: lora_merging.fit_adapter(policy, r, a) for r, a in adapters.items()}
        if load_optimizer and saved.optimizer is not None and not merged:
            engine = restored_engine(agent, saved.optimizer, keep_lr=keep_lr)

    overwrite_base(policy.model, changed)
    for role, tensors in fitted.items():
        lora_merging.write_adapter(policy, role, tensors)
    agent.lora_config = policy.lora_config
    if engine is not None:
        agent.engine.close()
        agent.engine = engine
    elif load_optimizer or merged:
        agent.reinit_optimizers()
    return bool(merged)


def _adapters_by_role(
    agent: LoRAAgent,
    saved: SavedCheckpoint,
    reference_from_actor: bool,
    kept_roles: Collection[str],
) -> dict[str, SavedAdapter]:
    """Which of the saved adapters each of the agent's roles gets."""
    loaded = saved.adapters.keys() - set(kept_roles)
    source = {role: role for role in agent.policy.roles if role in loaded}
    if "reference" in agent.policy.roles:
        if reference_from_actor or "reference" not in saved.adapters:
            source["reference"] = "actor"
    elif (reference_from_actor or "reference" in saved.adapters) and not ranks_of(
        agent.accelerator
    ).rank:
        logger.warning(
            "no reference was loaded from %s: with use_separate_reference_adapter=False it stays "
            "the base model",
            saved.path,
        )
    return {
        role: lora_merging.with_live_targets(agent.policy, role, saved.adapters[name])
        for role, name in source.items()
    }


def _changed_base(agent: LoRAAgent, saved: SavedCheckpoint) -> dict[str, torch.Tensor]:
    """The tensors of the base that the checkpoint has other values of; all ranks together."""
    base, attributes = agent.policy.base, saved.attributes
    if "actor_state_dict" in attributes:
        with base.whole():
            saved_base = without_adapter(attributes["actor_state_dict"])
            changed = changed_tensors(agent.policy.model, saved_base)
        require(
            not changed or base.partition is None,
            f"the checkpoint's base weights differ from the agent's ({sorted(changed)[:4]}), and "
            "with ZeRO stage 3 these cannot be overwritten; make the agent with load(path), which "
            "takes the base from the checkpoint",
        )
        return changed
    fingerprint = attributes.get("base_fingerprint")  # of a PEFT directory there is none
    another = fingerprint is not None and fingerprint != base.fingerprint()
    if another and not ranks_of(agent.accelerator).rank:
        logger.warning(
            "the adapters of %s were trained on other base weights (of %r) than this agent's",
            saved.path,
            attributes.get("base_name"),
        )
    return {}


def _merged_configs(
    policy: Policy, adapters: dict[str, SavedAdapter], merge: bool
) -> dict[str, LoraConfig]:
    """For roles whose saved adapter has another LoRA config: one that holds what both do."""
    merged: dict[str, LoraConfig] = {}
    for role, adapter in adapters.items():
        owner = "actor" if role == "reference" else role  # it may become a copy of the actor
        live = merged.get(owner, policy.lora_configs[owner])
        if not merge:
            lora_merging.check_same_config(live, adapter.config)
        elif lora_merging.differing_fields(live, adapter.config):
            merged[owner] = lora_merging.merge_configs(live, adapter.config)
    if "actor" in merged and "reference" in policy.roles:
        merged["reference"] = merged["actor"]
    return merged


def restored_engine(agent: LoRAAgent, state: Any, *, keep_lr: bool = False) -> LocalEngine:
    """A new engine for the agent with a saved optimizer and schedule.

    Raises:
        ValueError: If the state is damaged or that of other parameters.
    """
    remedy = "load without load_optimizer, or use another checkpoint"
    shapes = [parameter.shape for parameter in agent.engine.parameters]
    saved = state["optimizer"]
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    fits = all(
        values.shape == (torch.Size() if name == "step" else shapes[number])
        for number, moments in saved["state"].items()
        for name, values in moments.items()
        if 0 <= number < len(shapes)
    )
    require(
        fits and numbers == list(range(len(shapes))) and saved["state"].keys() <= {*numbers},
        "the checkpoint's optimizer state is that of another model: its moments have other shapes "
        f"than this agent's parameters; {remedy}",
    )
    engine = agent._build_engine()
    # Betas, weight decay and so on are the engine's own.
    taken = ("params", "lr", "initial_lr")
    groups = [
        {**live, **{name: group[name] for name in taken if name in group}}
        for live, group in zip(engine.optimizer.param_groups, saved["param_groups"], strict=False)
    ]
    state = {**state, "optimizer": {**saved, "param_groups": groups}}
    try:
        if engine.scheduler is not None and state["scheduler"] is not None:
            same = _same_form(state["scheduler"], engine.scheduler.state_dict())
            require(same, "its schedule is of another kind")
        engine.load_state_dict(state, keep_lr=keep_lr)
    except Exception as error:  # whatever torch runs into in content that is not its own
        engine.close()
        raise ValueError(
            f"the checkpoint's optimizer state is damaged, or that of another model ({error!r}); "
            f"{remedy}"
        ) from error
    return engine


def _same_form(saved: Any, live: Any) -> bool:
    """Whether two states are made of the same entries, of the same types."""
    if isinstance(live, dict):
        same = isinstance(saved, dict) and saved.keys() == live.keys()
        return same and all(_same_form(saved[name], live[name]) for name in live)
    if isinstance(live, list):
        same = isinstance(saved, list) and len(saved) == len(live)
        return same and all(map(_same_form, saved, live))
    if isinstance(live, int | float) and not isinstance(live, bool):
        return isinstance(saved, int | float) and math.isfinite(saved)
    return type(saved) is type(live)
