"""The progress bar, and the lines that are printed beside it."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Sequence
from typing import Any

from agilerl.training.protocols import Row


class ErrorTolerantStream:
    """A stream that ignores write errors, so that they never end the run.

    A terminal may be gone, a pipe without reader, the disk that a redirected stream goes to full.
    Errors have to end here, not around tqdm: it would keep its lock, and wait for it for ever.

    Args:
        stream: ``sys.stdout`` or ``sys.stderr``.
    """

    def __init__(self, stream: Any) -> None:
        self._wrapped = stream  # tqdm looks for this name to see which stream it is

    def write(self, text: str) -> None:
        """Write, if that is possible."""
        with contextlib.suppress(OSError):
            self._wrapped.write(text)

    def flush(self) -> None:
        """Flush, if that is possible."""
        with contextlib.suppress(OSError):
            self._wrapped.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)

    def __eq__(self, other: object) -> bool:
        return self._wrapped is getattr(other, "_wrapped", other)

    def __hash__(self) -> int:
        return hash(self._wrapped)


class ProgressBar:
    """Steps per agent, with reward, accuracy, KL, tokens per second and time left.

    Completions that failed are shown where there are any.

    Args:
        total: Steps per agent of the whole run, None when unknown.
        enabled: False draws nothing.
        done: Steps per agent that are completed already.
        unit: What a step is.
    """

    def __init__(
        self, total: int | None, enabled: bool, done: int = 0, unit: str = "prompts"
    ) -> None:
        # Imported late: in a notebook without ipywidgets the import warns.
        from tqdm.auto import tqdm

        self._bar = tqdm(
            total=total,
            initial=done if total is None else min(done, total),
            disable=not enabled,
            unit=f" {unit}",
            dynamic_ncols=True,
            file=ErrorTolerantStream(sys.stderr),
        )
        self._last_fitness: float | None = None

    def update(self, consumed: int, rows: Sequence[Row]) -> None:
        """Show how far the run is and the means of ``rows`` over the agents."""
        self._last_fitness = _mean(rows, "fitness", self._last_fitness)
        shown = {
            "reward": _mean(rows, "reward_mean"),
            "accuracy": _mean(rows, "accuracy"),
            "failed": sum(row.get("failed_completions", 0.0) for row in rows) or None,
            "KL": _mean(rows, "mean_kl"),
            "tokens/s": _mean(rows, "tokens_per_second"),
            "fitness": self._last_fitness,
        }
        texts = {name: f"{value:.3g}" for name, value in shown.items() if value is not None}
        self._bar.set_postfix(texts, refresh=False)
        # The last batch may go past the total, which would make tqdm forget it.
        end = consumed if self._bar.total is None else min(consumed, self._bar.total)
        self._bar.update(end - self._bar.n)

    def say(self, message: str) -> None:
        """Print a line without breaking the bar."""
        self._bar.write(message, file=ErrorTolerantStream(sys.stdout))

    def close(self) -> None:
        """Leave the bar as it stands."""
        self._bar.close()


def _mean(rows: Sequence[Row], name: str, default: float | None = None) -> float | None:
    # The KL of agents that compute none is nan.
    values = [row[name] for row in rows if name in row and not math.isnan(row[name])]
    return sum(values) / len(values) if values else default
