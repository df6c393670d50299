"""Scores groups of completions: from token ids to the rewards of ``(P, G)`` completions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from agilerl.llm_envs.dataset import PromptBatch
from agilerl.llm_envs.rewards.columns import CompletionReader, reward_columns
from agilerl.llm_envs.rewards.pool import RewardPool
from agilerl.typing import ActionResult


@dataclass(frozen=True)
class ScoredGroups:
    """P groups of G completions with their rewards, on the CPU."""

    texts: list[list[str]]
    """``[P][G]``"""
    rewards: torch.Tensor
    """``(P, G)`` float32."""
    named_rewards: dict[str, torch.Tensor]
    """Each of several rewards, ``(P, G)`` float32; NaN where it does not apply."""


def score_groups(
    pool: RewardPool,
    reader: CompletionReader,
    batch: PromptBatch,
    completion_ids: Sequence[torch.Tensor],
    action: ActionResult | None,
) -> ScoredGroups:
    """Score the completions of a batch.

    Args:
        pool: The reward functions.
        reader: From ids to texts.
        batch: The P prompts.
        completion_ids: Per prompt ``(G, T)`` long: prompt, completion, right padding.
        action: Says where completions end, and why; None: told from the ids.

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
    scores = pool.score_columns(reward_columns(batch, completions))
    return ScoredGroups(
        texts=[[each.text for each in texts] for texts in completions],
        rewards=_grouped(scores.total, group),
        named_rewards={name: _grouped(values, group) for name, values in scores.by_name.items()},
    )


def _grouped(values: Sequence[float | None], group: int) -> torch.Tensor:
    """Values of P·G rows as ``(P, G)`` float32, NaN for None."""
    numbers = [math.nan if value is None else value for value in values]
    return torch.tensor(numbers, dtype=torch.float32).reshape(-1, group)
