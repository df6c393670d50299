"""The trackers of one run."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

from agilerl.training.trackers.protocol import (
    CompletionTable,
    RunStatus,
    TrackedRun,
    Tracker,
    TrackerWaits,
)

logger = logging.getLogger(__name__)


class TrackerSet:
    """Passes on what a run shows; a tracker that fails is named, closed and dropped.

    Args:
        trackers: By a key that stays the same when the run is resumed.
        run: What they are to show.
        run_ids: Of a run that is resumed: what their ``run_id`` was, by key.

    Raises:
        Exception: What a tracker's ``start`` raised; it and those before it are closed.
    """

    def __init__(
        self, trackers: Mapping[str, Tracker], run: TrackedRun, run_ids: Mapping[str, str | None]
    ) -> None:
        self._trackers = dict(trackers)
        self._waiting: set[str] = set()
        with ExitStack() as started:
            for key, tracker in trackers.items():
                run_id = run_ids.get(key)
                logged = {} if run_id is None else run.logged
                started.callback(_close_quietly, tracker)  # also where it got half way
                tracker.start(replace(run, run_id=run_id, logged=logged))
            started.pop_all()
        self.run_ids = {key: tracker.run_id for key, tracker in trackers.items()}
        """What finds the trackers' runs again, by key."""

    @property
    def waits(self) -> bool:
        """Whether one keeps what it could not write yet."""
        return bool(self._waiting)

    def write(self, iteration: int, values: Mapping[str, float]) -> None:
        """Show an iteration's values by name of the series."""
        self._call("write", iteration, values)

    def write_completions(self, iteration: int, table: CompletionTable) -> None:
        """Show a table."""
        self._call("write_completions", iteration, table)

    def close(self, status: RunStatus) -> None:
        """Close all."""
        self._call("close", status)

    def _call(self, method: str, *arguments: Any) -> None:
        for key, tracker in list(self._trackers.items()):
            try:
                getattr(tracker, method)(*arguments)
            except TrackerWaits as error:
                if key not in self._waiting:
                    logger.error(
                        "%s cannot write now: %r. Training continues, and it writes once there is "
                        "room",
                        *(type(tracker).__name__, error),
                    )
                self._waiting.add(key)
            except Exception as error:  # noqa: BLE001 - a tracker must not cost the run
                del self._trackers[key]
                self._waiting.discard(key)
                logger.error(
                    "%s has failed in %s() and gets nothing more of this run, which goes on: "
                    "%s: %s",
                    *(type(tracker).__name__, method, type(error).__name__, error),
                )
                if method != "close":
                    _close_quietly(tracker)
            else:
                self._waiting.discard(key)


def _close_quietly(tracker: Tracker) -> None:
    """Close a tracker that failed, or that another one's failure leaves without a run."""
    with suppress(Exception):
        tracker.close("failed")
