"""Groups whose advantages are all 0 teach nothing: leave them out, or draw others for them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from agilerl.training.collectors.experience import Experience, together

if TYPE_CHECKING:
    from agilerl.distributed import Ranks
    from agilerl.typing import ActionResult, ExperiencesType, ReasoningPrompts

ZeroVariance = Literal["keep", "skip", "resample"]


@dataclass(frozen=True)
class DynamicSampling:
    """What becomes of groups without variance."""

    zero_variance: ZeroVariance = "keep"
    """Skip: they are no part of the batch that is learned from. Resample: groups of other prompts
    or seeds take their places."""
    max_resamples: int = 3
    """Further batches that an iteration may draw."""


class DynamicSamplingRollout(ABC):
    """A rollout of one batch, or with resampling of as many as it takes; see ``Rollout``.

    Args:
        sampling: What becomes of groups without variance.
        ranks: The processes that train together: all draw equally many batches.
    """

    prompts: Sequence[ReasoningPrompts] = ()

    def __init__(self, sampling: DynamicSampling, ranks: Ranks) -> None:
        self._sampling, self._ranks = sampling, ranks
        self._drawn: list[Experience] = []

    @abstractmethod
    def answer(self, result: ActionResult, seconds: float) -> None:
        """See :class:`agilerl.training.protocols.Rollout`."""

    @abstractmethod
    def collected(self) -> Experience:
        """What was collected of the batch, which is over; moves on in the data."""

    @abstractmethod
    def begin(self) -> None:
        """Hand out the prompts of the next batch."""

    def draw_again(self) -> bool:
        """See :class:`agilerl.training.protocols.Rollout`."""
        if self._sampling.zero_variance != "resample":
            return False
        self._drawn.append(self.collected())
        found = sum(int(each.varies.sum()) for each in self._drawn)
        lacks_groups = found < len(self._drawn[0].rewards)
        may_draw = len(self._drawn) <= self._sampling.max_resamples
        if not any(self._ranks.gather(lacks_groups and may_draw)):
            return False
        self.begin()
        return True

    def finish(self) -> Experience:
        """See :class:`agilerl.training.protocols.Rollout`."""
        if self._drawn:
            return fill_up(self._drawn)
        experience = self.collected()
        skips = self._sampling.zero_variance == "skip"
        return skip_flat_groups(experience) if skips else experience


def skip_flat_groups(experience: Experience) -> Experience:
    """The experience, of which ``learn`` leaves out groups without variance; metrics count all."""
    kept = experience.kept & experience.varies[:, None]
    return replace(
        experience,
        learn_arguments={**experience.learn_arguments, "sample_mask": kept},
        metrics=experience.metrics | _length_statistics(experience),
    )


def fill_up(drawn: Sequence[Experience]) -> Experience:
    """One experience of several batches: ``learn`` gets as many groups as the first one has.

    They are those with variance, in the order in which they were drawn; where these are too few,
    groups without take the places that are left. Rewards, counts and times are those of all.

    Args:
        drawn: What was collected, batch by batch.
    """
    whole = together(
        [replace(each, metrics=each.metrics | _length_statistics(each)) for each in drawn]
    )
    groups = [(each, p) for each in drawn for p in range(len(each.rewards))]
    varies = whole.varies.tolist()
    # Sorted stably: those with variance first.
    order = sorted(range(len(groups)), key=lambda place: not varies[place])
    chosen = [groups[place] for place in sorted(order[: len(drawn[0].rewards)])]
    experiences, learn_arguments = _joined([_group(each, p) for each, p in chosen])
    return replace(
        whole,
        experiences=experiences,
        learn_arguments=learn_arguments,
        metrics=whole.metrics | {"resamples": float(len(drawn) - 1)},
        generation_seconds=sum(each.generation_seconds for each in drawn),
        environment_seconds=sum(each.environment_seconds for each in drawn),
        samples=drawn[0].samples,
    )


def _length_statistics(experience: Experience) -> dict[str, float]:
    """Mean generated tokens per row, of which ``learn`` sees a part only; ``{}`` without any."""
    lengths = torch.cat([mask.sum(1) for mask in experience.experiences[1]]).cpu()
    trajectory_ids = experience.learn_arguments.get("trajectory_ids")
    kept = experience.kept.reshape(-1)
    counted = lengths[(lengths > 0) & (kept if trajectory_ids is None else kept[trajectory_ids])]
    return {"completion_length": float(counted.float().mean())} if len(counted) else {}


@dataclass(frozen=True)
class _Group:
    """What ``learn`` is given of one group; None: it is not given that.

    Of a prompt with two completions that is one block of rows; of a seed with two episodes, of
    which the second one's window slid once, it is two::

        token_ids       [(2, T)]   [(1, T), (2, T)]
        rewards         (1, 2)     (2, U)
        truncated       (1, 2)     (2,)
        trajectory_ids  None       [0, 1, 1]
    """

    token_ids: Sequence[torch.Tensor]
    action_masks: Sequence[torch.Tensor]
    rewards: torch.Tensor
    kept: torch.Tensor
    """``(1, G)`` bool."""
    turn_ids: Sequence[torch.Tensor] | None
    truncated: torch.Tensor | None
    sampling_logps: Sequence[torch.Tensor | None] | None
    """One per row."""
    trajectory_ids: torch.Tensor | None
    """One per row, counted from 0 in the group."""

    @property
    def rows(self) -> int:
        """Rows of token ids."""
        return sum(map(len, self.token_ids))


def _group(experience: Experience, p: int) -> _Group:
    """The group ``p`` of an experience."""
    count, size = experience.rewards.shape
    token_ids, action_masks, rewards = experience.experiences
    given = experience.learn_arguments

    def share(values: Any) -> Any:
        """Its part of a list or tensor of which every group has equally many entries, or None."""
        each = 0 if values is None else len(values) // count
        return None if values is None else values[p * each : (p + 1) * each]

    blocks = len(token_ids) // count
    start = sum(map(len, token_ids[: p * blocks]))
    end = start + sum(map(len, share(token_ids)))
    logps, trajectory_ids = given["sampling_logps"], given.get("trajectory_ids")
    return _Group(
        token_ids=share(token_ids),
        action_masks=share(action_masks),
        rewards=share(rewards),
        kept=experience.kept[p : p + 1],
        turn_ids=share(given.get("turn_ids")),
        truncated=share(given.get("truncated")),
        sampling_logps=None if logps is None else logps[start:end],
        trajectory_ids=None if trajectory_ids is None else trajectory_ids[start:end] - p * size,
    )


def _joined(groups: Sequence[_Group]) -> tuple[ExperiencesType, dict[str, Any]]:
    """The arguments of ``learn`` for these groups: ``experiences``, and the others by name."""
    size = groups[0].kept.shape[1]
    arguments: dict[str, Any] = {"sampling_logps": None}
    if any(group.sampling_logps is not None for group in groups):
        rows = [group.sampling_logps or [None] * group.rows for group in groups]
        arguments["sampling_logps"] = [logps for of_group in rows for logps in of_group]
    if all(group.turn_ids is not None for group in groups):
        arguments["turn_ids"] = [block for group in groups for block in group.turn_ids or ()]
    truncated = [group.truncated for group in groups if group.truncated is not None]
    if len(truncated) == len(groups):
        arguments["truncated"] = torch.cat(truncated)
    if any(group.trajectory_ids is not None for group in groups):
        # Where no window slid there is one row per trajectory.
        ids = [
            torch.arange(size) if group.trajectory_ids is None else group.trajectory_ids
            for group in groups
        ]
        arguments["trajectory_ids"] = torch.cat([each + n * size for n, each in enumerate(ids)])
    kept = torch.cat([group.kept for group in groups])
    if not bool(kept.all()):
        arguments["sample_mask"] = kept
    experiences = (
        [block for group in groups for block in group.token_ids],
        [block for group in groups for block in group.action_masks],
        torch.cat([group.rewards for group in groups]),
    )
    return experiences, arguments
