"""A batch into optimizer steps, and each of them into micro-batches.

One plan serves every pass over the batch, that of the reference, of the policy before the update
and of training: a row meets the same rows in each, so that log-probs of equal weights are equal to
the last bit, also in bfloat16.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from agilerl.distributed import Ranks
from agilerl.llm.batch import TrainBatch
from agilerl.llm.config import RowLayout, UpdateConfig
from agilerl.llm.losses import reduction_counts
from agilerl.llm.plan.micro_batches import (
    split_by_tokens,
    split_evenly_by_tokens,
    split_into_micro_batches,
)
from agilerl.llm.plan.rank_balancing import balance_over_ranks


@dataclass(frozen=True)
class MiniBatch:
    """This rank's share of one optimizer step.

    ``micro_batches [[4, 6], [7]], counts [20, 6]``: three rows here have a gradient; with those of
    the other rank and those without a gradient, six rows have twenty tokens.
    """

    micro_batches: list[torch.Tensor]
    """Long indices of the rows with a gradient; none where only other ranks have some."""
    counts: torch.Tensor
    """``(2,)`` tokens and sequences over all ranks: what means divide by."""
    has_gradient: bool
    """Whether any rank has a row with a gradient; if not, no rank steps."""
    dummy_micro_batches: int
    """Micro-batches of weight zero, so that ranks in lockstep run equally many."""
    without_gradient: list[torch.Tensor]
    """As ``micro_batches``, of the trained rows without a gradient; none unless their entropy
    counts, for ``top_entropy_quantile``."""

    @property
    def trained_rows(self) -> torch.Tensor:
        """``(n,)`` long: the rows of all micro-batches, and those without a gradient."""
        return torch.cat([self.rows, *self.without_gradient])

    @property
    def rows(self) -> torch.Tensor:
        """``(n,)`` long: the rows of all micro-batches."""
        nothing = torch.empty(0, dtype=torch.long, device=self.counts.device)
        return torch.cat([nothing, *self.micro_batches])


def plan_mini_batches(
    batch: TrainBatch,
    active: torch.Tensor,
    update: UpdateConfig,
    ranks: Ranks,
    rng: torch.Generator,
    *,
    lockstep: bool = False,
    layout: RowLayout = "padded",
) -> tuple[TrainBatch, list[MiniBatch]]:
    """Cut a batch into the optimizer steps of an epoch, equally many on every rank.

    Every epoch takes the same steps. All rows of a trajectory stay in one step, so that each
    trajectory weighs the same however many rows it has.

    Args:
        batch: This rank's rows, with their ``loss_mask``.
        active: ``(B,)`` bool, rows with a gradient.
        update: Sizes.
        ranks: The processes that step together.
        rng: Orders the prompts, on each rank its own.
        lockstep: Whether every rank must run equally many micro-batches.
        layout: How forwards lay rows out.

    Returns:
        The batch whose rows the plan is of, and the plan. With ``balance_tokens`` and several ranks
        rows of other ranks may follow the given ones.
    """
    steps = -(-int(batch.trajectory_of_row.max() + 1) // update.batch_size)
    steps = int(ranks.max(torch.tensor(steps)))
    shares = _mini_batch_rows(batch, steps, rng)
    own = torch.stack([_counts(batch, rows) for rows in shares])
    active_rows = torch.stack([active[rows].sum() for rows in shares])
    totals = ranks.sum(torch.cat([own, active_rows[:, None].to(own)], dim=1))
    # The quantile of entropy is over all trained tokens, whatever their advantages are.
    idle = batch.loss_mask.any(1) & ~active
    if update.top_entropy_quantile is None:
        idle = torch.zeros_like(idle)
    run = [(rows[active[rows]], rows[idle[rows]]) for rows in shares]
    balanced = update.balance_tokens and ranks.world_size > 1 and not lockstep
    if balanced:
        # Unless all ranks run packed rows, each has its own.
        balanced = not ranks.max(torch.tensor(int(layout != "packed")))
    if balanced:
        together = update.micro_batch_size if update.micro_batch_tokens is None else None
        batch, run = balance_over_ranks(batch, run, ranks, together)
    mean_rows = [float(total) / ranks.world_size if balanced else None for total in totals[:, 2]]
    micro_batches = [
        _micro_batches(batch, rows, update, layout, mean)
        for (rows, _), mean in zip(run, mean_rows, strict=True)
    ]
    without_gradient = [_micro_batches(batch, rows, update, layout) for _, rows in run]
    numbers = torch.tensor([len(each) for each in micro_batches])
    target = ranks.max(numbers) if lockstep else numbers
    return batch, [
        MiniBatch(each, total[:2], bool(total[2] > 0), extra, others)
        for each, total, extra, others in zip(
            micro_batches, totals, (target - numbers).tolist(), without_gradient, strict=True
        )
    ]


def _micro_batches(
    batch: TrainBatch,
    rows: torch.Tensor,
    update: UpdateConfig,
    layout: RowLayout,
    mean_rows: float | None = None,
) -> list[torch.Tensor]:
    """Cut rows into micro-batches, by what the settings count.

    Args:
        batch: The rows.
        rows: Which of them.
        update: Sizes.
        layout: How forwards lay rows out.
        mean_rows: The mean number of rows of ranks that have about as many tokens each, by which
            all cut as many micro-batches; None: this rank goes by its own.
    """
    if update.micro_batch_tokens is not None:
        if layout == "padded":  # rows of equal length need little padding
            rows = rows[batch.lengths[rows].argsort(stable=True)]
        return split_by_tokens(batch, rows, update.micro_batch_tokens, layout)
    if update.balance_tokens and layout == "packed":
        count = len(rows) if mean_rows is None else mean_rows
        parts = math.ceil(count / update.micro_batch_size)
        return split_evenly_by_tokens(batch, rows, parts)
    return split_into_micro_batches(batch, rows, update.micro_batch_size, layout)


def _counts(batch: TrainBatch, rows: torch.Tensor) -> torch.Tensor:
    weights = None if batch.sequence_weights is None else batch.sequence_weights[rows]
    return reduction_counts(batch.counted[rows], weights)


def _mini_batch_rows(batch: TrainBatch, steps: int, rng: torch.Generator) -> list[torch.Tensor]:
    """Row indices of each step: prompts in random order, trajectories with the same side by side.

    Steps differ by at most one trajectory in size.
    """
    rows = torch.arange(len(batch), device=batch.device)
    if steps == 1:
        return [rows]
    trajectory_ids, prompts = batch.trajectory_of_row, batch.prompt_of_trajectory
    count = len(prompts)
    order_of_prompts = torch.randperm(int(batch.prompt_index.max()) + 1, generator=rng)
    order = torch.argsort(order_of_prompts.to(rows.device)[prompts], stable=True)
    position = torch.empty_like(order).scatter(0, order, torch.arange(count, device=rows.device))
    position_of_row = position[trajectory_ids]
    # With n trajectories in k steps, the first n % k steps have one more.
    sizes = [count // steps + (step < count % steps) for step in range(steps)]
    ends = torch.tensor(sizes, device=rows.device).cumsum(0)
    step_of_row = torch.bucketize(position_of_row, ends, right=True)
    rows_per_step = torch.bincount(step_of_row, minlength=steps)
    return list(torch.argsort(position_of_row, stable=True).split(rows_per_step.tolist()))
