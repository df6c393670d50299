"""Saving a run and its best agent: on schedule, after a stop, after a crash; and reporting it."""

from __future__ import annotations

import contextlib
import errno
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from agilerl.distributed import Ranks
from agilerl.llm.checkpoint.atomic_directory import (
    complete_directory,
    holds_directory,
    move_aside,
    refuse_to_replace,
)
from agilerl.llm.checkpoint.checkpoint_files import ATTRIBUTES_FILE
from agilerl.llm.step_results import NonFiniteUpdateError
from agilerl.training.checkpoint.run_checkpoint import checkpoint_name, complete_checkpoints
from agilerl.training.checkpoint.run_directory import RunDirectory, lock_until_closed
from agilerl.training.logs.run_log import RunLog
from agilerl.training.logs.terminal import is_printed_by_logging
from agilerl.training.population import Best, Population
from agilerl.training.protocols import Agent

logger = logging.getLogger(__name__)


class Progress(Enum):
    """What a call has done to its run, which decides whether there is something to save."""

    UNTRAINED = auto()
    """A new run before its first ``learn``: nothing would be lost."""
    RESUMED = auto()
    """At the checkpoint that the run was resumed from."""
    EVALUATED = auto()
    """As RESUMED, and the evaluation or generation that the checkpoint lacks has been made: saved
    beside that checkpoint, as ``iteration_<number>_evaluated``."""
    TRAINED = auto()
    """At least one ``learn`` has been called."""


class Elite(contextlib.ExitStack):
    """Saves the best agent of one run; a context, in which no other run can save there.

    A checkpoint that is there already is kept: the run's first save moves it to
    ``<path>.earlier_1`` (2, 3, ...). An untrained agent is no reason to move it, so where there is
    one, it stays until the run has an agent that training made better. ``run.txt`` in a saved elite
    has the name of its run.

    Args:
        path: Directory of the checkpoint.
        run: Name of the run.
        ranks: The processes of the run, which must all call every method; rank 0 writes.

    Raises:
        RuntimeError: If another run that has not ended, in any process, saves there.
        ValueError: If it holds files that are no checkpoint, which saving would remove.
    """

    def __init__(self, path: str | Path, run: str, ranks: Ranks) -> None:
        super().__init__()
        self.path, self.run, self._ranks = Path(path), run, ranks
        self.saved = False
        """Whether this run has saved its best agent there."""
        ranks.on_rank_zero(self._take)

    def _take(self) -> None:
        try:
            refuse_to_replace(self.path, ATTRIBUTES_FILE)
        except FileExistsError as error:
            raise ValueError(f"elite_path={str(self.path)!r} cannot be replaced: {error}") from None
        lock_until_closed(self, "elite_path", self.path, self.path)

    def resume(self, run: str) -> None:
        """Go on with the elite at ``path`` if it is that of ``run``, which is resumed."""

        def goes_on() -> bool:
            with contextlib.suppress(OSError, UnicodeError):
                if self._run_file().read_text(encoding="utf-8") in (self.run, run):
                    self._note_run()
                    return True
            return False

        # Decided by one process: the same place may have another name on another machine.
        self.saved = self._ranks.on_rank_zero(goes_on)

    def save(self, agent: Agent, trained: bool) -> None:
        """Save the best agent so far; ``trained`` is False before the first iteration.

        Raises:
            FileExistsError: If ``path`` holds something that is not a checkpoint.
        """
        if self.saved or self._ranks.on_rank_zero(lambda: self._make_room(trained)):
            agent.save_checkpoint(self.path)
            self.saved = True
            self._ranks.on_rank_zero(self._note_run)

    def _make_room(self, trained: bool) -> bool:
        """Move an earlier run's elite out of the way; False: it stays, and nothing is saved."""
        if not holds_directory(self.path, ATTRIBUTES_FILE):
            return True
        if trained:
            moved = move_aside(self.path, ATTRIBUTES_FILE)
            logger.warning("The elite of an earlier run was moved from %s to %s", self.path, moved)
        else:
            message = "%s holds the elite of an earlier run: it stays there until training helps"
            logger.warning(message, self.path)
        return trained

    def _note_run(self) -> None:
        with contextlib.suppress(OSError):  # without it the elite counts as an earlier run's: kept
            self._run_file().write_text(self.run, encoding="utf-8")

    def _run_file(self) -> Path:
        return complete_directory(self.path, ATTRIBUTES_FILE) / "run.txt"


# Gives a run's state, and is told whether an iteration is under way. Saver does not keep it: it
# is a method of the loop, which has the saver, and a reference cycle would keep the agents.
StateDict = Callable[[bool], dict[str, Any]]


