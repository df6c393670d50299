"""Calls the callbacks of a run, alike on all processes."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from agilerl.training.callbacks.protocol import Callback, RunProgress
from agilerl.training.checkpoint.run_state import check_plain

if TYPE_CHECKING:
    from agilerl.distributed import Ranks

logger = logging.getLogger(__name__)


class ExitCalled(Exception):
    """A callback has called ``sys.exit`` with this code."""

    @property
    def code(self) -> Any:
        """What it was given."""
        return self.args[0]


class CallbackRunner:
    """The callbacks of one process.

    Args:
        callbacks: In the order in which they are called.
        ranks: The processes, which all call them together.
    """

    def __init__(self, callbacks: Sequence[Callback], ranks: Ranks) -> None:
        self._callbacks, self._ranks = list(callbacks), ranks
        # Before they change. As which callback, with its settings, they are known in a checkpoint.
        self._names = [repr(callback) for callback in callbacks]
        self._asked: dict[str, str] | None = None
        self._ended_by: dict[str, str] | None = None
        self.failed = False
        """Whether one raised an exception."""
        self._failing: Callback | None = None  # not called any more
        self._returned: set[tuple[int, str]] = set()  # methods that did, by position
        self._states: dict[int, Any] = {}  # the last ones, by position
        self._state_error: Exception | None = None

    @property
    def stop_reason(self) -> str | None:
        """What a callback of any process said when it ended the run."""
        return None if self._ended_by is None else self._ended_by["reason"]

    def call(self, method: str, progress: RunProgress) -> None:
        """Call a method of all of them.

        Raises:
            Exception: What one raises on any process, on all of them, with a note that names it.
        """
        if not self._callbacks:
            return
        rows, seconds = self._ranks.gather((progress.rows, progress.wall_seconds))[0]
        named = zip(self._names, self._callbacks, strict=True)
        for number, (name, callback) in enumerate(named):
            if callback is self._failing:
                continue
            # Rows of its own: what one changes, others and the log must not see.
            given = replace(
                progress,
                rows=[dict(row) for row in rows],
                wall_seconds=seconds,
                is_main_process=self._ranks.rank == 0,
                _stop=partial(self._ask, name, callback),
            )
            try:
                returned = self._ranks.on_all_ranks(partial(_called, callback, method, given))
            except Exception as error:
                self._failing = callback
                self._note_failure(error, method, callback)
                raise
            unused = returned is not None and (number, method) not in self._returned
            if unused and self._ranks.rank == 0:
                self._returned.add((number, method))
                logger.warning(
                    "%s of the callback %s returned %r, which has no effect: to end the run call "
                    "progress.stop(reason)",
                    *(method, name, returned),
                )
        asked = [each for each in self._ranks.gather(self._asked) if each is not None]
        if asked and self._ended_by is None:
            self._ended_by = asked[0]

    def state_dict(self) -> dict[str, Any]:
        """The states of the callbacks, and which one ended the run; JSON-compatible.

        Where a state cannot be taken, on any process, it is the one before it, if there was one, so
        that the run can be saved; :meth:`raise_state_error` raises the error afterwards.
        """
        for number, callback in enumerate(self._callbacks):
            try:
                state = self._ranks.on_all_ranks(partial(_plain_state, callback))
            except Exception as error:  # noqa: BLE001 - raised once the run is saved
                self._state_error = self._state_error or error
                self._note_failure(error, "state_dict", callback)
            else:
                self._states[number] = state
        states = [
            {"name": type(self._callbacks[number]).__name__, "state": state}
            for number, state in sorted(self._states.items())
        ]
        ended = {} if self._ended_by is None else {"ended_by": self._ended_by}
        return {"callbacks": states, **ended}

    def raise_state_error(self) -> None:
        """Raise what ``state_dict`` of a callback raised on any process, on all of them."""
        if self._state_error is not None:
            raise self._state_error

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give callbacks the state of the one of the same class, in their order.

        The callbacks of a resumed run may be others: one that is new begins anew. A run that one of
        them ended stays ended if it is given again with the same settings.

        Raises:
            Exception: What one raises on any process, on all of them, with a note that names it.
        """
        ended = state.get("ended_by")
        if ended is not None and ended["callback"] in self._names:
            self._ended_by = dict(ended)
        left = list(state.get("callbacks", []))
        for number, callback in enumerate(self._callbacks):
            name = type(callback).__name__
            saved = next((each for each in left if each["name"] == name), None)
            if saved is None:
                continue
            left.remove(saved)
            self._states[number] = copy.deepcopy(saved["state"])
            try:
                self._ranks.on_all_ranks(partial(callback.load_state_dict, saved["state"]))
            except Exception as error:
                self._note_failure(error, "load_state_dict", callback)
                raise

    def _note_failure(self, error: Exception, method: str, callback: Callback) -> None:
        self.failed = True
        error.add_note(f"It was raised by {method} of the callback {callback!r}.")

    def _ask(self, name: str, callback: Callback, reason: str) -> None:
        if self._asked is None:
            reason = f"{type(callback).__name__}: {reason}"
            self._asked = {"callback": name, "reason": reason}


def _called(callback: Callback, method: str, progress: RunProgress) -> Any:
    """What its method returns, which should be None."""
    try:
        return getattr(callback, method)(progress)
    except SystemExit as error:  # no Exception: no run would be saved after it
        raise ExitCalled(error.code) from error


def _plain_state(callback: Callback) -> Any:
    """Its state, which it does not change any more.

    Raises:
        TypeError: If JSON would not give it back.
    """
    state = callback.state_dict()
    check_plain(state, f"state_dict() of {type(callback).__name__}")
    return copy.deepcopy(state)
