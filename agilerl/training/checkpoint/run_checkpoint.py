"""Run checkpoints on disk: which are complete, which to keep, and reading one back with care.

A run checkpoint is a folder ``iteration_<number>`` of the run directory::

    iteration_00000040/
        agent_0/ agent_1/ ...   the agents' checkpoints, as save_checkpoint writes them
        run_state.json          counters, positions in the data, random streams
        SHA256SUMS              of every other file; `sha256sum -c SHA256SUMS` checks them

It is written under a temporary name, ``.iteration_00000040.<8 hex digits>.tmp``, and renamed last,
so it is complete. ``iteration_00000040_evaluated`` is the same with the evaluation that a stop
postponed.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agilerl.algorithms.checkpoint.load import SavedAgent, read_saved_agent
from agilerl.checks import require
from agilerl.distributed import Ranks
from agilerl.llm.checkpoint.schema import DamagedCheckpointError, check, damaged, reading
from agilerl.training.checkpoint.appended_rows import count_appended, with_appended_rows
from agilerl.training.checkpoint.run_state import RunState
from agilerl.training.population import Population

STATE_FILE = "run_state.json"
SUMS_FILE = "SHA256SUMS"
_APPENDED = (
    " The training data begin with those of that run: allow_appended_rows=True goes on with them, "
    "and then with the rest."
)
_NAME = re.compile(r"(crashed_in_)?iteration_(\d+)(_evaluated)?")


@dataclass(frozen=True)
class RunCheckpoint:
    """A run checkpoint whose files are whole."""

    path: Path
    state: dict[str, Any]
    """Content of ``run_state.json``, with the rows that were appended to the data since."""
    appended: list[int]
    """How many these are, of each environment."""
    agents: list[SavedAgent]
    """Those of a population, in its order, which they fit."""


def checkpoint_name(iteration: int, evaluated: bool = False) -> str:
    """Folder of the checkpoint of an iteration; ``evaluated``: with its postponed evaluation."""
    return f"iteration_{iteration:08d}" + "_evaluated" * evaluated


def iteration_of(folder: Path) -> int:
    """The iteration in the name of a checkpoint, also of a crashed run's; -1 for other names."""
    found = _NAME.fullmatch(folder.name)
    return -1 if found is None else int(found[2])


def complete_checkpoints(directory: str | Path) -> list[Path]:
    """The complete run checkpoints in a run directory, oldest first; ``[]`` if there are none.

    To resume a run if there is one, and else to start it::

        resume_from = "run" if complete_checkpoints("run") else None
    """
    children = sorted(Path(os.path.expanduser(directory)).glob("iteration_*"))
    return [c for c in children if iteration_of(c) >= 0 and (c / STATE_FILE).is_file()]


def best_checkpoint(directory: str | Path) -> Path | None:
    """The complete run checkpoint with the highest fitness (the oldest such one), or None.

    Its fitness is that of the population's best agent at the last evaluation before it was written.
    """
    best = max(complete_checkpoints(directory), key=_fitness, default=None)
    return None if best is None or _fitness(best) == -math.inf else best


def _fitness(folder: Path) -> float:
    """What is noted in the checkpoint; minus infinity if nothing is, or it is damaged."""
    try:
        fitness = float(json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))["fitness"])
    except (OSError, ValueError, KeyError, TypeError):
        return -math.inf
    return -math.inf if math.isnan(fitness) else fitness


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
    raise FileNotFoundError(
        f"resume_from={str(resume_from)!r} holds no complete run checkpoint: pass the "
        "checkpoint_path of a run that had checkpoint_steps set, or one of its "
        "iteration_<number> folders; leave resume_from out to start a new run. From a "
        "crashed_in_iteration_<number> folder only agents can be loaded, with load_checkpoint"
    )