@dataclass(frozen=True)
class Saver:
    """Saves a run and its best agent; all processes together, of which rank 0 reports."""

    population: Population
    directory: RunDirectory
    elite: Elite | None
    """Where the best agent goes, if anywhere."""
    log: RunLog
    keep: int
    """Checkpoints to keep."""
    ranks: Ranks

    def note_best(self, iteration: int) -> None:
        """After an evaluation, note and save its best agent if it is the best so far."""
        leader, best = self.population.leader.agent, self.population.best
        fitness = float(leader.fitness[-1])
        better = best is None or fitness > best.fitness
        # One that could not be saved does not count, so that the next best is saved instead.
        if better and self._save_elite(leader, trained=iteration > 0):
            self.population.best = Best(leader.index, fitness, iteration)

    def _save_elite(self, agent: Agent, trained: bool) -> bool:
        """Save it; False: that was not possible, which is reported."""
        elite = self.elite
        if elite is None:
            return True
        what = f"best agent so far ({agent.index})"
        return self._tried(what, elite.path, lambda: elite.save(agent, trained))

    def save(self, state: StateDict, iteration: int, evaluated: bool) -> Path | None:
        """Save the run and remove old checkpoints; a full disk, say, is no reason to end it.

        Args:
            state: Gives the run's state, here and below.
            iteration: The last one that is whole.
            evaluated: Whether the agents have been evaluated, and evolved, since it.

        Returns:
            Where; None: that was not possible, which is reported.
        """
        what, name = f"checkpoint of iteration {iteration}", checkpoint_name(iteration, evaluated)
        if not self._tried(what, self.directory.path, lambda: self._save(state, name)):
            return None
        self.directory.prune(self.keep)
        return self.directory.path / name

    def save_after_stop(
        self, state: StateDict, signal_name: str, iteration: int, evaluated: bool
    ) -> Path:
        """Save the run, and say where."""
        message = f"Stopped by {signal_name} after iteration {iteration}"
        try:
            where = self._save(state, checkpoint_name(iteration, evaluated))
        except Exception as error:
            error.add_note(
                f"{message}, which could not be saved. The newest checkpoint: {self._newest()}"
            )
            raise
        self.directory.prune(self.keep)
        message += f". Saved to {where}"
        if self.elite is not None and self.elite.saved:
            message += f"; the best agent so far is in {self.elite.path}"
        self.log.report(logger, message)
        return where

    def save_after_callback(
        self, state: StateDict, error: Exception, iteration: int, evaluated: bool
    ) -> Path | None:
        """Save the run before ``error`` of a callback is raised; note in it where.

        It is raised on all processes, between two iterations, so that nothing is lost.

        Returns:
            Where; None: that was not possible.
        """
        where = None
        try:
            where = self._save(state, checkpoint_name(iteration, evaluated))
            note = f"The run was saved after iteration {iteration}: resume_from={str(where)!r}"
        except Exception as second:  # noqa: BLE001 - it must not hide the first
            note = f"The run could not be saved ({second!r}). The newest: {self._newest()}"
        error.add_note(note)
        return where

    def rescue(self, state: StateDict, error: Exception, iteration: int, trained: bool) -> None:
        """Save the agents, if they were trained, before ``error`` is raised; note in it where."""
        logs = f"Logs are in {self.directory.path}"
        if not trained:
            error.add_note(f"Nothing was trained yet. {logs}")
            return
        # On several ranks the others may be anywhere, and saving takes all of them; only this
        # error is known to be raised on all.
        if self.ranks.world_size > 1 and not isinstance(error, NonFiniteUpdateError):
            error.add_note(
                f"Process {self.ranks.rank} of {self.ranks.world_size} ended with this error in "
                f"iteration {iteration}; if another process died, which raises errors in the "
                f"others, the launcher names it. The newest checkpoint: {self._newest()}"
            )
            return
        try:
            name = f"crashed_in_{checkpoint_name(iteration)}"
            where = self._save(state, name, in_iteration=True)
            note = f"Iteration {iteration} failed. The agents were saved to {where}"
        except Exception as second:  # noqa: BLE001 - it must not hide the first
            note = f"The agents could not be saved ({second!r}). {logs}"
        error.add_note(note)
        if self.ranks.rank == 0:
            logger.error(note)
        if newest := self._newest():
            error.add_note(f"To resume from before that: resume_from={str(newest)!r}")

    def _save(self, state: StateDict, name: str, in_iteration: bool = False) -> Path:
        self.log.sync()
        taken = state(in_iteration)
        return self.directory.write_checkpoint(name, self.population.agents, taken)

    def _tried(self, what: str, where: Path, save: Callable[[], object]) -> bool:
        """Save; whether it was possible."""
        try:
            save()
        except FileExistsError:  # someone's files are in the way, and will be next time
            raise
        except (OSError, SafetensorError) as error:
            remedy = "Free disk space" if is_no_room(error) else "Make the directory writable"
            message = (
                f"The {what} could NOT be saved in {where}: {error!r}. Training continues, and "
                f"earlier checkpoints are kept (the newest: {self._newest()}). {remedy}: later "
                "saves are tried as planned."
            )
            if self.ranks.rank == 0:
                logger.error(message, exc_info=error)
            if not is_printed_by_logging(logger, logging.ERROR):
                self.log.say(message)
            return False
        return True

    def _newest(self) -> Path | None:
        return next(reversed(complete_checkpoints(self.directory.path)), None)


def is_no_room(error: Exception) -> bool:
    """Whether a file could not be written because the disk, a quota or a limit is exhausted."""
    quoted = re.search(r"os error (\d+)", str(error))  # all that safetensors says
    number = error.errno if isinstance(error, OSError) else quoted and int(quoted[1])
    return number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
