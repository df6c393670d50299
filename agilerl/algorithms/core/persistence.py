"""Agents to checkpoints and back; the files themselves are :mod:`agilerl.llm.checkpoint`'s business."""

from __future__ import annotations

import json
import logging
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from peft import LoraConfig, PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from agilerl.algorithms.core.plain_values import decode_arguments, encode_arguments
from agilerl.llm import checkpoint, lora_merge
from agilerl.llm.adapters import copy_adapter
from agilerl.llm.policy import Policy

if TYPE_CHECKING:
    from accelerate import Accelerator

    from agilerl.algorithms.core.llm import LLMAlgorithm

    AgentT = TypeVar("AgentT", bound=LLMAlgorithm)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedAdapter:
    """An adapter taken off a PEFT model or read from disk."""

    config: LoraConfig
    tensors: dict[str, torch.Tensor]
    """By PEFT's names, without the adapter's."""


@dataclass(frozen=True)
class DetachedModel(LoadedAdapter):
    """A PEFT model taken apart."""

    model: PreTrainedModel


def save(agent: LLMAlgorithm, path: Path, *, lora_only: bool, save_optimizer: bool) -> None:
    """Write one cell of the checkpoint grid."""
    checkpoint.save_checkpoint(
        path,
        _attributes(agent),
        adapters=agent.policy.slots,
        model=agent.policy.model,
        lora_only=lora_only,
        optimizer=agent.engine.state_dict() if save_optimizer else None,
    )
    agent.health.last_checkpoint = str(path)


def load_into(
    agent: LLMAlgorithm,
    path: Path,
    *,
    load_optimizer: bool,
    reference_from_actor: bool,
    merge: bool,
) -> None:
    """Load a checkpoint's weights, and optimizer if asked, into a living agent."""
    saved, attributes = _read(path)
    rebuilt = _reconcile(agent, saved["actor"].config, merge)
    if "actor_state_dict" in attributes:
        _load_base(agent.policy, attributes["actor_state_dict"])
    roles = {"actor": saved["actor"]}
    if "reference" in agent.policy.slots:
        own = saved.get("reference")
        roles["reference"] = saved["actor"] if reference_from_actor or own is None else own
    for role, adapter in roles.items():
        lora_merge.load_adapter(agent.policy, role, adapter.tensors, adapter.config)

    if not load_optimizer:
        return
    state = attributes.get("optimizer")
    if state is None or rebuilt:
        reason = "its LoRA config was merged with another" if rebuilt else "it holds none"
        warnings.warn(
            f"no optimizer state was loaded from {path}: {reason}; it starts afresh", stacklevel=3
        )
        agent.reinit_optimizers()
    else:
        agent.engine.load_state_dict(state)


def rebuild(
    cls: type[AgentT],
    path: Path,
    device: str | torch.device,
    accelerator: Accelerator | None,
    actor_network: PreTrainedModel | None,
) -> AgentT:
    """Make an agent from a checkpoint alone, or from it and a base model."""
    attributes = checkpoint.load_attributes(path)
    if attributes["algo"] != cls.__name__:
        raise ValueError(
            f"{path} is a checkpoint of {attributes['algo']}, not {cls.__name__}: use {attributes['algo']}.load"
        )
    arguments = decode_arguments(attributes["arguments"])
    if actor_network is None:
        actor_network = _base_from(path, attributes)
    agent = cls(
        **arguments, actor_network=actor_network, device=str(device), accelerator=accelerator
    )
    has_optimizer = "optimizer" in attributes
    load_into(agent, path, load_optimizer=has_optimizer, reference_from_actor=False, merge=False)
    for name, value in attributes["history"].items():
        setattr(agent, name, value)
    agent.rng.set_state(attributes["rng_state"])
    return agent


def detach_adapter(model: PeftModel) -> DetachedModel:
    """Take the active adapter off a PEFT model, which becomes the plain base again."""
    slot = model.active_adapters[0]
    config = model.peft_config[slot]
    if not isinstance(config, LoraConfig):
        raise TypeError(
            f"actor_network carries a {type(config).__name__}; only LoRA adapters can be trained"
        )
    tensors = checkpoint.adapter_state_dict(model, slot)
    return DetachedModel(config, {name: t.clone() for name, t in tensors.items()}, model.unload())


def load_roles(
    policy: Policy, roles: dict[str, dict[str, torch.Tensor]], config: LoraConfig
) -> None:
    """Load tensors onto several roles of a policy whose LoRA config must agree with ``config``."""
    lora_merge.check_same_config(policy.lora_config, config)
    for role, tensors in roles.items():
        lora_merge.load_adapter(policy, role, tensors, config)


