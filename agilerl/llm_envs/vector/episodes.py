"""Finished multi-turn episodes as training rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from agilerl.llm_envs.failures import FailurePolicy
from agilerl.llm_envs.vector.episode import Episode


@dataclass(frozen=True)
class Episodes:
    """N finished episodes of at most U turns, as B training rows.

    Two episodes, U = 2. The first has two turns in one row: prompt 1 2, answer 3, feedback 4,
    answer 5. The second one's window slid, so its turns are trained in a row each, in the context
    that each was sampled in::

        token_ids       [[[1, 2, 3, 4, 5]],  [[1, 2, 6, 0], [1, 2, 7, 8]]]
        action_masks    [[[F, T, F, T]],     [[F, T, F],    [F, T, T]]]
        turn_ids        [[[-, 0, -, 1]],     [[-, 0, -],    [-, 1, 1]]]        - is -1
        sampling_logps  [ [-.2, -.1],         [-.3],        [-.5, -.4] ]       one per row
        trajectory_ids  [ 0,                  1,             1 ]
        rewards         [[0, 1],             [0, 0]]
        turns           [2, 2]
    """

    token_ids: list[torch.Tensor]
    """Per episode ``(R, T)`` long, right-padded; R is 1 unless a window slid."""
    action_masks: list[torch.Tensor]
    """Per episode ``(R, T - 1)`` bool: True where position s predicts a sampled token."""
    turn_ids: list[torch.Tensor]
    """Per episode ``(R, T - 1)`` long: the turn of each action, -1 elsewhere."""
    rewards: torch.Tensor
    """``(N, U)`` float32 as ``step`` returned them, 0 for turns that were not played."""
    sampling_logps: list[torch.Tensor | None] | None
    """Per row the sampler's log-probs of its actions, flat, in their order; None for a row with a
    turn that has none, None altogether if no turn has."""
    trajectory_ids: torch.Tensor
    """``(B,)`` long: the episode of each row."""
    turns: torch.Tensor
    """``(N,)`` long: answers given; 0 where the environment failed before the first."""
    truncated: torch.Tensor
    """``(N,)`` bool: cut off by the environment, by ``max_turns``, or because the next prompt would
    not fit ``max_model_len``; ``infos[i]["truncation_reason"]`` says which, if the environment
    does."""
    failures: list[str | None]
    """Per episode, by what exception or time-out of the environment it ended; None for others."""
    sample_mask: torch.Tensor
    """``(N,)`` bool for ``learn``: False for those that are dropped because they failed."""
    infos: list[dict[str, Any]]
    """Per episode the info of its last step, of ``reset`` if there was none; empty where that
    failed."""
    first_prompts: list[str]
    """The text of each first prompt; empty where ``reset`` failed."""
    transcripts: list[str]
    """What followed it, for logs; empty for environments without a ``transcript``."""
    generated_tokens: int
    """Tokens that were sampled in all."""
    generation_seconds: float
    """Time between prompts and answers."""
    environment_seconds: float
    """Time in resets and steps."""

    @property
    def failed(self) -> torch.Tensor:
        """``(N,)`` bool: ended by an exception or a time-out of the environment."""
        return torch.tensor([reason is not None for reason in self.failures])

    @property
    def returns(self) -> torch.Tensor:
        """``(N,)`` float32: the sum of each episode's rewards."""
        return self.rewards.sum(1)


def stack_episodes(
    episodes: Sequence[Episode],
    max_turns: int | None,
    policy: FailurePolicy,
    *,
    generation_seconds: float,
    environment_seconds: float,
) -> Episodes:
    """Put finished episodes into one record.

    Args:
        episodes: At least one.
        max_turns: U; None: the largest that an environment plans for.
        policy: What becomes of those that failed. Their last turn gets its reward.
        generation_seconds: As in the record.
        environment_seconds: As in the record.
    """
    longest = max(max(e.turns, e.turns_planned, 1) for e in episodes)
    rewards = torch.zeros(len(episodes), max_turns or longest)
    for row, episode in zip(rewards, episodes, strict=True):
        row[: len(episode.rewards)] = torch.tensor(episode.rewards)
        if episode.error is not None:
            row[max(episode.turns - 1, 0)] = policy.reward
    token_ids, action_masks, turn_ids = map(list, zip(*(e.rows for e in episodes), strict=True))
    rows = torch.tensor([len(ids) for ids in token_ids])
    reported = any(logps is not None for e in episodes for logps in e.logps)
    return Episodes(
        token_ids=token_ids,
        action_masks=action_masks,
        turn_ids=turn_ids,
        rewards=rewards,
        sampling_logps=[row for e in episodes for row in e.row_logps()] if reported else None,
        trajectory_ids=torch.arange(len(episodes)).repeat_interleave(rows),
        turns=torch.tensor([e.turns for e in episodes]),
        truncated=torch.tensor([e.truncated for e in episodes]),
        failures=[e.failure for e in episodes],
        sample_mask=torch.tensor([e.error is None or not policy.drops for e in episodes]),
        infos=[e.info for e in episodes],
        first_prompts=[e.first_prompt for e in episodes],
        transcripts=[e.transcript for e in episodes],
        generated_tokens=sum(e.generated_tokens for e in episodes),
        generation_seconds=generation_seconds,
        environment_seconds=environment_seconds,
    )
