"""Many multi-turn episodes at a time: prompts answered in one batch, environments in threads."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from agilerl.checks import COUNT, OPTIONAL_COUNT, Number, require
from agilerl.llm_envs.completion_checks import check_answer_length, check_completions
from agilerl.llm_envs.dataset.repetition import RepetitionCheck, key_of_ids
from agilerl.llm_envs.failures import EvaluationRows, FailurePolicy, OnFailure
from agilerl.llm_envs.seeds import EVALUATION_SEED_START, USE_ROW_OF_SEED
from agilerl.llm_envs.timeouts import TimeoutExecutor
from agilerl.llm_envs.vector.environment_pool import EnvironmentPool
from agilerl.llm_envs.vector.episode import Episode, check_groups
from agilerl.llm_envs.vector.episode_failures import BatchFailures, FailureBound, failed_episodes
from agilerl.llm_envs.vector.episodes import Episodes, stack_episodes
from agilerl.typing import Act, Evaluation, MultiTurnEnv, ReasoningPrompts


class SyncMultiTurnVecEnv:
    """Plays ``batch_size`` × ``group_size`` episodes at a time; those of a group share a seed.

    ::

        env = SyncMultiTurnVecEnv(make_env, batch_size=16, group_size=8)
        prompts = env.reset(seeds)  # 16 seeds, 128 prompts
        while prompts:  # of the episodes that are not over
            action = agent.get_action(prompts, repeat_prompts=False)
            prompts = env.step(action.completion_ids, action.sampling_logps)
        episodes = env.episodes()

    Environments are made when first needed and kept. Each is used by one thread at a time, but not
    always the same. If its ``reset`` or ``step`` raises, times out or returns something wrong, the
    episode fails and the environment is replaced for the next batch; it is closed in the
    background, unless the call that timed out is still running. Once too many have failed, the rest
    is cancelled.

    Args:
        env_factory: Makes an environment that follows ``agilerl.typing.MultiTurnEnv``, such as a
            ``TokenObservationWrapper``; a new one at each call.
        batch_size: Groups per batch. It and ``group_size`` may be changed between batches.
        group_size: Episodes per group, G.
        env_config: Keyword arguments of ``env_factory``.
        max_turns: Episodes end after this many turns at the latest; None leaves it to them.
        max_workers: Environments that are made or step at the same time. With 1 they take turns in
            order, so that those that draw from the global ``random`` while stepping are
            reproducible.
        step_timeout: Seconds that making, resetting or stepping one environment may take.
        evaluation_episodes: Episodes per :meth:`evaluate`, over all processes.
        process_index: This process, which plays its share of them.
        num_processes: Number of processes.
        reset_workers: Environments that reset at the same time. Many seed and draw from the global
            ``random``, and two at once would interfere; raise it for slow ones that do not.
        on_failure: What becomes of an episode that failed: ``"drop"`` leaves it out (see
            ``Episodes.sample_mask``); a number is the reward of its last turn; ``"raise"`` raises
            :class:`EnvironmentFailure`.
        max_failure_share: Largest share of a batch, or of an evaluation, that may fail; above it
            :class:`EnvironmentFailure` is raised. With several processes the training function and
            ``agent.test`` do so, on all of them alike, by the failures of all.
        failure_retries: How often an episode that fails before its first prompt is tried again,
            with a new environment. A step cannot be. Where more than ``max_failure_share`` run out
            of time, nothing is tried again.

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
        evaluation_episodes: int = 64,
        process_index: int = 0,
        num_processes: int = 1,
        reset_workers: int = 1,
        on_failure: OnFailure = "drop",
        max_failure_share: float = 0.5,
        failure_retries: int = 0,
    ) -> None:
        COUNT("batch_size", batch_size)
        COUNT("group_size", group_size)
        OPTIONAL_COUNT("max_turns", max_turns)
        COUNT("reset_workers", reset_workers)
        Number(num_processes, integer=True)("evaluation_episodes", evaluation_episodes)
        self.batch_size = batch_size
        self.group_size = group_size
        self.max_turns = max_turns
        self.policy = FailurePolicy(on_failure, max_failure_share, failure_retries)
        self.evaluation_episodes = evaluation_episodes
        self._num_processes = num_processes
        end = EVALUATION_SEED_START + evaluation_episodes
        self._evaluation_seeds = range(EVALUATION_SEED_START + process_index, end, num_processes)
        self._reset_workers = reset_workers
        executor = TimeoutExecutor(
            step_timeout,
            max_workers,
            name="environment",
            timeout_name="step_timeout",
            workers_name="max_workers",
        )
        self._pool = EnvironmentPool(env_factory, env_config, executor)
        self._episodes: list[Episode] = []
        """Those in play; none between batches."""
        self._seconds = {"generation_seconds": 0.0, "environment_seconds": 0.0}
        self._handed_out = 0.0
        self._repetition = RepetitionCheck("evaluation", "training", USE_ROW_OF_SEED)
        self._failures = BatchFailures(self.policy, 0)
        self.failures = 0
        """Episodes so far that failed."""
        self.timeouts = 0
        """How many of them by a call that ran out of time."""

    def reset(self, seeds: Sequence[int]) -> list[ReasoningPrompts]:
        """Begin a batch; one under way is dropped.

        Args:
            seeds: One per group, ``batch_size`` in all.

        Returns:
            The prompts of all episodes, group by group.

        Raises:
            EnvironmentFailure: Too many environments failed.
            TypeError: ``env_factory`` returned something else than a multi-turn environment.
            ValueError: Not ``batch_size`` seeds; episodes of a group began with different prompts;
                ``env_factory`` returned an environment twice.
        """
        COUNT("batch_size", self.batch_size)
        COUNT("group_size", self.group_size)
        require(
            len(seeds) == self.batch_size,
            f"{len(seeds)} seeds for a batch_size of {self.batch_size}; pass one per group",
        )
        for i, seed in enumerate(seeds):
            Number(0, integer=True)(f"seeds[{i}]", seed)
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        every = [int(seed) for seed in seeds for _ in range(self.group_size)]
        failures = BatchFailures(self.policy, len(every), of_several=self._num_processes > 1)
        prompts = self._begin(every, failures)
        episodes, self._episodes = self._episodes, []
        check_groups(episodes, self.group_size)
        self._episodes = episodes
        self._repetition.trained_on(map(key_of_ids, prompts))
        return prompts

    def step(
        self,
        completion_ids: Sequence[torch.Tensor],
        sampling_logps: Sequence[torch.Tensor | None] | None = None,
    ) -> list[ReasoningPrompts]:
        """Step the environments with the answers.

        Args:
            completion_ids: One ``(1, T)`` tensor per prompt handed out last, in their order.
            sampling_logps: The sampler's log-probs, one 1-D tensor (or None) per prompt.

        Returns:
            The prompts of the episodes that are not over, ``[]`` when all are.

        Raises:
            EnvironmentFailure: Too many of the batch's episodes failed.
            RuntimeError: No prompts are waiting: ``reset`` comes first.
            TypeError: Something else than tensors of ids.
            ValueError: Answers that do not belong to the prompts, or longer than ``max_model_len``
                of the environment. ``step`` may then be called again.
            WrongRewardError: The reward function of a ``ToolEnv`` returned no finite number.
        """
        playing = {i: e for i, e in enumerate(self._episodes) if e.prompt is not None}
        if not playing:
            raise RuntimeError("no prompts are waiting for answers; call reset(seeds) first")
        # Before any environment acts: an exception from one counts as its own failure.
        check_completions(completion_ids, _prompts(self._episodes), group_size=1)
        for k, (ids, episode) in enumerate(zip(completion_ids, playing.values(), strict=True)):
            assert episode.prompt is not None
            name, prompt = f"completion_ids[{k}]", episode.prompt["input_ids"]
            check_answer_length(name, ids, prompt, episode.env)
        logps = [None] * len(playing) if sampling_logps is None else sampling_logps
        require(
            len(logps) == len(playing),
            f"sampling_logps has {len(logps)} entries for the {len(playing)} prompts handed out; "
            "pass one per prompt, or None",
        )
        started = time.perf_counter()
        self._seconds["generation_seconds"] += started - self._handed_out
        answers = zip(playing.items(), completion_ids, logps, strict=True)
        steps = {i: e.act(ids.detach().cpu(), logp) for (i, e), ids, logp in answers}
        # Until the step is done: an interrupted one leaves no batch.
        episodes, self._episodes = self._episodes, []
        advance, bound = partial(Episode.advance, max_turns=self.max_turns), self._failures.bound
        self._pool.call(episodes, steps, advance, bound)
        # Rows are read now: a call that ran out of time may change them later.
        reads = {i: episode.read for i, episode in playing.items() if episode.prompt is None}
        self._pool.call(episodes, reads, Episode.finish, bound)
        return self._hand_out(episodes, started)

    def episodes(self) -> Episodes:
        """The finished batch.

        Raises:
            RuntimeError: There is none, or not all of its episodes are over.
        """
        if not self._episodes or _prompts(self._episodes):
            raise RuntimeError("the episodes are not over; call step until it returns no prompts")
        return self._stacked(self._episodes)

    def play(self, act: Act, seeds: Sequence[int]) -> Episodes:
        """Play one batch.

        Args:
            act: Answers prompts once each.
            seeds: As for :meth:`reset`; it raises what :meth:`reset` and :meth:`step` raise.
        """
        self._run_to_end(act, self.reset(seeds))
        return self.episodes()

    def evaluate(self, act: Act, loop: int = 1) -> Evaluation:
        """Play ``evaluation_episodes`` episodes (of this process's share), ``loop`` times over.

        Args:
            act: As for :meth:`play`. A training batch under way is dropped.
            loop: Times to play the evaluation seeds.

        Returns:
            The episodes that were played to their end.

        Raises:
            EnvironmentFailure: Too many failed.
        """
        rows = EvaluationRows(self.policy, "episodes")
        for _ in range(loop):
            played = self.play_evaluation(act)
            values, prompts = played.returns.tolist(), played.first_prompts
            of_episodes = zip(values, prompts, played.transcripts, played.failures, strict=True)
            for seed, episode in zip(self._evaluation_seeds, of_episodes, strict=True):
                rows.add(*episode, seed)
        return rows.result(loop * len(self._evaluation_seeds))

    def play_evaluation(self, act: Act) -> Episodes:
        """Play the evaluation seeds once each; they are always the same.

        At most ``batch_size`` × ``group_size`` are played at a time.

        Args:
            act: As for :meth:`play`. A training batch under way is dropped.

        Raises:
            EnvironmentFailure: Too many of them failed, counted over all their batches.
        """
        seeds = self._evaluation_seeds
        count = math.ceil(len(seeds) / (self.batch_size * self.group_size))
        ends = [len(seeds) * i // count for i in range(count + 1)]  # batches of equal size
        played, first_prompts = list[Episode](), list[ReasoningPrompts]()
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        for start, end in pairwise(ends):
            failed = len(failed_episodes(played))
            failures = BatchFailures(
                *(self.policy, self.evaluation_episodes, failed),
                training=False,
                of_several=self._num_processes > 1,
            )
            prompts = self._begin(seeds[start:end], failures)
            first_prompts += prompts
            self._run_to_end(act, prompts)
            played += self._episodes
        self._repetition.evaluated_on(map(key_of_ids, first_prompts))
        self._episodes = []
        return self._stacked(played)

    def made_environments(self) -> list[int]:
        """Indices of the environments made so far, for :meth:`make_environments`."""
        return self._pool.made()

    def make_environments(self, indices: Sequence[int]) -> None:
        """Make these environments now. One that cannot be made is tried again when needed."""
        self._pool.make(indices, FailureBound(self.policy.limit(len(indices))))

    def close(self) -> None:
        """Close all environments, within seconds; a later ``reset`` makes new ones."""
        self._episodes = []
        self._pool.close()

    def _begin(self, seeds: Sequence[int], failures: BatchFailures) -> list[ReasoningPrompts]:
        started, self._episodes, self._failures = time.perf_counter(), [], failures
        retries = self.policy.failure_retries
        episodes = self._pool.begin(seeds, self._reset_workers, retries, failures)
        return self._hand_out(episodes, started)

    def _run_to_end(self, act: Act, prompts: list[ReasoningPrompts]) -> None:
        while prompts:
            result = act(prompts)
            prompts = self.step(result.completion_ids, result.sampling_logps)

    def _hand_out(self, episodes: list[Episode], started: float) -> list[ReasoningPrompts]:
        self._pool.drop(failed_episodes(episodes))
        failures, timeouts = self._failures.count(episodes)
        self.failures += failures
        self.timeouts += timeouts
        self._failures.check(episodes)
        prompts = _prompts(episodes)
        if not prompts:
            self._failures.log(episodes)
        self._episodes, self._handed_out = episodes, time.perf_counter()
        self._seconds["environment_seconds"] += self._handed_out - started
        return prompts

    def _stacked(self, episodes: Sequence[Episode]) -> Episodes:
        return stack_episodes(episodes, self.max_turns, self.policy, **self._seconds)


def _prompts(episodes: Sequence[Episode]) -> list[ReasoningPrompts]:
    """The prompts to answer."""
    return [episode.prompt for episode in episodes if episode.prompt is not None]
