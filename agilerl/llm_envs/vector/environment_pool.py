"""The environments of a vector environment: made when needed, kept, replaced after failures."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any

from agilerl.checks import InstanceOf, require, shorten
from agilerl.llm_envs.timeouts import CallOutcome, TimeoutExecutor
from agilerl.llm_envs.token_observation import TokenObservationWrapper
from agilerl.llm_envs.vector.episode import Episode
from agilerl.llm_envs.vector.episode_failures import BatchFailures, FailureBound, failed_episodes
from agilerl.typing import MultiTurnEnv

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 10.0
"""Time limit for closing environments, all at the same time in a thread each."""

_MEMBERS = ("reset", "step", "get_episode_data", "close")


def checked_factory(
    env_factory: Callable[..., MultiTurnEnv], env_config: Mapping[str, Any] | None
) -> Callable[[], MultiTurnEnv]:
    """A function that makes an environment, of the arguments of those names.

    Raises:
        TypeError: An argument of the wrong type.
    """
    require(
        callable(env_factory),
        f"env_factory is {shorten(env_factory)}; it must be a function that returns a new "
        "multi-turn environment, such as a TokenObservationWrapper",
        TypeError,
    )
    InstanceOf(Mapping, "a dict of env_factory's arguments")("env_config", env_config)
    return partial(env_factory, **(env_config or {}))


class EnvironmentPool:
    """Environments by index: environment i plays episode i of every batch.

    Args:
        env_factory: Returns a new environment at each call.
        env_config: Its keyword arguments.
        executor: Calls the factory and the environments.

    Raises:
        TypeError: An argument of the wrong type.
    """

    def __init__(
        self,
        env_factory: Callable[..., MultiTurnEnv],
        env_config: Mapping[str, Any] | None,
        executor: TimeoutExecutor,
    ) -> None:
        self._factory = checked_factory(env_factory, env_config)
        self._executor = executor
        # None: not made, or left to a call that may still be running.
        self._envs: list[MultiTurnEnv | None] = []
        self._closing: list[threading.Thread] = []

    def made(self) -> list[int]:
        """Indices of the environments that can be used."""
        return [i for i, env in enumerate(self._envs) if env is not None]

    def begin(
        self, seeds: Sequence[int], workers: int, retries: int, failures: BatchFailures
    ) -> list[Episode]:
        """Reset an environment for each of these seeds.

        Args:
            seeds: Of the episodes.
            workers: Environments that reset at the same time.
            retries: How often those that failed are tried again, in new environments.
            failures: How many may fail in the end, and how many run out of time before that, until
                the rest is cancelled.

        Returns:
            A batch of episodes, some of which may have failed.

        Raises:
            TypeError: As :meth:`make`.
            ValueError: As :meth:`make`.
        """
        episodes = [Episode(seed) for seed in seeds]
        waiting = list(range(len(seeds)))
        for left in range(retries, -1, -1):
            bound = failures.retry_bound if left else failures.bound
            not_made = self.make(waiting, bound)
            for i in waiting:
                episodes[i].env = self._envs[i]
            for i, outcome in not_made.items():
                episodes[i].take(outcome, Episode.start)
            resets = {i: episodes[i].reset() for i in waiting if episodes[i].env is not None}
            self.call(episodes, resets, Episode.start, bound, workers)
            waiting = failed_episodes(episodes)
            if not waiting or not left or bound.exceeded(episodes):
                break
            self.drop(waiting)
            for i in waiting:
                episodes[i] = Episode(seeds[i])
        return episodes

    def make(self, indices: Sequence[int], bound: FailureBound) -> dict[int, CallOutcome]:
        """Make those of these environments that are missing.

        Args:
            indices: Of environments.
            bound: Once it is exceeded by those that could not be made, no more are made.

        Returns:
            The outcome of each that could not be made, by index.

        Raises:
            TypeError: ``env_factory`` returned something else than a multi-turn environment.
            ValueError: It returned the same environment twice.
        """
        self._envs += [None] * (max(indices, default=-1) + 1 - len(self._envs))
        missing = [i for i in indices if self._envs[i] is None]
        made, failed = list[Any](), dict[int, CallOutcome]()
        try:
            calls = [self._factory] * len(missing)
            with closing(self._executor.as_completed(calls)) as outcomes:
                for outcome in outcomes:
                    if outcome.error is None:
                        self._envs[missing[outcome.index]] = outcome.value
                        made.append(outcome.value)
                        continue
                    failed[missing[outcome.index]] = outcome
                    if bound.exceeded(failed.values()):
                        break
            self._check(made)
        except BaseException:
            self.drop(range(len(self._envs)))
            raise
        return failed

    def call(
        self,
        episodes: Sequence[Episode],
        calls: Mapping[int, Callable[[], Any]],
        method: Callable[[Episode, Any], None],
        bound: FailureBound,
        workers: int | None = None,
    ) -> None:
        """Call environments of a batch, each once, until too many of its episodes failed.

        An environment whose call may still be running afterwards is left to it: it is neither used
        again nor closed.

        Args:
            episodes: The batch.
            calls: What to call, by the index of the episode.
            method: Takes what a call returned: ``Episode.start``, ``advance`` or ``finish``.
            bound: Once it is exceeded in the batch, the rest is cancelled.
            workers: Calls at the same time; None: the executor's.
        """
        if bound.exceeded(episodes):
            return
        indices, unfinished = list(calls), set[int]()
        outcomes = self._executor.as_completed(
            list(calls.values()), workers=workers, unfinished=unfinished
        )
        try:
            with closing(outcomes):
                for outcome in outcomes:
                    episode = episodes[indices[outcome.index]]
                    episode.take(outcome, method)
                    if episode.error is not None and bound.exceeded(episodes):
                        return
        finally:
            for number in unfinished:
                self._envs[indices[number]] = None

    def drop(self, indices: Iterable[int]) -> None:
        """Forget environments and close them in the background, each once."""
        dropped: dict[int, Any] = {}
        for i in indices:
            env, self._envs[i] = self._envs[i], None
            dropped[id(_inner(env))] = env
        # What a factory made may be anything.
        closes = [getattr(env, "close", None) for env in dropped.values()]
        calls = [close for close in closes if callable(close)]
        if calls:
            thread = threading.Thread(target=self._run_closes, args=(calls,), daemon=True)
            thread.start()
            self._closing = [other for other in self._closing if other.is_alive()] + [thread]

    def close(self) -> None:
        """Close all environments that are not left to a call, within ``CLOSE_SECONDS``."""
        self.drop(range(len(self._envs)))
        for thread in self._closing:
            thread.join()
        self._closing = []
        self._executor.close()

    def _run_closes(self, calls: list[Callable[[], Any]]) -> None:
        outcomes = self._executor.run(calls, workers=len(calls), seconds=CLOSE_SECONDS)
        errors = [outcome.error for outcome in outcomes if outcome.error is not None]
        if errors:
            message = "%d of %d environments could not be closed. The first: %r"
            logger.warning(message, len(errors), len(calls), errors[0])

    def _check(self, made: Iterable[Any]) -> None:
        for env in made:
            if isinstance(env, MultiTurnEnv):
                continue
            missing = [name for name in _MEMBERS if not hasattr(env, name)]
            remedy = "return a TokenObservationWrapper"
            if "reset" not in missing and "step" not in missing:
                remedy = (
                    "a text environment has to be wrapped: return TokenObservationWrapper(env, "
                    "tokenizer, max_turns=...)"
                )
            raise TypeError(
                f"env_factory returned {shorten(env)} of type {type(env).__name__}, which has no "
                f"{' and no '.join(missing)}; {remedy}"
            )
        inner = [id(_inner(env)) for env in self._envs if env is not None]
        require(
            len(set(inner)) == len(inner),
            "env_factory returned the same environment twice; it must make a new one at each call, "
            "wrapped environment included: episodes are played at the same time",
        )


def _inner(env: Any) -> Any:
    """The text environment in a wrapper. Other environments' ``env`` may be anything."""
    return env.env if isinstance(env, TokenObservationWrapper) else env
