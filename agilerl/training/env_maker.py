"""The multi-turn environments of a run, the first made before it begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agilerl.training import arguments
from agilerl.training.protocols import Agent
from agilerl.typing import MultiTurnEnv


class EnvMaker:
    """Makes environments that fit the agents.

    One is made at once, so that what is wrong with it shows before anything is written; it is
    handed out first.

    Args:
        env_factory: Makes an environment.
        env_config: Its keyword arguments.
        agents: Who will play in them.

    Raises:
        TypeError: If ``env_factory`` or ``env_config`` is of the wrong kind.
        ValueError: If an environment does not fit the agents' contexts.
    """

    def __init__(
        self,
        env_factory: Callable[..., MultiTurnEnv],
        env_config: Mapping[str, Any] | None,
        agents: Sequence[Agent],
    ) -> None:
        arguments.check_env_factory(env_factory, env_config)
        self._factory, self._agents = env_factory, agents
        first = self._make(**(env_config or {}))
        self._waiting = [first]
        self.name = type(getattr(first, "env", first)).__name__
        """Class of the environment inside the wrapper, for the run's name."""

    def __call__(self, **config: Any) -> MultiTurnEnv:
        """An environment that was not handed out yet."""
        try:
            return self._waiting.pop()
        except IndexError:  # asked beforehand, another thread could take the last one meanwhile
            return self._make(**config)

    def close(self) -> None:
        """Close what was never handed out."""
        while self._waiting:
            self._waiting.pop().close()

    def _make(self, **config: Any) -> MultiTurnEnv:
        made = self._factory(**config)
        arguments.fit_context(made, self._agents)
        return made
