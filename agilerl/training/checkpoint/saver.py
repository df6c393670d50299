"""Saving a run: on schedule, at the end, after a stop, after a crash; and reporting it."""

from __future__ import annotations

import errno
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from agilerl.distributed import Ranks
from agilerl.llm.update import NonFiniteUpdateError
from agilerl.training.checkpoint.elite import Elite
from agilerl.training.checkpoint.run_checkpoint import checkpoint_name
from agilerl.training.checkpoint.run_directory import RunDirectory
from agilerl.training.logs.run_log import RunLog
from agilerl.training.population import Population
from agilerl.training.protocols import Agent

logger = logging.getLogger(__name__)

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class Saver:
    """Saves a run and its best agent; all processes together, of which rank 0 reports."""

    population: Population
    directory: RunDirectory
    elite: Elite | None
    """Where the best agent goes, if anywhere."""
    log: RunLog
    state: Callable[[bool], dict[str, Any]]
    """Gives the run's state, and is told whether an iteration is under way."""
    keep: int
    """Checkpoints to keep."""
    ranks: Ranks

    def save_elite(self, agent: Agent, trained: bool) -> bool:
        """Save the best agent so far; False: that was not possible, which is reported."""
        elite = self.elite
        if elite is None:
            return True
        what = f"best agent so far ({agent.index})"
        return self._tried(what, elite.path, lambda: elite.save(agent, trained))

    def save(self, iteration: int, evaluated: bool) -> None:
        """Save the run and remove old checkpoints; a full disk, say, is no reason to end it."""
        what, name = f"checkpoint of iteration {iteration}", checkpoint_name(iteration, evaluated)
        if self._tried(what, self.directory.path, lambda: self._save(name)):
            self.directory.prune(self.keep)

    def save_after_stop(self, signal_name: str, iteration: int, evaluated: bool) -> None:
        """Save the run, and say where."""
        try:
            where = self._save(checkpoint_name(iteration, evaluated))
        except Exception as error:
            error.add_note(
                f"Stopped by {signal_name} after iteration {iteration}, which could not be "
                f"saved. The newest checkpoint: {self._newest()}"
            )
            raise
        self.directory.prune(self.keep)
        message = f"Stopped by {signal_name} after iteration {iteration}. Saved to {where}"
        if self.elite is not None and self.elite.saved:
            message += f"; the best agent so far is in {self.elite.path}"
        if self.ranks.rank == 0:
            logger.info(message)
            self.log.say(message)

    def rescue(self, error: Exception, iteration: int, trained: bool) -> None:
        """Save the agents, if they were trained, before ``error`` is raised; note in it where."""
        if not trained:
            error.add_note(f"Nothing was trained yet. Logs are in {self.directory.path}")
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
            where = self._save(f"crashed_in_{checkpoint_name(iteration)}", in_iteration=True)
        except Exception as second:
            logger.exception("Could not save the agents after %r", error)
            error.add_note(
                f"The agents could not be saved ({second!r}). Logs are in {self.directory.path}"
            )
        else:
            if self.ranks.rank == 0:
                logger.error("Iteration %d failed; the agents were saved to %s", iteration, where)
            error.add_note(f"Iteration {iteration} failed. The agents were saved to {where}")
        if newest := self.directory.newest_checkpoint():
            error.add_note(f"To resume from before that: resume_from={str(newest)!r}")

    def _save(self, name: str, in_iteration: bool = False) -> Path:
        self.log.sync()
        state = self.state(in_iteration)
        return self.directory.write_checkpoint(name, self.population.agents, state)

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
                self.log.say(message)
            return False
        return True

    def _newest(self) -> str:
        return str(self.directory.newest_checkpoint() or "none")


def is_no_room(error: Exception) -> bool:
    """Whether a file could not be written because the disk, a quota or a limit is exhausted."""
    number = error.errno if isinstance(error, OSError) else None
    if number is None and (quoted := re.search(r"os error (\d+)", str(error))):
        number = int(quoted[1])  # safetensors only quotes it
    return number in _NO_ROOM
