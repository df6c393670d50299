"""The best agent's checkpoint; one that an earlier run left is kept."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from agilerl.distributed import Ranks
from agilerl.llm.checkpoint.atomic_directory import (
    complete_directory,
    holds_directory,
    lock_name,
    move_aside,
    refuse_to_replace,
    unlock_name,
)
from agilerl.llm.checkpoint.checkpoint_files import ATTRIBUTES_FILE
from agilerl.training.checkpoint.run_directory import lock_until_closed
from agilerl.training.protocols import Agent

logger = logging.getLogger(__name__)


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

    def __init__(self, path: str | Path, run: str, ranks: Ranks | None = None) -> None:
        super().__init__()
        self.path, self.run = Path(path), run
        self._ranks = Ranks() if ranks is None else ranks
        self.saved = False
        """Whether this run has saved its best agent there."""
        self._ranks.on_rank_zero(self._take)

    def _take(self) -> None:
        try:
            refuse_to_replace(self.path, ATTRIBUTES_FILE)
        except FileExistsError as error:
            raise ValueError(f"elite_path={str(self.path)!r} cannot be replaced: {error}") from None
        release = partial(unlock_name, self.path)
        lock_until_closed(self, "elite_path", self.path, lock_name, release)

    def state_dict(self) -> dict[str, Any]:
        """For run checkpoints."""
        return {"path": str(self.path.resolve()), "saved": self.saved}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Take over the elite of the run that is resumed, also if it was saved after ``state``.

        One that was saved elsewhere stays there.
        """

        def is_of_this_run() -> bool:
            if state == {**self.state_dict(), "saved": True}:
                return True
            with contextlib.suppress(OSError, UnicodeError):
                return self._run_file().read_text(encoding="utf-8") == self.run
            return False

        # Decided by one process: the same place may have another name on another machine.
        self.saved = self._ranks.on_rank_zero(is_of_this_run)

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
