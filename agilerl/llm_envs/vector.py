"""Many multi-turn episodes at a time: answered in one batch, environments stepping in threads."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from agilerl.llm_envs.base import checked_int, finite_number
from agilerl.llm_envs.calls import CallOutcome, CallPool
from agilerl.llm_envs.environment_slots import EnvironmentSlots
from agilerl.llm_envs.episode_batch import EpisodeBatch, checked_answers
from agilerl.llm_envs.episodes import Episode, Episodes, stack_episodes
from agilerl.typing import ActionResult, MultiTurnEnv, ReasoningPrompts

logger = logging.getLogger(__name__)

EVALUATION_SEED_START = 1_000_000_000
"""Evaluation episodes have the seeds from here on; training seeds are below."""


class EnvironmentFailure(RuntimeError):
    """More than half of a batch's episodes failed; ``__cause__`` is the first error."""


class SyncMultiTurnVecEnv:
    """Plays ``batch_size`` × ``group_size`` episodes at a time; members of a group share a seed.

    ::

        env = SyncMultiTurnVecEnv(make_env, batch_size=16, group_size=8)
        prompts = env.reset(seeds)  # 16 seeds, 128 prompts
        while prompts:  # of the episodes that are not over
            action = agent.get_action(prompts, repeat_prompts=False)
            prompts = env.step(action.completion_ids, action.sampling_logps)
        episodes = env.episodes()

    Environments are made when first needed and kept. Each is used by one thread at a time, but not
    always the same. One whose ``reset`` or ``step`` raises, returns nonsense or runs out of time
    ends its episode with ``error_reward``, and is replaced for the next batch.

    Args:
        env_factory: Makes an environment that follows ``agilerl.typing.MultiTurnEnv``, such as a
            ``TokenObservationWrapper``; a new one at each call.
        batch_size: Groups per batch. It and ``group_size`` may be changed between batches.
        group_size: Episodes per group, G.
        env_config: Keyword arguments of ``env_factory``.
        max_turns: Episodes end after this many turns at the latest; None leaves it to them.
        max_workers: Environments that step at the same time, at most. With 1 they step in order:
            what draws from the global ``random`` while stepping is then reproducible.
        step_timeout: Seconds that making, resetting or stepping one environment may take.
        error_reward: Reward of the turn in which an environment failed.
        evaluation_episodes: Episodes per :meth:`evaluate`.
        reset_workers: Environments that reset at the same time. Many seed and draw from the global
            ``random``, and two at once would mix; raise it for slow ones that do not.

    Raises:
        TypeError: An argument of the wrong type.
        ValueError: A number out of range.
    """

    def __init__(  # noqa: PLR0913 - options that belong together
        self,
        env_factory: Callable[..., MultiTurnEnv],
        batch_size: int,
        group_size: int = 1,
        *,
        env_config: Mapping[str, Any] | None = None,
        max_turns: int | None = None,
        max_workers: int = 16,
        step_timeout: float = 60.0,
        error_reward: float = 0.0,
        evaluation_episodes: int = 64,
        reset_workers: int = 1,
    ) -> None:
        self.batch_size = checked_int("batch_size", batch_size)
        self.group_size = checked_int("group_size", group_size)
        self.max_turns = None if max_turns is None else checked_int("max_turns", max_turns)
        self.error_reward = finite_number("error_reward is", error_reward, "pass a finite number")
        self.evaluation_episodes = checked_int("evaluation_episodes", evaluation_episodes)
        pool = partial(CallPool, step_timeout, called="environment", timeout_name="step_timeout")
        self._steps = pool(max_workers, workers_name="max_workers")
        self._resets = pool(reset_workers, workers_name="reset_workers")
        self.failures = 0
        """Episodes so far that an environment's exception or time-out ended."""
        self.timeouts = 0
        """Those of them that ran out of time."""
        self._slots = EnvironmentSlots(env_factory, env_config, self._resets)
        self._batch: EpisodeBatch | None = None

    def reset(self, seeds: Sequence[int]) -> list[ReasoningPrompts]:
        """Begin a batch; one under way is dropped.

        Args:
            seeds: One per group, ``batch_size`` in all.

        Returns:
            The prompts of all episodes, group by group.

        Raises:
            EnvironmentFailure: More than half of the environments failed.
            TypeError: ``env_factory`` returned something else than a multi-turn environment.
            ValueError: Not ``batch_size`` seeds; ``env_factory`` returned an environment twice.
        """
        batch_size = checked_int("batch_size", self.batch_size)
        group_size = checked_int("group_size", self.group_size)
        if len(seeds) != batch_size:
            raise ValueError(
                f"{len(seeds)} seeds for a batch_size of {batch_size}; pass one per group"
            )
        checked = [checked_int(f"seeds[{i}]", seed, least=0) for i, seed in enumerate(seeds)]
        return self._begin([seed for seed in checked for _ in range(group_size)])

    def step(
        self,
        completion_ids: Sequence[torch.Tensor],
        sampling_logps: Sequence[torch.Tensor | None] | None = None,
    ) -> list[ReasoningPrompts]:
        """Give the answers to the environments.

        Args:
            completion_ids: One ``(1, T)`` tensor per prompt handed out last, in their order.
            sampling_logps: The sampler's log-probs, one 1-D tensor (or None) per prompt.

        Returns:
            The prompts of the episodes that are not over, ``[]`` when all are.

        Raises:
            EnvironmentFailure: More than half of the batch's episodes failed.
            RuntimeError: No prompts are waiting: ``reset`` comes first.
            TypeError: Something else than tensors of ids.
            ValueError: Answers that do not belong to the prompts.
        """
        batch = self._batch
        if batch is None or not batch.waiting():
            raise RuntimeError("no prompts are waiting for answers; call reset(seeds) first")
        places, prompts = batch.waiting(), batch.prompts()
        answers = checked_answers(completion_ids, prompts)
        logps = [None] * len(places) if sampling_logps is None else list(sampling_logps)
        if len(logps) != len(places):
            raise ValueError(
                f"sampling_logps has {len(logps)} entries for the {len(places)} prompts handed "
                "out; pass one per prompt, or None"
            )
        batch.generation_seconds += time.perf_counter() - batch.handed_out
        self._batch = None  # Until the step is done: one that is interrupted leaves no batch.
        with batch.in_environments():
            for place, answer, logp in zip(places, answers, logps, strict=True):
                batch.episodes[place].act(answer, logp)
            calls = [
                partial(self._slots[place].step, answer)
                for place, answer in zip(places, answers, strict=True)
            ]
            for place, outcome in zip(places, self._steps.run(calls), strict=True):
                advance = partial(batch.episodes[place].advance, max_turns=self.max_turns)
                self._settle(batch, place, outcome, advance)
            self._read(batch, [p for p in places if batch.episodes[p].prompt is None])
        return self._hand_out(batch)

    def episodes(self) -> Episodes:
        """The finished batch.

        Raises:
            RuntimeError: There is none, or not all of its episodes are over.
        """
        if self._batch is None or self._batch.waiting():
            raise RuntimeError("the episodes are not over; call step until it returns no prompts")
        return self._stack([self._batch])

    def play(
        self, act: Callable[[list[ReasoningPrompts]], ActionResult], seeds: Sequence[int]
    ) -> Episodes:
        """Play one batch.

        Args:
            act: Answers prompts once each.
            seeds: As for :meth:`reset`; it raises what :meth:`reset` and :meth:`step` raise.
        """
        self._finish(act, self.reset(seeds))
        return self.episodes()

    def evaluate(self, act: Callable[[list[ReasoningPrompts]], ActionResult]) -> Episodes:
        """Play ``evaluation_episodes`` episodes, always the same seeds, once each.

        Args:
            act: As for :meth:`play`. A training batch under way is dropped.
        """
        first, count = EVALUATION_SEED_START, self.evaluation_episodes
        parts = math.ceil(count / (self.batch_size * self.group_size))
        # Batches of equal size: in one of few episodes, few failures would be more than half.
        ends = [first + count * part // parts for part in range(parts + 1)]
        batches = [
            self._finish(act, self._begin(range(start, end))) for start, end in pairwise(ends)
        ]
        self._batch = None
        return self._stack(batches)

    def close(self) -> None:
        """Close all environments; a later ``reset`` makes new ones."""
        self._batch = None
        self._slots.close()
        self._steps.close()

    def _begin(self, seeds: Sequence[int]) -> list[ReasoningPrompts]:
        self._batch = None
        batch = EpisodeBatch([Episode(seed) for seed in seeds])
        with batch.in_environments():
            missing = self._slots.fill(len(seeds))
            for place, outcome in missing.items():
                self._settle(batch, place, outcome, batch.episodes[place].start)
            places = [place for place in range(len(seeds)) if place not in missing]
            calls = [partial(self._slots[place].reset, seed=seeds[place]) for place in places]
            for place, outcome in zip(places, self._resets.run(calls), strict=True):
                self._settle(batch, place, outcome, batch.episodes[place].start)
        return self._hand_out(batch)

    def _finish(
        self,
        act: Callable[[list[ReasoningPrompts]], ActionResult],
        prompts: list[ReasoningPrompts],
    ) -> EpisodeBatch:
        while prompts:
            result = act(prompts)
            prompts = self.step(result.completion_ids, result.sampling_logps)
        assert self._batch is not None
        return self._batch

    def _read(self, batch: EpisodeBatch, places: Sequence[int]) -> None:
        """Take the rows of the episodes that are over, now: a hung thread may change them later."""
        calls = [partial(_episode_data, self._slots[place]) for place in places]
        for place, outcome in zip(places, self._steps.run(calls), strict=True):
            self._settle(batch, place, outcome, batch.episodes[place].finish)

    def _settle(
        self, batch: EpisodeBatch, place: int, outcome: CallOutcome, take: Callable[[Any], None]
    ) -> None:
        """Hand what an environment returned to its episode, or end the episode."""
        episode, error = batch.episodes[place], outcome.error
        if error is None:
            try:
                take(outcome.value)
            except (TypeError, ValueError) as wrong_value:
                error = wrong_value
        if error is None or episode.failed:
            return
        self.failures += 1
        self.timeouts += outcome.timed_out
        batch.note(place, error, outcome.timed_out)
        episode.fail(self.error_reward)

    def _hand_out(self, batch: EpisodeBatch) -> list[ReasoningPrompts]:
        failed = [place for place, episode in enumerate(batch.episodes) if episode.failed]
        self._slots.drop(failed, batch.hung)
        of_all = f"{len(failed)} of {len(batch.episodes)} episodes failed"
        if 2 * len(failed) > len(batch.episodes):
            raise EnvironmentFailure(
                f"{of_all}, more than half of the batch. The first: {batch.first_failure}\n"
                "  Mend the environment; step_timeout gives slow ones more time."
            ) from batch.first_error
        prompts = batch.prompts()
        if failed and not prompts:
            message = "%s and got error_reward=%s. The first: %s"
            logger.warning(message, of_all, self.error_reward, batch.first_failure)
        batch.handed_out = time.perf_counter()
        self._batch = batch
        return prompts

    def _stack(self, batches: Sequence[EpisodeBatch]) -> Episodes:
        return stack_episodes(
            [episode for batch in batches for episode in batch.episodes],
            self.max_turns,
            sum(batch.generation_seconds for batch in batches),
            sum(batch.environment_seconds for batch in batches),
        )


def _episode_data(env: MultiTurnEnv) -> tuple[Any, str]:
    return env.get_episode_data(), str(getattr(env, "transcript", ""))
