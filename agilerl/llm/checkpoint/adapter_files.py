"""Adapters on disk: the plain PEFT directories that every tool of the field reads."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file, save_file

from agilerl.checks import require
from agilerl.llm.checkpoint.schema import AdapterConfig, check, damaged, reading

ADAPTER_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"

ORIGIN_FIELDS = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "loftq_config",
    "lora_ga_config", "peft_version", "revision", "runtime_config",
}  # fmt: skip
"""Fields of a LoRA config that say where it came from and how it was initialised."""


@dataclass(frozen=True)
class SavedAdapter:
    """An adapter read from disk."""

    config: LoraConfig
    tensors: dict[str, torch.Tensor]
    """By PEFT's names, without the adapter's."""


def adapter_state_dict(model: PeftModel, slot: str) -> dict[str, torch.Tensor]:
    """One adapter's tensors by PEFT's names, on the CPU."""
    state = get_peft_model_state_dict(model, adapter_name=slot, save_embedding_layers=False)
    return {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}


def config_dict(config: LoraConfig) -> dict[str, Any]:
    """A config as JSON has it, whatever enumerations and sets are in it."""
    content: dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=sorted))
    return content


def save_adapter(model: PeftModel, slot: str, folder: Path) -> None:
    """Write one adapter as a plain PEFT directory."""
    folder.mkdir(parents=True)
    save_file(adapter_state_dict(model, slot), folder / ADAPTER_FILE, metadata={"format": "pt"})
    model.peft_config[slot].save_pretrained(folder, inference_mode=True)


def load_adapter(folder: Path) -> SavedAdapter:
    """Config and tensors of a PEFT directory, whoever wrote it.

    Raises:
        FileNotFoundError: It holds no adapter.
        DamagedCheckpointError: One of its files is damaged.
        ValueError: The adapter is not LoRA, or of a kind that cannot be loaded.
    """
    for name in (ADAPTER_FILE, CONFIG_FILE):
        if not (folder / name).is_file():
            raise FileNotFoundError(
                f"{folder} holds no {name}; pass a directory written by save_checkpoint or by "
                "PEFT's save_pretrained (with safetensors)"
            )
    tensors_file, config_file = folder / ADAPTER_FILE, folder / CONFIG_FILE
    with reading(tensors_file):
        tensors = load_file(tensors_file)
    with reading(config_file):
        config = json.loads(config_file.read_text(encoding="utf-8"))
    return checked_adapter(tensors_file, lora_config_from(config_file, config), tensors)


def lora_config_from(file: Path, content: Any) -> LoraConfig:
    """A config as it was saved; see :class:`agilerl.llm.checkpoint.schema.AdapterConfig`.

    Raises:
        DamagedCheckpointError: A field is missing or of the wrong type.
        ValueError: It is not LoRA, or of a kind that cannot be loaded.
    """
    check(file, content, dict)
    kind = content.get("peft_type", "LORA")
    require(kind == "LORA", f"{file} is that of a {kind} adapter; only LoRA can be loaded")
    check(file, content, AdapterConfig)
    names, defaults = AdapterConfig.__annotations__.keys(), LoraConfig().to_dict()
    other = sorted(content.keys() - names - ORIGIN_FIELDS)
    refused = {n: content[n] for n in other if content[n] and content[n] != defaults.get(n)}
    require(
        not refused,
        f"{file} sets {refused!r}; adapters with these cannot be loaded: they may run code, or "
        "compute something else than LoRA and DoRA",
    )
    with reading(file):
        return LoraConfig(**{n: content[n] for n in names if n in content})


def checked_adapter(
    file: Path, config: LoraConfig, tensors: dict[str, torch.Tensor]
) -> SavedAdapter:
    """Put config and tensors together.

    Raises:
        DamagedCheckpointError: A rank is larger than any tensor; the agent would allocate it.
    """
    rank = max([config.r, *(config.rank_pattern or {}).values()])
    if rank > max((size for tensor in tensors.values() for size in tensor.shape), default=0):
        damaged(file, f"no tensor of it has rank {rank}")
    return SavedAdapter(config, tensors)
