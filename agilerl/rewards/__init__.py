r"""Reward functions to use in ``ReasoningGym``, alone or in a list or dict with weights.

* :func:`batched_reward`: marks a function that takes and returns lists.
* :func:`exact_match`, :func:`boxed_answer`: the right answer, plain or in ``\boxed{...}``.
* :func:`format_matches`: the right format.
* :func:`soft_overlong_penalty`: the length penalty of DAPO.
* :class:`CodeExecutionReward`: runs the program in a completion against tests.
* :class:`RewardModel`: a trained model scores completions, in one batch.
"""

from __future__ import annotations

from agilerl.rewards.answers import boxed_answer, exact_match, extract_boxed, format_matches
from agilerl.rewards.batched import batched_reward
from agilerl.rewards.code_execution import CodeExecutionReward
from agilerl.rewards.length import soft_overlong_penalty
from agilerl.rewards.reward_model import RewardModel

__all__ = [
    "CodeExecutionReward",
    "RewardModel",
    "batched_reward",
    "boxed_answer",
    "exact_match",
    "extract_boxed",
    "format_matches",
    "soft_overlong_penalty",
]
