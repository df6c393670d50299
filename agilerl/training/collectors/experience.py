"""What an agent collects for one ``learn``, over all processes, and the metrics read off it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from agilerl.checks import require
from agilerl.llm.advantages import varying_groups
from agilerl.llm_envs.failures import excess

if TYPE_CHECKING:
    from agilerl.distributed import Ranks
    from agilerl.typing import ExperiencesType

SAMPLES_PER_ITERATION = 4
"""Completions of an agent that are written to ``completions.jsonl``."""


@dataclass(frozen=True)
class Sample:
    """One completion for ``completions.jsonl``."""

    question: str
    completion: str
    answer: Any
    reward: float | None
    """None of one that was dropped."""
    rewards: dict[str, float | None] = field(default_factory=dict)
    """Each of several rewards, None where it does not apply or failed."""
    failure: str | None = None
    """Why it could not be scored, or played."""
    truncated: bool = False
    """Whether it was cut off."""


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
    """``(P, G)`` float32 on the CPU: one reward per completion, one row per group; only those that
    ``sample_mask`` keeps mean something."""
    steps: int
    """What ``max_steps`` counts: prompts consumed, or turns played."""
    generated_tokens: int
    """Tokens sampled, end-of-sequence tokens included."""
    generation_seconds: float
    environment_seconds: float
    learn_arguments: dict[str, Any] = field(default_factory=dict)
    """Further keyword arguments of ``learn``."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Further columns of ``metrics.csv``: means over the completions that are kept."""
    named_rewards: dict[str, torch.Tensor] = field(default_factory=dict)
    """Each of several rewards, ``(P, G)`` float32 as ``rewards``; NaN where it does not apply."""
    sample_mask: torch.Tensor | None = None
    """``(P, G)`` bool on the CPU: False for completions that failed and are left out; None: all
    are kept."""
    varying: torch.Tensor | None = None
    """``(P,)`` bool on the CPU: groups of which an advantage is not 0; None: those with two
    different rewards."""
    failed_completions: int = 0
    """How many failed, those with a reward for it included."""
    first_failure: str = ""
    """Why the first of them did."""
    max_failure_share: float = 1.0
    """The largest share of them that is no error; the same on all ranks."""
    samples: list[Sample] = field(default_factory=list)
    """All completions of this process to read, group by group."""

    @property
    def few_samples(self) -> list[Sample]:
        """Those for ``completions.jsonl``."""
        if not self.samples:
            return []
        failures = [sample.failure for sample in self.samples]
        return [self.samples[i] for i in samples_to_show(failures, self.rewards.shape[1])]

    @property
    def kept(self) -> torch.Tensor:
        """``(P, G)`` bool: ``sample_mask``, or True everywhere where there is none."""
        if self.sample_mask is None:
            return torch.ones(self.rewards.shape, dtype=torch.bool)
        return self.sample_mask

    @property
    def varies(self) -> torch.Tensor:
        """``(P,)`` bool: ``varying``, or the groups with two rewards that count and differ."""
        if self.varying is not None:
            return self.varying
        rewards, kept = self.rewards.reshape(-1), self.kept.reshape(-1)
        return varying_groups(rewards, self.rewards.shape[1], kept)

    @property
    def kept_rewards(self) -> torch.Tensor:
        """``(N,)``: the rewards that mean something."""
        return self.rewards[self.kept]


def gather_statistics(experience: Experience, ranks: Ranks) -> Experience:
    """The experience with rewards, counts and metrics of all ranks; ``learn``'s stay this rank's.

    Rewards are ``(P, G)`` over all ranks; of times the longest counts, because all wait for it.
    """
    if ranks.world_size == 1:
        return experience
    own = replace(experience, experiences=([], [], None), learn_arguments={}, samples=[])
    all_ranks: list[Experience] = ranks.gather(own)
    return replace(
        together(all_ranks),
        experiences=experience.experiences,
        learn_arguments=experience.learn_arguments,
        samples=experience.samples,
        generation_seconds=max(each.generation_seconds for each in all_ranks),
        environment_seconds=max(each.environment_seconds for each in all_ranks),
    )


def check_failures(experience: Experience) -> None:
    """Refuse to learn where too many completions have failed.

    Asked about those of all ranks, so that all raise, and none waits for another one.

    Raises:
        RuntimeError: More than ``max_failure_share`` of them.
    """
    failed, total = experience.failed_completions, experience.rewards.numel()
    what = "completions of all processes"
    too_many = excess(failed, total, what, experience.max_failure_share)
    require(not too_many, f"{too_many}. The first: {experience.first_failure}", RuntimeError)


