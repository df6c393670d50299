"""Numbers of an iteration's row that come from rewards and clocks."""

from __future__ import annotations

import logging

import torch

from agilerl.training.protocols import Agent, Experience

logger = logging.getLogger(__name__)


def accuracy(rewards: torch.Tensor, threshold: float) -> float:
    """Share of rewards (any shape) at or above the threshold."""
    # Compared in the rewards' own precision: a float32 reward of 1.3 has to reach 1.3.
    return float((rewards >= torch.tensor(threshold, dtype=rewards.dtype)).float().mean())


def reward_statistics(rewards: torch.Tensor, accuracy_threshold: float) -> dict[str, float]:
    """Mean, population standard deviation and accuracy of ``(P, G)`` rewards."""
    return {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std(correction=0)),
        "accuracy": accuracy(rewards, accuracy_threshold),
    }


def time_statistics(experience: Experience, learning_seconds: float) -> dict[str, float]:
    """Seconds of each stage, and tokens generated per second of all three together."""
    seconds = experience.generation_seconds + experience.environment_seconds + learning_seconds
    return {
        "tokens_per_second": experience.generated_tokens / seconds,
        "generation_seconds": experience.generation_seconds,
        "environment_seconds": experience.environment_seconds,
        "learning_seconds": learning_seconds,
    }


def has_reward_variance(rewards: torch.Tensor) -> bool:
    """Whether some group (row of ``(P, G)``) holds two different rewards."""
    return bool((rewards != rewards[:, :1]).any())


def warn_of_flat_rewards(agent: Agent, iteration: int, window: int, mean: float) -> None:
    """Say loudly that an agent learns nothing, for ``window`` iterations up to this one."""
    logger.warning(
        "%s agent %d learns nothing: in the last %d iterations (%d to %d) all rewards of a group "
        "were equal in every group, so all advantages were zero. The mean reward of the last one "
        "was %.4g. Look at completions.jsonl, and make the task easier or harder, the reward "
        "finer, the temperature higher or the group larger.",
        agent.algo,
        agent.index,
        window,
        iteration - window + 1,
        iteration,
        mean,
    )
