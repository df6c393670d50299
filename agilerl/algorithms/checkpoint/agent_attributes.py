"""What a checkpoint says of an agent besides its weights: arguments, history, random stream."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from enum import Enum
from numbers import Integral, Real
from typing import Any

import torch
from peft import LoraConfig

from agilerl.algorithms.core.arguments import REQUIRED, Argument
from agilerl.algorithms.core.registry import HyperparameterConfig
from agilerl.checks import require
from agilerl.distributed import Ranks
from agilerl.llm.checkpoint.checkpoint_files import (
    ATTRIBUTES_FILE,
    SavedCheckpoint,
    lora_config_from,
)
from agilerl.llm.checkpoint.schema import damaged, reading
from agilerl.llm.config import CosineLRScheduleConfig

logger = logging.getLogger(__name__)

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


def decode_arguments(saved: SavedCheckpoint, table: Mapping[str, Argument]) -> dict[str, Any]:
    """The agent's constructor arguments, each checked as the constructor does.

    Raises:
        DamagedCheckpointError: If an agent cannot have been made with one.
        ValueError: If the checkpoint holds one that the table does not, or not as saved.
    """
    given = saved.attributes["arguments"]
    unknown = [n for n in given if n not in table or not table[n].saved]
    require(
        not unknown,
        f"{saved.path} holds arguments that {saved.attributes['algo']} does not take: {unknown}; "
        "load it with the version that saved it",
    )
    file = saved.path / ATTRIBUTES_FILE
    needed = [n for n, row in table.items() if row.default is REQUIRED or n == "lora_config"]
    missing = [name for name in needed if given.get(name) is None]
    if missing:
        damaged(file, f"its arguments lack {missing}")
    builders: dict[str, Callable[[Any], Any]] = {
        "lora_config": lambda content: lora_config_from(file, content),
        "hp_config": HyperparameterConfig.from_dict,
        "cosine_lr_schedule_config": lambda content: CosineLRScheduleConfig(**content),
    }
    arguments = {}
    for name, encoded in given.items():
        with reading(file, f"its argument {name}"):
            value = decode_value(encoded)
            if name in builders and value is not None:
                value = builders[name](value)
            table[name].check(name, value)
            arguments[name] = value
    return arguments


def saved_history(saved: SavedCheckpoint, names: Iterable[str]) -> dict[str, Any]:
    """The agent's attributes of these names."""
    with reading(saved.path / ATTRIBUTES_FILE, "its history"):
        return {name: decode_value(saved.attributes["history"][name]) for name in names}


def saved_generator(saved: SavedCheckpoint, ranks: Ranks) -> torch.Generator:
    """The agent's generator on this rank; one of its own if there were other ranks.

    Raises:
        DamagedCheckpointError: If what was saved is no state of a generator.
    """
    first: torch.Tensor = saved.attributes["rng_state"]
    states = saved.attributes.get("rng_states") or [first]
    same = len(states) == ranks.world_size
    with reading(saved.path / ATTRIBUTES_FILE, "its rng_state is no state of a generator"):
        generator = torch.Generator().set_state(states[ranks.rank] if same else first)
    if not same and ranks.rank == 0:
        logger.warning(
            "the checkpoint is of %d processes and read by %d: sampling goes on differently",
            len(states),
            ranks.world_size,
        )
    if not same and ranks.rank > 0:  # not all ranks may sample the same
        generator.manual_seed(int(first[:8].view(torch.int64)) % 2**32 + ranks.rank)
    return generator


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
    elif isinstance(value, list | tuple):
        plain = type(value)(encode_value(item, name) for item in value)
    elif isinstance(value, set | frozenset):
        plain = sorted(value)
    elif isinstance(value, Mapping):
        plain = {str(key): encode_value(item, name) for key, item in value.items()}
    else:
        raise TypeError(
            f"{name} holds {value!r}, which a checkpoint cannot; it must be made of numbers, "
            "strings, lists and dicts"
        )
    return plain


def decode_value(value: Any) -> Any:
    """Inverse of :func:`encode_value`, except that sets come back as lists.

    Raises:
        ValueError: For what :func:`encode_value` does not return.
    """
    if isinstance(value, dict) and value.keys() == {_DTYPE}:
        dtype = vars(torch).get(value[_DTYPE])
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{value[_DTYPE]!r} is no dtype of torch")
        return dtype
    if isinstance(value, dict):
        return {key: decode_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(decode_value(item) for item in value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(f"it holds a {type(value).__name__}")
