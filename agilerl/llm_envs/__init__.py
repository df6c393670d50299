"""Environments that hand out prompts and score completions.

* :class:`ReasoningGym`: one answer per question, from a dataset and reward functions.
* :class:`TokenObservationWrapper`: a text environment over several turns, as token ids.
* :class:`SyncMultiTurnVecEnv`: many of these at a time, in threads; returns :class:`Episodes`.
* :class:`ToolEnv`: a text environment in which questions are answered with tools.
* :func:`row_of_seed`: training or held-out rows of a dataset for such environments.
* :class:`RewardPool`: runs reward functions, sync or async, concurrently and with a timeout.
"""

from __future__ import annotations

from agilerl.llm_envs.failures import WrongRewardError
from agilerl.llm_envs.reasoning import ReasoningGym
from agilerl.llm_envs.rewards import RewardError, RewardFunction, RewardFunctions, RewardPool
from agilerl.llm_envs.seeds import EVALUATION_SEED_START, row_of_seed
from agilerl.llm_envs.token_observation import TokenObservationWrapper
from agilerl.llm_envs.tools import ToolEnv
from agilerl.llm_envs.vector import EnvironmentFailure, Episodes, SyncMultiTurnVecEnv

__all__ = [
    "EVALUATION_SEED_START",
    "EnvironmentFailure",
    "Episodes",
    "ReasoningGym",
    "RewardError",
    "RewardFunction",
    "RewardFunctions",
    "RewardPool",
    "SyncMultiTurnVecEnv",
    "TokenObservationWrapper",
    "ToolEnv",
    "WrongRewardError",
    "row_of_seed",
]
