"""From completions to rewards: the functions, what each is given, the pool that calls them."""

from __future__ import annotations

from agilerl.llm_envs.rewards.functions import RewardFunction, RewardFunctions
from agilerl.llm_envs.rewards.pool import RewardError, RewardPool

__all__ = ["RewardError", "RewardFunction", "RewardFunctions", "RewardPool"]
