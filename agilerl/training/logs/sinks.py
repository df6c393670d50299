"""The trackers a run can report to: TensorBoard and W&B, each imported only when asked."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agilerl.training.protocols import Row

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardSink:
    """Rows as scalars ``agent_<index>/<metric>`` over iterations.

    Rows that cannot be written are kept and written with the next one that can. As an error ends
    the thread that TensorBoard writes with, that takes a new event file.

    Args:
        log_dir: Folder of the event files.
        first: Iteration that the events start with; those of an earlier run in ``log_dir`` from
            there on are no longer shown. None: all are.
    """

    def __init__(self, log_dir: Path, first: int | None = None) -> None:
        self._log_dir = log_dir
        self._waiting: list[Row] = []
        self._writer: SummaryWriter | None = self._open(first)

    def write(self, row: Row) -> None:
        """Add and flush the row's scalars.

        Raises:
            OSError: If that is not possible now.
        """
        self._waiting.append(row)
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
            for row in self._waiting:
                for tag, value in _tagged(row).items():
                    self._writer.add_scalar(tag, value, global_step=int(row["iteration"]))
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
    """Rows as W&B metrics ``agent_<index>/<metric>`` over iterations.

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

    def write(self, row: Row) -> None:
        """Log the row; W&B merges the rows that agents have for the same iteration."""
        self._run.log(_tagged(row), step=int(row["iteration"]))

    def close(self, failed: bool) -> None:
        """Finish the W&B run, as failed or not."""
        self._run.finish(exit_code=1 if failed else 0)


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


def _tagged(row: Row) -> dict[str, float]:
    prefix = f"agent_{int(row['agent'])}"
    return {
        f"{prefix}/{name}": value
        for name, value in row.items()
        if name not in ("iteration", "agent")
    }


def _with_api_key(settings: Any, api_key: str) -> Any:
    import wandb

    if settings is None or isinstance(settings, Mapping):
        return wandb.Settings(**{**(settings or {}), "api_key": api_key})
    return settings.model_copy(update={"api_key": api_key})
