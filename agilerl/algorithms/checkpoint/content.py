"""What an agent's checkpoint holds, read and checked; nothing here changes an agent."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from agilerl.algorithms.checkpoint.plain_values import decode_arguments, decode_value
from agilerl.distributed import Ranks
from agilerl.llm.checkpoint import grid
from agilerl.llm.checkpoint.adapter_files import ADAPTER_FILE, LoadedAdapter, load_adapter
from agilerl.llm.checkpoint.atomic_directory import read_directory
from agilerl.llm.checkpoint.base_weights import adapter_part

logger = logging.getLogger(__name__)


class DamagedCheckpointError(ValueError):
    """A checkpoint's file is missing or its content not what was written."""


@dataclass(frozen=True)
class CheckpointContent:
    """A checkpoint of any cell of the grid, or a plain PEFT directory."""

    path: Path
    adapters: dict[str, LoadedAdapter]
    """By role; of a PEFT directory an actor only."""
    attributes: dict[str, Any]
    """Of a PEFT directory none."""
    optimizer: dict[str, Any] | None
    """Optimizer and schedule, if asked for and there."""

    def arguments(self) -> dict[str, Any]:
        """The agent's constructor arguments."""
        return decode_arguments(self.attributes["arguments"])

    def history(self, names: Iterable[str]) -> dict[str, Any]:
        """The agent's attributes of these names.

        Raises:
            DamagedCheckpointError: One is missing.
        """
        saved = self.attributes["history"]
        missing = [name for name in names if name not in saved]
        if missing:
            raise DamagedCheckpointError(
                f"{self.path} is damaged: its history lacks {missing}; use another checkpoint"
            )
        return {name: decode_value(saved[name]) for name in names}

    def generator(self, ranks: Ranks) -> torch.Generator:
        """The agent's generator on this rank; one of its own if there were other ranks.

        Raises:
            DamagedCheckpointError: What was saved is no state of a generator.
        """
        states = self.attributes.get("rng_states") or [self.attributes["rng_state"]]
        try:
            if len(states) == ranks.world_size:
                return torch.Generator().set_state(states[ranks.rank])
            first: torch.Tensor = self.attributes["rng_state"]
            if ranks.rank == 0:
                logger.warning(
                    "the checkpoint is of %d processes and read by %d: sampling goes on "
                    "differently",
                    len(states),
                    ranks.world_size,
                )
                return torch.Generator().set_state(first)
            # Not all ranks may sample the same.
            seed = int(first[:8].view(torch.int64)) % 2**32 + ranks.rank
            return torch.Generator().manual_seed(seed)
        except (RuntimeError, TypeError) as error:
            raise DamagedCheckpointError(
                f"{self.path} is damaged: its rng_state is no state of a generator; use another "
                "checkpoint"
            ) from error


def read_content(path: Path, ranks: Ranks, *, load_optimizer: bool) -> CheckpointContent:
    """Read a checkpoint; all ranks together: what one cannot read, none gets.

    Raises:
        FileNotFoundError: If there is no checkpoint, or it lacks a file.
        ValueError: If it is damaged.
    """
    path = path.expanduser()
    return ranks.on_all_ranks(lambda: _read(path, load_optimizer))


def _read(path: Path, load_optimizer: bool) -> CheckpointContent:
    if (path / ADAPTER_FILE).is_file():
        return CheckpointContent(path, {"actor": load_adapter(path)}, {}, None)

    def read(folder: Path) -> CheckpointContent:
        attributes = grid.load_attributes(folder)
        adapters = ADAPTERS_OF[attributes["lora_only"]](folder, attributes)
        optimizer = grid.load_optimizer(folder, attributes) if load_optimizer else None
        return CheckpointContent(path, adapters, attributes, optimizer)

    return read_directory(path, grid.ATTRIBUTES_FILE, read)


def _from_folders(folder: Path, attributes: Mapping[str, Any]) -> dict[str, LoadedAdapter]:
    return {role: load_adapter(folder / role) for role in attributes["roles"]}


def _from_full_actor(folder: Path, attributes: Mapping[str, Any]) -> dict[str, LoadedAdapter]:
    config = decode_arguments(attributes["arguments"]).get("lora_config")
    states = {"actor": adapter_part(attributes["actor_state_dict"])}
    states |= attributes["adapter_state_dicts"]
    if config is None or not all(isinstance(state, dict) for state in states.values()):
        raise ValueError(
            f"{folder} is damaged: it lacks its lora_config or an adapter; use another checkpoint"
        )
    return {role: LoadedAdapter(config, tensors) for role, tensors in states.items()}


ADAPTERS_OF: Mapping[bool, Callable[[Path, Mapping[str, Any]], dict[str, LoadedAdapter]]] = {
    # lora_only, as it was saved
    True: _from_folders,
    False: _from_full_actor,
}
