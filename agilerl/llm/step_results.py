"""How an optimizer step ended, and the error after too many that were skipped."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

logger = logging.getLogger(__name__)

MAX_SKIPPED_STEPS = 3


class NonFiniteUpdateError(RuntimeError):
    """Several optimizer steps in a row had a non-finite loss or gradient."""


@dataclass(frozen=True)
class StepResult:
    """The result of one optimizer step, the same on every rank."""

    outcome: Literal["taken", "skipped", "no_gradient"]
    """Skipped: the loss or its gradient was not finite. No gradient: no rank had a row with one."""
    loss: float = 0.0
    """Over all ranks; of a step that was taken."""
    grad_norm: float = 0.0
    """Likewise, before clipping."""
    bad_rows: tuple[list[int], ...] = ()
    """Of a skipped step: per rank, the rows of the batch it was given whose loss was not finite, or
    all of the step's rows where only the gradient was not."""


@dataclass
class SkippedSteps:
    """Optimizer steps in a row that were skipped, counted over updates."""

    in_a_row: int = 0
    last_checkpoint: str | None = None
    """Named by the error that is raised after too many."""

    def count(self, result: StepResult, rank: int) -> None:
        """Count one step.

        Raises:
            NonFiniteUpdateError: When ``MAX_SKIPPED_STEPS`` in a row were skipped.
        """
        if result.outcome == "taken":
            self.in_a_row = 0
        if result.outcome != "skipped":
            return
        self.in_a_row += 1
        rows = _listed(result.bad_rows)
        if rank == 0:
            logger.warning(
                "optimizer step skipped: the loss or its gradient is not finite (%s)", rows
            )
        if self.in_a_row >= MAX_SKIPPED_STEPS:
            raise NonFiniteUpdateError(
                f"{self.in_a_row} optimizer steps in a row had a non-finite loss or gradient, last "
                f"on {rows}. Weights are those before the first; last good checkpoint: "
                f"{self.last_checkpoint or 'none was written yet'}. Lower lr or max_grad_norm, or "
                "check the rewards."
            )


def _listed(bad_rows: tuple[list[int], ...]) -> str:
    """Rows by rank, as a message names them."""
    several = len(bad_rows) > 1
    return ", ".join(
        f"rows {rows[:16]}{' ...' if len(rows) > 16 else ''} of "
        + (f"rank {rank}'s batch" if several else "the batch")
        for rank, rows in enumerate(bad_rows)
        if rows
    )
