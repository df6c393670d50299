"""An agent's part of an iteration: it learns from what was collected, and what came of it."""

from __future__ import annotations

import logging
import time

from agilerl.distributed import Ranks
from agilerl.training.collectors.experience import (
    Experience,
    named_reward_statistics,
    remedy_for_flat_rewards,
    reward_statistics,
    time_statistics,
    zero_variance_statistics,
)
from agilerl.training.logs.run_log import RunLog
from agilerl.training.options import TrainingOptions
from agilerl.training.population import Member

logger = logging.getLogger(__name__)

FLAT_WINDOW = 10
"""Consecutive iterations without reward variance after which the log says so."""


class Learner:
    """Has agents learn, and warns where that changes nothing.

    Args:
        options: Of the run.
        log: Where samples go.
        ranks: The processes, of which rank 0 warns.
    """

    def __init__(self, options: TrainingOptions, log: RunLog, ranks: Ranks) -> None:
        self._options, self._log, self._ranks = options, log, ranks
        self._without_rate: set[int] = set()  # agents that were warned of

    def learn(self, member: Member, experience: Experience, iteration: int) -> dict[str, float]:
        """Have a member learn from the experience of all ranks, and count its steps.

        Returns:
            Columns of the iteration.
        """
        agent = member.agent
        started = time.perf_counter()
        metrics = agent.learn(experience.experiences, **experience.learn_arguments)
        learning_seconds = time.perf_counter() - started
        member.consumed += experience.steps
        agent.total_steps = member.steps
        rewards = experience.kept_rewards
        if len(rewards):
            agent.scores.append(float(rewards.mean()))
        self._warn_of_flat_rewards(member, experience, iteration)
        self._warn_of_no_rate(member, metrics.get("lr"), iteration)
        self._log.write_samples(iteration, agent.index, experience.few_samples)
        self._log.show_training(agent, iteration, experience)
        columns = {
            **reward_statistics(rewards, self._options.accuracy_threshold),
            **named_reward_statistics(experience),
            "failed_completions": float(experience.failed_completions),
            **time_statistics(experience, learning_seconds),
            **experience.metrics,
            **{name: float(value) for name, value in metrics.items()},
        }
        if self._options.zero_variance == "keep":
            return columns
        # Learn was given other groups than were drawn; columns are of these.
        return columns | experience.metrics | zero_variance_statistics(experience)

    def _warn_of_flat_rewards(self, member: Member, experience: Experience, iteration: int) -> None:
        """Warn about iterations in which no group held two different rewards."""
        if bool(experience.varies.any()):
            member.flat_iterations = 0
            return
        member.flat_iterations += 1
        if member.flat_iterations % FLAT_WINDOW == 0 and self._ranks.rank == 0:
            logger.warning(
                "%s agent %d learns nothing: in the last %d iterations (%d to %d) no group held "
                "two different rewards, so all advantages were zero. The mean reward of the last "
                "one was %.4g. %s",
                member.agent.algo,
                member.agent.index,
                FLAT_WINDOW,
                iteration - FLAT_WINDOW + 1,
                iteration,
                float(experience.kept_rewards.mean()),
                remedy_for_flat_rewards(experience, self._options.accuracy_threshold),
            )

    def _warn_of_no_rate(self, member: Member, lr: float | None, iteration: int) -> None:
        """Warn once of an agent whose learning rate is zero, as it is after its schedule."""
        agent = member.agent
        if lr != 0 or agent.index in self._without_rate:
            return
        self._without_rate.add(agent.index)
        if self._ranks.rank == 0:
            logger.warning(
                "%s agent %d learns nothing since iteration %d: its learning rate is 0, as after "
                "the end of a schedule. lr_schedule_steps (num_epochs of "
                "cosine_lr_schedule_config) counts calls of learn, one per iteration of a "
                "training function: pass at least as many as the whole run has.",
                agent.algo,
                agent.index,
                iteration,
            )
