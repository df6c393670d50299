"""Returns relative to their group: baseline and normalisation, per trajectory or per turn.

Sources: GRPO https://arxiv.org/abs/2402.03300, eq. 3 and section 4.1; ``"leave_one_out"`` (RLOO)
https://arxiv.org/abs/2402.14740; ``"batch_std"`` https://arxiv.org/abs/2508.08221.
"""

from __future__ import annotations

import torch

from agilerl.distributed import Ranks, mean_and_std
from agilerl.llm.config import AdvNorm, Baseline

STD_EPS = 1e-8
# Returns closer than this, relative to the rewards they are sums of, count as equal: float32
# rounding can make equal returns differ.
EQUAL_RTOL = 4 * torch.finfo(torch.float32).eps


def group_relative(
    rewards: torch.Tensor,
    group_size: int,
    norm: AdvNorm = "mean_std",
    kept: torch.Tensor | None = None,
    *,
    baseline: Baseline = "group_mean",
    ranks: Ranks | None = None,
) -> torch.Tensor:
    """Centre (and scale) the returns of each contiguous group.

    ``[3, 1, 1, 1]`` is centred to ``[1.5, -.5, -.5, -.5]`` on the group's mean, and to
    ``[2, -.67, -.67, -.67]`` on the mean of the others.

    Args:
        rewards: ``(N,)`` returns, N a multiple of ``group_size``; or ``(N, U)`` rewards per turn,
            whose sums are the returns.
        group_size: Members per group.
        norm: ``"mean_std"`` divides by ``std + 1e-8`` (unbiased std of those that the mean is of),
            ``"batch_std"`` by that of all returns that count, ``"mean_only"`` does not. A member
            whose others are all equal is divided by the std of the group.
        kept: ``(N,)`` bool: the members that count; None: all of them.
        baseline: What a return is compared with: the mean of its group, or of the group's others.
        ranks: The processes whose returns ``"batch_std"`` is over, a collective; None: this one.

    Returns:
        ``(N,)`` advantages, exactly 0 in a group whose returns are equal up to rounding, in one
        with fewer than two members that count, and for members that do not.
    """
    returns, magnitude = _returns(rewards)
    played = torch.ones_like(returns, dtype=torch.bool) if kept is None else kept
    scale = mean_and_std(returns[played], ranks or Ranks())[2] if norm == "batch_std" else None
    advantages = _in_groups(returns, magnitude, played, group_size, norm, baseline, scale)
    return advantages.to(_result_dtype(rewards))


def group_relative_per_turn(
    rewards: torch.Tensor,
    played: torch.Tensor,
    group_size: int,
    norm: AdvNorm = "mean_std",
    kept: torch.Tensor | None = None,
    *,
    baseline: Baseline = "group_mean",
    ranks: Ranks | None = None,
) -> torch.Tensor:
    """Group-relative advantage of every turn over the members that played it.

    Args:
        rewards: ``(N, U)`` reward per turn, 0 where not played.
        played: ``(N, U)`` bool.
        group_size: Members per group.
        norm: As in :func:`group_relative`; ``"batch_std"`` is that of a turn's rewards.
        kept: As there.
        baseline: As there.
        ranks: As there.

    Returns:
        ``(N, U)``; a turn that fewer than two members of the group reached takes the
        trajectory's advantage.
    """
    if kept is not None:
        played = played & kept[:, None]
    exact = rewards.to(torch.float64)
    scales = _std_of_turns(exact, played, ranks or Ranks()) if norm == "batch_std" else None
    columns = [
        _in_groups(
            exact[:, u],
            exact[:, u].abs(),
            played[:, u],
            group_size,
            norm,
            baseline,
            None if scales is None else scales[u],
        )
        for u in range(rewards.shape[1])
    ]
    per_turn = torch.stack(columns, dim=1).to(_result_dtype(rewards))
    trajectory = group_relative(rewards, group_size, norm, kept, baseline=baseline, ranks=ranks)
    players = (
        played.view(-1, group_size, rewards.shape[1]).sum(1).repeat_interleave(group_size, dim=0)
    )
    return torch.where(players >= 2, per_turn, trajectory[:, None]) * played


def zero_variance_groups(
    rewards: torch.Tensor,
    group_size: int,
    kept: torch.Tensor | None = None,
    turns: torch.Tensor | None = None,
) -> int:
    """Count the groups that are not among the :func:`varying_groups`.

    Those with fewer than two members that count (``kept``, ``(N,)`` bool) are none of them.
    """
    member = (torch.ones(len(rewards), dtype=torch.bool) if kept is None else kept).view(
        -1, group_size
    )
    varying = varying_groups(rewards, group_size, kept, turns)
    return int((~varying & (member.sum(1) > 1).to(varying.device)).sum())