def copy_role(source: Policy, target: Policy, role: str) -> None:
    """Copy a role's weights from one policy to another on the same base."""
    copy_adapter(source.parameters(role), target.parameters(role))


def _attributes(agent: LLMAlgorithm) -> dict[str, Any]:
    """What every cell of the grid holds."""
    return {
        "algo": agent.algo,
        "arguments": encode_arguments(agent.inspect_attributes(agent, input_args_only=True)),
        "history": {name: getattr(agent, name) for name in ("index", *agent._history)},
        "rng_state": agent.rng.get_state(),
        "base_name": agent.model_name or agent.policy.base.model.name_or_path or None,
    }


def _read(path: Path) -> tuple[dict[str, LoadedAdapter], dict[str, Any]]:
    """The adapters by role, and the attributes, of a checkpoint or of a plain PEFT directory (the actor)."""
    if (path / checkpoint.ADAPTER_FILE).is_file():
        return {"actor": LoadedAdapter(*checkpoint.load_adapter(path))}, {}
    attributes = checkpoint.load_attributes(path)
    if attributes["lora_only"]:
        folder = checkpoint.complete_directory(path)
        return {
            r: LoadedAdapter(*checkpoint.load_adapter(folder / r)) for r in attributes["roles"]
        }, attributes
    config = decode_arguments(attributes["arguments"])["lora_config"]
    full = attributes["actor_state_dict"]
    states = {"actor": {n: t for n, t in full.items() if n not in _base_part(full)}}
    states |= attributes["adapter_state_dicts"]
    return {role: LoadedAdapter(config, tensors) for role, tensors in states.items()}, attributes


def _reconcile(agent: LLMAlgorithm, saved: LoraConfig, merge: bool) -> bool:
    """Make the agent's LoRA config able to hold ``saved``. Returns whether its adapters had to be rebuilt."""
    if not merge:
        lora_merge.check_same_config(agent.policy.lora_config, saved)
        return False
    merged = lora_merge.merge_configs(agent.policy.lora_config, saved)
    if not lora_merge.differing_fields(agent.policy.lora_config, merged):
        return False
    lora_merge.rebuild_adapters(agent.policy, merged, agent.seed)
    agent.lora_config = merged
    agent.reinit_optimizers()
    return True


@torch.no_grad()
def _load_base(policy: Policy, state: dict[str, torch.Tensor]) -> None:
    """Write saved base weights into the shared base, where they differ."""
    saved = _base_part(state)
    live = checkpoint.base_tensors(policy.model)
    if saved.keys() != live.keys():
        raise ValueError(
            f"the checkpoint's base model is another one: they differ in {sorted(saved.keys() ^ live.keys())[:4]}"
        )
    for name, tensor in live.items():
        if tensor.shape != saved[name].shape:
            raise ValueError(
                f"the checkpoint's base model is another one: {name} is {tuple(saved[name].shape)}, not "
                f"{tuple(tensor.shape)}"
            )
    changed = [n for n, t in live.items() if not torch.equal(t.cpu(), saved[n].to(t.dtype))]
    if changed:
        logger.warning(
            "%d base tensors are overwritten from the checkpoint, for all agents on this base",
            len(changed),
        )
    for name in changed:
        live[name].copy_(saved[name])


def _base_part(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What of a full actor is not adapter: PEFT's names all start with ``base_model.``."""
    return {name: tensor for name, tensor in state.items() if not name.startswith("base_model.")}


def _base_from(path: Path, attributes: dict[str, Any]) -> PreTrainedModel | None:
    """The base model, from the full actor if the checkpoint holds it, else None if its name can be loaded by the agent."""
    if "actor_state_dict" in attributes:
        content = json.loads(attributes["model_config"])
        config = AutoConfig.for_model(content.pop("model_type"), **content)
        state = attributes["actor_state_dict"]
        dtype = next(t.dtype for t in state.values() if t.is_floating_point())
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        model.load_state_dict(_base_part(state))
        return model
    name = attributes["base_name"]
    try:
        if name is None:
            raise OSError("it recorded no model name")
        model_config = decode_arguments(attributes["arguments"])["model_config"]
        return AutoModelForCausalLM.from_pretrained(name, **(model_config or {}))
    except OSError as error:
        raise ValueError(
            f"{path} holds adapters only, and their base model ({name!r}) cannot be loaded ({error}); pass it as "
            "actor_network"
        ) from error
