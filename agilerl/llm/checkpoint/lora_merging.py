"""Loading adapters into a policy whose LoRA config may differ: compare, merge, pad the rank."""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import re
from collections.abc import Iterator
from typing import Any

import torch
from peft import LoraConfig, PeftModel, set_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer

from agilerl.llm.checkpoint.adapter_files import LoadedAdapter, adapter_state_dict
from agilerl.llm.policy import Policy

logger = logging.getLogger(__name__)

# Fields that do not change what an adapter computes or holds.
_NO_EFFECT = {
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "task_type",
    "auto_mapping",
    "peft_version",
    "peft_type",
    "init_lora_weights",
    "runtime_config",
    "loftq_config",
    "lora_dropout",
}
_MERGED = ("r", "target_modules", "modules_to_save")


def differing_fields(live: LoraConfig, saved: LoraConfig) -> dict[str, tuple[Any, Any]]:
    """Fields in which two configs describe different adapters, as ``(live, saved)``."""
    mine, theirs = _comparable(live), _comparable(saved)
    return {
        n: (mine.get(n), theirs.get(n))
        for n in sorted(mine | theirs)
        if mine.get(n) != theirs.get(n)
    }


def with_live_targets(policy: Policy, adapter: LoadedAdapter) -> LoadedAdapter:
    """The adapter, its targets written as the policy's if they are the same modules.

    ``"all-linear"`` and a list of names may mean the same; the tensors tell.
    """
    live = adapter_state_dict(policy.model, policy.slot("actor"))
    modules = {re.sub(r"^base_model\.model\.|\.lora_[^.]*(\..*)?$", "", name) for name in live}
    if adapter.tensors.keys() != live.keys() or not _names(adapter.config.target_modules, modules):
        return adapter
    config = copy.deepcopy(adapter.config)
    config.target_modules = copy.copy(policy.lora_config.target_modules)
    return LoadedAdapter(config, adapter.tensors)


def _names(targets: Any, modules: set[str]) -> bool:
    """Whether targets, by PEFT's rules, name all of the modules, and none idly."""
    if not isinstance(targets, list | set | tuple):
        return targets == "all-linear"
    named = {t: {m for m in modules if f".{m}".endswith(f".{t}")} for t in targets}
    return all(named.values()) and set().union(*named.values()) == modules


def check_same_config(
    live: LoraConfig,
    saved: LoraConfig,
    whose: str = "checkpoint",
    remedy: str = "Create the agent with the checkpoint's lora_config, or load with "
    "merge_lora_configs=True",
) -> None:
    """Raise ValueError listing each field in which two configs differ."""
    differing = differing_fields(live, saved)
    if differing:
        listed = "; ".join(
            f"{n}: agent has {mine!r}, {whose} {theirs!r}"
            for n, (mine, theirs) in differing.items()
        )
        raise ValueError(f"LoRA configs differ ({listed}). {remedy}")


def merge_configs(live: LoraConfig, saved: LoraConfig) -> LoraConfig:
    """A config that can hold both: largest rank, union of targets.

    Of other fields that differ the live value wins, with a warning.

    Raises:
        ValueError: If targets are given as different patterns, or ranks per module.
    """
    for config in (live, saved):
        if config.rank_pattern or config.alpha_pattern:
            raise ValueError("LoRA configs with rank_pattern or alpha_pattern cannot be merged")
    merged = copy.deepcopy(live)
    merged.r = max(live.r, saved.r)
    merged.target_modules = _union(live.target_modules, saved.target_modules)
    merged.modules_to_save = (
        sorted(_union(live.modules_to_save, saved.modules_to_save) or ()) or None
    )
    for name, (mine, theirs) in differing_fields(live, saved).items():
        if name not in _MERGED:
            logger.warning(
                "LoRA configs differ in %s: the agent's %r is kept, not the checkpoint's %r",
                name,
                mine,
                theirs,
            )
    return merged


@contextlib.contextmanager
def rebuilt_adapters(policy: Policy, config: LoraConfig, seed: int) -> Iterator[None]:
    """Replace every adapter of a policy by one of ``config`` that computes the same function.

    The old ones are kept until the block ends; an error in it brings them back.
    """
    before, old_slots = policy.lora_config, dict(policy.slots)
    try:
        _add_rebuilt(policy, config, seed)
        yield
    except BaseException:
        discarded = [slot for slot in policy.slots.values() if slot not in old_slots.values()]
        policy.lora_config = before
        policy.slots.update(old_slots)
        for slot in discarded:
            policy.base.remove_slot(slot)
        _remove_half_made(policy.model)
        policy.set_role(policy.role)
        raise
    for slot in old_slots.values():
        policy.base.remove_slot(slot)
    policy.set_role(policy.role)


