"""The environments of a vector environment: made when needed, kept, replaced after failures."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any

from agilerl.llm_envs.base import shorten
from agilerl.llm_envs.timeouts import CallOutcome, CallPool
from agilerl.llm_envs.token_observation import TokenObservationWrapper
from agilerl.typing import MultiTurnEnv

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 10.0
"""What closing environments may take: they close at the same time, each in a thread of its own."""

_MEMBERS = ("reset", "step", "get_episode_data", "close")


class EnvironmentPool:
    """One environment per place in a batch.

    Args:
        env_factory: Returns a new environment at each call.
        env_config: Its keyword arguments.
        calls: Calls the factory and the environments.

    Raises:
        TypeError: An argument of the wrong type.
    """

    def __init__(
        self,
        env_factory: Callable[..., MultiTurnEnv],
        env_config: Mapping[str, Any] | None,
        calls: CallPool,
    ) -> None:
        if not callable(env_factory):
            raise TypeError(
                f"env_factory must be callable, got {shorten(env_factory)}; pass a function that "
                "returns a new environment"
            )
        if env_config is not None and not isinstance(env_config, Mapping):
            raise TypeError(
                f"env_config must be a dict of env_factory's arguments, got {shorten(env_config)}"
            )
        self._make = partial(env_factory, **(env_config or {}))
        self._calls = calls
        self._envs: list[MultiTurnEnv | None] = []
        # Places of environments that a thread still has.
        self._hung: set[int] = set()
        self._closing: list[threading.Thread] = []

    def __getitem__(self, place: int) -> MultiTurnEnv:
        env = self._envs[place]
        assert env is not None
        return env

    def filled(self) -> list[int]:
        """Places with an environment that can be used."""
        envs = enumerate(self._envs)
        return [place for place, env in envs if env is not None and place not in self._hung]

    def fill(self, places: Sequence[int]) -> dict[int, CallOutcome]:
        """Make what is missing at ``places``.

        Returns:
            The places where making one failed, with what happened. Once these are more than half
            of all, no more are made.

        Raises:
            TypeError: ``env_factory`` returned something else than a multi-turn environment.
            ValueError: It returned the same environment twice.
        """
        self.drop(set(self._hung))  # Of a step that was interrupted.
        self._envs += [None] * (max(places, default=-1) + 1 - len(self._envs))
        empty = [place for place in places if self._envs[place] is None]
        made: dict[int, CallOutcome] = {}
        failed: dict[int, CallOutcome] = {}
        try:
            with closing(self._calls.as_completed([self._make] * len(empty))) as outcomes:
                for outcome in outcomes:
                    (made if outcome.error is None else failed)[empty[outcome.index]] = outcome
                    if 2 * len(failed) > len(places):
                        break
            for place, outcome in made.items():
                self._envs[place] = self._checked(outcome.value)
        except BaseException:
            for place, outcome in made.items():
                self._envs[place] = outcome.value
            self.drop(range(len(self._envs)))
            raise
        return failed

    def call(
        self, functions: Mapping[int, Callable[[], Any]], workers: int | None = None
    ) -> Generator[tuple[int, CallOutcome], None, None]:
        """Make one call per place, into the environment there.

        Args:
            functions: What to call, by place.
            workers: Calls that run at the same time; None: as many as the pool says.

        Yields:
            Places and how the calls ended, as they come in. Closing the generator drops the calls
            that have not begun. An environment whose call may be running still is never closed.
        """
        places, unfinished = list(functions), set[int]()
        outcomes = self._calls.as_completed(
            list(functions.values()), workers=workers, unfinished=unfinished
        )
        try:
            with closing(outcomes):
                for outcome in outcomes:
                    yield places[outcome.index], outcome
        finally:
            self._hung.update(places[index] for index in unfinished)

    def drop(self, places: Iterable[int]) -> None:
        """Empty ``places``.

        What was there is closed in the background, unless a thread still has it.
        """
        dropped = list(places)
        self._close_all(self._envs[place] for place in dropped if place not in self._hung)
        for place in dropped:
            self._envs[place] = None
        self._hung.difference_update(dropped)

    def close(self) -> None:
        """Close all environments but those that a thread still has; takes ``CLOSE_SECONDS``."""
        self.drop(range(len(self._envs)))
        for thread in self._closing:
            thread.join()
        self._closing = []
        self._calls.close()

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
        outcomes = self._calls.run(calls, workers=len(calls), seconds=CLOSE_SECONDS)
        errors = [outcome.error for outcome in outcomes if outcome.error is not None]
        if errors:
            message = "%d of %d environments could not be closed. The first: %r"
            logger.warning(message, len(errors), len(calls), errors[0])

    def _checked(self, env: Any) -> MultiTurnEnv:
        if isinstance(env, MultiTurnEnv):
            if any(_inner(env) is _inner(other) for other in self._envs if other is not None):
                raise ValueError(
                    "env_factory returned the same environment twice; it must make a new one at "
                    "each call, wrapped environment included: episodes are played at the same time"
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
