"""Checkpoints on disk: what each cell of the grid holds, written atomically, loaded without code.

=========  ==============  =========  ==========================================================
lora_only  save_optimizer  ZeRO 2, 3  on disk
=========  ==============  =========  ==========================================================
True       True            no         ``<role>/``; ``attributes.pt`` with the optimizer
True       False           no         ``<role>/``; ``attributes.pt``
False      True            no         ``attributes.pt`` with the full actor and the optimizer
False      False           no         ``attributes.pt`` with the full actor
True       True            yes        ``<role>/``; ``attributes.pt``; ``save_checkpoint/``
True       False           yes        ``<role>/``; ``attributes.pt``
False      True            yes        ``attributes.pt`` with the full actor; ``save_checkpoint/``
False      False           yes        ``attributes.pt`` with the full actor
=========  ==============  =========  ==========================================================

``<role>/`` are PEFT directories, ``save_checkpoint/`` holds the optimizer in one file per process
(:mod:`agilerl.llm.checkpoint.optimizer_shards`). ``attributes.pt`` always holds the agent's
attributes, as numbers, strings, lists and tensors only. Every cell loads into every agent.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
from transformers import GenerationConfig

from agilerl.distributed import Ranks
from agilerl.llm.checkpoint.adapter_files import adapter_state_dict, save_adapter
from agilerl.llm.checkpoint.atomic_directory import atomic_directory
from agilerl.llm.checkpoint.base_weights import base_state_dict
from agilerl.llm.checkpoint.optimizer_shards import read_shards, write_shard
from agilerl.llm.engine.local import LocalEngine
from agilerl.llm.policy import Policy

if TYPE_CHECKING:
    from agilerl.llm.engine.zero import ZeroEngine

ATTRIBUTES_FILE = "attributes.pt"
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


@dataclass(frozen=True)
class Saved:
    """What a checkpoint is made from."""

    policy: Policy
    engine: LocalEngine
    ranks: Ranks
    """The processes that save together."""


def _nothing(folder: Path) -> None:
    pass


@dataclass(frozen=True)
class Part:
    """What one part of a checkpoint comes to on this process."""

    attributes: dict[str, Any] = field(default_factory=dict)
    """For ``attributes.pt``; rank 0's count."""
    write: Callable[[Path], None] = _nothing
    """Writes this process's files below a folder."""


Collect: TypeAlias = Callable[[Saved], Part]
"""Reads one part off the agent; all ranks together. Files are written later, by each rank alone."""


def adapter_folders(saved: Saved) -> Part:
    """A PEFT directory per role."""
    if saved.ranks.rank > 0:
        return Part()

    def write(folder: Path) -> None:
        for role, slot in saved.policy.slots.items():
            save_adapter(saved.policy.model, slot, folder / role)

    return Part(write=write)


def full_actor(saved: Saved) -> Part:
    """Base and adapters, and the configurations that the base is rebuilt from."""
    model, slots = saved.policy.model, saved.policy.slots

    def read() -> dict[str, Any]:
        if saved.ranks.rank > 0:
            return {}
        others = {role: slot for role, slot in slots.items() if role != "actor"}
        base = model.get_base_model()
        generation = base.generation_config or GenerationConfig()
        return {
            "actor_state_dict": base_state_dict(model) | adapter_state_dict(model, slots["actor"]),
            "adapter_state_dicts": {r: adapter_state_dict(model, s) for r, s in others.items()},
            "model_config": base.config.to_json_string(use_diff=False),
            # It decides which tokens end a completion, and need not be what the config implies.
            "generation_config": generation.to_json_string(use_diff=False),
        }

    with saved.policy.base.whole():
        return Part(saved.ranks.on_all_ranks(read))


def whole_optimizer(saved: Saved) -> Part:
    """Optimizer and schedule."""
    return Part({"optimizer": saved.engine.state_dict()})


