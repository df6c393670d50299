"""Arguments as numbers, strings, lists and dicts, and back: what a checkpoint may hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from enum import Enum
from numbers import Integral, Real
from typing import Any

import torch
from peft import LoraConfig

from agilerl.algorithms.core.registry import HyperparameterConfig
from agilerl.llm.config import CosineLRScheduleConfig

_DTYPE = "__dtype__"


def encode_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Constructor arguments in a form that loads with ``weights_only=True``."""
    encoded = {}
    for name, value in arguments.items():
        if isinstance(value, LoraConfig | HyperparameterConfig):
            value = value.to_dict()
        elif isinstance(value, CosineLRScheduleConfig):
            value = asdict(value)
        encoded[name] = encode_value(value, name)
    return encoded


def decode_arguments(encoded: Mapping[str, Any]) -> dict[str, Any]:
    """Inverse of :func:`encode_arguments`.

    Raises:
        ValueError: If a config cannot be built from what was saved.
    """
    builders: dict[str, Callable[[Any], Any]] = {
        "lora_config": lambda content: LoraConfig(**content),
        "hp_config": HyperparameterConfig.from_dict,
        "cosine_lr_schedule_config": lambda content: CosineLRScheduleConfig(**content),
    }
    arguments = {name: decode_value(value) for name, value in encoded.items()}
    for name, build in builders.items():
        content = arguments.get(name)
        if content is not None:
            try:
                arguments[name] = build(content)
            except (TypeError, KeyError, AttributeError) as error:
                raise ValueError(
                    f"the checkpoint's {name} is damaged ({error!r}); use another checkpoint"
                ) from error
    return arguments


def encode_value(value: Any, name: str) -> Any:
    """One value; ``name`` is for the error message.

    Raises:
        TypeError: For an object that has no plain form.
    """
    plain: Any
    if isinstance(value, Enum):
        plain = value.value
    elif value is None or isinstance(value, bool | str):
        plain = value
    elif isinstance(value, Real):  # NumPy's scalars too, which would have to be pickled
        plain = int(value) if isinstance(value, Integral) else float(value)
    elif isinstance(value, torch.dtype):
        plain = {_DTYPE: str(value).removeprefix("torch.")}
    elif isinstance(value, tuple):
        plain = tuple(encode_value(item, name) for item in value)
    elif isinstance(value, set | frozenset):
        plain = sorted(value)
    elif isinstance(value, list):
        plain = [encode_value(item, name) for item in value]
    elif isinstance(value, Mapping):
        plain = {str(key): encode_value(item, name) for key, item in value.items()}
    else:
        raise TypeError(
            f"{name} holds {value!r}, which a checkpoint cannot; it must be made of numbers, "
            "strings, lists and dicts"
        )
    return plain


def decode_value(value: Any) -> Any:
    """Inverse of :func:`encode_value`, but for sets, which come back as lists."""
    if isinstance(value, dict):
        if set(value) == {_DTYPE}:
            dtype = getattr(torch, value[_DTYPE], None)
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"{value[_DTYPE]!r} in the checkpoint is no dtype of torch")
            return dtype
        return {key: decode_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(decode_value(item) for item in value)
    return value
