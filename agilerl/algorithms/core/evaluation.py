"""Greedy rewards of an agent on the held-out data of an environment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from agilerl.checks import COUNT, require
from agilerl.llm_envs.episodes import evaluate_episodes
from agilerl.typing import ActionResult, EvaluableEnv, Evaluation, MultiTurnEnv, ReasoningPrompts

if TYPE_CHECKING:
    from agilerl.algorithms.core.llm import LLMAlgorithm


def evaluate(agent: LLMAlgorithm, env: Any, loop: int) -> torch.Tensor:
    """Greedy rewards ``(N,)`` float32 on the CPU: of this process's share, ``loop`` times over.

    Raises:
        TypeError: If the environment cannot be evaluated, or ``loop`` is no integer.
        ValueError: If ``loop`` is not positive.
    """
    COUNT("loop", loop)
    require(
        isinstance(env, EvaluableEnv | MultiTurnEnv),
        f"env is of type {type(env).__name__}, which has no evaluate(act, loop) method; it must be "
        "a ReasoningGym, a SyncMultiTurnVecEnv or a TokenObservationWrapper, or follow "
        "agilerl.typing.EvaluableEnv or MultiTurnEnv",
        TypeError,
    )

    def act(prompts: list[ReasoningPrompts]) -> ActionResult:
        return agent.get_action(prompts, training=False)

    with agent.rollout():  # the adapter is merged once for all answers
        if isinstance(env, EvaluableEnv):
            evaluation = env.evaluate(act, loop)
        else:
            evaluation = evaluate_episodes(env, act, range(loop))
    require(
        isinstance(evaluation, Evaluation),
        f"evaluate of {type(env).__name__} returned a {type(evaluation).__name__}; it must be an "
        "agilerl.typing.Evaluation",
        TypeError,
    )
    return evaluation.rewards.detach().float().cpu()
