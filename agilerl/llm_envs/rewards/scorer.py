"""Scores groups of completions: from token ids to the rewards of ``(P, G)`` completions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from agilerl.llm_envs.dataset import PromptBatch
from agilerl.llm_envs.rewards.columns import CompletionReader, reward_columns
from agilerl.llm_envs.rewards.pool import RewardError, RewardPool
from agilerl.typing import ActionResult


@dataclass(frozen=True)
class ScoredGroups:
    """P groups of G completions with their rewards, on the CPU."""

    texts: list[list[str]]
    """``[P][G]``"""
    rewards: torch.Tensor
    """``(P, G)`` float32."""
    named_rewards: dict[str, torch.Tensor]
    """Each of several rewards, ``(P, G)`` float32; NaN where it does not apply or failed."""
    failures: list[list[str | None]]
    """``[P][G]``: why a completion failed, None for others."""
    sample_mask: torch.Tensor
    """``(P, G)`` bool: False for those that were dropped."""
    first_failure: RewardError | None
    """With question and completion; None if none failed."""

    @property
    def failed(self) -> int:
        """How many failed."""
        return sum(reason is not None for group in self.failures for reason in group)


def score_groups(
    pool: RewardPool,
    reader: CompletionReader,
    batch: PromptBatch,
    completion_ids: Sequence[torch.Tensor],
    action: ActionResult | None,
    *,
    bounded: bool = True,
) -> ScoredGroups:
    """Score the completions of a batch.

    Args:
        pool: The reward functions.
        reader: From ids to texts.
        batch: The P prompts.
        completion_ids: Per prompt ``(G, T)`` long: prompt, completion, right padding.
        action: Says where completions end, and why; None: told from the ids.
        bounded: As for the pool.

    Raises:
        Exception: What the pool raises.
    """
    group = completion_ids[0].shape[0]
    completions = []
    for index, (ids, prompt) in enumerate(zip(completion_ids, batch.prompts, strict=True)):
        masks = None if action is None or not action.action_masks else action.action_masks[index]
        reasons = None if action is None or not action.finish_reasons else action.finish_reasons
        completions.append(
            reader.read(
                ids,
                prompt["input_ids"].shape[1],
                None if masks is None else masks.sum(1).tolist(),
                None if reasons is None else reasons[index],
            )
        )
    scores = pool.score_columns(reward_columns(batch, completions), bounded=bounded)
    failed = [reason is not None for reason in scores.failures]
    dropped = torch.tensor(failed, dtype=torch.bool) & pool.policy.drops
    return ScoredGroups(
        texts=[[each.text for each in texts] for texts in completions],
        rewards=_grouped(scores.total, group),
        named_rewards={name: _grouped(values, group) for name, values in scores.by_name.items()},
        failures=[
            scores.failures[start : start + group]
            for start in range(0, len(scores.failures), group)
        ],
        sample_mask=~dropped.reshape(-1, group),
        first_failure=scores.first_failure,
    )


def _grouped(values: Sequence[float | None], group: int) -> torch.Tensor:
    """Values of P·G rows as ``(P, G)`` float32, NaN for None."""
    numbers = [math.nan if value is None else value for value in values]
    return torch.tensor(numbers, dtype=torch.float32).reshape(-1, group)
