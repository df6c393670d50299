"""Weights & Biases."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from weakref import WeakSet

from agilerl.checks import warn
from agilerl.training.trackers.protocol import CompletionTable, RunStatus, TrackedRun

STEP = "agilerl/iteration"
"""The metric that the series are shown over."""
EXIT_CODES: Mapping[RunStatus, int] = {"finished": 0, "failed": 1, "killed": 143}
"""What W&B is told: any but 0 marks the run as failed, and 143 is that of SIGTERM."""

_opened: WeakSet[Any] = WeakSet()
"""W&B runs of ours: one that could not be finished is not the program's own."""


class WandbTracker:
    """Series as metrics of a W&B run, over a step metric of their own.

    A run that the program has begun itself, with ``wandb.init()``, is used as it is: its metrics
    are not touched, and it is not finished. Each iteration is one step of it.

    Args:
        kwargs: Further arguments of ``wandb.init``; they win over the ones set here.
        api_key: Handed to W&B in memory; unlike ``wandb.login`` this writes it to no file.
    """

    def __init__(self, kwargs: Mapping[str, Any] | None, api_key: str | None) -> None:
        self._kwargs, self._api_key = dict(kwargs or {}), api_key
        self._run: Any = None
        self._is_ours = True
        self._tables: dict[str, Any] = {}  # of the iteration that is under way
        self._iteration = 0

    @property
    def run_id(self) -> str | None:
        """What W&B calls the run; None of one that is the program's own."""
        run_id: str | None = self._run.id if self._is_ours and self._run is not None else None
        return run_id

    def start(self, run: TrackedRun) -> None:
        """Begin or continue a W&B run, or take the program's own."""
        import wandb

        self._tracked, active = run, wandb.run
        if active is not None and active not in _opened:
            self._run, self._is_ours = active, False
            if self._kwargs or self._api_key is not None:
                warn(
                    "wandb_kwargs and wandb_api_key have no effect: the W&B run that is active "
                    "already is used. Give them to its wandb.init()."
                )
            self._run.config.update({"agilerl": dict(run.config)}, allow_val_change=True)
        else:
            if active is not None:  # or init() would return it
                with suppress(Exception):
                    active.finish(exit_code=EXIT_CODES["failed"])
            self._run = wandb.init(**self._arguments(run))
            _opened.add(self._run)
        self._run.define_metric(STEP, hidden=True)
        for series in ("agent_*", "best/*"):
            self._run.define_metric(series, step_metric=STEP)

    def write(self, iteration: int, values: Mapping[str, float]) -> None:
        """Log an iteration's values, and its tables with them: one step of the run."""
        new = self._tracked.new_values(iteration, values)
        tables, self._tables = self._tables, {}
        if new or tables:
            with self._process_of_wandb():
                self._run.log({**tables, **new, STEP: iteration})

    def write_completions(self, iteration: int, table: CompletionTable) -> None:
        """Keep a table for the iteration's step."""
        import wandb

        if self._tracked.is_new_table(iteration, table):
            with self._process_of_wandb():
                logged = wandb.Table(
                    columns=list(table.columns), data=[list(row) for row in table.rows]
                )
            self._tables[f"completions/{table.name}"] = logged
            self._iteration = iteration

    def close(self, status: RunStatus) -> None:
        """Finish the W&B run, unless it is the program's own."""
        try:
            if self._tables:  # of an iteration that failed
                self.write(self._iteration, {})
            if self._is_ours and self._run is not None:
                with self._process_of_wandb():
                    self._run.finish(exit_code=EXIT_CODES[status])
        except ConnectionError:
            if self._is_ours:
                _forget_process()
            raise

    @contextmanager
    def _process_of_wandb(self) -> Iterator[None]:
        """Say what a lost connection means.

        Raises:
            ConnectionError: In place of one that names no reason.
        """
        try:
            yield
        except ConnectionError as error:
            raise ConnectionError(
                "the process wandb-core, which sends what is logged to Weights & Biases, has ended "
                f"({type(error).__name__}: {error}), perhaps killed for want of memory. "
                f"`wandb sync {Path(self._run.dir).parent}` uploads what it had taken until then"
            ) from error

    def _arguments(self, run: TrackedRun) -> dict[str, Any]:
        arguments: dict[str, Any] = {
            "project": "agilerl",
            "name": run.name,
            "dir": str(run.directory),
            "config": dict(run.config),
            **({} if run.run_id is None else {"id": run.run_id, "resume": "allow"}),
            **self._kwargs,
        }
        if self._api_key is not None:
            arguments["settings"] = _with_api_key(arguments.get("settings"), self._api_key)
        return arguments


def _forget_process() -> None:
    """Have the next ``wandb.init()`` start another wandb-core, as this program's has ended."""
    import wandb

    # It exits the program where wandb-core did not end by itself.
    with suppress(Exception, SystemExit):
        wandb.teardown()


def _with_api_key(settings: Any, api_key: str) -> Any:
    import wandb

    if settings is None or isinstance(settings, Mapping):
        return wandb.Settings(**{**(settings or {}), "api_key": api_key})
    return settings.model_copy(update={"api_key": api_key})