def varying_groups(
    rewards: torch.Tensor,
    group_size: int,
    kept: torch.Tensor | None = None,
    turns: torch.Tensor | None = None,
) -> torch.Tensor:
    """Groups of which an advantage is not 0.

    Per trajectory these are groups with two returns that differ beyond rounding. Per turn, two
    episodes with rewards ``[1, 0]`` and ``[0, 1]`` vary although their returns are equal, and of
    three with ``[1]``, ``[1, 1]`` and ``[1, 1]`` no turn varies although their returns do.

    Args:
        rewards: ``(N,)`` returns, or ``(N, U)`` rewards per turn.
        group_size: G.
        kept: ``(N,)`` bool: the members that count; None: all of them.
        turns: ``(N, U)`` bool, the turns that have an advantage each, see :func:`credited_turns`;
            None: advantages are per trajectory.

    Returns:
        ``(P,)`` bool.
    """
    if turns is None:
        centred = group_relative(rewards, group_size, "mean_only", kept)
    else:
        centred = group_relative_per_turn(rewards * turns, turns, group_size, "mean_only", kept)
    return (centred != 0).view(len(rewards) // group_size, -1).any(1)


def _std_of_turns(rewards: torch.Tensor, played: torch.Tensor, ranks: Ranks) -> list[float]:
    """The unbiased std of each turn's rewards over all ranks, on which episodes differ in turns."""
    turns = rewards.shape[1]
    most = int(ranks.max(torch.tensor(turns)))
    nothing = rewards.new_zeros(0)
    return [
        mean_and_std(rewards[:, u][played[:, u]] if u < turns else nothing, ranks)[2]
        for u in range(most)
    ]


def _returns(rewards: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``(N,)`` float64 returns, and the sums of the magnitudes of what they are sums of."""
    exact = rewards.to(torch.float64)
    return (exact, exact.abs()) if rewards.dim() == 1 else (exact.sum(-1), exact.abs().sum(-1))


def _result_dtype(rewards: torch.Tensor) -> torch.dtype:
    return rewards.dtype if rewards.dtype == torch.float64 else torch.float32


def _in_groups(
    values: torch.Tensor,
    magnitude: torch.Tensor,
    played: torch.Tensor,
    group_size: int,
    norm: AdvNorm,
    baseline: Baseline,
    scale: float | None,
) -> torch.Tensor:
    """``(N,)`` float64 values relative to the members of each group that played; 0 for others.

    ``scale`` is the std that ``"batch_std"`` divides by.
    """
    shape = (-1, group_size)
    groups, sizes, member = values.view(shape), magnitude.view(shape), played.view(shape)
    mean, std, equal = _moments(groups, sizes, member)
    nothing = equal | (member.sum(1, keepdim=True) < 2)
    if baseline == "leave_one_out":
        itself = torch.eye(group_size, dtype=torch.bool, device=values.device)
        others = member[:, None, :] & ~itself
        mean, std_of_others, alike = _moments(groups[:, None, :], sizes[:, None, :], others)
        std = torch.where(alike.squeeze(2), std, std_of_others.squeeze(2))
        mean = mean.squeeze(2)
    advantages = torch.where(member, groups - mean, 0.0)
    if norm != "mean_only":
        advantages = advantages / ((std if scale is None else scale) + STD_EPS)
    return torch.where(nothing, 0.0, advantages).reshape(-1)


def _moments(
    values: torch.Tensor, magnitude: torch.Tensor, member: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean, unbiased std and whether all are equal, of the members along the last axis (kept)."""
    count = member.sum(-1, keepdim=True)
    mean = torch.where(member, values, 0.0).sum(-1, keepdim=True) / count.clamp(min=1)
    squares = torch.where(member, values - mean, 0.0).square().sum(-1, keepdim=True)
    std = (squares / (count - 1).clamp(min=1)).sqrt()
    return mean, std, _equal(*_spread(values, magnitude, member))


def _spread(
    groups: torch.Tensor, magnitude: torch.Tensor, member: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Range and largest magnitude of the members along the last axis (kept)."""
    high = torch.where(member, groups, -torch.inf).amax(-1, keepdim=True)
    low = torch.where(member, groups, torch.inf).amin(-1, keepdim=True)
    return high - low, torch.where(member, magnitude, 0.0).amax(-1, keepdim=True)


def _equal(spread: torch.Tensor, magnitude: torch.Tensor) -> torch.Tensor:
    return spread <= EQUAL_RTOL * magnitude
