"""The rewards of answers on the held-out data of an environment."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np

from agilerl.checks import COUNT, missing_members, require
from agilerl.llm_envs.seeds import evaluate_episodes
from agilerl.typing import Act, EvaluableEnv, Evaluation, MultiTurnEnv

if TYPE_CHECKING:
    from agilerl.distributed import Ranks


logger = logging.getLogger(__name__)


class EvaluationStopped(BaseException):
    """Raised where an agent is asked for answers, to stop an evaluation between two batches.

    ``agent.test`` then raises it on all ranks. It is no ``Exception``: an environment that deals
    with the failures of its own code must not take it for one of them.
    """


def evaluate(env: Any, act: Act, loop: int) -> Evaluation:
    """Evaluate on this process's share of the data.

    Args:
        env: An ``EvaluableEnv``, or a ``MultiTurnEnv``, whose first ``loop`` evaluation seeds are
            played.
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
    evaluation = env.evaluate(act, loop) if evaluable else evaluate_episodes(env, act, loop)
    require(
        isinstance(evaluation, Evaluation),
        f"evaluate of {type(env).__name__} returned a {type(evaluation).__name__}; it must be an "
        "agilerl.typing.Evaluation",
        TypeError,
    )
    return evaluation


def scores_of_all_ranks(evaluation: Evaluation | None, ranks: Ranks) -> np.ndarray:
    """Rewards ``(N,)`` float32 of the answers of all ranks, in their order; each must call it.

    Args:
        evaluation: This rank's; None: it was stopped.
        ranks: The processes.

    Raises:
        EvaluationStopped: If that of a rank was stopped.
        RuntimeError: If more answers failed than may, or all of them.
    """
    own = None
    if evaluation is not None:
        rewards = evaluation.rewards.detach().float().cpu().numpy()
        own = rewards, evaluation.failures, evaluation.failure_limit
    of_ranks = ranks.gather(own)
    gathered = [each for each in of_ranks if each is not None]
    if len(gathered) < len(of_ranks):
        raise EvaluationStopped
    scores = np.concatenate([rewards for rewards, _, _ in gathered])
    failures = [reason for _, reasons, _ in gathered for reason in reasons]
    limit = sum(limit for _, _, limit in gathered)
    first = f" The first: {failures[0]}" if failures else ""
    require(
        len(failures) <= limit,
        f"{len(failures)} of the evaluation's answers failed, more than the {limit:g} that may "
        f"(max_failure_share).{first}",
        RuntimeError,
    )
    require(
        len(scores) > 0,
        f"none of the evaluation's answers was scored, so there is no fitness.{first}",
        RuntimeError,
    )
    if failures and ranks.rank == 0:
        logger.warning("%d of the evaluation's answers failed.%s", len(failures), first)
    return scores
