"""Advantages per token: those of its trajectory or turn, then filtered, whitened, clipped."""

from __future__ import annotations

import logging

import torch

from agilerl.checks import require, warn_once
from agilerl.distributed import Ranks, mean_and_std
from agilerl.llm.advantages.baselines import STD_EPS, group_relative, group_relative_per_turn
from agilerl.llm.config import AdvantageConfig

logger = logging.getLogger(__name__)


def credited_turns(
    rewards: torch.Tensor,
    action_mask: torch.Tensor,
    config: AdvantageConfig,
    turn_ids: torch.Tensor | None = None,
    trajectory_ids: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """The turns that have an advantage each.

    Args:
        rewards: As for :func:`compute_advantages`, like what follows.
        action_mask: As there.
        config: As there.
        turn_ids: As there.
        trajectory_ids: As there.

    Returns:
        ``(N, U)`` bool, the turns of each trajectory that have an action; None: advantages are per
        trajectory.

    Raises:
        ValueError: If a turn has no reward.
    """
    if config.granularity != "turn" or turn_ids is None or rewards.dim() == 1:
        return None
    turns = torch.where(action_mask, turn_ids, -1)
    require(
        int(turns.max()) < rewards.shape[1],
        f"turn_ids go up to {int(turns.max())}, but rewards have {rewards.shape[1]} turns: turns "
        "count from 0, one column of rewards each",
    )
    if trajectory_ids is None:
        trajectory_ids = torch.arange(len(turns), device=turns.device)
    # One column more than there are turns takes the positions without an action.
    played = torch.zeros(rewards.shape[0], rewards.shape[1] + 1, dtype=torch.bool).to(turns.device)
    played[trajectory_ids[:, None].expand_as(turns), turns] = True
    return played[:, :-1]


def compute_advantages(
    rewards: torch.Tensor,
    action_mask: torch.Tensor,
    config: AdvantageConfig,
    turn_ids: torch.Tensor | None = None,
    trajectory_ids: torch.Tensor | None = None,
    ranks: Ranks | None = None,
    kept: torch.Tensor | None = None,
    masked: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn the rewards of a batch into per-token advantages.

    A group of two rows with rewards 1 and 0, ``mean_only``, masks [F, T, T] and [F, T, F]::

        advantages  [[0, .5, .5], [0, -.5, 0]]
        loss_mask   [[F, T, T], [F, T, F]]

    Args:
        rewards: ``(N,)`` returns of the trajectories, or ``(N, U)`` per turn, summed at trajectory
            granularity.
        action_mask: ``(B, S)`` bool.
        config: Baseline and normalisation, granularity, filter, whitening and clipping, applied in
            that order.
        turn_ids: ``(B, S)`` turn index per action, -1 elsewhere. Turn granularity needs these and
            rewards per turn; without, it falls back to the trajectory, which the log says once.
        trajectory_ids: ``(B,)`` long, the trajectory that each row belongs to; None: N = B, one row
            each.
        ranks: The processes whose batches make one; whitening and ``"batch_std"`` are over all of
            them. None: this one.
        kept: ``(N,)`` bool: the trajectories that count, all if None. Others are in no mean and no
            std, and are not trained. A group with fewer than two left has the advantage 0, and is
            not whitened.
        masked: ``(N,)`` bool: the trajectories that count, but are masked out of the loss; none if
            None. Their rewards are in the means and stds, their tokens are not whitened.

    Returns:
        ``(B, S)`` advantages, float32 (float64 for float64 rewards), 0 where they do not count or
        are filtered; and the ``(B, S)`` bool mask of the actions that count: of the trajectories
        that do all, or those that are not filtered. Of masked trajectories they count too, in what
        the means of the loss divide by.

    Raises:
        ValueError: If the batch does not consist of whole groups, or a turn has no reward.
    """
    require(
        rewards.shape[0] % config.group_size == 0,
        f"{rewards.shape[0]} sequences are not whole groups of group_size {config.group_size}; "
        "pass every completion of each prompt, contiguously",
    )
    if trajectory_ids is None:
        trajectory_ids = torch.arange(len(action_mask), device=action_mask.device)
    if kept is None:
        kept = torch.ones(len(rewards), dtype=torch.bool, device=action_mask.device)
    played = credited_turns(rewards, action_mask, config, turn_ids, trajectory_ids)
    if played is not None and turn_ids is not None:
        per_turn = group_relative_per_turn(
            rewards * played,
            played,
            config.group_size,
            config.norm,
            kept,
            baseline=config.baseline,
            ranks=ranks,
        )
        turns = torch.where(action_mask, turn_ids, -1)
        advantages = per_turn[trajectory_ids].gather(1, turns.clamp(min=0))
    else:
        if config.granularity == "turn":
            warn_once(
                logger,
                'advantage_granularity is "turn", but learn() got no turn_ids or no rewards per '
                "turn: advantages are per trajectory",
            )
        per_trajectory = group_relative(
            rewards, config.group_size, config.norm, kept, baseline=config.baseline, ranks=ranks
        )
        advantages = per_trajectory[trajectory_ids][:, None].expand(action_mask.shape)

    loss_mask = action_mask & kept[trajectory_ids][:, None]
    if config.filter_zero:
        loss_mask = loss_mask & (advantages.abs() > config.filter_eps)
    advantages = torch.where(loss_mask, advantages, 0.0)
    if config.whiten:
        compared = has_baseline(kept, config.group_size)
        trained = compared if masked is None else compared & ~masked
        advantages = _whiten(
            advantages, loss_mask & trained[trajectory_ids][:, None], ranks or Ranks()
        )
    if config.clip_range is not None:
        advantages = advantages.clamp(-config.clip_range, config.clip_range)
    return advantages, loss_mask


def has_baseline(kept: torch.Tensor, group_size: int) -> torch.Tensor:
    """``(N,)`` bool: those of ``kept`` whose group has another one to be compared with."""
    groups = kept.view(-1, group_size)
    return (groups & (groups.sum(1, keepdim=True) > 1)).reshape(-1)


def _whiten(values: torch.Tensor, mask: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Zero mean and unit (unbiased) std over the masked tokens; unchanged with fewer than two."""
    count, mean, std = mean_and_std(values[mask], ranks)
    if count < 2:
        return values
    return torch.where(mask, (values - mean) / (std + STD_EPS), 0.0)
