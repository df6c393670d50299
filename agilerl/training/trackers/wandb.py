"""Weights & Biases."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from agilerl.checks import warn
from agilerl.training.trackers.protocol import CompletionTable, TrackedRun

STEP = "agilerl/iteration"
"""The metric that the series are shown over."""


class WandbTracker:
    """Series as metrics of a W&B run, over a step metric of their own.

    A run that the program has begun itself, with ``wandb.init()``, is used as it is: its own steps
    and metrics are not touched, and it is not finished.

    Args:
        kwargs: Further arguments of ``wandb.init``; they win over the ones set here.
        api_key: Handed to W&B in memory; unlike ``wandb.login`` this writes it to no file.
    """

    def __init__(self, kwargs: Mapping[str, Any] | None, api_key: str | None) -> None:
        self._kwargs, self._api_key = dict(kwargs or {}), api_key
        self._run: Any = None
        self._is_ours = True

    @property
    def run_id(self) -> str | None:
        """What W&B calls the run; None of one that is the program's own."""
        run_id: str | None = self._run.id if self._is_ours and self._run is not None else None
        return run_id

    def start(self, run: TrackedRun) -> None:
        """Begin or continue a W&B run, or take the program's own."""
        import wandb

        if wandb.run is not None:
            self._run, self._is_ours = wandb.run, False
            if self._kwargs or self._api_key is not None:
                warn(
                    "wandb_kwargs and wandb_api_key have no effect: the W&B run that is active "
                    "already is used. Give them to its wandb.init()."
                )
            self._run.config.update({"agilerl": dict(run.config)}, allow_val_change=True)
        else:
            self._run = wandb.init(**self._arguments(run))
        self._run.define_metric(STEP, hidden=True)
        for series in ("agent_*", "best/*"):
            self._run.define_metric(series, step_metric=STEP)

    def write(self, iteration: int, values: Mapping[str, float]) -> None:
        """Log an iteration's values."""
        with self._process_of_wandb():
            self._run.log({**values, STEP: iteration})

    def write_completions(self, iteration: int, table: CompletionTable) -> None:
        """Log a table."""
        import wandb

        with self._process_of_wandb():
            logged = wandb.Table(columns=list(table.columns), data=[list(r) for r in table.rows])
            self._run.log({f"completions/{table.name}": logged, STEP: iteration})

    def close(self, failed: bool) -> None:
        """Finish the W&B run, as failed or not, unless it is the program's own."""
        if self._is_ours:
            with self._process_of_wandb():
                self._run.finish(exit_code=1 if failed else 0)

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
                f"({type(error).__name__}: {error}), perhaps killed for want of memory. What it "
                f"had taken until then is in {self._run.dir!r}; `wandb sync` uploads it"
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


def _with_api_key(settings: Any, api_key: str) -> Any:
    import wandb

    if settings is None or isinstance(settings, Mapping):
        return wandb.Settings(**{**(settings or {}), "api_key": api_key})
    return settings.model_copy(update={"api_key": api_key})
