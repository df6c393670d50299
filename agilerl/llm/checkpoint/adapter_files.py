"""Adapters on disk: the plain PEFT directories that every tool of the field reads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file, save_file

ADAPTER_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"


@dataclass(frozen=True)
class LoadedAdapter:
    """An adapter read from disk."""

    config: LoraConfig
    tensors: dict[str, torch.Tensor]
    """By PEFT's names, without the adapter's."""


def adapter_state_dict(model: PeftModel, slot: str) -> dict[str, torch.Tensor]:
    """One adapter's tensors by PEFT's names, on the CPU."""
    state = get_peft_model_state_dict(model, adapter_name=slot, save_embedding_layers=False)
    return {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}


def save_adapter(model: PeftModel, slot: str, folder: Path) -> None:
    """Write one adapter as a plain PEFT directory."""
    folder.mkdir(parents=True)
    save_file(adapter_state_dict(model, slot), folder / ADAPTER_FILE, metadata={"format": "pt"})
    model.peft_config[slot].save_pretrained(folder, inference_mode=True)


def load_adapter(folder: Path) -> LoadedAdapter:
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
    return LoadedAdapter(config, tensors)
