"""The optimizer's state in one file per process, as ZeRO keeps it, read back by any number of them.

A shard is what one process holds: of each parameter with elements there, the moments of these
elements, flat. The files are safetensors, so a stranger's checkpoint runs no code (DeepSpeed's own
are pickled)::

    save_checkpoint/
        optimizer_rank_00000.safetensors    "3.exp_avg": moments of elements of parameter 3,
        optimizer_rank_00001.safetensors    "step": the count of steps; where the elements belong
                                            is in the header
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

FOLDER = "save_checkpoint"
_PLACES = "places"


@dataclass(frozen=True)
class Fragment:
    """What a shard holds of one parameter."""

    shape: tuple[int, ...]
    """The parameter's."""
    start: int
    """First of its elements here, counted in the flattened parameter."""
    moments: dict[str, torch.Tensor]
    """By AdamW's names, ``(n,)`` each."""


@dataclass(frozen=True)
class Shard:
    """One process's part of the optimizer's state."""

    step: torch.Tensor | None
    """Scalar count of steps; None before the first, when there are no moments either."""
    fragments: dict[int, Fragment]
    """By the parameter's number."""


def shard_file(folder: Path, rank: int) -> Path:
    """The file of a process below a checkpoint's folder."""
    return folder / FOLDER / f"optimizer_rank_{rank:05d}.safetensors"


def write_shard(folder: Path, rank: int, shard: Shard) -> None:
    """Write one process's file below a checkpoint's folder, and flush it to disk."""
    file = shard_file(folder, rank)
    file.parent.mkdir(exist_ok=True)
    tensors = {
        f"{number}.{name}": values.detach().cpu().contiguous()
        for number, fragment in shard.fragments.items()
        for name, values in fragment.moments.items()
    }
    if shard.step is not None:
        tensors["step"] = shard.step.detach().cpu()
    places = {n: {"shape": f.shape, "start": f.start} for n, f in shard.fragments.items()}
    save_file(tensors, file, metadata={"format": "pt", _PLACES: json.dumps(places)})
    # On shared storage only the machine that has written a file can flush it.
    with file.open("rb") as written:
        os.fsync(written.fileno())


def read_shards(
    folder: Path, processes: int, parameters: int
) -> dict[int, dict[str, torch.Tensor]]:
    """Put the moments of all processes together.

    Args:
        folder: The checkpoint's.
        processes: How many saved it.
        parameters: How many they trained.

    Returns:
        By the parameter's number ``step`` and moments in its shape, as an optimizer's
        ``state_dict()["state"]``.

    Raises:
        ValueError: If a file is missing, damaged, or of another checkpoint.
    """
    shards = [_read_shard(shard_file(folder, rank)) for rank in range(processes)]
    return assemble(shards, parameters)


def assemble(shards: Iterable[Shard], parameters: int) -> dict[int, dict[str, torch.Tensor]]:
    """Put the shards of all processes together; see :func:`read_shards`."""
    state: dict[int, dict[str, torch.Tensor]] = {}
    missing: dict[int, int] = {}
    for shard in shards:
        for number, fragment in shard.fragments.items():
            if number not in state:
                missing[number] = math.prod(fragment.shape)
                state[number] = {} if shard.step is None else {"step": shard.step.clone()}
            end = fragment.start
            for name, values in fragment.moments.items():
                whole = state[number].setdefault(name, values.new_zeros(fragment.shape))
                end = fragment.start + len(values)
                whole.view(-1)[fragment.start : end] = values
            missing[number] -= end - fragment.start
    # Before the first step nobody has moments.
    numbers = range(parameters if state else 0)
    short = sorted(
        {number for number in numbers if missing.get(number)} | state.keys() ^ {*numbers}
    )
    if short:
        raise ValueError(
            f"the optimizer's shards lack elements of the parameters {short[:8]}, or hold them "
            "twice; use another checkpoint, or load without load_optimizer"
        )
    return dict(sorted(state.items()))


def _read_shard(file: Path) -> Shard:
    if not file.is_file():
        raise ValueError(
            f"{file} is missing; use another checkpoint, or load without load_optimizer"
        )
    try:
        with safe_open(file, framework="pt") as stored:
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
            places = json.loads(stored.metadata()[_PLACES])
        step = tensors.pop("step", None)
        if places.keys() != {name.partition(".")[0] for name in tensors}:
            raise ValueError("header and tensors are of different parameters")
        return Shard(step, {int(n): _fragment(n, place, tensors) for n, place in places.items()})
    except Exception as error:
        raise ValueError(
            f"{file} is damaged ({error!r}); use another checkpoint, or load without load_optimizer"
        ) from error


def _fragment(
    number: str, place: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> Fragment:
    moments = {
        name.partition(".")[2]: values
        for name, values in tensors.items()
        if name.partition(".")[0] == number
    }
    shape, start = tuple(int(size) for size in place["shape"]), int(place["start"])
    for name, values in moments.items():
        if values.dim() != 1 or not 0 <= start <= start + len(values) <= math.prod(shape):
            raise ValueError(f"{number}.{name} does not fit into {shape}")
    return Fragment(shape, start, moments)
