"""The optimizer's state in one file per process, as ZeRO keeps it, read by any number of processes.

A shard is what one process holds: of each parameter with elements there, the moments of these
elements, flat. The files are safetensors, so reading them runs no code (DeepSpeed's own are
pickled)::

    save_checkpoint/
        optimizer_rank_00000.safetensors    "3.exp_avg": moments of elements of parameter 3,
        optimizer_rank_00001.safetensors    "step": the count of steps ("3.step": where parameter
                                            groups count apart); the header says where in the
                                            parameter the elements are
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from agilerl.llm.checkpoint.schema import FragmentHeader, check, damaged, reading

FOLDER = "save_checkpoint"
MOMENTS = ("exp_avg", "exp_avg_sq")
_HEADER = "places"


@dataclass(frozen=True)
class Fragment:
    """What a shard holds of one parameter."""

    shape: tuple[int, ...]
    """The parameter's."""
    start: int
    """First of its elements here, counted in the flattened parameter."""
    moments: dict[str, torch.Tensor]
    """``exp_avg`` and ``exp_avg_sq``, ``(n,)`` each."""
    step: torch.Tensor | None = None
    """Scalar count of steps, where parameter groups count apart; None: the shard's."""


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
    tensors |= {f"{n}.step": f.step.cpu() for n, f in shard.fragments.items() if f.step is not None}
    if shard.step is not None:
        tensors["step"] = shard.step.detach().cpu()
    header = {n: {"shape": f.shape, "start": f.start} for n, f in shard.fragments.items()}
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
    shards = [_read_shard(shard_file(folder, rank)) for rank in range(processes)]
    return assemble(shards, parameters, folder / FOLDER)


def assemble(
    shards: Iterable[Shard], parameters: int, folder: Path = Path(FOLDER)
) -> dict[int, dict[str, torch.Tensor]]:
    """Put the shards of a folder together; see :func:`read_shards`."""
    found: dict[int, list[Fragment]] = {}
    step: torch.Tensor | None = None
    for shard in shards:
        step = shard.step if step is None else step
        for number, fragment in shard.fragments.items():
            found.setdefault(number, []).append(fragment)
    # Before the first step nobody has moments.
    wanted = range(parameters if found else 0)
    bad = sorted({n for n in wanted if not _complete(found.get(n, []))} | found.keys() - {*wanted})
    if bad or (found and step is None):
        damaged(folder, f"its files lack elements of the parameters {bad[:8]}, or hold them twice")
    state = {}
    for number, fragments in sorted(found.items()):
        fragments.sort(key=lambda fragment: fragment.start)
        own = step if fragments[0].step is None else fragments[0].step
        state[number] = {"step": own.clone()} | {  # type: ignore[union-attr]
            name: torch.cat([f.moments[name] for f in fragments]).view(fragments[0].shape)
            for name in fragments[0].moments
        }
    return state


def _complete(fragments: list[Fragment]) -> bool:
    """Whether fragments of a parameter, one behind the other, are all of it."""
    end = 0
    for fragment in sorted(fragments, key=lambda fragment: fragment.start):
        sizes = {len(values) for values in fragment.moments.values()}
        if fragment.start != end or len(sizes) != 1 or fragment.shape != fragments[0].shape:
            return False
        end += sizes.pop()
    return bool(fragments) and end == math.prod(fragments[0].shape)


def _read_shard(file: Path) -> Shard:
    if not file.is_file():
        damaged(file, "it is missing")
    with reading(file), safe_open(file, framework="pt") as stored:
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        header = json.loads(stored.metadata()[_HEADER])
    check(file, header, dict[Annotated[str, str.isdecimal, "a number"], FragmentHeader], "header")
    step = tensors.pop("step", None)
    own_steps = {n: tensors.pop(f"{n}.step", None) for n in header}
    names = {f"{number}.{name}" for number in header for name in MOMENTS}
    if names != tensors.keys() or any(t.dim() != 1 for t in tensors.values()):
        damaged(file, "its header and its tensors differ")
    return Shard(
        step,
        {
            int(n): Fragment(
                tuple(place["shape"]),
                place["start"],
                {m: tensors[f"{n}.{m}"] for m in MOMENTS},
                own_steps[n],
            )
            for n, place in header.items()
        },
    )
