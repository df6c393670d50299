"""Rewards to advantages: group-relative, per trajectory or per turn, then filter, whiten, clip.

Source: GRPO, https://arxiv.org/abs/2402.03300, eq. 3 and section 4.1.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass

import torch

from agilerl.distributed import Ranks, mean_and_std
from agilerl.llm.config import AdvantageConfig, AdvNorm

logger = logging.getLogger(__name__)

STD_EPS = 1e-8
# Returns closer than this, relative to the largest, count as equal: float32 rounding parts them.
EQUAL_RTOL = 4 * torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Advantages:
    """Per-token advantages of a batch.

    A group of two rows with rewards 1 and 0, ``mean_only``, masks [F, T, T] and [F, T, F]::

        values                [[0, .5, .5], [0, -.5, 0]]
        mask                  [[F, T, T], [F, T, F]]
        zero_variance_groups  0
    """

    values: torch.Tensor
    """``(B, S)`` float32 (float64 for float64 rewards), 0 outside ``mask``."""
    mask: torch.Tensor
    """``(B, S)`` bool: the action positions that are trained; filtered ones are not."""
    zero_variance_groups: int
    """Groups whose returns are all equal, which teach nothing."""


def group_relative(
    values: torch.Tensor, group_size: int, norm: AdvNorm = "mean_std"
) -> torch.Tensor:
    """Centre (and scale) each contiguous block of ``group_size`` values on its own mean (and std).

    Args:
        values: ``(B,)`` returns, B a multiple of ``group_size``.
        group_size: Members per group.
        norm: ``"mean_std"`` divides by ``std + 1e-8`` (unbiased std), ``"mean_only"`` does not.

    Returns:
        ``(B,)`` advantages, exactly 0 in a group whose returns are equal up to rounding.
    """
    played = torch.ones_like(values, dtype=torch.bool)
    return _group_relative(values, played, group_size, norm)


def group_relative_per_turn(
    rewards: torch.Tensor, played: torch.Tensor, group_size: int, norm: AdvNorm = "mean_std"
) -> torch.Tensor:
    """Group-relative advantage of every turn over the members that played it.

    Args:
        rewards: ``(B, U)`` reward per turn, 0 where not played.
        played: ``(B, U)`` bool.
        group_size: Members per group.
        norm: As in :func:`group_relative`.

    Returns:
        ``(B, U)``; a turn with fewer than two players in its group takes the trajectory's
        advantage.
    """
    trajectory = group_relative(rewards.sum(-1), group_size, norm)
    columns = [
        _group_relative(rewards[:, u], played[:, u], group_size, norm)
        for u in range(rewards.shape[1])
    ]
    per_turn = torch.stack(columns, dim=1)
    players = (
        played.view(-1, group_size, rewards.shape[1]).sum(1).repeat_interleave(group_size, dim=0)
    )
    return torch.where(players >= 2, per_turn, trajectory[:, None]) * played


def zero_variance_groups(values: torch.Tensor, group_size: int) -> int:
    """Count the groups of ``(B,)`` returns that are equal up to rounding."""
    groups = values.to(torch.float64).view(-1, group_size)
    return int(_equal(groups.amax(1) - groups.amin(1), groups.abs().amax(1)).sum())


def compute_advantages(
    rewards: torch.Tensor,
    action_mask: torch.Tensor,
    config: AdvantageConfig,
    turn_ids: torch.Tensor | None = None,
    trajectory_ids: torch.Tensor | None = None,
    ranks: Ranks | None = None,
) -> Advantages:
    """Turn the rewards of a batch into per-token advantages.

    Args:
        rewards: ``(N,)`` returns of the trajectories, or ``(N, U)`` per turn, summed at trajectory
            granularity.
        action_mask: ``(B, S)`` bool.
        config: Normalisation, granularity, filter, whitening and clipping, applied in that order.
        turn_ids: ``(B, S)`` turn index per action, -1 elsewhere. Turn granularity needs these and
            rewards per turn; without, it falls back to the trajectory, which the log says once.
        trajectory_ids: ``(B,)`` long, the trajectory that each row belongs to; None: N = B, one row
            each.
        ranks: The processes whose batches make one; whitening is over all of them. None: this one.

    Raises:
        ValueError: If the batch does not consist of whole groups, or a turn has no reward.
    """
    if rewards.shape[0] % config.group_size:
        raise ValueError(
            f"{rewards.shape[0]} sequences are not whole groups of group_size "
            f"{config.group_size}; "
            "pass every completion of each prompt, contiguously"
        )
    if trajectory_ids is None:
        trajectory_ids = torch.arange(len(action_mask), device=action_mask.device)
    returns = rewards if rewards.dim() == 1 else rewards.sum(-1)
    per_turn = config.granularity == "turn"
    if per_turn and (turn_ids is None or rewards.dim() == 1):
        _warn_no_turns()
    if per_turn and turn_ids is not None and rewards.dim() == 2:
        turns = torch.where(action_mask, turn_ids, -1)
        values = _scatter_turns(rewards, turns, trajectory_ids, config)
    else:
        per_trajectory = group_relative(returns, config.group_size, config.norm)
        values = per_trajectory[trajectory_ids][:, None].expand(action_mask.shape)

    mask = action_mask
    if config.filter_zero:
        mask = mask & (values.abs() > config.filter_eps)
    values = torch.where(mask, values, 0.0)
    if config.whiten:
        values = _whiten(values, mask, ranks or Ranks())
    if config.clip_range is not None:
        values = values.clamp(-config.clip_range, config.clip_range)
    return Advantages(values, mask, zero_variance_groups(returns, config.group_size))


def _group_relative(
    values: torch.Tensor, played: torch.Tensor, group_size: int, norm: AdvNorm
) -> torch.Tensor:
    """``(B,)`` values relative to the members of each group that played; 0 for the others."""
    groups = values.to(torch.float64).view(-1, group_size)
    member = played.view(-1, group_size)
    count = member.sum(1, keepdim=True)
    centred = torch.where(member, groups, 0.0)
    centred = torch.where(member, groups - centred.sum(1, keepdim=True) / count.clamp(min=1), 0.0)
    high = groups.masked_fill(~member, -torch.inf).amax(1, keepdim=True)
    low = groups.masked_fill(~member, torch.inf).amin(1, keepdim=True)
    equal = _equal(high - low, torch.maximum(high.abs(), low.abs()))
    advantages = centred
    if norm == "mean_std":
        std = (centred.square().sum(1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
        advantages = centred / (std + STD_EPS)
    advantages = torch.where(equal | (count < 2), 0.0, advantages)
    dtype = values.dtype if values.dtype == torch.float64 else torch.float32
    return advantages.reshape(-1).to(dtype)


@functools.lru_cache(maxsize=1)
def _warn_no_turns() -> None:
    logger.warning(
        'advantage_granularity is "turn", but learn() got no turn_ids or no rewards per turn: '
        "advantages are per trajectory"
    )


def _equal(spread: torch.Tensor, magnitude: torch.Tensor) -> torch.Tensor:
    return spread <= EQUAL_RTOL * magnitude


def _scatter_turns(
    rewards: torch.Tensor,
    turns: torch.Tensor,
    trajectory_ids: torch.Tensor,
    config: AdvantageConfig,
) -> torch.Tensor:
    """Per-turn advantages of ``(N, U)`` rewards spread over the tokens of ``(B, S)`` turns."""
    if int(turns.max()) >= rewards.shape[1]:
        raise ValueError(
            f"turn_ids go up to {int(turns.max())}, but rewards have {rewards.shape[1]} turns: "
            "turns count from 0, one column of rewards each"
        )
    in_row = (turns[:, :, None] == torch.arange(rewards.shape[1], device=turns.device)).any(1)
    rows_with_turn = torch.zeros(rewards.shape, dtype=torch.long, device=turns.device)
    played = rows_with_turn.index_add(0, trajectory_ids, in_row.long()) > 0
    per_turn = group_relative_per_turn(rewards * played, played, config.group_size, config.norm)
    return per_turn[trajectory_ids].gather(1, turns.clamp(min=0))


def _whiten(values: torch.Tensor, mask: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Zero mean and unit (unbiased) std over the masked tokens; unchanged with fewer than two."""
    count, mean, std = mean_and_std(values[mask], ranks)
    if count < 2:
        return values
    return torch.where(mask, (values - mean) / (std + STD_EPS), 0.0)
