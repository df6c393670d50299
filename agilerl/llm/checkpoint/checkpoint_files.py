"""A checkpoint on disk: written atomically, read without running anything in it.

::

    <role>/             a PEFT directory per role, if lora_only
    attributes.pt       schema.Attributes; the full actor unless lora_only; the optimizer if saved
    save_checkpoint/    of an optimizer that ZeRO 2 or 3 partitions: one file per process

All combinations load into every agent; docs/checkpoints.md has the table.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig

from agilerl.checks import require
from agilerl.distributed import Ranks
from agilerl.llm.adapters import adapter_state_dict
from agilerl.llm.checkpoint import schema
from agilerl.llm.checkpoint.atomic_directory import atomic_directory, read_directory
from agilerl.llm.checkpoint.optimizer_shards import read_shards, write_shard
from agilerl.llm.checkpoint.schema import check, damaged, reading
from agilerl.llm.engine.local import LocalEngine
from agilerl.llm.policy import Policy
from agilerl.llm.shared_base import base_state_dict

if TYPE_CHECKING:
    from agilerl.llm.engine.zero import ZeroEngine

ATTRIBUTES_FILE = "attributes.pt"
ADAPTER_PREFIX = "base_model."  # PEFT's, of all adapter tensors
ADAPTER_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"


@dataclass(frozen=True)
class SavedAdapter:
    """An adapter read from disk."""

    config: LoraConfig
    tensors: dict[str, torch.Tensor]
    """By PEFT's names, without the adapter's."""


@dataclass(frozen=True)
class SavedCheckpoint:
    """What was read from a checkpoint; of a plain PEFT directory an actor and nothing else."""

    path: Path
    adapters: dict[str, SavedAdapter]
    """By role."""
    attributes: dict[str, Any]
    """See :class:`agilerl.llm.checkpoint.schema.Attributes`."""
    base: dict[str, torch.Tensor] | None = None
    """The base's tensors, of a full actor."""
    optimizer: dict[str, Any] | None = None
    """Optimizer and schedule as every engine loads them, if asked for and there."""


def write_checkpoint(
    path: Path,
    attributes: Mapping[str, Any],
    policy: Policy,
    engine: LocalEngine,
    ranks: Ranks,
    *,
    lora_only: bool,
    save_optimizer: bool,
) -> None:
    """Write a checkpoint; all ranks together, on storage that all of them see.

    Args:
        path: Directory to write; an existing checkpoint there is replaced.
        attributes: What ``attributes.pt`` holds of the agent.
        policy: The adapters and their base.
        engine: Optimizer and schedule, saved if ``save_optimizer``.
        ranks: The processes that save together.
        lora_only: Adapters as PEFT directories; False: the full actor in ``attributes.pt``.
        save_optimizer: See ``engine``.

    Raises:
        FileExistsError: If ``path`` holds something that is not a checkpoint.
    """
    content = {"format": schema.FORMAT, **attributes, "lora_only": lora_only, "roles": policy.roles}
    shard = None
    if not lora_only:
        with policy.base.whole():
            content |= ranks.on_all_ranks(lambda: {} if ranks.rank else _full_actor(policy))
    if save_optimizer and engine.sharded:
        zero = cast("ZeroEngine", engine)
        shard = ranks.on_all_ranks(zero.shard)
        content |= {"optimizer": zero.settings_dict(), "optimizer_shards": ranks.world_size}
    elif save_optimizer:
        content["optimizer"] = engine.state_dict()

    def write(folder: Path) -> None:
        if shard is not None:
            write_shard(folder, ranks.rank, shard)
        if ranks.rank > 0:
            return
        for role, slot in policy.slots.items() if lora_only else ():
            (folder / role).mkdir()
            tensors = adapter_state_dict(policy.model, slot)
            save_file(tensors, folder / role / ADAPTER_FILE, metadata={"format": "pt"})
            policy.model.peft_config[slot].save_pretrained(folder / role, inference_mode=True)
        try:
            torch.save(content, folder / ATTRIBUTES_FILE)
        except RuntimeError as error:  # what torch makes of a full disk
            raise OSError(f"{folder / ATTRIBUTES_FILE} could not be written: {error}") from error

    with contextlib.ExitStack() as directory:  # rank 0's
        folder = ranks.on_rank_zero(
            lambda: directory.enter_context(atomic_directory(path, ATTRIBUTES_FILE))
        )
        ranks.on_all_ranks(lambda: write(folder))
        ranks.on_rank_zero(directory.close)


def _full_actor(policy: Policy) -> dict[str, Any]:
    """Base and adapters, and the configurations that the base is rebuilt from."""
    adapters = {r: adapter_state_dict(policy.model, s) for r, s in policy.slots.items()}
    model = policy.base.model
    generation = model.generation_config or GenerationConfig()
    return {
        "actor_state_dict": base_state_dict(policy.model) | adapters.pop("actor"),
        "adapter_state_dicts": adapters,
        # As JSON has them, whatever enumerations and sets are in them.
        "lora_configs": {
            role: json.loads(json.dumps(config.to_dict(), default=sorted))
            for role, config in policy.lora_configs.items()
        },
        "model_config": model.config.to_json_string(use_diff=False),
        # It decides which tokens end a completion, and need not be what the config implies.
        "generation_config": generation.to_json_string(use_diff=False),
    }


