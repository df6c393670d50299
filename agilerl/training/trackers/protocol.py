"""What a tracker is, and what it is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

from agilerl.training.population import Best
from agilerl.training.protocols import Row

RunStatus: TypeAlias = Literal["finished", "failed", "killed"]
"""How a run ended: at a bound, by a callback or by Ctrl-C; with an exception; with SIGTERM."""


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker is to show."""

    name: str
    directory: Path
    config: Mapping[str, Any]
    """Content of ``config.json``: plain JSON, no secrets."""
    resumed_at: int | None = None
    """The iteration that the run is resumed after, None for a new run."""
    run_id: str | None = None
    """What the tracker's own :attr:`Tracker.run_id` was in the run that is resumed."""
    logged: Mapping[str, int] = field(default_factory=dict)
    """Of a run that is found again by ``run_id``: the last iteration that it has of each series,
    and as ``completions/<table.name>`` of each table, those after the checkpoint included."""

    def new_values(self, iteration: int, values: Mapping[str, float]) -> dict[str, float]:
        """Those that the run that is resumed does not have yet."""
        return {
            name: value for name, value in values.items() if iteration > self.logged.get(name, -1)
        }

    def is_new_table(self, iteration: int, table: CompletionTable) -> bool:
        """Whether the run that is resumed does not have the table yet."""
        return iteration > self.logged.get(f"completions/{table.name}", -1)


@dataclass(frozen=True)
class CompletionTable:
    """Some completions of one agent: the best and the worst of groups, or of an evaluation.

    Two completions of a group::

        columns  ["shown as", "prompt", "completion", "answer", "reward"]
        rows     [["best", "2+2?", "4", "4", 1.0], ["worst", "2+2?", "5", "4", 0.0]]
    """

    name: str
    """``agent_<index>/training`` or ``agent_<index>/evaluation``."""
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | float | None]]

    def markdown(self) -> str:
        """As a table in Markdown, texts as code."""
        lines = [self.columns, ["---"] * len(self.columns), *map(self._cells, self.rows)]
        return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)

    @staticmethod
    def _cells(row: Sequence[str | float | None]) -> list[str]:
        return [_code(cell) if isinstance(cell, str) else number_text(cell) for cell in row]


class Tracker(Protocol):
    """Shows series of values over iterations, and tables of completions.

    One that raises, in any method but :meth:`start`, is named in the log, closed as failed, and
    gets nothing more; the run goes on. If one cannot start, no run begins, and it and those that
    have started are closed as failed. Only the process of rank 0 calls it.
    """

    @property
    def run_id(self) -> str | None:
        """What finds the same run again when training is resumed; None: nothing does."""

    def start(self, run: TrackedRun) -> None:
        """Begin, before anything is trained."""

    def write(self, iteration: int, values: Mapping[str, float]) -> None:
        """Take an iteration's values, of all agents, by name of the series.

        It comes after the iteration's tables. The values are to outlive a kill right after.

        Raises:
            TrackerWaits: They are kept, and written later.
        """

    def write_completions(self, iteration: int, table: CompletionTable) -> None:
        """Take a table."""

    def close(self, status: RunStatus) -> None:
        """End; ``"failed"`` also of a tracker that raised, whatever becomes of the run."""


class TrackerWaits(OSError):
    """A tracker kept what it could not write now, and writes it with what comes next."""


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


def require_package(module: str, asked: str, package: str) -> None:
    """Check that a package can be imported.

    Args:
        module: What is imported.
        asked: What asked for it, such as ``"wb=True"``.
        package: Name for pip.

    Raises:
        ImportError: Naming the extra to install.
    """
    try:
        import_module(module)
    except ImportError as error:
        extra = "logging" if package in ("tensorboard", "wandb") else package
        raise ImportError(
            f"{asked} needs the package {package}: pip install 'agilerl[{extra}]'"
        ) from error


def require_trackers(tensorboard: bool, wb: bool) -> None:
    """Check that the trackers asked for by these options can be imported.

    Raises:
        ImportError: Naming the extra to install.
    """
    if tensorboard:
        require_package("torch.utils.tensorboard", "tensorboard=True", "tensorboard")
    if wb:
        require_package("wandb", "wb=True", "wandb")


def number_text(value: float | None) -> str:
    """A cell that is no text."""
    return "" if value is None else f"{value:.4g}"


def _code(text: str) -> str:
    """Text as it is, on the one line that a cell of Markdown has."""
    if not text:
        return ""
    safe = text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;")
    return f"<code>{safe}</code>".replace("\r", "").replace("\n", "<br>")
