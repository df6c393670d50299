"""Many multi-turn episodes at a time."""

from __future__ import annotations

from agilerl.llm_envs.vector.episode_failures import EnvironmentFailure
from agilerl.llm_envs.vector.episodes import Episodes
from agilerl.llm_envs.vector.vector_env import SyncMultiTurnVecEnv

__all__ = ["EnvironmentFailure", "Episodes", "SyncMultiTurnVecEnv"]
