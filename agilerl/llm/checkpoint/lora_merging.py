"""Loading adapters into a policy whose LoRA config may differ: compare, merge, pad the rank."""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from peft import LoraConfig, PeftModel, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import get_pattern_key

from agilerl.checks import require
from agilerl.llm.checkpoint.adapter_files import SavedAdapter, adapter_state_dict
from agilerl.llm.policy import Policy

logger = logging.getLogger(__name__)

_MAGNITUDE = ".lora_magnitude_vector"

# Fields that do not change what an adapter computes or holds.
_NO_EFFECT = {
    "auto_mapping", "base_model_name_or_path", "inference_mode", "init_lora_weights",
    "loftq_config", "lora_dropout", "peft_type", "peft_version", "revision", "runtime_config",
    "task_type",
}  # fmt: skip
_MERGED = ("r", "target_modules", "modules_to_save", "use_dora")
# Padding cannot make up for a difference in these.
_NOT_MERGED = (
    "rank_pattern", "alpha_pattern", "target_parameters", "trainable_token_indices",
    "alora_invocation_tokens",
)  # fmt: skip


def differing_fields(live: LoraConfig, saved: LoraConfig) -> dict[str, tuple[Any, Any]]:
    """Fields in which two configs describe different adapters, as ``(live, saved)``."""
    own, other = _comparable(live), _comparable(saved)
    return {
        n: (own.get(n), other.get(n)) for n in sorted(own | other) if own.get(n) != other.get(n)
    }


def with_live_targets(policy: Policy, role: str, adapter: SavedAdapter) -> SavedAdapter:
    """The adapter, its targets written as those of a role if they are the same modules.

    ``"all-linear"`` and a list of names may mean the same; the tensors tell.
    """
    live = adapter_state_dict(policy.model, policy.slot(role))
    modules = {_module(name) for name in live}
    if adapter.tensors.keys() != live.keys() or not _names(adapter.config.target_modules, modules):
        return adapter
    config = copy.deepcopy(adapter.config)
    config.target_modules = copy.copy(policy.lora_configs[role].target_modules)
    return SavedAdapter(config, adapter.tensors)


def _names(targets: Any, modules: set[str]) -> bool:
    """Whether targets, by PEFT's rules, name all of the modules, and each at least one."""
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
    differing = differing_fields(live, saved).items()
    listed = "; ".join(
        f"{n}: agent has {own!r}, {whose} {other!r}" for n, (own, other) in differing
    )
    require(not differing, f"LoRA configs differ ({listed}). {remedy}")


def merge_configs(live: LoraConfig, saved: LoraConfig) -> LoraConfig:
    """A config that can hold both: largest rank, union of targets, DoRA if one of them is DoRA.

    Of other fields that differ the live value wins, with a warning.

    Raises:
        ValueError: If no adapter of the live kind computes what the saved one does.
    """
    differing = differing_fields(live, saved)
    refused = [name for name in _NOT_MERGED if name in differing]
    if live.target_parameters and "r" in differing:  # experts are stacked along the rank
        refused += ["r (with target_parameters)"]
    require(not refused, f"LoRA configs that differ in {', '.join(refused)} cannot be merged")
    merged = copy.deepcopy(live)
    merged.r = max(live.r, saved.r)
    merged.target_modules = _union(live.target_modules, saved.target_modules)
    merged.modules_to_save = (
        sorted(_union(live.modules_to_save, saved.modules_to_save) or ()) or None
    )
    merged.use_dora = live.use_dora or saved.use_dora
    for name, (own, other) in differing.items():
        if name not in _MERGED:
            logger.warning(
                "LoRA configs differ in %s: the agent's %r is kept, not the checkpoint's %r",
                name,
                own,
                other,
            )
    return merged


@contextlib.contextmanager
def fresh_adapters(policy: Policy, configs: Mapping[str, LoraConfig], seed: int) -> Iterator[None]:
    """Replace the adapters of some roles by new ones of other configs.

    The old ones are kept until the block ends; an error in it brings them back.
    """
    old_configs, old_slots = policy.lora_configs, dict(policy.slots)
    try:
        policy.lora_configs = {**old_configs, **configs}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for role, config in configs.items():
                policy.slots[role] = policy.base.add_slot(role, config)
        yield
    except BaseException:
        new_slots = [slot for role, slot in policy.slots.items() if slot != old_slots[role]]
        policy.lora_configs = old_configs
        policy.slots.update(old_slots)
        for slot in new_slots:
            policy.base.remove_slot(slot)
        _remove_half_made(policy.model)
        policy.set_role(policy.role)
        raise
    for role in configs:
        policy.base.remove_slot(old_slots[role])
    policy.set_role(policy.role)


