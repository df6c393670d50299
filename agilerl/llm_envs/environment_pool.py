"""The environments of a vector environment: made when needed, kept, replaced after failures."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any

from agilerl.checks import InstanceOf, require, shorten
from agilerl.llm_envs.timeouts import CallOutcome, TimeoutExecutor
from agilerl.llm_envs.token_observation import TokenObservationWrapper
from agilerl.typing import MultiTurnEnv

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 10.0
"""Time limit for closing environments, all at the same time in a thread each."""

_MEMBERS = ("reset", "step", "get_episode_data", "close")


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
        require(
            callable(env_factory),
            f"env_factory is {shorten(env_factory)}; it must be a function that returns a new "
            "environment",
            TypeError,
        )
        InstanceOf(Mapping, "a dict of env_factory's arguments")("env_config", env_config)
        self._factory = partial(env_factory, **(env_config or {}))
        self._executor = executor
        self._envs: list[MultiTurnEnv | None] = []
        # Environments with a call that ran out of time and may still be running.
        self._hung: set[int] = set()
        self._closing: list[threading.Thread] = []

    def __getitem__(self, index: int) -> MultiTurnEnv:
        env = self._envs[index]
        assert env is not None
        return env

    def made(self) -> list[int]:
        """Indices of the environments that can be used."""
        return [i for i, env in enumerate(self._envs) if env is not None and i not in self._hung]

    def make(self, indices: Sequence[int]) -> dict[int, CallOutcome]:
        """Make those of these environments that are missing.

        Returns:
            The outcome of each that could not be made, by index. Once these are more than half of
            all, no more are made.

        Raises:
            TypeError: ``env_factory`` returned something else than a multi-turn environment.
            ValueError: It returned the same environment twice.
        """
        self.drop(set(self._hung))  # Of a step that was interrupted.
        self._envs += [None] * (max(indices, default=-1) + 1 - len(self._envs))
        missing = [i for i in indices if self._envs[i] is None]
        made: dict[int, CallOutcome] = {}
        failed: dict[int, CallOutcome] = {}
        try:
            calls = [self._factory] * len(missing)
            with closing(self._executor.as_completed(calls)) as outcomes:
                for outcome in outcomes:
                    (made if outcome.error is None else failed)[missing[outcome.index]] = outcome
                    if 2 * len(failed) > len(indices):
                        break
            for i, outcome in made.items():
                self._envs[i] = self._checked(outcome.value)
        except BaseException:
            for i, outcome in made.items():
                self._envs[i] = outcome.value
            self.drop(range(len(self._envs)))
            raise
        return failed

    def call(
        self, functions: Mapping[int, Callable[[], Any]], workers: int | None = None
    ) -> Generator[tuple[int, CallOutcome], None, None]:
        """Make one call into each of some environments.

        Args:
            functions: What to call, by the index of the environment.
            workers: Calls at the same time; None: the executor's.

        Yields:
            Indices and outcomes, as calls complete. Closing the generator cancels the calls that
            have not begun. An environment whose call may still be running is never closed.
        """
        indices, unfinished = list(functions), set[int]()
        outcomes = self._executor.as_completed(
            list(functions.values()), workers=workers, unfinished=unfinished
        )
        try:
            with closing(outcomes):
                for outcome in outcomes:
                    yield indices[outcome.index], outcome
        finally:
            self._hung.update(indices[number] for number in unfinished)

    def drop(self, indices: Iterable[int]) -> None:
        """Forget environments; those without a running call are closed in the background."""
        dropped = list(indices)
        self._close_all(self._envs[i] for i in dropped if i not in self._hung)
        for i in dropped:
            self._envs[i] = None
        self._hung.difference_update(dropped)

    def close(self) -> None:
        """Close all environments but those with a running call; takes ``CLOSE_SECONDS`` at most."""
        self.drop(range(len(self._envs)))
        for thread in self._closing:
            thread.join()
        self._closing = []
        self._executor.close()

    def _close_all(self, envs: Iterable[Any]) -> None:
        """Close environments in the background, each once."""
        # What a factory made may be anything.
        closes = [getattr(env, "close", None) for env in {id(_inner(e)): e for e in envs}.values()]
        calls = [close for close in closes if callable(close)]
        if not calls:
            return
        thread = threading.Thread(target=self._run_closes, args=(calls,), daemon=True)
        thread.start()
        self._closing = [other for other in self._closing if other.is_alive()] + [thread]

    def _run_closes(self, calls: list[Callable[[], Any]]) -> None:
        outcomes = self._executor.run(calls, workers=len(calls), seconds=CLOSE_SECONDS)
        errors = [outcome.error for outcome in outcomes if outcome.error is not None]
        if errors:
            message = "%d of %d environments could not be closed. The first: %r"
            logger.warning(message, len(errors), len(calls), errors[0])

    def _checked(self, env: Any) -> MultiTurnEnv:
        if isinstance(env, MultiTurnEnv):
            others = [_inner(other) for other in self._envs if other is not None]
            require(
                all(_inner(env) is not other for other in others),
                "env_factory returned the same environment twice; it must make a new one at each "
                "call, wrapped environment included: episodes are played at the same time",
            )
            return env
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


def _inner(env: Any) -> Any:
    """The text environment in a wrapper. Other environments' ``env`` may be anything."""
    return env.env if isinstance(env, TokenObservationWrapper) else env