def sharded_optimizer(saved: Saved) -> Part:
    """The same, with every process's moments in a file of its own."""
    engine, ranks = cast("ZeroEngine", saved.engine), saved.ranks
    shard = ranks.on_all_ranks(engine.shard)
    return Part(
        {"optimizer": engine.settings_dict(), "optimizer_shards": ranks.world_size},
        lambda folder: write_shard(folder, ranks.rank, shard),
    )


GRID: Mapping[tuple[bool, bool, bool], tuple[Collect, ...]] = {
    # lora_only, save_optimizer, whether the engine's optimizer is sharded
    (True, True, False): (adapter_folders, whole_optimizer),
    (True, False, False): (adapter_folders,),
    (False, True, False): (full_actor, whole_optimizer),
    (False, False, False): (full_actor,),
    (True, True, True): (adapter_folders, sharded_optimizer),
    (True, False, True): (adapter_folders,),
    (False, True, True): (full_actor, sharded_optimizer),
    (False, False, True): (full_actor,),
}


def save_checkpoint(
    path: Path,
    attributes: Mapping[str, Any],
    saved: Saved,
    *,
    lora_only: bool,
    save_optimizer: bool,
) -> None:
    """Write one cell of the grid; all ranks together, on storage that all of them see.

    Args:
        path: Directory to write; an existing checkpoint there is replaced.
        attributes: What is always saved.
        saved: What the rest is read off.
        lora_only: Adapters as PEFT directories, or the full actor inside ``attributes.pt``.
        save_optimizer: Whether optimizer and schedule are saved.

    Raises:
        FileExistsError: If ``path`` holds something that is not a checkpoint.
    """
    ranks = saved.ranks
    cell = GRID[lora_only, save_optimizer, saved.engine.sharded]
    parts = [collect(saved) for collect in cell]
    content = {"format": FORMAT, **attributes, "lora_only": lora_only}
    content["roles"] = list(saved.policy.slots)
    for part in parts:
        content |= part.attributes

    def write(folder: Path) -> None:
        for part in parts:
            part.write(folder)
        if ranks.rank == 0:
            _save_attributes(content, folder / ATTRIBUTES_FILE)

    with contextlib.ExitStack() as directory:  # rank 0's
        folder = ranks.on_rank_zero(
            lambda: directory.enter_context(atomic_directory(path, ATTRIBUTES_FILE))
        )
        ranks.on_all_ranks(lambda: write(folder))
        ranks.on_rank_zero(directory.close)


def _save_attributes(content: dict[str, Any], file: Path) -> None:
    try:
        torch.save(content, file)
    except RuntimeError as error:  # what torch makes of a full disk
        raise OSError(f"{file} could not be written: {error}") from error


def load_attributes(folder: Path) -> dict[str, Any]:
    """The content of a checkpoint's ``attributes.pt``; never runs code from the file.

    Raises:
        FileNotFoundError: If it is not there.
        ValueError: If it is truncated, tampered with, or of an unknown format.
    """
    file = folder / ATTRIBUTES_FILE
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise
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


def load_optimizer(folder: Path, attributes: Mapping[str, Any]) -> dict[str, Any] | None:
    """Optimizer and schedule in the form that every engine loads; None if none were saved.

    Args:
        folder: The checkpoint.
        attributes: Its :func:`load_attributes`.

    Raises:
        ValueError: If a process's file is missing or damaged.
    """
    state: dict[str, Any] | None = attributes.get("optimizer")
    processes = attributes.get("optimizer_shards")
    if state is None or processes is None:
        return state
    try:
        (group,) = state["optimizer"]["param_groups"]
        parameters = len(group["params"])
        if not isinstance(processes, int) or processes < 1:
            raise ValueError(f"it is of {processes!r} processes")
    except Exception as error:
        raise ValueError(
            f"the optimizer of {folder} is damaged ({error!r}); use another checkpoint, or load "
            "without load_optimizer"
        ) from error
    moments = read_shards(folder, processes, parameters)
    return {**state, "optimizer": {**state["optimizer"], "state": moments}}