def read_checkpoint(
    path: Path,
    population: Population,
    env_name: str,
    ranks: Ranks,
    allow_appended_rows: bool = False,
) -> RunCheckpoint:
    """Read the checkpoint that a run is to be resumed from, on all ranks; changes nothing.

    Args:
        path: Its folder.
        population: Who trains, and on what.
        env_name: Of the environment.
        ranks: The processes that train together.
        allow_appended_rows: Whether the data may have more rows than those of the checkpoint.

    Raises:
        ValueError: If a file is missing, damaged or of another version, if it was saved in the
            middle of an iteration, or if it is a checkpoint of other agents or environments;
            naming what differs and what to do instead.
    """

    def read_run() -> tuple[dict[str, Any], list[int]]:
        state = _read_state(path)
        own = population.state_dict() | {"environment": env_name}
        grown, obstacle = state, ""
        if _difference(_run_identity(state), _run_identity(own)) is None:
            grown, obstacle = with_appended_rows(state, population.collectors)
        of_grown = _difference(_identity(grown), _identity(own))
        if allow_appended_rows:
            difference = of_grown
            remedy = f" allow_appended_rows=True does not help: {obstacle}." * bool(obstacle)
        else:
            difference = _difference(_identity(state), _identity(own))
            remedy = _APPENDED * (of_grown is None)
        require(
            difference is None,
            f"{path} is a checkpoint of another run: {difference}.{remedy} Pass the population and "
            "the environments that the run was started with, or leave resume_from out to start a "
            "new run.",
        )
        return grown, count_appended(state, grown)

    try:
        state, appended = ranks.on_all_ranks(read_run)
        agents = [
            read_saved_agent(agent, path / f"agent_{agent.index}") for agent in population.agents
        ]
    except (FileNotFoundError, DamagedCheckpointError) as error:
        raise ValueError(f"{error}; {_alternative(path)}") from error
    return RunCheckpoint(path, state, appended, agents)


def _read_state(path: Path) -> dict[str, Any]:
    """The content of ``run_state.json``, after checking that every file is as it was written."""
    _check_sums(path)
    file = path / STATE_FILE
    with reading(file):
        state: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    check(file, state, RunState)
    require(
        not state["in_iteration"],
        f"{path} was saved in the middle of iteration {state['iteration']}, which failed: a run "
        f"cannot be resumed from there; {_alternative(path)}, or load its agents with "
        "load_checkpoint, to start a new run with",
    )
    return state


def _alternative(path: Path) -> str:
    """What to resume from instead of the checkpoint at ``path``."""
    for older in reversed(complete_checkpoints(path.parent)):
        if iteration_of(older) < iteration_of(path):
            return f"resume from the one before it: resume_from={str(older)!r}"
    return "there is no older checkpoint beside it"


def _difference(theirs: Mapping[str, Any], own: Mapping[str, Any]) -> str | None:
    """The first thing that is another one in a checkpoint, with both values."""
    for what in {**theirs, **own}:
        if theirs.get(what) != own.get(what):
            return f"{what}: {theirs.get(what)!r} there, {own.get(what)!r} here"
    return None


def _run_identity(state: Mapping[str, Any]) -> dict[str, Any]:
    """Who trains in what, by the name that an error gives it."""
    return {
        "agents": [f"{agent['algo']} {agent['index']}" for agent in state["agents"]],
        "environment of each agent": [agent["environment"] for agent in state["agents"]],
        "environment": state["environment"],
    }


def _identity(state: Mapping[str, Any]) -> dict[str, Any]:
    """What does not change while a run trains, by the name that an error gives it."""
    identity = _run_identity(state)
    for number, env in enumerate(state["environments"]):
        data = {name: env["position"].get(name) for name in ("rows", "seed")} | env
        del data["position"]
        identity |= {f"{name} of environment {number}": value for name, value in data.items()}
    return identity


def write_sums(folder: Path) -> None:
    """Write ``SHA256SUMS`` for all files in ``folder``."""
    (folder / SUMS_FILE).write_text("\n".join([*_sums(folder), ""]), encoding="utf-8")


def _check_sums(path: Path) -> None:
    file = path / SUMS_FILE
    require(file.is_file(), f"{file} is missing", DamagedCheckpointError)
    noted = file.read_text("utf-8", "replace").splitlines()
    if changed := {*noted} ^ {*_sums(path)}:
        name = min(line.partition("  ")[2] for line in changed)
        damaged(path / name, f"it is missing, or not what was written (see {file})")


def _sums(folder: Path) -> list[str]:
    """The lines of ``SHA256SUMS``: every file below ``folder`` but the list itself."""
    lines = []
    for file in sorted(folder.rglob("*")):
        if file.is_file() and file.name != SUMS_FILE:
            with file.open("rb") as content:
                digest = hashlib.file_digest(content, "sha256").hexdigest()
            lines.append(f"{digest}  {file.relative_to(folder).as_posix()}")
    return lines
