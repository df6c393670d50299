"""The environments of a vector environment: made when needed, kept, replaced after failures."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from agilerl.llm_envs.base import shorten
from agilerl.llm_envs.calls import CallOutcome, CallPool
from agilerl.typing import MultiTurnEnv

logger = logging.getLogger(__name__)

_MEMBERS = ("reset", "step", "get_episode_data", "close")


class EnvironmentSlots:
    """One environment per place in a batch.

    Args:
        env_factory: Returns a new environment at each call.
        env_config: Its keyword arguments.
        calls: Makes and closes environments.

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

    def __getitem__(self, place: int) -> MultiTurnEnv:
        env = self._envs[place]
        assert env is not None
        return env

    def fill(self, count: int) -> dict[int, CallOutcome]:
        """Make what is missing at the first ``count`` places.

        Returns:
            The places that are still empty, with what happened there.

        Raises:
            TypeError: ``env_factory`` returned something else than a multi-turn environment.
            ValueError: It returned the same environment twice.
        """
        self._envs += [None] * (count - len(self._envs))
        empty = [place for place in range(count) if self._envs[place] is None]
        outcomes = self._calls.run([self._make] * len(empty))
        failed = {}
        for place, outcome in zip(empty, outcomes, strict=True):
            if outcome.error is None:
                self._envs[place] = self._checked(outcome.value)
            else:
                failed[place] = outcome
        return failed

    def drop(self, places: Collection[int], hung: Collection[int]) -> None:
        """Empty ``places`` and close what was there, unless a thread still has it."""
        self._close([self._envs[place] for place in places if place not in hung])
        for place in places:
            self._envs[place] = None

    def close(self) -> None:
        """Close all environments."""
        self._close(self._envs)
        self._envs = []
        self._calls.close()

    def _close(self, envs: Sequence[MultiTurnEnv | None]) -> None:
        for outcome in self._calls.run([env.close for env in envs if env is not None]):
            if outcome.error is not None:
                logger.warning("An environment could not be closed: %r", outcome.error)

    def _checked(self, env: Any) -> MultiTurnEnv:
        if isinstance(env, MultiTurnEnv):
            inner = getattr(env, "env", env)
            others = [getattr(other, "env", other) for other in self._envs if other is not None]
            if any(inner is other for other in others):
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
