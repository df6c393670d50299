"""The optimizer steps of an update, agreed upon by all ranks before the first forward."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from agilerl.llm.batch import Batch
from agilerl.llm.config import UpdateConfig
from agilerl.llm.engine import Engine
from agilerl.llm.losses import reduction_counts


@dataclass(frozen=True)
class MiniBatch:
    """This rank's part of one optimizer step.

    ``active [4, 6, 7], counts [20, 6]``: three rows here have a gradient; with those of the other
    rank and those without a gradient, six rows have twenty trained tokens.
    """

    active: torch.Tensor
    """``(a,)`` long, rows of the batch with a gradient; none where other ranks have more rows."""
    counts: torch.Tensor
    """``(2,)`` trained tokens and sequences over all ranks: what means divide by."""
    has_gradient: bool
    """Whether any rank has an active row; if not, no rank steps."""
    weightless: int
    """Micro-batches of weight zero to run here, so that ranks in lockstep run equally many."""


def plan_mini_batches(
    batch: Batch,
    mask: torch.Tensor,
    active: torch.Tensor,
    shares: torch.Tensor | None,
    trajectory_ids: torch.Tensor | None,
    update: UpdateConfig,
    engine: Engine,
    rng: torch.Generator,
) -> list[MiniBatch]:
    """Cut every epoch into mini-batches, equally many on every rank.

    Args:
        batch: This rank's rows.
        mask: ``(B, S)`` bool, the trained positions.
        active: ``(B,)`` bool, rows with a gradient.
        shares: ``(B,)`` part of its trajectory in each row; None: all of it.
        trajectory_ids: ``(B,)`` long; None: every row is one. They are not torn apart, so that each
            weighs the same however many rows it has.
        update: Sizes, in trajectories of this rank, and epochs.
        engine: Whose ranks agree.
        rng: Orders the prompts, on each rank its own.
    """
    if trajectory_ids is None:
        trajectory_ids = torch.arange(len(batch), device=batch.device)
    cuts = -(-int(trajectory_ids.max() + 1) // update.batch_size)
    most = int(engine.ranks.max(torch.tensor(cuts)))
    nothing = torch.empty(0, dtype=torch.long, device=batch.device)
    parts: list[torch.Tensor] = []
    for _ in range(update.epochs):
        epoch = _shuffled_parts(batch.prompt_index, trajectory_ids, update.batch_size, rng)
        parts += epoch + [nothing] * (most - len(epoch))

    own = [reduction_counts(mask[p], None if shares is None else shares[p]) for p in parts]
    with_gradient = [part[active[part]] for part in parts]
    rows = torch.tensor([len(part) for part in with_gradient])
    totals = engine.ranks.sum(torch.cat([torch.stack(own), rows[:, None].to(own[0])], dim=1))
    micro_batches = rows.add(update.micro_batch_size - 1) // update.micro_batch_size
    target = engine.ranks.max(micro_batches) if engine.lockstep else micro_batches
    weightless = (target - micro_batches).tolist()
    return [
        MiniBatch(chosen, total[:2], bool(total[2] > 0), extra)
        for chosen, total, extra in zip(with_gradient, totals, weightless, strict=True)
    ]


def _shuffled_parts(
    prompt_index: torch.Tensor, trajectory_ids: torch.Tensor, size: int, rng: torch.Generator
) -> list[torch.Tensor]:
    """Row indices of each step: prompts in random order, trajectories with the same side by side.

    Args:
        prompt_index: ``(B,)`` long.
        trajectory_ids: ``(B,)`` long.
        size: Trajectories per step.
        rng: Orders the prompts.
    """
    rows = torch.arange(len(prompt_index), device=prompt_index.device)
    count = int(trajectory_ids.max()) + 1
    if count <= size:
        return [rows]
    rank = torch.randperm(int(prompt_index.max()) + 1, generator=rng).to(rows.device)
    first_row = torch.full((count,), len(rows), device=rows.device)
    first_row = first_row.scatter_reduce(0, trajectory_ids, rows, reduce="amin")
    order = torch.argsort(rank[prompt_index[first_row]], stable=True)
    place = torch.empty_like(order).scatter(0, order, torch.arange(count, device=rows.device))
    place_of_row = place[trajectory_ids]
    rows_per_step = torch.bincount(place_of_row // size)
    return list(torch.argsort(place_of_row, stable=True).split(rows_per_step.tolist()))
