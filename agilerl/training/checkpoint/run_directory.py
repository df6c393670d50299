"""The folder of one run: configuration, and checkpoints that are complete or not there at all."""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from agilerl.distributed import Ranks
from agilerl.llm.checkpoint.atomic_directory import (
    lock_directory,
    sync_directory,
    sync_tree,
    unlock_directory,
)
from agilerl.training.checkpoint.locks import lock_for_a_run
from agilerl.training.checkpoint.plain_json import write_json
from agilerl.training.checkpoint.run_checkpoint import (
    PARTIAL,
    STATE_FILE,
    RunCheckpoint,
    complete_checkpoints,
    iteration_of,
    prune_checkpoints,
    write_sums,
)
from agilerl.training.protocols import Agent

logger = logging.getLogger(__name__)

# What a run leaves in its folder, but for W&B's folder, which tells runs apart itself.
_RUN_ENTRIES = (
    "metrics.csv",
    "completions.jsonl",
    "config.json",
    "tensorboard",
    "iteration_*",
    "crashed_in_iteration_*",
)


class RunDirectory:
    """Where one run writes; a context, in which no other run can write there.

    Args:
        name: Name of the run, see :func:`run_name`.
        path: The folder; ``runs/<name>`` when None. What an earlier run left there is moved to
            ``earlier_run_1`` (2, 3, ...) inside it, never overwritten.
        resumed: The checkpoint from which a run goes on. If it lies in ``path``, what the run left
            there stays, but for checkpoints of later iterations, which are moved likewise.
        ranks: The processes of the run, which must all call every method; rank 0 writes.

    Raises:
        RuntimeError: If a living run, in whatever process, writes to ``path``.
    """

    def __init__(
        self,
        name: str,
        path: str | Path | None = None,
        resumed: RunCheckpoint | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.name = name
        self._ranks = Ranks() if ranks is None else ranks
        self._lock: int | None = None
        self.path = self._ranks.on_rank_zero(lambda: self._take(path, resumed))

    def _take(self, path: str | Path | None, resumed: RunCheckpoint | None) -> Path:
        taken = _make_unused(Path("runs") / self.name) if path is None else Path(path)
        taken.mkdir(parents=True, exist_ok=True)
        self._lock = lock_for_a_run(
            "checkpoint_path", taken, lock_directory, "two runs would mix their files"
        )
        try:
            if resumed is not None and lies_in(resumed.path, path):
                _move_later_checkpoints(taken, resumed.iteration)
            else:
                _move_earlier_run(taken)
        except BaseException:
            self.close()
            raise
        return taken

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Let other runs have the directory."""
        if self._lock is not None:
            unlock_directory(self._lock)
            self._lock = None

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write ``config.json``; values that JSON does not know are written as their text."""

        def write() -> None:
            partial = self.path / "config.json.partial"
            write_json(partial, config, exact=False)
            partial.replace(self.path / "config.json")

        self._ranks.on_rank_zero(write)

    def newest_checkpoint(self) -> Path | None:
        """The newest complete checkpoint, None if there is none."""
        return next(reversed(complete_checkpoints(self.path)), None)

    def write_checkpoint(
        self, name: str, agents: Sequence[Agent], run_state: Mapping[str, Any]
    ) -> Path:
        """Save every agent to ``<name>/agent_<index>`` and the state to ``<name>/run_state.json``.

        What a checkpoint holds: :mod:`agilerl.training.checkpoint.run_checkpoint`. One that exists
        already is left as it is.

        Returns:
            The checkpoint's folder.

        Raises:
            OSError: If it cannot be written; nothing is left of it then.
            TypeError: If the state holds what JSON does not know.
        """
        target = self.path / name
        partial = self.path / f"{name}{PARTIAL}"
        if self._ranks.on_rank_zero(target.exists):
            return target

        def make_room() -> None:
            if partial.exists():  # of a save that was killed
                shutil.rmtree(partial)
            partial.mkdir()

        def complete() -> None:
            # From the middle of an iteration no run goes on: then the agents count, not the state.
            write_json(partial / STATE_FILE, run_state, exact=not run_state["in_iteration"])
            write_sums(partial)
            sync_tree(partial)
            partial.rename(target)
            sync_directory(self.path)

        with _noting(agents, target):
            try:
                self._ranks.on_rank_zero(make_room)
                for agent in agents:
                    agent.save_checkpoint(partial / f"agent_{agent.index}")
                self._ranks.on_rank_zero(complete)
            except BaseException:
                if self._ranks.rank == 0:
                    shutil.rmtree(partial, ignore_errors=True)
                raise
        return target

    def prune(self, keep: int) -> None:
        """Remove old checkpoints, see :func:`prune_checkpoints`; failing to is only logged."""
        if self._ranks.rank > 0:
            return
        try:
            prune_checkpoints(self.path, keep)
        except OSError as error:
            logger.warning("Old checkpoints in %s could not be removed: %s", self.path, error)


@contextlib.contextmanager
def _noting(agents: Sequence[Agent], checkpoint: Path) -> Iterator[None]:
    """Agents note under which name they were saved: the last one, or none if saving fails."""
    before = [agent.last_checkpoint for agent in agents]
    try:
        yield
    except BaseException:
        for agent, noted in zip(agents, before, strict=True):
            agent.last_checkpoint = noted
        raise
    for agent in agents:
        agent.last_checkpoint = str(checkpoint / f"agent_{agent.index}")


def lies_in(checkpoint: Path, run_directory: str | Path | None) -> bool:
    """Whether a run that goes on from ``checkpoint`` in ``run_directory`` goes on in its own."""
    return (
        run_directory is not None and checkpoint.resolve().parent == Path(run_directory).resolve()
    )


def run_name(agents: Sequence[Agent], env_name: str) -> str:
    """``<ALGO>-<environment>-<date>-<time>``, safe as a file name."""
    algos = "+".join(dict.fromkeys(agent.algo for agent in agents))
    environment = re.sub(r"[^\w.+-]+", "_", env_name).strip("._") or "env"
    return f"{algos}-{environment}-{time.strftime('%Y%m%d-%H%M%S')}"


def _make_unused(path: Path) -> Path:
    """Create ``path``, or ``path-2``, ``path-3`` ... when runs started in the same second."""
    candidate, number = path, 1
    while True:
        try:
            candidate.mkdir(parents=True)
            return candidate
        except FileExistsError:
            number += 1
            candidate = path.with_name(f"{path.name}-{number}")


def _move_earlier_run(path: Path) -> None:
    leftovers = [entry for pattern in _RUN_ENTRIES for entry in sorted(path.glob(pattern))]
    if leftovers:
        logger.warning(
            "%s holds an earlier run: its metrics, samples and checkpoints were moved to %s",
            path,
            _move_aside(path, leftovers),
        )


def _move_later_checkpoints(path: Path, iteration: int) -> None:
    """Move what was saved after ``iteration``; remove what is not complete."""
    later = []
    for entry in sorted([*path.glob("iteration_*"), *path.glob("crashed_in_iteration_*")]):
        number = iteration_of(entry)
        if entry.name.endswith(PARTIAL):
            shutil.rmtree(entry, ignore_errors=True)
        elif entry.name.startswith("crashed_in") or (number is not None and number > iteration):
            later.append(entry)
    if later:
        logger.warning(
            "The run goes on after iteration %d: what was saved later was moved to %s",
            iteration,
            _move_aside(path, later),
        )


def _move_aside(path: Path, entries: Sequence[Path]) -> Path:
    """Move entries of ``path`` into its next unused ``earlier_run_<number>``."""
    number = 1
    while (destination := path / f"earlier_run_{number}").exists():
        number += 1
    destination.mkdir()
    for entry in entries:
        entry.rename(destination / entry.name)
    return destination
