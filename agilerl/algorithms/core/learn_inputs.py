"""What ``learn`` is given: its checks and shapes, and the batch that is made of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from agilerl.checks import require, shorten
from agilerl.distributed import Ranks
from agilerl.llm.advantages import compute_advantages, credited_turns, zero_variance_groups
from agilerl.llm.batch import TrainBatch, make_batch
from agilerl.llm.config import BatchConfig
from agilerl.typing import ExperiencesType


@dataclass(frozen=True)
class LearnInputs:
    """The arguments of :meth:`agilerl.algorithms.GRPO.learn`; see there."""

    experiences: ExperiencesType
    turn_ids: Sequence[torch.Tensor] | torch.Tensor | None = None
    sampling_logps: Sequence[torch.Tensor | None] | None = None
    trajectory_ids: Sequence[int] | torch.Tensor | None = None
    sample_mask: torch.Tensor | Sequence[Any] | None = None
    truncated: torch.Tensor | Sequence[Any] | None = None


def training_batch(
    given: LearnInputs, config: BatchConfig, ranks: Ranks, device: torch.device
) -> tuple[TrainBatch, int]:
    """The batch that an update is made on, and the number of its groups without variance.

    Args:
        given: This rank's part.
        config: What of it is read, and how rewards become advantages.
        ranks: The processes that train together, which must all call this.
        device: Where the batch shall be.

    Raises:
        TypeError: If ``sample_mask`` or ``truncated`` is not of True and False.
        ValueError: If shapes disagree, groups are incomplete, a reward is not finite, or something
            is needed and None.
    """
    completion_ids, action_masks, rewards = given.experiences
    may_lack_actions = ranks.world_size > 1 or given.sample_mask is not None
    batch = make_batch(
        completion_ids, action_masks, given.turn_ids, may_lack_actions=may_lack_actions
    )
    batch = _with_rows(batch, given, config, ranks).to(device)
    trajectories, group_size = int(batch.trajectory_of_row.max()) + 1, config.advantages.group_size
    kept = check_sample_mask(given.sample_mask, trajectories, group_size).to(device)
    cut_off = torch.zeros_like(kept)
    if config.masks_truncated:
        cut_off = check_truncated(given.truncated, trajectories, group_size).to(device)
    returns = shape_rewards(rewards, trajectories, group_size, kept).to(device)
    credit = config.advantages, batch.turn_ids, batch.trajectory_ids
    advantages, counted = compute_advantages(
        returns, batch.action_mask, *credit, ranks, kept, cut_off
    )
    turns = credited_turns(returns, batch.action_mask, *credit)
    batch = replace(
        batch,
        advantages=advantages,
        loss_mask=counted & ~cut_off[batch.trajectory_of_row][:, None],
        denominator_mask=counted,
    )
    if config.needs_sampling_logps:
        require_sampling_logps(batch, ranks)
    equal_groups = zero_variance_groups(returns, group_size, kept, turns)
    return batch.of_trajectories(kept), equal_groups


def _with_rows(
    batch: TrainBatch, given: LearnInputs, config: BatchConfig, ranks: Ranks
) -> TrainBatch:
    """The batch with what is given per row, on the device that the rows came from."""
    if given.trajectory_ids is not None:
        ids = check_trajectory_ids(given.trajectory_ids, len(batch))
        batch = replace(batch, trajectory_ids=ids)
    if config.needs_group_ids:
        groups = batch.trajectory_of_row // config.advantages.group_size
        batch = replace(batch, group_ids=groups)
    if config.reads_sampling_logps:
        logps = given.sampling_logps
        rows = [None] * len(batch) if logps is None else logps
        # Where the sampler of any rank reported some, all ranks correct, others by a weight of 1:
        # the means of the weights are over all rows.
        if any(ranks.gather(any(row is not None for row in rows))):
            batch = add_sampling_logps(batch, rows)
    return batch


def check_sample_mask(sample_mask: Any, trajectories: int, group_size: int) -> torch.Tensor:
    """Which trajectories count, ``(N,)`` bool; all of them if ``sample_mask`` is None.

    Args:
        sample_mask: ``(N,)`` or ``(P, G)`` bool tensor, array, or (nested) list.
        trajectories: N.
        group_size: G.

    Raises:
        TypeError: If it holds anything but True and False.
        ValueError: For another shape.
    """
    if sample_mask is None:
        return torch.ones(trajectories, dtype=torch.bool)
    return _flags("sample_mask", sample_mask, trajectories, group_size)


def check_truncated(truncated: Any, trajectories: int, group_size: int) -> torch.Tensor:
    """Which trajectories were cut off, ``(N,)`` bool; arguments and errors as for ``sample_mask``.

    Raises:
        ValueError: If ``truncated`` is None.
    """
    require(
        truncated is not None,
        "truncated is None, but mask_truncated_completions is True, so learn() has to be told "
        "which completions were cut off: pass truncated=action.truncated, of what get_action "
        "returned",
    )
    return _flags("truncated", truncated, trajectories, group_size)


def _flags(name: str, value: Any, trajectories: int, group_size: int) -> torch.Tensor:
    """True or False per trajectory, ``(N,)`` bool."""
    try:
        flags = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"{name} is {shorten(value)}, no array ({error}); pass True or False per trajectory"
        ) from error
    require(
        flags.dtype == torch.bool,
        f"{name} has the type {flags.dtype}; pass True or False per trajectory, such as "
        f"{name}.bool()",
        TypeError,
    )
    require(
        tuple(flags.shape) in ((trajectories,), (trajectories // group_size, group_size)),
        f"{name} has shape {tuple(flags.shape)} for {trajectories} completions in groups of "
        f"{group_size}; pass (prompts, group_size) or (completions,)",
    )
    return flags.reshape(-1)


def shape_rewards(
    rewards: Any, rows: int, group_size: int, kept: torch.Tensor | None = None
) -> torch.Tensor:
    """Rewards of ``rows`` completions as ``(B,)``, or ``(B, U)`` per turn.

    Args:
        rewards: ``(P, G)``, ``(B,)`` or ``(B, U)`` tensor, array, or (nested) list.
        rows: B.
        group_size: G.
        kept: ``(B,)`` bool: those that count, all if None. The rewards of others become 0.

    Raises:
        ValueError: For another shape, or a reward that counts and is not a finite number.
    """
    remedy = "pass (prompts, group_size), (completions,) or, per turn, (completions, turns)"
    try:
        if isinstance(rewards, list | tuple):
            rewards = torch.stack([torch.as_tensor(row) for row in rewards])
        rewards = torch.as_tensor(rewards)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"rewards are not an array of numbers ({error}); {remedy}") from error
    if not rewards.dtype.is_floating_point:
        rewards = rewards.float()
    shape = tuple(rewards.shape)
    if shape in ((rows,), (rows // group_size, group_size)):
        rewards = rewards.reshape(-1)
    elif len(shape) != 2 or shape[0] != rows:
        raise ValueError(
            f"rewards have shape {shape} for {rows} completions in groups of {group_size}; {remedy}"
        )
    if kept is not None:
        kept = kept.to(rewards.device)
        # Not by a product: it may be NaN.
        rewards = torch.where(kept if rewards.dim() == 1 else kept[:, None], rewards, 0.0)
    bad = (~rewards.isfinite()).nonzero()
    if len(bad):
        raise ValueError(
            f"reward of completion {int(bad[0, 0])} is {rewards[tuple(bad[0])].item()}; it must "
            "be finite; leave completions without a reward out with sample_mask"
        )
    return rewards


def check_trajectory_ids(trajectory_ids: Any, rows: int) -> torch.Tensor:
    """The trajectory of each row, ``(B,)`` long.

    Raises:
        ValueError: Unless there is one number per row and every trajectory from 0 on has a row.
    """
    ids = torch.as_tensor(trajectory_ids)
    counted = ids.unique() if ids.dim() == 1 and not ids.is_floating_point() else None
    if counted is None or len(ids) != rows or counted.tolist() != list(range(len(counted))):
        raise ValueError(
            f"trajectory_ids is {ids.tolist()}; pass one number per row ({rows}), counting the "
            "trajectories from 0 without gaps"
        )
    return ids.long()


def require_sampling_logps(batch: TrainBatch, ranks: Ranks) -> None:
    """Refuse, on all ranks together, a batch with rows to train that the sampler said nothing of.

    Args:
        batch: All rows; those with a ``loss_mask`` are trained.
        ranks: The processes that train.

    Raises:
        ValueError: If there are any on any rank.
    """

    def refuse() -> None:
        missing = batch.loss_mask.any(1)
        if batch.has_sampling_logp is not None:
            missing = missing & ~batch.has_sampling_logp
        require(
            not missing.any(),
            f"sampling_logps is None for row {int(missing.long().argmax())} of the batch, but "
            "importance_anchor is 'sampler'; pass learn() the sampler's log-probs of every "
            "completion, as get_action and environments return them",
        )

    ranks.on_all_ranks(refuse)


def add_sampling_logps(batch: TrainBatch, rows: Sequence[torch.Tensor | None]) -> TrainBatch:
    """The batch with the sampler's log-probs.

    Args:
        batch: The batch, on the CPU or wherever its rows came from.
        rows: One 1-D tensor per completion, generated tokens only; None: not reported.

    Raises:
        ValueError: If there are not as many as there are completions, or generated tokens.
    """
    require(
        len(rows) == len(batch),
        f"sampling_logps has {len(rows)} entries for {len(batch)} completions; pass one tensor (or "
        "None) per completion",
    )
    stacked = torch.zeros(batch.action_mask.shape, device=batch.device)
    for i, row in enumerate(rows):
        if row is not None:
            tokens = int(batch.action_mask[i].sum())
            require(
                row.numel() == tokens,
                f"sampling_logps[{i}] has {row.numel()} entries, but completion {i} has {tokens} "
                "generated tokens; pass one log-prob per generated token",
            )
            stacked[i, batch.action_mask[i]] = row.reshape(-1).to(stacked)
    reported = torch.tensor([row is not None for row in rows], device=batch.device)
    return replace(batch, sampling_logp=stacked, has_sampling_logp=reported)
