"""Loading adapters into a policy whose LoRA config may differ: compare, merge, pad the rank."""

from __future__ import annotations

import copy
import logging
import math
import re
from typing import Any

import torch
from peft import LoraConfig, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.utils.other import get_pattern_key

from agilerl.checks import require
from agilerl.llm.adapters import adapter_state_dict
from agilerl.llm.checkpoint.checkpoint_files import SavedAdapter
from agilerl.llm.checkpoint.schema import ORIGIN_FIELDS
from agilerl.llm.policy import Policy

logger = logging.getLogger(__name__)

_MAGNITUDE = ".lora_magnitude_vector"

# Fields that do not change what an adapter computes or holds.
_NO_EFFECT = ORIGIN_FIELDS | {
    "inference_mode", "init_lora_weights", "lora_dropout", "peft_type", "task_type",
}  # fmt: skip
# Padding cannot make up for a difference in these.
_NOT_MERGED = (
    "rank_pattern", "alpha_pattern", "target_parameters", "trainable_token_indices",
    "alora_invocation_tokens",
)  # fmt: skip


def differing_fields(live: LoraConfig, saved: LoraConfig) -> dict[str, tuple[Any, Any]]:
    """Fields in which two configs describe different adapters, as ``(live, saved)``."""

    def comparable(value: Any) -> Any:
        return sorted(value) if isinstance(value, set | list | tuple) else value or None

    own, other = live.to_dict(), saved.to_dict()
    pairs = {
        name: (comparable(own.get(name)), comparable(other.get(name)))
        for name in sorted((own | other).keys() - _NO_EFFECT)
    }
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def with_live_targets(policy: Policy, role: str, adapter: SavedAdapter) -> SavedAdapter:
    """The adapter, its targets written as those of a role if they are the same modules.

    ``"all-linear"`` and a list of names may mean the same; the tensors tell.
    """
    if adapter.tensors.keys() != adapter_state_dict(policy.model, policy.slot(role)).keys():
        return adapter
    config = copy.deepcopy(adapter.config)
    config.target_modules = copy.copy(policy.lora_configs[role].target_modules)
    return SavedAdapter(config, adapter.tensors)


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
    own, other = live.target_modules, saved.target_modules
    pattern = isinstance(own, str) or isinstance(other, str)
    require(
        not (own and other and own != other and pattern),
        f"target_modules {own!r} and {other!r} cannot be merged: one is a pattern",
    )
    merged.target_modules = own or other if pattern else {*(own or ()), *(other or ())} or own
    to_save = {*(live.modules_to_save or ()), *(saved.modules_to_save or ())}
    merged.modules_to_save = sorted(to_save) or None
    merged.use_dora = live.use_dora or saved.use_dora
    for name, (own, other) in differing.items():
        if name not in ("r", "target_modules", "modules_to_save", "use_dora"):
            logger.warning(
                "LoRA configs differ in %s: the agent's %r is kept, not the checkpoint's %r",
                name,
                own,
                other,
            )
    return merged


def fit_adapter(policy: Policy, role: str, saved: SavedAdapter) -> dict[str, torch.Tensor]:
    """Tensors of a saved adapter, padded to rank and targets of a role's; writes nothing.

    The function computed stays the same: new rows of A keep the values that they have, new columns
    of B are zero, and B absorbs the change of scaling. Magnitudes of DoRA are there if saved.

    Raises:
        ValueError: If the tensors do not fit into the role's adapter.
    """
    live, config = adapter_state_dict(policy.model, policy.slot(role)), policy.lora_configs[role]
    same = not differing_fields(config, saved.config)
    padded = {
        name: _padded(name, fresh, saved, config)
        for name, fresh in live.items()
        if name in saved.tensors or not (same or name.endswith(_MAGNITUDE))
    }
    problems = {
        "has tensors that this agent's has not": sorted(saved.tensors.keys() - live.keys()),
        "lacks tensors": sorted(live.keys() - saved.tensors.keys()) if same else [],
        "has tensors in another shape": [n for n, tensor in padded.items() if tensor is None],
    }
    found = "; ".join(f"{what}: {names[:4]}" for what, names in problems.items() if names)
    require(
        not found,
        f"the checkpoint's {role} adapter {found}; it was trained on another model, or its files "
        "are damaged",
    )
    return {name: tensor for name, tensor in padded.items() if tensor is not None}


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


def _padded(
    name: str, fresh: torch.Tensor, saved: SavedAdapter, config: LoraConfig
) -> torch.Tensor | None:
    """A saved tensor in the leading rank slice of a fresh one of ``config``; None: no fit."""
    is_a, is_b = (f"lora_{f}" in name or f"lora_embedding_{f}" in name for f in "AB")
    padded = torch.zeros_like(fresh) if is_b else fresh.clone()
    if name not in saved.tensors:
        return padded
    tensor, rank_axis = saved.tensors[name], 0 if is_a else 1 if is_b else None
    (rank, scaling), (saved_rank, saved_scaling) = (
        _rank_and_scaling(each, name) for each in (config, saved.config)
    )
    shape = [n * saved_rank // rank if i == rank_axis else n for i, n in enumerate(fresh.shape)]
    if list(tensor.shape) != shape:
        return None
    if is_b:
        tensor = tensor * (saved_scaling / scaling)
    padded[tuple(map(slice, shape))] = tensor
    return padded


def _rank_and_scaling(config: LoraConfig, tensor_name: str) -> tuple[int, float]:
    """A layer's rank, and what PEFT multiplies the product of its factors with."""
    module = re.sub(r"^base_model\.model\.|\.lora_[^.]*(\..*)?$", "", tensor_name)
    rank, alpha = (
        pattern.get(get_pattern_key(pattern.keys(), module), default)
        for pattern, default in (
            (config.rank_pattern or {}, config.r),
            (config.alpha_pattern or {}, config.lora_alpha),
        )
    )
    return rank, alpha / (math.sqrt(rank) if config.use_rslora else rank)
