"""Constructor arguments as numbers, strings, lists and dicts, and back: what a checkpoint may hold without pickling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from enum import Enum
from typing import Any

import torch
from peft import LoraConfig

from agilerl.algorithms.core.registry import HyperparameterConfig
from agilerl.llm.config import CosineLRScheduleConfig

# Bound to one process, or saved elsewhere in the checkpoint.
NOT_SAVED = ("actor_network", "accelerator", "device", "wrap", "clone")


def encode_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Constructor arguments in a form that loads with ``weights_only=True``."""
    encoded = {}
    for name, value in arguments.items():
        if name in NOT_SAVED:
            continue
        if isinstance(value, LoraConfig | HyperparameterConfig):
            value = value.to_dict()
        elif isinstance(value, CosineLRScheduleConfig):
            value = asdict(value)
        encoded[name] = _encode(value)
    return encoded


def decode_arguments(encoded: Mapping[str, Any]) -> dict[str, Any]:
    """Inverse of :func:`encode_arguments`."""
    arguments = {name: _decode(value) for name, value in encoded.items()}
    if arguments["lora_config"] is not None:
        arguments["lora_config"] = LoraConfig(**arguments["lora_config"])
    if arguments["hp_config"] is not None:
        arguments["hp_config"] = HyperparameterConfig.from_dict(arguments["hp_config"])
    if arguments["cosine_lr_schedule_config"] is not None:
        arguments["cosine_lr_schedule_config"] = CosineLRScheduleConfig(
            **arguments["cosine_lr_schedule_config"]
        )
    return arguments


def _encode(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, bool | int | float | str | None):
        return value
    if isinstance(value, torch.dtype):
        return {"__dtype__": str(value).removeprefix("torch.")}
    if isinstance(value, tuple):
        return tuple(_encode(item) for item in value)
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, list):
        return [_encode(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _encode(item) for key, item in value.items()}
    raise TypeError(
        f"a checkpoint cannot hold {value!r}; it takes numbers, strings, lists and dicts"
    )


def _decode(value: Any) -> Any:
    if isinstance(value, dict):
        if set(value) == {"__dtype__"}:
            return getattr(torch, value["__dtype__"])
        return {key: _decode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_decode(item) for item in value)
    return value
