"""The trackers a run can report to: TensorBoard and W&B, each imported only when asked.

Both show series over iterations: ``agent_<index>/<metric>`` of every member, and ``best/fitness``
with ``best/agent``, the highest fitness so far and whose it was.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agilerl.training.population import Best
from agilerl.training.protocols import Row

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardSink:
    """Series as TensorBoard's scalars.

    Values that cannot be written are kept and written with the next one that can. As an error ends
    the thread that TensorBoard writes with, that takes a new event file.

    Args:
        log_dir: Folder of the event files.
        first: Iteration that the events start with; those of an earlier run in ``log_dir`` from
            there on are no longer shown. None: all are.
    """

    def __init__(self, log_dir: Path, first: int | None = None) -> None:
        self._log_dir = log_dir
        self._waiting: list[tuple[int, Mapping[str, float]]] = []
        self._writer: SummaryWriter | None = self._open(first)

    def write(self, iteration: int, values: Mapping[str, float]) -> None:
        """Add and flush an iteration's values, by name of the series.

        Raises:
            OSError: If that is not possible now.
        """
        self._waiting.append((iteration, values))
        self._write_waiting()

    def close(self, failed: bool) -> None:
        """Close the event file."""
        if self._waiting:
            self._write_waiting()
        if self._writer is not None:
            self._writer.close()

    def _write_waiting(self) -> None:
        if self._writer is None:
            self._writer = self._open()
        try:
            for iteration, values in self._waiting:
                for tag, value in values.items():
                    self._writer.add_scalar(tag, value, global_step=iteration)
            self._writer.flush()
        except OSError:
            broken, self._writer = self._writer, None
            with contextlib.suppress(OSError):
                broken.close()
            raise
        self._waiting.clear()

    def _open(self, first: int | None = None) -> SummaryWriter:
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(log_dir=str(self._log_dir), purge_step=first)


class WandbSink:
    """Series as metrics of a W&B run.

    Args:
        name: Name of the W&B run.
        directory: Parent of W&B's own ``wandb`` folder.
        config: What is shown as the run's configuration.
        kwargs: Further arguments of ``wandb.init``; they win over the ones set here.
        api_key: Handed to W&B in memory; unlike ``wandb.login`` this writes it to no file.
        run_id: The W&B run to continue; None: a new one.
    """

    def __init__(
        self,
        name: str,
        directory: Path,
        config: Mapping[str, Any],
        kwargs: Mapping[str, Any] | None,
        api_key: str | None,
        run_id: str | None = None,
    ) -> None:
        import wandb

        arguments: dict[str, Any] = {
            "project": "agilerl",
            "name": name,
            "dir": str(directory),
            "config": dict(config),
            **({} if run_id is None else {"id": run_id, "resume": "allow"}),
            **(kwargs or {}),
        }
        if api_key is not None:
            arguments["settings"] = _with_api_key(arguments.get("settings"), api_key)
        self._run = wandb.init(**arguments)
        self.run_id: str | None = self._run.id
        """What W&B calls the run."""

    def write(self, iteration: int, values: Mapping[str, float]) -> None:
        """Log an iteration's values; W&B merges those that come one after the other."""
        self._run.log(dict(values), step=iteration)

    def close(self, failed: bool) -> None:
        """Finish the W&B run, as failed or not."""
        self._run.finish(exit_code=1 if failed else 0)


def series_of_agent(row: Row) -> dict[str, float]:
    """A row's values by name of the series."""
    prefix = f"agent_{int(row['agent'])}"
    return {
        f"{prefix}/{name}": value
        for name, value in row.items()
        if name not in ("iteration", "agent")
    }


def series_of_best(best: Best) -> dict[str, float]:
    """The highest fitness so far by name of the series."""
    return {"best/fitness": best.fitness, "best/agent": best.agent_index}


def require_trackers(tensorboard: bool, wb: bool) -> None:
    """Check that the trackers asked for can be imported.

    Raises:
        ImportError: Naming the extra to install.
    """
    if tensorboard:
        _require("torch.utils.tensorboard", "tensorboard=True", "tensorboard")
    if wb:
        _require("wandb", "wb=True", "wandb")


def _require(module: str, argument: str, package: str) -> None:
    try:
        import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{argument} needs the package {package}: pip install 'agilerl[logging]'"
        ) from error


def _with_api_key(settings: Any, api_key: str) -> Any:
    import wandb

    if settings is None or isinstance(settings, Mapping):
        return wandb.Settings(**{**(settings or {}), "api_key": api_key})
    return settings.model_copy(update={"api_key": api_key})
