"""Groups without two different rewards teach nothing: leave them out, or draw others for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from agilerl.checks import COUNT, OneOf
from agilerl.llm.advantages import varying_groups
from agilerl.training.collectors.experience import Experience, together

ZeroVariance = Literal["keep", "skip", "resample"]


@dataclass(frozen=True)
class DynamicSampling:
    """What becomes of groups whose rewards are all equal, checked when the record is made."""

    zero_variance: ZeroVariance = "keep"
    """Skip: they are no part of the batch that is learned from. Resample: other prompts take their
    places."""
    max_resamples: int = 3
    """Further batches of prompts that an iteration may draw."""

    def __post_init__(self) -> None:
        OneOf(("keep", "skip", "resample"))("zero_variance", self.zero_variance)
        COUNT("max_resamples", self.max_resamples)

    @property
    def resamples(self) -> bool:
        """Whether an iteration may draw more than one batch."""
        return self.zero_variance == "resample"


def varying(experience: Experience) -> torch.Tensor:
    """``(P,)`` bool: groups with two rewards that count and differ beyond rounding."""
    rewards, kept = experience.rewards.reshape(-1), experience.kept.reshape(-1)
    return varying_groups(rewards, experience.rewards.shape[1], kept)


def skip_flat_groups(experience: Experience) -> Experience:
    """The experience, of which ``learn`` leaves out groups without variance; metrics count all."""
    kept = experience.kept & varying(experience)[:, None]
    return replace(
        experience,
        learn_arguments={**experience.learn_arguments, "sample_mask": kept},
        metrics=experience.metrics | _flat_share(experience),
    )


def fill_up(drawn: Sequence[Experience]) -> Experience:
    """One experience of several batches: ``learn`` gets as many groups as the first one has.

    They are those with variance, in the order in which they were drawn; where these are too few,
    groups without take the places that are left. Rewards, counts and times are those of all.

    Args:
        drawn: What was collected, batch by batch.
    """
    groups = [(n, p) for n, each in enumerate(drawn) for p in range(len(each.rewards))]
    varies = torch.cat([varying(each) for each in drawn]).tolist()
    # Sorted stably: those with variance first.
    order = sorted(range(len(groups)), key=lambda place: not varies[place])
    chosen = [groups[place] for place in sorted(order[: len(drawn[0].rewards)])]
    counted = [replace(e, metrics=e.metrics | _flat_share(e)) for e in drawn]
    whole = together(counted)
    return replace(
        whole,
        experiences=(
            [drawn[n].experiences[0][p] for n, p in chosen],
            [drawn[n].experiences[1][p] for n, p in chosen],
            torch.stack([drawn[n].experiences[2][p] for n, p in chosen]),
        ),
        learn_arguments=_learn_arguments(drawn, chosen),
        metrics=whole.metrics | {"resamples": float(len(drawn) - 1)},
        generation_seconds=sum(each.generation_seconds for each in drawn),
        environment_seconds=sum(each.environment_seconds for each in drawn),
        samples=drawn[0].samples,
    )


def _learn_arguments(
    drawn: Sequence[Experience], chosen: Sequence[tuple[int, int]]
) -> dict[str, Any]:
    """Keyword arguments of ``learn`` for the chosen groups, each ``(batch, group of it)``."""
    size = drawn[0].rewards.shape[1]
    sampled = [each.learn_arguments["sampling_logps"] for each in drawn]
    arguments: dict[str, Any] = {"sampling_logps": None}
    if any(each is not None for each in sampled):
        arguments["sampling_logps"] = [
            row
            for n, p in chosen
            for row in (sampled[n] or [None] * drawn[n].rewards.numel())[p * size : (p + 1) * size]
        ]
    kept = torch.stack([drawn[n].kept[p] for n, p in chosen])
    if not bool(kept.all()):
        arguments["sample_mask"] = kept
    cut_off = [each.learn_arguments.get("truncated") for each in drawn]
    if all(each is not None for each in cut_off):
        arguments["truncated"] = torch.stack([cut_off[n][p] for n, p in chosen])  # type: ignore[index]
    return arguments


def _flat_share(experience: Experience) -> dict[str, float]:
    return {"zero_variance_share": 1.0 - float(varying(experience).float().mean())}
