"""Calls the callbacks of a run, alike on all processes."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from agilerl.training.callbacks.protocol import Callback, RunProgress

if TYPE_CHECKING:
    from agilerl.distributed import Ranks

logger = logging.getLogger(__name__)


class CallbackRunner:
    """The callbacks of one process.

    Args:
        callbacks: In the order in which they are called.
        ranks: The processes, which all call them together.
    """

    def __init__(self, callbacks: Sequence[Callback], ranks: Ranks) -> None:
        self._callbacks, self._ranks = list(callbacks), ranks
        self._asked: str | None = None
        self.stop_reason: str | None = None
        """What a callback of any process said when it ended the run."""
        self.failed = False
        """Whether one raised an exception."""

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    def call(self, method: str, progress: RunProgress) -> None:
        """Call a method of all of them.

        Raises:
            Exception: What one raises on any process, on all of them, with a note that names it.
        """
        rows, seconds = self._ranks.gather((progress.rows, progress.wall_seconds))[0]
        for callback in self._callbacks:
            # Rows of its own: what one changes, others and the log must not see.
            given = replace(
                progress,
                rows=[dict(row) for row in rows],
                wall_seconds=seconds,
                is_main_process=self._ranks.rank == 0,
                _stop=partial(self._ask, callback),
            )
            try:
                self._ranks.on_all_ranks(partial(getattr(callback, method), given))
            except Exception as error:
                self.failed = True
                error.add_note(f"It was raised by {method} of the callback {callback!r}.")
                raise
        asked = [reason for reason in self._ranks.gather(self._asked) if reason is not None]
        if asked and self.stop_reason is None:
            self.stop_reason = asked[0]

    def state_dict(self) -> list[dict[str, Any]]:
        """The states of the callbacks, JSON-compatible."""
        return [
            {"name": type(callback).__name__, "state": callback.state_dict()}
            for callback in self._callbacks
        ]

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Give callbacks the state of the one of the same class, in their order.

        The callbacks of a resumed run may be others: one that is new begins anew.
        """
        left = list(states)
        for callback in self._callbacks:
            name = type(callback).__name__
            saved = next((each for each in left if each["name"] == name), None)
            if saved is not None:
                left.remove(saved)
                callback.load_state_dict(saved["state"])

    def _ask(self, callback: Callback, reason: str) -> None:
        if self._asked is None:
            self._asked = f"{type(callback).__name__}: {reason}"