def fit_adapter(policy: Policy, role: str, saved: SavedAdapter) -> dict[str, torch.Tensor]:
    """Tensors of a saved adapter, padded to rank and targets of a role's; writes nothing.

    The function computed stays the same: new rows of A keep the values that they have, new columns
    of B are zero, and B absorbs the change of scaling. Magnitudes of DoRA are there if saved.

    Raises:
        ValueError: If the tensors do not fit into the role's adapter.
    """
    live = adapter_state_dict(policy.model, policy.slot(role))
    unknown = sorted(saved.tensors.keys() - live.keys())
    require(
        not unknown,
        f"the checkpoint's {role} adapter has tensors that this agent's has not: {unknown[:4]}; it "
        "was trained on another model, or its files are damaged",
    )
    if differing_fields(policy.lora_configs[role], saved.config):
        return {
            name: _padded(name, fresh, saved, policy.lora_configs[role])
            for name, fresh in live.items()
            if name in saved.tensors or not name.endswith(_MAGNITUDE)
        }
    tensors = saved.tensors
    bad = [n for n in live if n not in tensors or tensors[n].shape != live[n].shape]
    require(
        not bad,
        f"the checkpoint's {role} adapter lacks tensors, or has them in another shape than this "
        f"agent's: {bad[:4]}; it was trained on another model, or its files are damaged",
    )
    return tensors


@torch.no_grad()
def write_adapter(policy: Policy, role: str, fitted: dict[str, torch.Tensor]) -> None:
    """Write what :func:`fit_adapter` returned onto a role.

    DoRA computes ``m · (W + ΔW) / ‖W + ΔW‖``, with norms of rows; where no magnitude m was saved it
    becomes ``‖W + ΔW‖``, and the layer computes what LoRA does.
    """
    slot = policy.slot(role)
    set_peft_model_state_dict(policy.model, fitted, adapter_name=slot)
    for path, layer in policy.model.named_modules():
        if not isinstance(layer, LoraLayer) or slot not in layer.lora_magnitude_vector:
            continue
        if path + _MAGNITUDE not in fitted:
            magnitude = layer.lora_magnitude_vector[slot]
            # PEFT's initialisation is this norm, in a new module.
            layer.lora_variant[slot].init(layer, adapter_name=slot)
            magnitude.weight.copy_(layer.lora_magnitude_vector[slot].weight)
            layer.lora_magnitude_vector[slot] = magnitude


def _remove_half_made(model: PeftModel) -> None:
    """Delete what layers still have of adapters that PEFT refused halfway."""
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    found = {name for layer in layers for name in layer._all_available_adapter_names()}
    for name in found - model.peft_config.keys():
        for layer in layers:
            layer.delete_adapter(name)


def _padded(
    name: str, fresh: torch.Tensor, saved: SavedAdapter, config: LoraConfig
) -> torch.Tensor:
    """A saved tensor in the leading rank slice of a fresh one of ``config``."""
    tensor = saved.tensors.get(name)
    is_a, is_b = (f"lora_{f}" in name or f"lora_embedding_{f}" in name for f in "AB")
    padded = torch.zeros_like(fresh) if is_b else fresh.clone()
    if tensor is None:
        return padded
    rank_axis = 0 if is_a else 1 if is_b else None
    fits = tensor.dim() == fresh.dim() and all(
        s == f or (axis == rank_axis and s < f)
        for axis, (s, f) in enumerate(zip(tensor.shape, fresh.shape, strict=True))
    )
    require(
        fits,
        f"{name} has shape {tuple(tensor.shape)}, which does not fit into {tuple(fresh.shape)}",
    )
    if is_b:
        tensor = tensor * (_scaling(saved.config, name) / _scaling(config, name))
    padded[tuple(slice(0, n) for n in tensor.shape)] = tensor
    return padded


def _scaling(config: LoraConfig, tensor_name: str) -> float:
    """What PEFT multiplies the product of a layer's factors with."""
    module = _module(tensor_name)
    rank, alpha = (
        pattern.get(get_pattern_key(pattern.keys(), module), default)
        for pattern, default in (
            (config.rank_pattern or {}, config.r),
            (config.alpha_pattern or {}, config.lora_alpha),
        )
    )
    return float(alpha / (math.sqrt(rank) if config.use_rslora else rank))


def _module(tensor_name: str) -> str:
    """Path of the module that an adapter's tensor belongs to."""
    return re.sub(r"^base_model\.model\.|\.lora_[^.]*(\..*)?$", "", tensor_name)


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
    require(
        not isinstance(first, str) and not isinstance(second, str),
        f"target_modules {first!r} and {second!r} cannot be merged: one is a pattern",
    )
    return set(first) | set(second)