def read_checkpoint(path: Path, ranks: Ranks, *, load_optimizer: bool) -> SavedCheckpoint:
    """Read a checkpoint, or a plain PEFT directory; all ranks together, or none of them.

    Raises:
        FileNotFoundError: If there is no checkpoint, or it lacks a file.
        ValueError: If it is damaged, or asks for what loading must not do.
    """
    path = path.expanduser()

    def read(folder: Path) -> SavedCheckpoint:
        attributes = _read_attributes(folder / ATTRIBUTES_FILE)
        optimizer = _read_optimizer(folder, attributes) if load_optimizer else None
        if attributes["lora_only"]:
            adapters = {role: _read_adapter(folder / role) for role in attributes["roles"]}
            return SavedCheckpoint(path, adapters, attributes, None, optimizer)
        adapters, base = _read_full_actor(folder / ATTRIBUTES_FILE, attributes)
        return SavedCheckpoint(path, adapters, attributes, base, optimizer)

    def read_either() -> SavedCheckpoint:
        if (path / ADAPTER_FILE).is_file():
            return SavedCheckpoint(path, {"actor": _read_adapter(path)}, {})
        return read_directory(path, ATTRIBUTES_FILE, read)

    return ranks.on_all_ranks(read_either)


def _read_attributes(file: Path) -> dict[str, Any]:
    with reading(file):
        content = torch.load(file, map_location="cpu", weights_only=True)
    check(file, content, dict)
    found = content.get("format")
    if type(found) is not int or found != schema.FORMAT:
        damaged(file, f"it has format {found!r}, and this version reads format {schema.FORMAT}")
    lora_only = content.get("lora_only") is True
    check(file, content, schema.Attributes if lora_only else schema.FullActorAttributes)
    return cast(dict[str, Any], content)


def _read_full_actor(
    file: Path, attributes: Mapping[str, Any]
) -> tuple[dict[str, SavedAdapter], dict[str, torch.Tensor]]:
    """Adapters by role, and the base."""
    full = attributes["actor_state_dict"]
    actor, base = (
        {name: tensor for name, tensor in full.items() if name.startswith(ADAPTER_PREFIX) == own}
        for own in (True, False)
    )
    tensors, configs = (
        {"actor": actor, **attributes["adapter_state_dicts"]},
        attributes["lora_configs"],
    )
    return {r: _adapter_from(file, configs.get(r), t) for r, t in tensors.items()}, base


def _read_adapter(folder: Path) -> SavedAdapter:
    """Config and tensors of a PEFT directory, whoever wrote it."""
    tensors_file, config_file = folder / ADAPTER_FILE, folder / CONFIG_FILE
    for file in (tensors_file, config_file):
        require(
            file.is_file(),
            f"{folder} holds no {file.name}; pass a directory written by save_checkpoint or by "
            "PEFT's save_pretrained (with safetensors)",
            FileNotFoundError,
        )
    with reading(tensors_file):
        tensors = load_file(tensors_file)
    with reading(config_file):
        config = json.loads(config_file.read_text(encoding="utf-8"))
    return _adapter_from(config_file, config, tensors)


def _adapter_from(file: Path, content: Any, tensors: dict[str, torch.Tensor]) -> SavedAdapter:
    config = lora_config_from(file, content)
    rank = max([config.r, *(config.rank_pattern or {}).values()])
    # The agent would allocate it.
    if rank > max((size for tensor in tensors.values() for size in tensor.shape), default=0):
        damaged(file, f"no tensor of it has rank {rank}")
    return SavedAdapter(config, tensors)


def _is_set(value: Any, default: Any) -> bool:
    """Whether an option differs from its default; what was read may be anything."""
    try:
        return bool(value) and bool(value != default)
    except (RuntimeError, ValueError):  # a tensor or an array
        return True


def lora_config_from(file: Path, content: Any) -> LoraConfig:
    """A config as it was saved; see :class:`agilerl.llm.checkpoint.schema.AdapterConfig`.

    Raises:
        DamagedCheckpointError: A field is missing or of the wrong type.
        ValueError: It is not LoRA, or of a kind that cannot be loaded.
    """
    check(file, content, dict)
    kind = content.get("peft_type", "LORA")
    require(kind == "LORA", f"{file} is that of a {kind} adapter; only LoRA can be loaded")
    check(file, content, schema.AdapterConfig)
    names, defaults = schema.AdapterConfig.__annotations__.keys(), LoraConfig().to_dict()
    other = sorted(content.keys() - names - schema.ORIGIN_FIELDS)
    refused = {n: content[n] for n in other if _is_set(content[n], defaults.get(n))}
    require(
        not refused,
        f"{file} sets {refused!r}; adapters with these cannot be loaded: they may run code, or "
        "compute something else than LoRA and DoRA",
    )
    with reading(file):
        return LoraConfig(**{n: content[n] for n in names if n in content})


def _read_optimizer(folder: Path, attributes: Mapping[str, Any]) -> dict[str, Any] | None:
    file, state = folder / ATTRIBUTES_FILE, attributes.get("optimizer")
    if state is None:
        return None
    other = isinstance(state, dict) and "kind" in state
    check(file, state, schema.OtherEngineState if other else schema.EngineState, "optimizer")
    if "optimizer_shards" not in attributes:
        return dict(state)
    check(file, attributes["optimizer_shards"], schema.Count, "optimizer_shards")
    parameters = sum(len(group["params"]) for group in state["optimizer"]["param_groups"])
    moments = read_shards(folder, attributes["optimizer_shards"], parameters)
    return {**state, "optimizer": {**state["optimizer"], "state": moments}}
