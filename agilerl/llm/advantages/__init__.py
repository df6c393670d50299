"""Rewards to advantages: group-relative, per trajectory or per turn, then filter, whiten, clip."""

from agilerl.llm.advantages.baselines import (
    group_relative,
    group_relative_per_turn,
    varying_groups,
    zero_variance_groups,
)
from agilerl.llm.advantages.tokens import compute_advantages, credited_turns, has_baseline

__all__ = [
    "compute_advantages",
    "credited_turns",
    "group_relative",
    "group_relative_per_turn",
    "has_baseline",
    "varying_groups",
    "zero_variance_groups",
]