def together(parts: Sequence[Experience]) -> Experience:
    """Rewards, counts and metrics of several experiences; all else is that of the first."""
    # Those that dropped every completion have no metrics.
    measured = [each for each in parts if len(each.kept_rewards)]
    kept = sum(len(each.kept_rewards) for each in measured)
    metrics = {
        name: sum(each.metrics[name] * len(each.kept_rewards) / kept for each in measured)
        for name in (measured[0].metrics if measured else ())
    }
    return replace(
        parts[0],
        rewards=torch.cat([each.rewards for each in parts]),
        sample_mask=torch.cat([each.kept for each in parts]),
        varying=torch.cat([each.varies for each in parts]),
        failed_completions=sum(each.failed_completions for each in parts),
        first_failure=next((each.first_failure for each in parts if each.first_failure), ""),
        steps=sum(each.steps for each in parts),
        generated_tokens=sum(each.generated_tokens for each in parts),
        metrics=metrics,
        named_rewards={
            name: torch.cat([each.named_rewards[name] for each in parts])
            for name in parts[0].named_rewards
        },
    )


def right_answers(rewards: torch.Tensor, threshold: float) -> torch.Tensor:
    """Which rewards are at or above the threshold, in their shape, bool."""
    # Compared in the rewards' own precision: a float32 reward of 1.3 has to reach 1.3.
    return rewards >= torch.tensor(threshold, dtype=rewards.dtype)


def accuracy(rewards: torch.Tensor, threshold: float) -> float:
    """Share of rewards (any shape) at or above the threshold."""
    return float(right_answers(rewards, threshold).float().mean())


def reward_statistics(rewards: torch.Tensor, accuracy_threshold: float) -> dict[str, float]:
    """Mean, population standard deviation and accuracy of rewards, of any shape; {} if empty."""
    if not rewards.numel():
        return {}
    return {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std(correction=0)),
        "accuracy": accuracy(rewards, accuracy_threshold),
    }


def named_reward_statistics(experience: Experience) -> dict[str, float]:
    """Mean and population standard deviation of each reward, over the rows that it applies to.

    A reward that applies to no row has none.
    """
    statistics = {}
    for name, rewards in experience.named_rewards.items():
        numbers = rewards[experience.kept & ~rewards.isnan()]
        if len(numbers):
            statistics[f"rewards/{name}/mean"] = float(numbers.mean())
            statistics[f"rewards/{name}/std"] = float(numbers.std(correction=0))
    return statistics


def zero_variance_statistics(experience: Experience) -> dict[str, float]:
    """How many groups' advantages are all 0, and which share of those that could have some.

    A group with fewer than two completions that count has nothing to be compared with, and is
    neither.
    """
    compared = experience.kept.sum(1) > 1
    flat, total = int((compared & ~experience.varies).sum()), int(compared.sum())
    share = flat / total if total else math.nan
    return {"zero_variance_groups": float(flat), "zero_variance_share": share}


def truncation_statistics(truncated: torch.Tensor | None, kept: torch.Tensor) -> dict[str, float]:
    """Share of the completions or episodes that count (bool, as ``truncated``) that were cut off.

    None where it is not known, or none counts.
    """
    if truncated is None or not bool(kept.any()):
        return {}
    return {"truncated_share": float(truncated[kept].float().mean())}


def time_statistics(experience: Experience, learning_seconds: float) -> dict[str, float]:
    """Seconds of each stage, and tokens generated per second of all three together."""
    seconds = experience.generation_seconds + experience.environment_seconds + learning_seconds
    return {
        "tokens_per_second": experience.generated_tokens / seconds,
        "generation_seconds": experience.generation_seconds,
        "environment_seconds": experience.environment_seconds,
        "learning_seconds": learning_seconds,
    }


def remedy_for_flat_rewards(experience: Experience, accuracy_threshold: float) -> str:
    """Says so if all answers are right; names truncation where most were cut off before the end."""
    if bool(right_answers(experience.kept_rewards, accuracy_threshold).all()):
        return (
            f"All of its answers have at least the reward {accuracy_threshold:g}, so the task is "
            "solved: end the run, or give it harder prompts."
        )
    share = experience.metrics.get("truncated_share", 0.0)
    if share > 0.5:
        what, limits = "completions", "max_output_tokens or max_model_len"
        if "turns_mean" in experience.metrics:
            what, limits = "episodes", "max_turns or max_model_len"
        return (
            f"The likely cause: {share:.0%} of its {what} were cut off before their end. Raise "
            f"{limits}, or ask for shorter answers."
        )
    return (
        "Look at completions.jsonl, and make the task easier or harder, the reward finer, the "
        "temperature higher or the group larger."
    )


def samples_to_show(failures: Sequence[str | None], group_size: int) -> list[int]:
    """Which of N completions are written: the first of the first groups, and one that failed.

    Batches are shuffled, so nothing is hand-picked.

    Args:
        failures: ``[N]``, why a completion failed, None for those that did not.
        group_size: G.
    """
    shown = list(range(0, len(failures), group_size))[:SAMPLES_PER_ITERATION]
    failed = [i for i, reason in enumerate(failures) if reason is not None]
    if failed and not any(failures[i] is not None for i in shown):
        shown[-1] = failed[0]
    return shown