def load_adapter(
    policy: Policy, role: str, tensors: dict[str, torch.Tensor], config: LoraConfig
) -> None:
    """Load tensors of an adapter of ``config`` onto a role, padded to its rank and targets.

    Raises:
        ValueError: If the tensors do not fit into the role's adapter, which is then unchanged.
    """
    write_adapter(policy, role, fit_adapter(policy, role, tensors, config))


def fit_adapter(
    policy: Policy, role: str, tensors: dict[str, torch.Tensor], config: LoraConfig
) -> dict[str, torch.Tensor]:
    """Tensors of an adapter of ``config``, padded to the rank and targets of a role's adapter.

    The padding leaves the function unchanged: new rows of A keep their fresh values, new columns of
    B are zero, and B absorbs the change of scaling. Nothing is written.

    Raises:
        ValueError: If the tensors do not fit into the role's adapter.
    """
    live = adapter_state_dict(policy.model, policy.slot(role))
    unknown = sorted(tensors.keys() - live.keys())
    if unknown:
        raise ValueError(
            f"the checkpoint's {role} adapter has tensors that this agent's has not: {unknown[:4]}"
            "; it was trained on another model, or its files are damaged"
        )
    if differing_fields(policy.lora_config, config):
        rescale = _scaling(config) / _scaling(policy.lora_config)
        return {n: _place(n, fresh, tensors.get(n), rescale) for n, fresh in live.items()}
    bad = [n for n in live if n not in tensors or tensors[n].shape != live[n].shape]
    if bad:
        raise ValueError(
            f"the checkpoint's {role} adapter lacks tensors, or has them in another shape than "
            f"this agent's: {bad[:4]}; it was trained on another model, or its files are "
            "damaged"
        )
    return tensors


def write_adapter(policy: Policy, role: str, fitted: dict[str, torch.Tensor]) -> None:
    """Write what :func:`fit_adapter` returned onto a role."""
    set_peft_model_state_dict(policy.model, fitted, adapter_name=policy.slot(role))


def _add_rebuilt(policy: Policy, config: LoraConfig, seed: int) -> None:
    """Give every role a slot of ``config`` that computes what its present one does."""
    held = {role: adapter_state_dict(policy.model, slot) for role, slot in policy.slots.items()}
    before, policy.lora_config = policy.lora_config, config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for role in held:
            policy.slots[role] = policy.base.add_slot(role, config)
    for role, tensors in held.items():
        load_adapter(policy, role, tensors, before)


def _remove_half_made(model: PeftModel) -> None:
    """Delete adapters that PEFT refused halfway: their config is gone, layers may still have them.

    They would count as tensors of the base.
    """
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    found = {name for layer in layers for name in layer._all_available_adapter_names()}
    for name in found - model.peft_config.keys():
        for layer in layers:
            layer.delete_adapter(name)


def _place(
    name: str, fresh: torch.Tensor, saved: torch.Tensor | None, rescale: float
) -> torch.Tensor:
    """A saved tensor in the leading rank slice of a fresh one."""
    is_a = "lora_A" in name or "lora_embedding_A" in name
    is_b = "lora_B" in name or "lora_embedding_B" in name
    placed = fresh.clone()
    if is_b:
        placed.zero_()
    if saved is None:
        return placed
    fits = saved.dim() == fresh.dim() and all(
        s <= f for s, f in zip(saved.shape, fresh.shape, strict=True)
    )
    if not fits or not (is_a or is_b or saved.shape == fresh.shape):
        raise ValueError(
            f"{name} has shape {tuple(saved.shape)}, which does not fit into {tuple(fresh.shape)}"
        )
    placed[tuple(slice(0, n) for n in saved.shape)] = saved * (rescale if is_b else 1.0)
    return placed


def _scaling(config: LoraConfig) -> float:
    return config.lora_alpha / (math.sqrt(config.r) if config.use_rslora else config.r)


def _comparable(config: LoraConfig) -> dict[str, Any]:
    fields = {name: value for name, value in config.to_dict().items() if name not in _NO_EFFECT}
    return {
        name: sorted(v) if isinstance(v, set | list | tuple) else v or None
        for name, v in fields.items()
    }


def _union(first: Any, second: Any) -> Any:
    if first == second or second is None:
        return first
    if first is None:
        return second
    if isinstance(first, str) or isinstance(second, str):
        raise ValueError(
            f"target_modules {first!r} and {second!r} cannot be merged: one is a pattern"
        )
    return set(first) | set(second)
