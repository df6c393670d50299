"""What the processes of a run collected, as one: rewards side by side, counts summed."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from agilerl.distributed import Ranks
from agilerl.training.protocols import Experience

SUMMED_FACTS = ("failed_episodes",)
"""Facts that count something; the others are means over completions."""


@dataclass(frozen=True)
class _Part:
    """What statistics need of one process's experience."""

    rewards: torch.Tensor
    steps: int
    generated_tokens: int
    generation_seconds: float
    environment_seconds: float
    facts: dict[str, float]


def merged(experience: Experience, ranks: Ranks) -> Experience:
    """The experience with the statistics of all ranks; what is learned from stays this rank's own.

    Rewards are ``(P, G)`` over all ranks; of times the longest counts, because all wait for it.
    """
    if ranks.world_size == 1:
        return experience
    names = _Part.__dataclass_fields__
    parts = ranks.gather(_Part(**{name: getattr(experience, name) for name in names}))
    completions = [part.rewards.numel() for part in parts]
    return replace(
        experience,
        rewards=torch.cat([part.rewards for part in parts]),
        steps=sum(part.steps for part in parts),
        generated_tokens=sum(part.generated_tokens for part in parts),
        generation_seconds=max(part.generation_seconds for part in parts),
        environment_seconds=max(part.environment_seconds for part in parts),
        facts={
            name: sum(
                part.facts[name] * (1 if name in SUMMED_FACTS else count / sum(completions))
                for part, count in zip(parts, completions, strict=True)
            )
            for name in experience.facts
        },
    )
