"""Environments that hand out prompts and score completions.

* :class:`ReasoningGym`: one answer per question, from a dataset and a reward function.
* :class:`TokenObservationWrapper`: a text environment over several turns, as token ids.
* :class:`RewardPool`: runs a reward function, sync or async, concurrently and with a time limit.
"""

from __future__ import annotations

from agilerl.llm_envs.reasoning import ReasoningGym
from agilerl.llm_envs.rewards import RewardError, RewardFunction, RewardPool
from agilerl.llm_envs.token_observation import TokenObservationWrapper

__all__ = [
    "ReasoningGym",
    "RewardError",
    "RewardFunction",
    "RewardPool",
    "TokenObservationWrapper",
]
