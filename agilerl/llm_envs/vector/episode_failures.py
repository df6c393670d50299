"""Failures among the episodes of a batch: counted, bounded and logged."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from agilerl.llm_envs.failures import FailurePolicy, reason
from agilerl.llm_envs.timeouts import CallOutcome
from agilerl.llm_envs.vector.episode import Episode

logger = logging.getLogger(__name__)


class EnvironmentFailure(RuntimeError):
    """More episodes failed than may; ``__cause__`` is the first error."""


@dataclass(frozen=True)
class FailureBound:
    """How many may fail before the rest is cancelled."""

    most: float
    timeouts_only: bool = False
    """Only those that ran out of time count."""

    def exceeded(self, attempts: Iterable[Episode | CallOutcome]) -> bool:
        """Whether more than that failed."""
        failed = [each for each in attempts if each.error is not None]
        return sum(each.timed_out or not self.timeouts_only for each in failed) > self.most


@dataclass
class BatchFailures:
    """The failures of a batch, which may be part of an evaluation."""

    policy: FailurePolicy
    total: int
    """Episodes that failures are a share of: those in play, or an evaluation's on all processes."""
    failed_before: int = 0
    """Of earlier episodes among these."""
    training: bool = True
    of_several: bool = False
    """Whether other processes have a part of the batch or evaluation. They could not be told that
    this one has given up, and would wait for it: so all failures are counted together, after it."""
    counted: set[int] = field(default_factory=set)
    """Episodes in play whose failures are counted."""

    @property
    def bound(self) -> FailureBound:
        """How many of the episodes in play may fail."""
        if self._is_counted_later:
            return FailureBound(math.inf)
        return FailureBound(self.policy.limit(self.total) - self.failed_before)

    @property
    def retry_bound(self) -> FailureBound:
        """How many may run out of time while all that fail are tried again.

        Those that fail at once cost no time. One may, or ``on_failure="raise"`` would allow no
        retry.
        """
        share = self.policy.max_failure_share * self.total - self.failed_before
        return FailureBound(max(share, 1.0), timeouts_only=True)

    @property
    def _is_counted_later(self) -> bool:
        return self.of_several and self.policy.on_failure != "raise"

    def count(self, episodes: Sequence[Episode]) -> tuple[int, int]:
        """Episodes that failed since the last count, and how many of them ran out of time."""
        new = [i for i in failed_episodes(episodes) if i not in self.counted]
        self.counted.update(new)
        return len(new), sum(episodes[i].timed_out for i in new)

    def check(self, episodes: Sequence[Episode]) -> None:
        """Refuse to go on where too many have failed.

        Raises:
            EnvironmentFailure: Naming the first failure.
        """
        if self._is_counted_later:
            return
        failed = self.failed_before + len(failed_episodes(episodes))
        if excess := self.policy.excess(failed, self.total, "episodes"):
            first, error = first_failure(episodes)
            raise EnvironmentFailure(
                f"{excess}. The first: {first}\n"
                "  Fix the environment, or raise step_timeout if it is slow."
            ) from error

    def log(self, episodes: Sequence[Episode]) -> None:
        """Log the failures of a training batch that is over."""
        failed = len(failed_episodes(episodes))
        if failed and self.training:
            message = "%d of %d episodes failed and %s. The first: %s"
            first, _ = first_failure(episodes)
            logger.warning(message, failed, self.total, self.policy.outcome, first)


def failed_episodes(episodes: Sequence[Episode]) -> list[int]:
    """Indices of those that failed."""
    return [i for i, episode in enumerate(episodes) if episode.error is not None]


def first_failure(episodes: Sequence[Episode]) -> tuple[str, BaseException | None]:
    """The failure of the earliest turn, for a message, and its error."""
    i = min(failed_episodes(episodes), key=lambda i: episodes[i].turns)
    episode = episodes[i]
    assert episode.error is not None
    why = reason(episode.error)
    return f"episode {i} (seed {episode.seed}) {episode.stage}: {why}", episode.error
