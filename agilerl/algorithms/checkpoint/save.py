"""Saves agents; and reads back what a checkpoint says of one besides its weights."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig

from agilerl.algorithms.core.arguments import REQUIRED, Argument
from agilerl.algorithms.core.lora_agent import LoRAAgent
from agilerl.algorithms.core.registry import HyperparameterConfig
from agilerl.checks import require
from agilerl.distributed import Ranks, ranks_of
from agilerl.llm.checkpoint import checkpoint_files
from agilerl.llm.checkpoint.schema import damaged, reading
from agilerl.llm.config import CosineLRScheduleConfig
from agilerl.llm.quantization import is_quantized, recorded_quantization

logger = logging.getLogger(__name__)


def save(agent: LoRAAgent, path: Path, *, lora_only: bool, save_optimizer: bool) -> None:
    """Write a checkpoint; all ranks together.

    Raises:
        ValueError: If the full actor of a quantized base is asked for.
    """
    policy, ranks = agent.policy, ranks_of(agent.accelerator)
    model = policy.base.model
    require(
        lora_only or not is_quantized(model),
        "lora_only is False, but the base model is quantized, and its packed weights cannot be "
        "restored from a checkpoint; save with lora_only=True: load(path) loads and quantizes the "
        "base again",
    )
    attributes = {
        "algo": agent.algo,
        "arguments": encode(agent.saved_arguments(), "arguments"),
        "history": encode(agent.attributes(("index", *agent._history)), "history"),
        "rng_states": ranks.gather(agent.rng.get_state()),
        "bad_steps": agent.skipped_steps.in_a_row,
        "base_name": agent.model_name or model.name_or_path or None,
        "base_dtype": encode(model.dtype, "base_dtype"),
        "base_fingerprint": policy.base.fingerprint(),
        "base_quantization": encode(recorded_quantization(model), "base_quantization"),
    }
    parts = {"lora_only": lora_only, "save_optimizer": save_optimizer}
    checkpoint_files.write_checkpoint(path, attributes, policy, agent.engine, ranks, **parts)
    agent.skipped_steps.last_checkpoint = str(path)


def encode(value: Any, name: str) -> Any:
    """A value in a form that ``torch.load(weights_only=True)`` reads; ``name`` is for the message.

    Raises:
        TypeError: For an object that has no such form.
    """
    match value:
        case LoraConfig():
            value = json.loads(json.dumps(value.to_dict(), default=sorted))
        case HyperparameterConfig():
            value = value.to_dict()
        case CosineLRScheduleConfig():
            value = asdict(value)
        case torch.dtype():
            value = {"__dtype__": str(value).removeprefix("torch.")}
    if isinstance(value, Mapping):
        return {str(key): encode(item, f"{name}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(encode(item, name) for item in value)
    if value is None or isinstance(value, bool):
        return value
    # NumPy's scalars and enumerations would have to be pickled.
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Real):
        return int(value) if isinstance(value, Integral) else float(value)
    raise TypeError(
        f"{name} holds {value!r}, which a checkpoint cannot; it must be made of numbers, strings, "
        "lists and dicts"
    )


def decode(value: Any) -> Any:
    """Inverse of :func:`encode`, except that configs come back as dicts.

    Raises:
        ValueError: For what :func:`encode` does not return.
    """
    match value:
        case {"__dtype__": str(name)} if isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        case dict():
            return {key: decode(item) for key, item in value.items()}
        case list() | tuple():
            return type(value)(decode(item) for item in value)
        case None | bool() | int() | float() | str():
            return value
    raise ValueError(f"it holds a {type(value).__name__}")


def decode_arguments(
    saved: checkpoint_files.SavedCheckpoint, table: Mapping[str, Argument]
) -> dict[str, Any]:
    """The agent's constructor arguments, each checked as the constructor does.

    Raises:
        DamagedCheckpointError: If an agent cannot have been made with one.
        ValueError: If the checkpoint holds one that the table does not, or not as saved.
    """
    given, file = saved.attributes["arguments"], saved.path / checkpoint_files.ATTRIBUTES_FILE
    # A row that is not saved may have been in another version, which then had its default only.
    given = {n: v for n, v in given.items() if n not in table or table[n].saved or v is not None}
    unknown = [name for name in given if name not in table or not table[name].saved]
    require(
        not unknown,
        f"{saved.path} holds arguments that {saved.attributes['algo']} does not take: {unknown}; "
        "load it with the version that saved it",
    )
    needed = [n for n, row in table.items() if row.default is REQUIRED or n == "lora_config"]
    missing = [name for name in needed if given.get(name) is None]
    if missing:
        damaged(file, f"its arguments lack {missing}")
    arguments = {}
    for name, encoded in given.items():
        with reading(file, f"its argument {name}"):
            value = decode(encoded)
            if name == "lora_config":
                value = checkpoint_files.lora_config_from(file, value)
            elif name == "hp_config" and value is not None:
                value = HyperparameterConfig.from_dict(value)
            elif name == "cosine_lr_schedule_config" and value is not None:
                value = CosineLRScheduleConfig(**value)
            table[name].check(name, value)
            arguments[name] = value
    return arguments


def saved_state(
    saved: checkpoint_files.SavedCheckpoint, history: Iterable[str], ranks: Ranks
) -> dict[str, Any]:
    """The attributes that change as an agent trains: its history, and ``rng`` on this rank.

    Raises:
        DamagedCheckpointError: If what was saved is no history, or no state of a generator.
    """
    file, attributes = saved.path / checkpoint_files.ATTRIBUTES_FILE, saved.attributes
    with reading(file, "its history"):
        written = attributes["history"]
        state = {name: decode(written[name]) for name in history if name in written}
    rng_states = attributes["rng_states"]
    same = len(rng_states) == ranks.world_size
    with reading(file, "its rng_states are no states of a generator"):
        rng = torch.Generator().set_state(rng_states[ranks.rank if same else 0])
    if not same and ranks.rank == 0:
        logger.warning("%s is of %d processes: sampling differs", saved.path, len(rng_states))
    elif not same:  # not all ranks may sample the same
        rng.manual_seed(int(rng_states[0][:8].view(torch.int64)) % 2**32 + ranks.rank)
    return state | {"rng": rng}
