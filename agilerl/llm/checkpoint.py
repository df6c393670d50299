"""Checkpoints on disk: what each cell of the grid holds, written atomically, loaded without running code.

========================================  ===================================================================
``lora_only=True,  save_optimizer=True``  ``<role>/`` PEFT directories; ``attributes.pt`` with optimizer state
``lora_only=True,  save_optimizer=False`` ``<role>/`` PEFT directories; ``attributes.pt``
``lora_only=False, save_optimizer=True``  ``attributes.pt`` with the full actor and optimizer state
``lora_only=False, save_optimizer=False`` ``attributes.pt`` with the full actor
========================================  ===================================================================

``attributes.pt`` always holds the agent's attributes, as numbers, strings, lists and tensors only.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file, save_file

logger = logging.getLogger(__name__)

ATTRIBUTES_FILE = "attributes.pt"
ADAPTER_FILE = "adapter_model.safetensors"
FORMAT = 1


@contextlib.contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Write a directory under a temporary name beside ``path``; on leaving, sync it to disk and rename it into place.

    A kill at any instant leaves the previous directory whole: under ``path``, or, between the two renames that replace
    it, under the name that :func:`complete_directory` looks at.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    temporary.mkdir()
    try:
        yield temporary
        _sync(temporary)
        previous = _previous(path)
        if path.exists():
            if previous.exists():
                shutil.rmtree(previous)
            path.rename(previous)
        temporary.rename(path)
        _sync_directory(path.parent)
        shutil.rmtree(previous, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def complete_directory(path: Path) -> Path:
    """``path``, or what it held before a save that was killed at the moment of replacing it.

    Raises:
        FileNotFoundError: If there is neither.
    """
    if not path.is_dir() and _previous(path).is_dir():
        logger.warning("%s was being replaced when its writer died; the previous one is used", path)
        return _previous(path)
    if not (path / ATTRIBUTES_FILE).is_file():
        raise FileNotFoundError(f"{path} holds no checkpoint: there is no {ATTRIBUTES_FILE} in it")
    return path


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
        content["model_config"] = model.get_base_model().config.to_json_string(use_diff=False)
    with atomic_directory(path) as folder:
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
    file = complete_directory(path) / ATTRIBUTES_FILE
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(
            f"{file} cannot be loaded safely: it is truncated, damaged, or holds pickled code ({error}). "
            "Use another checkpoint."
        ) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise ValueError(f"{file} has format {found!r}; this version reads format {FORMAT}")
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
        ValueError: If its file is damaged.
    """
    file = folder / ADAPTER_FILE
    if not file.is_file():
        raise FileNotFoundError(f"{folder} holds no {ADAPTER_FILE}")
    try:
        tensors = load_file(file)
    except Exception as error:
        raise ValueError(f"{file} is damaged ({error}); use another checkpoint") from error
    return LoraConfig.from_pretrained(str(folder)), tensors


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


def _previous(path: Path) -> Path:
    return path.with_name(f".{path.name}.previous")


def _sync(folder: Path) -> None:
    """Flush every file and directory below ``folder`` to disk."""
    for root, _, files in os.walk(folder):
        for name in files:
            with open(os.path.join(root, name), "rb") as file:
                os.fsync(file.fileno())
        _sync_directory(Path(root))


def _sync_directory(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
