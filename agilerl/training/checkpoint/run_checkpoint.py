"""Run checkpoints on disk: which are complete, which to keep, and reading one back with care.

A run checkpoint is a folder ``iteration_<number>`` of the run directory (with ``_evaluated`` after
it, if a stop kept the run from the evaluation that was due, and it was made up for later)::

    iteration_00000040/
        agent_0/ agent_1/ ...   the agents' checkpoints, as save_checkpoint writes them
        run_state.json          counters, positions in the data, random streams
        SHA256SUMS              of every other file; `sha256sum -c SHA256SUMS` checks them

It is written as ``iteration_00000040.partial`` and renamed last, so a folder without that suffix is
complete.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STATE_FILE = "run_state.json"
SUMS_FILE = "SHA256SUMS"
FORMAT = 1
PARTIAL = ".partial"
_NAME = re.compile(r"iteration_(\d+)(_evaluated)?")
_STATE: Mapping[str, type | tuple[type, ...]] = {
    "run": str,
    "environment": str,
    "iteration": int,
    "in_iteration": bool,
    "wall_seconds": (int, float),
    "agents": list,
    "environments": list,
    "random": dict,
    "log": dict,
}
_AGENT: Mapping[str, type] = {
    "index": int,
    "algo": str,
    "steps": int,
    "steps_of_run": int,
    "epochs_of_run": int,
    "flat_iterations": int,
    "environment": int,
}


@dataclass(frozen=True)
class RunCheckpoint:
    """A run checkpoint whose files are whole."""

    path: Path
    state: dict[str, Any]
    """Content of ``run_state.json``."""

    @property
    def iteration(self) -> int:
        """The iteration after which it was written."""
        return int(self.state["iteration"])


def checkpoint_name(iteration: int, evaluated_later: bool = False) -> str:
    """Folder of the checkpoint written after an iteration, and after an evaluation made up for."""
    return f"iteration_{iteration:08d}" + "_evaluated" * evaluated_later


def iteration_of(folder: Path) -> int | None:
    """The iteration in a :func:`checkpoint_name`; None for other names."""
    found = _NAME.fullmatch(folder.name)
    return None if found is None else int(found[1])


def complete_checkpoints(directory: str | Path) -> list[Path]:
    """The complete run checkpoints in a run directory, oldest first; ``[]`` if there are none.

    To go on where there is something to go on from::

        resume_from = "run" if complete_checkpoints("run") else None
    """
    found = [
        (number, child)
        for child in Path(os.path.expanduser(directory)).glob("iteration_*")
        if (number := iteration_of(child)) is not None and (child / STATE_FILE).is_file()
    ]
    return [child for _, child in sorted(found)]


def best_checkpoint(directory: str | Path) -> Path | None:
    """The complete run checkpoint with the highest fitness (the oldest such one), or None.

    Its fitness is that of the population's best agent at the last evaluation before it was written.
    """
    best, highest = None, float("-inf")
    for child in complete_checkpoints(directory):
        fitness = _fitness(child)
        if fitness is not None and fitness > highest:
            best, highest = child, fitness
    return best


def prune_checkpoints(directory: Path, keep: int) -> None:
    """Remove all complete checkpoints but the last ``keep`` and the best one."""
    children = complete_checkpoints(directory)
    kept = {*children[-keep:], best_checkpoint(directory)}
    for child in children:
        if child not in kept:
            # Removing takes a while: a kill meanwhile must not leave half of something complete.
            doomed = child.with_name(child.name + PARTIAL)
            child.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def find_checkpoint(resume_from: str | Path) -> Path:
    """The checkpoint that ``resume_from`` names: itself, or its newest complete child.

    Raises:
        FileNotFoundError: If there is none.
    """
    path = Path(os.path.expanduser(resume_from))
    if (path / STATE_FILE).is_file():
        return path
    children = complete_checkpoints(path)
    if children:
        return children[-1]
    message = (
        f"resume_from={str(resume_from)!r} holds no complete run checkpoint: pass the "
        "checkpoint_path of a run that had checkpoint_steps set, or one of its "
        "iteration_<number> folders; leave resume_from out to start a new run"
    )
    crashed = sorted(path.glob("crashed_in_iteration_*"))
    if crashed:
        message += (
            f". {crashed[-1]} was saved in the middle of an iteration: its agents can be loaded "
            "with load_checkpoint, to start a new run with"
        )
    raise FileNotFoundError(message)


def read_checkpoint(path: Path) -> RunCheckpoint:
    """Read a checkpoint's state after checking that every file is as it was written.

    Raises:
        ValueError: Naming the file that is missing, damaged or of another version, and what to
            resume from instead.
    """
    _check_sums(path)
    file = path / STATE_FILE
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise damaged(path, f"{file} is damaged: {error}") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        found = state.get("format") if isinstance(state, dict) else type(state).__name__
        raise damaged(path, f"{file} has format {found!r}, but this version reads format {FORMAT}")
    wrong = _wrong_types(state, _STATE)
    if not wrong:
        wrong = [
            f"agents[{i}]" + ("" if not isinstance(agent, dict) else f".{name}")
            for i, agent in enumerate(state["agents"])
            for name in (_wrong_types(agent, _AGENT) if isinstance(agent, dict) else ("",))
        ]
        if Path(state["run"]).name != state["run"]:  # it names a folder
            wrong.append("run")
    if wrong:
        raise damaged(path, f"{file} is damaged: {', '.join(wrong)} missing or of a wrong type")
    if state["in_iteration"]:
        raise ValueError(
            f"{path} was saved in the middle of iteration {state['iteration']}, which failed: a "
            "run cannot go on from there; "
            + (_older(path) or "load its agents with load_checkpoint and start a new run")
        )
    return RunCheckpoint(path, state)


def damaged(path: Path, what: str) -> ValueError:
    """An error that says what is wrong with the checkpoint at ``path``, and what to use instead."""
    return ValueError(f"{what}; {_older(path) or 'there is no older checkpoint beside it'}")


def write_sums(folder: Path) -> None:
    """Write ``SHA256SUMS`` for all files in ``folder``."""
    lines = [f"{digest}  {name}\n" for name, digest in _sums(folder).items()]
    (folder / SUMS_FILE).write_text("".join(lines), encoding="utf-8")


def _check_sums(path: Path) -> None:
    file = path / SUMS_FILE
    if not file.is_file():
        raise damaged(path, f"{file} is missing")
    pairs = [line.split("  ", 1) for line in file.read_text("utf-8", "replace").splitlines()]
    noted = {pair[1]: pair[0] for pair in pairs if len(pair) == 2}
    found = _sums(path)
    for name in sorted(noted.keys() | found.keys()):
        if name not in found:
            raise damaged(path, f"{path / name} is missing")
        if name not in noted:
            raise damaged(path, f"{path / name} is not listed in {file}")
        if noted[name] != found[name]:
            raise damaged(
                path, f"{path / name} is damaged: it is not what was written (see {file})"
            )


def _sums(folder: Path) -> dict[str, str]:
    """SHA-256 of every file below ``folder`` but the list itself, by relative path."""
    sums = {}
    for file in sorted(entry for entry in folder.rglob("*") if entry.is_file()):
        name = file.relative_to(folder).as_posix()
        if name != SUMS_FILE:
            with file.open("rb") as content:
                sums[name] = hashlib.file_digest(content, "sha256").hexdigest()
    return sums


def _older(path: Path) -> str | None:
    """Advice to use the checkpoint before ``path``, if there is one."""
    found = re.search(r"iteration_(\d+)", path.name)
    if found is None:
        return None
    number = int(found[1])
    older = [c for c in complete_checkpoints(path.parent) if (iteration_of(c) or 0) < number]
    return f"resume from the one before it: resume_from={str(older[-1])!r}" if older else None


def _fitness(folder: Path) -> float | None:
    try:
        value = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))["fitness"]
    except (OSError, ValueError, KeyError, TypeError):  # a damaged one is not the best
        return None
    return float(value) if isinstance(value, int | float) else None


def _wrong_types(
    content: Mapping[str, Any], expected: Mapping[str, type | tuple[type, ...]]
) -> list[str]:
    return [name for name, kind in expected.items() if not isinstance(content.get(name), kind)]
