"""The rewards of answers on the held-out data of an environment."""

from __future__ import annotations

from typing import Any

import torch

from agilerl.checks import COUNT, missing_members, require
from agilerl.llm_envs.seeds import evaluate_episodes
from agilerl.typing import Act, EvaluableEnv, Evaluation, MultiTurnEnv


def evaluate(env: Any, act: Act, loop: int) -> torch.Tensor:
    """Rewards ``(N,)`` float32 on the CPU, of this process's share of the data.

    Args:
        env: An ``EvaluableEnv``, or a ``MultiTurnEnv``, whose seeds 0 to ``loop - 1`` are played.
        act: Answers prompts.
        loop: Times to go through the data.

    Raises:
        TypeError: If the environment cannot be evaluated, or ``loop`` is no integer.
        ValueError: If ``loop`` is not positive.
    """
    COUNT("loop", loop)
    evaluable = not missing_members(env, EvaluableEnv)
    require(
        evaluable or not missing_members(env, MultiTurnEnv),
        f"env is of type {type(env).__name__}, which has no evaluate(act, loop) method; it must be "
        "a ReasoningGym, a SyncMultiTurnVecEnv or a TokenObservationWrapper, or follow "
        "agilerl.typing.EvaluableEnv or MultiTurnEnv",
        TypeError,
    )
    evaluation = env.evaluate(act, loop) if evaluable else evaluate_episodes(env, act, range(loop))
    require(
        isinstance(evaluation, Evaluation),
        f"evaluate of {type(env).__name__} returned a {type(evaluation).__name__}; it must be an "
        "agilerl.typing.Evaluation",
        TypeError,
    )
    return evaluation.rewards.detach().float().cpu()
