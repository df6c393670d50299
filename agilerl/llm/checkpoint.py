"""Checkpoints on disk: what each cell of the grid holds, written atomically, loaded without code.

=========  ==============  ====================================================================
lora_only  save_optimizer  content
=========  ==============  ====================================================================
True       True            ``<role>/`` PEFT directories; ``attributes.pt`` with optimizer state
True       False           ``<role>/`` PEFT directories; ``attributes.pt``
False      True            ``attributes.pt`` with the full actor and optimizer state
False      False           ``attributes.pt`` with the full actor
=========  ==============  ====================================================================

``attributes.pt`` always holds the agent's attributes, as numbers, strings, lists and tensors only.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig

from agilerl.llm.atomic_directory import atomic_directory, complete_directory

ATTRIBUTES_FILE = "attributes.pt"
ADAPTER_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
FORMAT = 1
ROLES = ("actor", "reference", "critic")
REQUIRED: Mapping[str, type] = {
    "algo": str,
    "arguments": dict,
    "history": dict,
    "rng_state": torch.Tensor,
    "lora_only": bool,
    "roles": list,
}
REQUIRED_IF_FULL: Mapping[str, type] = {
    "actor_state_dict": dict,
    "adapter_state_dicts": dict,
    "model_config": str,
    "generation_config": str,
}


def save_checkpoint(
    path: Path,
    attributes: dict[str, Any],
    *,
    adapters: dict[str, str],
    model: PeftModel,
    lora_only: bool,
    optimizer: dict[str, Any] | None,
) -> None:
    """Write one cell of the grid.

    Args:
        path: Directory to write; an existing checkpoint there is replaced.
        attributes: What is always saved.
        adapters: PEFT slot by role.
        model: The PEFT model.
        lora_only: Adapters as PEFT directories, or the full actor inside ``attributes.pt``.
        optimizer: The engine's state, or None to leave it out.
    """
    content = {"format": FORMAT, **attributes, "lora_only": lora_only, "roles": list(adapters)}
    if optimizer is not None:
        content["optimizer"] = optimizer
    if not lora_only:
        content["actor_state_dict"] = full_state_dict(model, adapters["actor"])
        content["adapter_state_dicts"] = {
            role: adapter_state_dict(model, slot)
            for role, slot in adapters.items()
            if role != "actor"
        }
        base = model.get_base_model()
        generation = base.generation_config or GenerationConfig()
        content["model_config"] = base.config.to_json_string(use_diff=False)
        # It decides which tokens end a completion, and need not be what the config implies.
        content["generation_config"] = generation.to_json_string(use_diff=False)
    with atomic_directory(path, ATTRIBUTES_FILE) as folder:
        if lora_only:
            for role, slot in adapters.items():
                save_adapter(model, slot, folder / role)
        torch.save(content, folder / ATTRIBUTES_FILE)


def load_attributes(path: Path) -> dict[str, Any]:
    """The content of ``attributes.pt``; never runs code from the file.

    Raises:
        FileNotFoundError: If there is no checkpoint.
        ValueError: If the file is truncated, tampered with, or of an unknown format.
    """
    file = complete_directory(path, ATTRIBUTES_FILE) / ATTRIBUTES_FILE
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # not quoted: torch's message advises to load without this safety
        raise ValueError(
            f"{file} cannot be loaded safely: it is truncated, damaged, or holds pickled code; use "
            "another checkpoint"
        ) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise ValueError(
            f"{file} has format {found!r}, but this version reads format {FORMAT}; use another "
            "checkpoint"
        )
    needed = REQUIRED if content.get("lora_only") else {**REQUIRED, **REQUIRED_IF_FULL}
    for name, kind in needed.items():
        if not isinstance(content.get(name), kind):
            raise ValueError(
                f"{file} is damaged: its {name!r} is {type(content.get(name)).__name__}; use "
                "another checkpoint"
            )
    if "actor" not in content["roles"] or not set(content["roles"]) <= set(ROLES):
        raise ValueError(
            f"{file} is damaged: its roles are {content['roles']!r}, they must be 'actor' and "
            f"others of {ROLES}; use another checkpoint"
        )
    return content


def save_adapter(model: PeftModel, slot: str, folder: Path) -> None:
    """Write one adapter as a plain PEFT directory."""
    folder.mkdir(parents=True)
    save_file(adapter_state_dict(model, slot), folder / ADAPTER_FILE, metadata={"format": "pt"})
    model.peft_config[slot].save_pretrained(folder, inference_mode=True)


def load_adapter(folder: Path) -> tuple[LoraConfig, dict[str, torch.Tensor]]:
    """Config and tensors of a PEFT directory, whoever wrote it.

    Raises:
        FileNotFoundError: If it holds no adapter.
        ValueError: If one of its files is damaged, or the adapter is not LoRA.
    """
    for name in (ADAPTER_FILE, CONFIG_FILE):
        if not (folder / name).is_file():
            raise FileNotFoundError(
                f"{folder} holds no {name}; pass a directory written by save_checkpoint or by "
                "PEFT's save_pretrained (with safetensors)"
            )
    try:
        tensors = load_file(folder / ADAPTER_FILE)
    except Exception as error:
        raise ValueError(
            f"{folder / ADAPTER_FILE} is damaged ({error}); use another checkpoint"
        ) from error
    try:
        config = PeftConfig.from_pretrained(str(folder))
    except Exception as error:
        raise ValueError(
            f"{folder / CONFIG_FILE} is damaged ({error!r}); use another checkpoint"
        ) from error
    if not isinstance(config, LoraConfig):
        raise ValueError(
            f"{folder} holds a {type(config).__name__}; only LoRA adapters can be loaded"
        )
    return config, tensors


def adapter_state_dict(model: PeftModel, slot: str) -> dict[str, torch.Tensor]:
    """One adapter's tensors by PEFT's names, on the CPU."""
    state = get_peft_model_state_dict(model, adapter_name=slot, save_embedding_layers=False)
    return {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}


def full_state_dict(model: PeftModel, slot: str) -> dict[str, torch.Tensor]:
    """The base under its own names, plus the actor's adapter under PEFT's."""
    return {**base_state_dict(model), **adapter_state_dict(model, slot)}


def base_state_dict(model: PeftModel) -> dict[str, torch.Tensor]:
    """The frozen base's tensors under the names they have without PEFT, on the CPU."""
    return {
        name: tensor.detach().cpu().contiguous() for name, tensor in base_tensors(model).items()
    }


def base_tensors(model: PeftModel) -> dict[str, torch.Tensor]:
    """The same, as they are in the model."""
    slots = set(model.peft_config)
    found: dict[str, torch.Tensor] = {}
    for name, tensor in model.get_base_model().state_dict().items():
        parts = name.split(".")
        if slots.isdisjoint(parts):
            found[
                ".".join(part for part in parts if part not in ("base_layer", "original_module"))
            ] = tensor
    return found
