"""Reward functions: called on a batch of completions in threads, each call with a timeout."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from typing import Any, TypeAlias

from agilerl.checks import finite_number, require, shorten
from agilerl.llm_envs.timeouts import TimeoutExecutor

logger = logging.getLogger(__name__)

RewardFunction: TypeAlias = Callable[[str, Any, str], "float | Awaitable[float]"]
"""``reward_fn(completion, answer, question)``, called with these three by position."""


class RewardError(RuntimeError):
    """A reward call raised or ran out of time; ``__cause__`` is its exception."""


class RewardPool:
    """Scores completions with a reward function, a bounded number of them at a time.

    Args:
        reward_fn: ``reward_fn(completion, answer, question)``, plain or ``async``, returns one
            finite number. It runs in threads: several calls at the same time.
        reward_timeout: Seconds that one call may take, counted from its own start.
        failure_reward: The reward of a completion whose call raises or runs out of time. None
            raises :class:`RewardError` instead. A wrong return value always raises.
        reward_workers: Largest number of calls at the same time.

    Raises:
        TypeError: An argument of the wrong type; a ``reward_fn`` that cannot take three arguments.
        ValueError: An argument out of range.
    """

    def __init__(
        self,
        reward_fn: RewardFunction,
        reward_timeout: float = 60.0,
        failure_reward: float | None = None,
        reward_workers: int = 16,
    ) -> None:
        _check_reward_fn(reward_fn)
        self.reward_fn = reward_fn
        if failure_reward is not None:
            remedy = "pass one finite number, or None to raise on failure"
            failure_reward = finite_number("failure_reward is", failure_reward, remedy)
        self.failure_reward = failure_reward
        self._executor = TimeoutExecutor(
            reward_timeout,
            reward_workers,
            name="reward_fn",
            timeout_name="reward_timeout",
            workers_name="reward_workers",
        )
        self.failures = 0
        """Calls so far that raised or ran out of time."""
        self.timeouts = 0
        """How many of them ran out of time."""

    def score(
        self, completions: Sequence[str], answers: Sequence[Any], questions: Sequence[str]
    ) -> list[float]:
        """Score completions, each with its own answer and question.

        Returns:
            One reward per completion, in the order given.

        Raises:
            RewardError: A call raised or ran out of time and there is no ``failure_reward``.
            TypeError: ``reward_fn`` returned something other than one real number.
            ValueError: ``reward_fn`` returned NaN or infinity; the arguments differ in length.
        """
        rows = list(zip(completions, answers, questions, strict=True))
        calls = [functools.partial(self.reward_fn, *row) for row in rows]
        rewards: dict[int, float] = {}
        failures: list[RewardError] = []
        with closing(self._executor.as_completed(calls)) as outcomes:
            for outcome in outcomes:
                completion, _, question = rows[outcome.index]
                shown = f"  question: {shorten(question)}\n  completion: {shorten(completion)}"
                if outcome.error is None:
                    remedy = f"return one finite number, such as float(correct)\n{shown}"
                    reward = finite_number("reward_fn returned", outcome.value, remedy)
                    rewards[outcome.index] = reward
                    continue
                self.timeouts += outcome.timed_out
                failures.append(self._failure(outcome.error, shown))
                if self.failure_reward is None:
                    raise failures[-1] from outcome.error
                rewards[outcome.index] = self.failure_reward
        if failures:
            message = "%d of %d reward calls failed and got failure_reward=%s. The first: %s"
            logger.warning(message, len(failures), len(rows), self.failure_reward, failures[0])
        return [rewards[index] for index in range(len(rows))]

    def close(self) -> None:
        """Stop the thread that coroutines run on; a later ``score`` starts another one."""
        self._executor.close()

    def _failure(self, error: BaseException, shown: str) -> RewardError:
        self.failures += 1
        message = f"reward_fn failed with {type(error).__name__}: {error}\n{shown}"
        if self.failure_reward is None:
            message += (
                "\n  Set failure_reward to give such completions a reward instead, or raise "
                "reward_timeout if the function is slow."
            )
        return RewardError(message)


def _check_reward_fn(reward_fn: Any) -> None:
    remedy = "pass a function reward_fn(completion, answer, question) that returns a float"
    require(callable(reward_fn), f"reward_fn is {reward_fn!r}; {remedy}", TypeError)
    try:
        inspect.signature(reward_fn).bind("", "", "")
    except TypeError as exc:
        raise TypeError(
            f"reward_fn cannot be called with three arguments ({exc}); {remedy}"
        ) from exc
    except ValueError:
        pass  # Some builtins have no signature; the first call will show.
