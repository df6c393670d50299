"""What an agent collects for one ``learn``, over all processes, and the metrics read off it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from agilerl.llm.advantages import zero_variance_groups

if TYPE_CHECKING:
    from agilerl.distributed import Ranks
    from agilerl.typing import ExperiencesType

SAMPLES_PER_ITERATION = 4
"""Completions of an agent that are written to ``completions.jsonl``."""
SUMMED_METRICS = ("failed_episodes",)
"""Metrics that count something; the others are means over completions."""


@dataclass(frozen=True)
class Sample:
    """One completion for ``completions.jsonl``."""

    question: str
    completion: str
    answer: Any
    reward: float
    rewards: dict[str, float | None] = field(default_factory=dict)
    """Each of several rewards, None where it does not apply."""


@dataclass(frozen=True)
class Experience:
    """What one agent collected for one ``learn`` call.

    Two prompts in groups of two, three of the four completions right::

        rewards           [[1.0, 0.0], [1.0, 1.0]]
        steps             2
        generated_tokens  40
    """

    experiences: ExperiencesType
    """First argument of ``learn``."""
    rewards: torch.Tensor
    """``(P, G)`` float32 on the CPU: one reward per completion, one row per group."""
    steps: int
    """What ``max_steps`` counts: prompts consumed, or turns played."""
    generated_tokens: int
    """Tokens sampled, end-of-sequence tokens included."""
    generation_seconds: float
    environment_seconds: float
    learn_arguments: dict[str, Any] = field(default_factory=dict)
    """Further keyword arguments of ``learn``."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Further columns of ``metrics.csv``."""
    named_rewards: dict[str, torch.Tensor] = field(default_factory=dict)
    """Each of several rewards, ``(P, G)`` float32 as ``rewards``; NaN where it does not apply."""
    samples: list[Sample] = field(default_factory=list)
    """A few completions to read."""


def gather_statistics(experience: Experience, ranks: Ranks) -> Experience:
    """The experience with rewards, counts and metrics of all ranks; ``learn``'s stay this rank's.

    Rewards are ``(P, G)`` over all ranks; of times the longest counts, because all wait for it.
    """
    if ranks.world_size == 1:
        return experience
    own = replace(experience, experiences=([], [], None), learn_arguments={}, samples=[])
    all_ranks: list[Experience] = ranks.gather(own)
    completions = [each.rewards.numel() for each in all_ranks]
    metrics = {}
    for name in experience.metrics:
        values = [each.metrics[name] for each in all_ranks]
        if name not in SUMMED_METRICS:
            shares = zip(values, completions, strict=True)
            values = [value * count / sum(completions) for value, count in shares]
        metrics[name] = sum(values)
    return replace(
        experience,
        rewards=torch.cat([each.rewards for each in all_ranks]),
        steps=sum(each.steps for each in all_ranks),
        generated_tokens=sum(each.generated_tokens for each in all_ranks),
        generation_seconds=max(each.generation_seconds for each in all_ranks),
        environment_seconds=max(each.environment_seconds for each in all_ranks),
        metrics=metrics,
        named_rewards={
            name: torch.cat([each.named_rewards[name] for each in all_ranks])
            for name in experience.named_rewards
        },
    )


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


def named_reward_statistics(named_rewards: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Mean and population standard deviation of each reward, over the rows that it applies to.

    A reward that applies to no row has none.
    """
    statistics = {}
    for name, rewards in named_rewards.items():
        numbers = rewards[~rewards.isnan()]
        if len(numbers):
            statistics[f"rewards/{name}/mean"] = float(numbers.mean())
            statistics[f"rewards/{name}/std"] = float(numbers.std(correction=0))
    return statistics


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
    """Whether some group (row of ``(P, G)``) holds two rewards that differ beyond rounding."""
    return zero_variance_groups(rewards.reshape(-1), rewards.shape[1]) < len(rewards)
