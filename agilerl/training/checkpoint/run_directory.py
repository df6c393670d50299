"""The folder of one run: configuration, and checkpoints that are complete or not there at all."""

from __future__ import annotations

import contextlib
import itertools
import logging
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agilerl.distributed import Ranks
from agilerl.llm.checkpoint.atomic_directory import atomic_directory, lock_name, unlock_name
from agilerl.training.checkpoint.run_checkpoint import (
    STATE_FILE,
    RunCheckpoint,
    best_checkpoint,
    complete_checkpoints,
    iteration_of,
    write_sums,
)
from agilerl.training.checkpoint.run_state import check_plain, write_json
from agilerl.training.protocols import Agent

logger = logging.getLogger(__name__)

# What a run leaves in its folder, but for W&B's folder, which has a folder per run.
_LOGS = ("metrics.csv", "completions.jsonl", "config.json", "lineage.json", "tensorboard")


class RunDirectory(contextlib.ExitStack):
    """Where one run writes; a context, in which no other run can write there.

    Args:
        name: Name of the run.
        path: The folder; None: ``runs/<name>`` (``-2``, ``-3`` ... where runs start in the same
            second). What an earlier run left there is moved to ``earlier_run_1`` (2, 3, ...) inside
            it, never overwritten.
        resumed: The checkpoint that a run is resumed from. If it lies in ``path``, what the run
            left there stays, but for checkpoints of later iterations, which are moved likewise.
        ranks: The processes of the run, which must all call every method; rank 0 writes.

    Raises:
        RuntimeError: If another run that has not ended, in any process, writes there.
    """

    def __init__(
        self, name: str, path: str | Path | None, resumed: RunCheckpoint | None, ranks: Ranks
    ) -> None:
        super().__init__()
        self.name, self._ranks = name, ranks
        self.path = ranks.on_rank_zero(lambda: self._take(path, resumed))

    def _take(self, path: str | Path | None, resumed: RunCheckpoint | None) -> Path:
        if path is None:
            for number in itertools.count(1):
                taken = Path("runs") / (self.name + f"-{number}" * (number > 1))
                with contextlib.suppress(FileExistsError):
                    taken.mkdir(parents=True)
                    break
        else:
            taken = Path(path)
            taken.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as lock:
            lock_until_closed(lock, "checkpoint_path", taken, taken / "run")
            if resumed is not None and lies_in(resumed.path, path):
                _move_aside(taken, "what was saved later", after=resumed.state["iteration"])
            else:
                _move_aside(taken, "an earlier run", _LOGS)
            self.enter_context(lock.pop_all())
        return taken

    def write_checkpoint(
        self, name: str, agents: Sequence[Agent], run_state: Mapping[str, Any]
    ) -> Path:
        """Save agents and state, see :mod:`agilerl.training.checkpoint.run_checkpoint`.

        Returns:
            The checkpoint's folder. One that exists already is left as it is.

        Raises:
            OSError: If it cannot be written; nothing is left of it then.
            TypeError: If the state holds what JSON does not know.
        """
        target = self.path / name
        if self._ranks.on_rank_zero(target.exists):
            return target
        noted = [agent.last_checkpoint for agent in agents]
        try:
            with contextlib.ExitStack() as directory:  # rank 0's
                folder = self._ranks.on_rank_zero(
                    lambda: directory.enter_context(atomic_directory(target, STATE_FILE))
                )
                for agent in agents:
                    agent.save_checkpoint(folder / f"agent_{agent.index}")

                def complete() -> None:
                    if not run_state["in_iteration"]:  # otherwise the agents count, not the state
                        check_plain(run_state, "run_state")
                    write_json(folder / STATE_FILE, run_state)
                    write_sums(folder)
                    directory.close()

                self._ranks.on_rank_zero(complete)
            noted = [str(target / f"agent_{agent.index}") for agent in agents]
        finally:
            # Not the temporary folder that they were saved to.
            for agent, path in zip(agents, noted, strict=True):
                agent.last_checkpoint = path
        return target

    def prune(self, keep: int) -> None:
        """Remove all checkpoints but the last ``keep`` and the best; failing to is only logged."""
        if self._ranks.rank > 0:
            return
        try:
            for child in {*complete_checkpoints(self.path)[:-keep]} - {best_checkpoint(self.path)}:
                # Removing takes a while, and a kill meanwhile must not leave half of a checkpoint.
                doomed = child.with_name(f".{child.name}.removed.tmp")
                child.rename(doomed)
                shutil.rmtree(doomed, ignore_errors=True)
        except OSError as error:
            logger.warning("Old checkpoints in %s could not be removed: %s", self.path, error)


def lock_until_closed(stack: contextlib.ExitStack, argument: str, path: Path, name: Path) -> None:
    """Lock ``name`` for the ``path`` that ``argument`` gives, until ``stack`` is closed.

    Raises:
        RuntimeError: If another run that has not ended, in any process, uses it.
    """
    try:
        stack.callback(unlock_name, name.resolve(), lock_name(name))
    except BlockingIOError:
        raise RuntimeError(
            f"{argument}={str(path)!r} belongs to a run that is still going on, and two would "
            f"replace each other's files: wait for it or stop it, or choose another {argument}."
        ) from None
    except OSError as error:
        logger.warning("%s cannot be locked (%s): let no other run use it", path, error)


def lies_in(checkpoint: Path, run_directory: str | Path | None) -> bool:
    """Whether a run that is resumed from ``checkpoint`` in ``run_directory`` stays in its own."""
    folder = None if run_directory is None else Path(run_directory).resolve()
    return checkpoint.resolve().parent == folder


def _move_aside(path: Path, what: str, logs: Sequence[str] = (), after: int = -1) -> None:
    """Move logs and later checkpoints to the next unused ``earlier_run_<number>`` in ``path``."""
    for leftover in path.glob(".*iteration_*.tmp"):  # of a save that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    later = [c for c in path.glob("iteration_*") if iteration_of(c) > after]
    found = [path / name for name in logs if (path / name).exists()]
    left = [*found, *later, *path.glob("crashed_in_iteration_*")]
    if left:
        names = (path / f"earlier_run_{number}" for number in itertools.count(1))
        destination = next(name for name in names if not name.exists())
        destination.mkdir()
        for entry in left:
            entry.rename(destination / entry.name)
        logger.warning("%s holds %s: moved to %s", path, what, destination)
