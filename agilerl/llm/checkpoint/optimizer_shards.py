"""The optimizer's state in one file per process, as ZeRO keeps it, read by any number of processes.

The files are safetensors, so reading them runs no code (DeepSpeed's own are pickled)::

    save_checkpoint/
        optimizer_rank_00000.safetensors    "3.exp_avg": moments of elements of parameter 3,
        optimizer_rank_00001.safetensors    "3.step": its count of steps; the header says where in
                                            the parameter the elements are
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from annotated_types import Predicate
from safetensors import safe_open
from safetensors.torch import save_file

from agilerl.llm.checkpoint.schema import AdamWMoments, FragmentHeader, check, damaged, reading

FOLDER = "save_checkpoint"
MOMENTS = ("exp_avg", "exp_avg_sq")
_HEADER = "places"


@dataclass(frozen=True)
class Fragment:
    """What a process holds of one parameter's state."""

    shape: tuple[int, ...]
    """The parameter's."""
    start: int
    """First of its elements here, counted in the flattened parameter."""
    state: dict[str, torch.Tensor]
    """The scalar ``step``, and the moments of these elements, ``(n,)`` each."""


# What one process holds, by the parameter's number; nothing before the first step.
Shard = Mapping[int, Fragment]


def shard_file(folder: Path, rank: int) -> Path:
    """The file of a process below a checkpoint's folder."""
    return folder / FOLDER / f"optimizer_rank_{rank:05d}.safetensors"


def write_shard(folder: Path, rank: int, shard: Shard) -> None:
    """Write one process's file below a checkpoint's folder, and flush it to disk."""
    file = shard_file(folder, rank)
    file.parent.mkdir(exist_ok=True)
    tensors = {
        f"{number}.{name}": values.detach().to(
            "cpu", copy=True
        )  # safetensors refuses shared memory
        for number, fragment in shard.items()
        for name, values in fragment.state.items()
    }
    header = {n: {"shape": f.shape, "start": f.start} for n, f in shard.items()}
    save_file(tensors, file, metadata={"format": "pt", _HEADER: json.dumps(header)})
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
        DamagedCheckpointError: If a file is missing, damaged, or of another checkpoint.
    """
    found: defaultdict[int, list[Fragment]] = defaultdict(list)
    for rank in range(processes):
        for number, fragment in _read_shard(shard_file(folder, rank)).items():
            found[number].append(fragment)
    # Before the first step nobody has moments.
    wanted = range(parameters if found else 0)
    state, bad = {}, sorted(found.keys() - {*wanted})
    for number in wanted:
        fragments = sorted(found[number], key=lambda fragment: fragment.start)
        parts, shapes = [f.state for f in fragments], {f.shape for f in fragments}
        ends = itertools.accumulate((len(part["exp_avg"]) for part in parts), initial=0)
        starts = [f.start for f in fragments]
        if len(shapes) != 1 or [*starts, math.prod(*shapes)] != [*ends]:
            bad.append(number)
            continue
        state[number] = {"step": parts[0]["step"].clone()} | {
            name: torch.cat([part[name] for part in parts]).view(*shapes) for name in MOMENTS
        }
    if bad:
        reason = f"its files lack elements of the parameters {bad[:8]}, or hold them twice"
        damaged(folder / FOLDER, reason)
    return state


def _read_shard(file: Path) -> Shard:
    if not file.is_file():
        damaged(file, "it is missing")
    with reading(file), safe_open(file, framework="pt") as stored:
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        header = json.loads(stored.metadata()[_HEADER])
    check(file, header, dict[Annotated[str, Predicate(str.isdecimal)], FragmentHeader], "header")
    shard = {}
    for number, place in header.items():
        names = {name: f"{number}.{name}" for name in ("step", *MOMENTS)}
        state = {name: tensors[key] for name, key in names.items() if key in tensors}
        check(file, state, AdamWMoments, number)
        if any(state[name].shape != (state["exp_avg"].numel(),) for name in MOMENTS):
            damaged(file, f"its moments of parameter {number} differ in size, or are not flat")
        shard[int(number)] = Fragment(tuple(place["shape"]), place["start"], state)
    return shard
