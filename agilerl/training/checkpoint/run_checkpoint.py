"""Run checkpoints on disk: which are complete, which to keep, and reading one back with care.

A run checkpoint is a folder ``iteration_<number>`` of the run directory::

    iteration_00000040/
        agent_0/ agent_1/ ...   the agents' checkpoints, as save_checkpoint writes them
        run_state.json          counters, positions in the data, random streams
        SHA256SUMS              of every other file; `sha256sum -c SHA256SUMS` checks them

It is written as ``iteration_00000040.partial`` and renamed last, so a folder without that suffix is
complete. ``iteration_00000040_evaluated`` is the same with the evaluation that a stop postponed.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agilerl.llm.checkpoint.schema import mismatch
from agilerl.training.checkpoint.run_state import RunState

STATE_FILE = "run_state.json"
SUMS_FILE = "SHA256SUMS"
FORMAT = 1
PARTIAL = ".partial"
_NAME = re.compile(r"iteration_(\d+)(_evaluated)?")
_AGENTS_ONLY = "load its agents with load_checkpoint, to start a new run with"


@dataclass(frozen=True)
class RunCheckpoint:
    """A run checkpoint whose files are whole."""

    path: Path
    state: dict[str, Any]
    """Content of ``run_state.json``."""


def checkpoint_name(iteration: int, evaluated: bool = False) -> str:
    """Folder of the checkpoint of an iteration; ``evaluated``: with its postponed evaluation."""
    return f"iteration_{iteration:08d}" + "_evaluated" * evaluated


def iteration_of(folder: Path) -> int | None:
    """The iteration in a :func:`checkpoint_name`; None for other names."""
    found = _NAME.fullmatch(folder.name)
    return None if found is None else int(found[1])


def complete_checkpoints(directory: str | Path) -> list[Path]:
    """The complete run checkpoints in a run directory, oldest first; ``[]`` if there are none.

    To resume a run if there is one, and else to start it::

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
    best = max(complete_checkpoints(directory), key=_fitness, default=None)
    return None if best is None or _fitness(best) == -math.inf else best


def find_checkpoint(resume_from: str | Path) -> Path:
    """The checkpoint that ``resume_from`` names: itself, or its newest complete child.

    Raises:
        FileNotFoundError: If there is none.
    """
    path = Path(os.path.expanduser(resume_from))
    if (path / STATE_FILE).is_file():
        return path
    if children := complete_checkpoints(path):
        return children[-1]
    message = (
        f"resume_from={str(resume_from)!r} holds no complete run checkpoint: pass the "
        "checkpoint_path of a run that had checkpoint_steps set, or one of its "
        "iteration_<number> folders; leave resume_from out to start a new run"
    )
    for crashed in sorted(path.glob("crashed_in_iteration_*"))[-1:]:
        message += f". {crashed} was saved in the middle of an iteration: {_AGENTS_ONLY}"
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
    found = state.get("format") if isinstance(state, dict) else type(state).__name__
    if found != FORMAT:
        raise damaged(path, f"{file} has format {found!r}, but this version reads format {FORMAT}")
    wrong = mismatch(state, RunState)
    if wrong is None and Path(state["run"]).name != state["run"]:
        wrong = f"its run is {state['run']!r}, not the name of a folder"
    if wrong is not None:
        raise damaged(path, f"{file} is damaged: {wrong}")
    if state["in_iteration"]:
        raise ValueError(
            f"{path} was saved in the middle of iteration {state['iteration']}, which failed: a "
            f"run cannot be resumed from there; {_older(path) or _AGENTS_ONLY}"
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
    lines = [line.split("  ", 1) for line in file.read_text("utf-8", "replace").splitlines()]
    noted = {line[1]: line[0] for line in lines if len(line) == 2}
    found = _sums(path)
    for name in sorted(noted.keys() | found.keys()):
        if noted.get(name) != found.get(name):
            problem = "damaged: it is not what was written" if name in found else "missing"
            raise damaged(path, f"{path / name} is {problem} (see {file})")


def _sums(folder: Path) -> dict[str, str]:
    """SHA-256 of every file below ``folder`` but the list itself, by relative path."""
    sums = {}
    for file in sorted(entry for entry in folder.rglob("*") if entry.is_file()):
        with file.open("rb") as content:
            digest = hashlib.file_digest(content, "sha256")
        sums[file.relative_to(folder).as_posix()] = digest.hexdigest()
    sums.pop(SUMS_FILE, None)
    return sums


def _older(path: Path) -> str | None:
    """Advice to use the checkpoint before ``path``, if there is one."""
    found = re.search(r"iteration_(\d+)", path.name)
    number = -1 if found is None else int(found[1])
    older = [c for c in complete_checkpoints(path.parent) if (iteration_of(c) or 0) < number]
    return f"resume from the one before it: resume_from={str(older[-1])!r}" if older else None


def _fitness(folder: Path) -> float:
    """What is noted in the checkpoint; minus infinity if nothing is, or it is damaged."""
    try:
        value = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))["fitness"]
    except (OSError, ValueError, KeyError, TypeError):
        return -math.inf
    # No comparison with nan holds.
    return float(value) if isinstance(value, int | float) and value > -math.inf else -math.inf
