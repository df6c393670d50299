"""Trackio."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agilerl.training.trackers.protocol import (
    CompletionTable,
    RunStatus,
    TrackedRun,
    require_package,
)


class TrackioTracker:
    """Series as metrics of a Trackio run, tables as its tables.

    Args:
        project: Trackio's project.
        **kwargs: Further arguments of ``trackio.init``, such as ``space_id``.

    Raises:
        ImportError: If Trackio is not installed.
    """

    def __init__(self, project: str = "agilerl", **kwargs: Any) -> None:
        require_package("trackio", "TrackioTracker", "trackio")
        self._project, self._kwargs = project, kwargs
        self._run: Any = None
        self.run_id: str | None = None
        """Name of the Trackio run, once it has begun."""

    def start(self, run: TrackedRun) -> None:
        """Begin a run, or continue that of the same name."""
        import trackio

        self._tracked = run
        arguments = {
            "name": run.name if run.run_id is None else run.run_id,
            "config": dict(run.config),
            "resume": "never" if run.run_id is None else "allow",
            "embed": False,
            **self._kwargs,
        }
        self._run = trackio.init(self._project, **arguments)
        self.run_id = self._run.name

    def write(self, iteration: int, values: Mapping[str, float]) -> None:
        """Log an iteration's values."""
        if new := self._tracked.new_values(iteration, values):
            self._run.log(new, step=iteration)

    def write_completions(self, iteration: int, table: CompletionTable) -> None:
        """Log a table."""
        import trackio

        if not self._tracked.is_new_table(iteration, table):
            return
        logged = trackio.Table(columns=list(table.columns), data=[list(r) for r in table.rows])
        self._run.log({f"completions/{table.name}": logged}, step=iteration)

    def close(self, status: RunStatus) -> None:
        """Finish the run."""
        if self._run is not None:
            self._run.finish()
