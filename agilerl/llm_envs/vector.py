"""Many multi-turn episodes at a time: answered in one batch, environments stepping in threads."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from agilerl.llm_envs.base import checked_int, finite_number
from agilerl.llm_envs.episode_batch import EpisodeBatch, checked_answers, checked_logps
from agilerl.llm_envs.episodes import Episode, Episodes, episode_data, stack_episodes
from agilerl.llm_envs.pool import EnvironmentPool
from agilerl.llm_envs.timeouts import CallOutcome, CallPool
from agilerl.typing import Act, Evaluation, MultiTurnEnv, ReasoningPrompts

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
    ends its episode with ``error_reward``, and is replaced for the next batch; it is closed in the
    background, unless a thread still has it. Nothing more is called once more than half failed.

    Args:
        env_factory: Makes an environment that follows ``agilerl.typing.MultiTurnEnv``, such as a
            ``TokenObservationWrapper``; a new one at each call.
        batch_size: Groups per batch. It and ``group_size`` may be changed between batches.
        group_size: Episodes per group, G.
        env_config: Keyword arguments of ``env_factory``.
        max_turns: Episodes end after this many turns at the latest; None leaves it to them.
        max_workers: Environments that are made or step at the same time, at most. With 1 they do in
            order: what draws from the global ``random`` while stepping is then reproducible.
        step_timeout: Seconds that making, resetting or stepping one environment may take.
        error_reward: Reward of the turn in which an environment failed.
        evaluation_episodes: Episodes per :meth:`evaluate`, over all processes.
        process_index: Which share of them this process plays.
        num_processes: Number of shares.
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
        process_index: int = 0,
        num_processes: int = 1,
        reset_workers: int = 1,
    ) -> None:
        self.batch_size = checked_int("batch_size", batch_size)
        self.group_size = checked_int("group_size", group_size)
        self.max_turns = None if max_turns is None else checked_int("max_turns", max_turns)
        self.error_reward = finite_number("error_reward is", error_reward, "pass a finite number")
        self.evaluation_episodes = checked_int(
            "evaluation_episodes", evaluation_episodes, least=num_processes
        )
        last = EVALUATION_SEED_START + self.evaluation_episodes
        self._evaluation_seeds = range(EVALUATION_SEED_START + process_index, last, num_processes)
        self._reset_workers = checked_int("reset_workers", reset_workers)
        calls = CallPool(
            step_timeout,
            max_workers,
            called="environment",
            timeout_name="step_timeout",
            workers_name="max_workers",
        )
        self._slots = EnvironmentPool(env_factory, env_config, calls)
        self.failures = 0
        """Episodes so far that an environment's exception or time-out ended."""
        self.timeouts = 0
        """Those of them that ran out of time."""
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
            ValueError: Answers that do not belong to the prompts, or longer than ``max_model_len``
                of the environment. The prompts then go on waiting.
        """
        batch = self._batch
        if batch is None or not batch.waiting():
            raise RuntimeError("no prompts are waiting for answers; call reset(seeds) first")
        places, prompts = batch.waiting(), batch.prompts()
        envs = [self._slots[place] for place in places]
        answers = checked_answers(completion_ids, prompts, envs)
        logps = checked_logps(sampling_logps, len(places))
        batch.generation_seconds += time.perf_counter() - batch.handed_out
        self._batch = None  # Until the step is done: one that is interrupted leaves no batch.
        with batch.in_environments():
            for place, answer, logp in zip(places, answers, logps, strict=True):
                batch.episodes[place].act(answer, logp)
            steps = [partial(env.step, answer) for env, answer in zip(envs, answers, strict=True)]
            advance = partial(Episode.advance, max_turns=self.max_turns)
            self._call(batch, dict(zip(places, steps, strict=True)), advance)
            # Rows are taken now: a hung thread may change them later.
            over = [place for place in places if batch.episodes[place].prompt is None]
            reads = {place: partial(episode_data, self._slots[place]) for place in over}
            self._call(batch, reads, Episode.finish)
        return self._hand_out(batch)

    def episodes(self) -> Episodes:
        """The finished batch.

        Raises:
            RuntimeError: There is none, or not all of its episodes are over.
        """
        if self._batch is None or self._batch.waiting():
            raise RuntimeError("the episodes are not over; call step until it returns no prompts")
        return self._stack([self._batch])

    def play(self, act: Act, seeds: Sequence[int]) -> Episodes:
        """Play one batch.

        Args:
            act: Answers prompts once each.
            seeds: As for :meth:`reset`; it raises what :meth:`reset` and :meth:`step` raise.
        """
        self._finish(act, self.reset(seeds))
        return self.episodes()

    def evaluate(self, act: Act, loop: int = 1) -> Evaluation:
        """Play ``evaluation_episodes`` episodes (of this process's share), ``loop`` times over.

        Args:
            act: As for :meth:`play`. A training batch under way is dropped.
            loop: Times to play the evaluation seeds.
        """
        played = [self.play_evaluation(act) for _ in range(loop)]
        return Evaluation(
            torch.cat([episodes.returns for episodes in played]),
            [prompt for episodes in played for prompt in episodes.first_prompts],
            completions=[text for episodes in played for text in episodes.transcripts],
        )

    def play_evaluation(self, act: Act) -> Episodes:
        """Play the evaluation seeds, always the same, once each, with all there is to know of them.

        At most ``batch_size`` × ``group_size`` are played at a time.

        Args:
            act: As for :meth:`play`. A training batch under way is dropped.
        """
        seeds = self._evaluation_seeds
        parts = math.ceil(len(seeds) / (self.batch_size * self.group_size))
        # Batches of equal size: in one of few episodes, few failures would be more than half.
        ends = [len(seeds) * part // parts for part in range(parts + 1)]
        batches = [
            self._finish(act, self._begin(seeds[start:end])) for start, end in pairwise(ends)
        ]
        self._batch = None
        return self._stack(batches)

    def made(self) -> list[int]:
        """Places in a batch that have an environment, for :meth:`make`."""
        return self._slots.filled()

    def make(self, places: Sequence[int]) -> None:
        """Make the environments at these places now. One that cannot be is made when needed."""
        self._slots.fill(places)

    def close(self) -> None:
        """Close all environments, within seconds; a later ``reset`` makes new ones."""
        self._batch = None
        self._slots.close()

    def _begin(self, seeds: Sequence[int]) -> list[ReasoningPrompts]:
        self._batch = None
        batch = EpisodeBatch([Episode(seed) for seed in seeds])
        with batch.in_environments():
            missing = self._slots.fill(range(len(seeds)))
            for place, outcome in missing.items():
                self._settle(batch, place, outcome, Episode.start)
            if not batch.lost:
                places = [place for place in range(len(seeds)) if place not in missing]
                resets = {p: partial(self._slots[p].reset, seed=seeds[p]) for p in places}
                self._call(batch, resets, Episode.start, self._reset_workers)
        return self._hand_out(batch)

    def _finish(
        self,
        act: Act,
        prompts: list[ReasoningPrompts],
    ) -> EpisodeBatch:
        while prompts:
            result = act(prompts)
            prompts = self.step(result.completion_ids, result.sampling_logps)
        assert self._batch is not None
        return self._batch

    def _call(
        self,
        batch: EpisodeBatch,
        functions: Mapping[int, Callable[[], Any]],
        take: Callable[[Episode, Any], None],
        workers: int | None = None,
    ) -> None:
        """Call into the environments at some places, until done or more than half failed."""
        if batch.lost:
            return
        with closing(self._slots.call(functions, workers)) as outcomes:
            for place, outcome in outcomes:
                self._settle(batch, place, outcome, take)
                if batch.episodes[place].failed and batch.lost:
                    return

    def _settle(
        self,
        batch: EpisodeBatch,
        place: int,
        outcome: CallOutcome,
        take: Callable[[Episode, Any], None],
    ) -> None:
        """Hand what an environment returned to its episode, or end the episode."""
        episode, error = batch.episodes[place], outcome.error
        if error is None:
            try:
                take(episode, outcome.value)
            except (TypeError, ValueError) as wrong_value:
                error = wrong_value
        if error is None or episode.failed:
            return
        self.failures += 1
        self.timeouts += outcome.timed_out
        batch.note(place, error)
        episode.fail(self.error_reward)

    def _hand_out(self, batch: EpisodeBatch) -> list[ReasoningPrompts]:
        failed = batch.failed()
        self._slots.drop(failed)
        of_all = f"{len(failed)} of {len(batch.episodes)} episodes failed"
        if batch.lost:
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
