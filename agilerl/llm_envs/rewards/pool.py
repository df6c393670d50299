"""Calls of reward functions on a batch of completions, in threads, each with a timeout."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from agilerl.checks import finite_number, require, shorten
from agilerl.llm_envs.rewards.arguments import BY_POSITION
from agilerl.llm_envs.rewards.functions import Reward, RewardFunctions, read_rewards
from agilerl.llm_envs.timeouts import CallOutcome, TimeoutExecutor

logger = logging.getLogger(__name__)


class RewardError(RuntimeError):
    """A reward call raised or ran out of time; ``__cause__`` is its exception."""


@dataclass(frozen=True)
class Scores:
    """The rewards of some completions.

    Of two, with the weights 1 and 0.5, where the second reward does not apply to the first one::

        total    [1.0, 0.25]
        by_name  {"correct": [1.0, 0.0], "polite": [None, 0.5]}
    """

    total: list[float]
    """The weighted sum over the rewards that apply."""
    by_name: dict[str, list[float | None]]
    """Each without its weight, None where it does not apply; empty for a single function."""


@dataclass(frozen=True)
class _Job:
    """One call: of a batched function for all rows, of another for one."""

    reward: Reward
    rows: Sequence[int]
    call: Callable[[], Any]


class RewardPool:
    """Scores completions with reward functions, a bounded number of calls at a time.

    Args:
        reward_fn: One function, a list of functions or a dict by name, plain or ``async``. Each is
            given the columns that its parameters name; ``completion, answer, question`` by position
            where they name none. It returns one finite number, or, in a list or dict, None where it
            does not apply. One marked with ``agilerl.rewards.batched_reward`` is called once, with
            lists. They run in threads: several calls at the same time.
        reward_timeout: Seconds that one call may take, counted from its own start.
        failure_reward: The reward of a completion whose call raises or runs out of time. None
            raises :class:`RewardError` instead. A wrong return value always raises.
        reward_workers: Largest number of calls at the same time.
        reward_weights: Factor of each reward in the total: a list in the order of the functions, or
            a dict by name; 1 where there is none.
        columns: Columns that functions may ask for beside ``completion, answer, question``.

    Raises:
        TypeError: An argument of the wrong type; a function with a parameter that is no column.
        ValueError: An argument out of range; two functions of one name.
    """

    def __init__(
        self,
        reward_fn: RewardFunctions,
        reward_timeout: float = 60.0,
        failure_reward: float | None = None,
        reward_workers: int = 16,
        *,
        reward_weights: Sequence[float] | Mapping[str, float] | None = None,
        columns: Collection[str] = (),
    ) -> None:
        offered = dict.fromkeys([*BY_POSITION, *columns])
        self._rewards = read_rewards(reward_fn, reward_weights, offered)
        self.columns = set().union(*(reward.arguments.columns for reward in self._rewards))
        """What some function asks for."""
        self.named_columns = set().union(*(reward.arguments.named for reward in self._rewards))
        """The same without what only ``**kwargs`` gets."""
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

    @property
    def names(self) -> list[str]:
        """Names of the rewards; none where ``reward_fn`` is a single function."""
        return [reward.name for reward in self._rewards if reward.optional]

    def score(
        self, completions: Sequence[str], answers: Sequence[Any], questions: Sequence[str]
    ) -> list[float]:
        """Score completions, each with its own answer and question.

        Returns:
            One reward per completion, in the order given.

        Raises:
            RewardError: A call raised or ran out of time and there is no ``failure_reward``.
            TypeError: A function returned something other than one real number.
            ValueError: A function returned NaN or infinity; the arguments differ in length; no
                reward applies to a row.
        """
        columns = (completions, answers, questions)
        lengths = [len(column) for column in columns]
        require(
            len(set(lengths)) == 1,
            f"completions, answers and questions have the lengths {lengths}, and some are shorter "
            "than others; pass one of each per row",
        )
        named = dict(zip(BY_POSITION, map(list, columns), strict=True))
        return self.score_columns(named).total

    def score_columns(self, columns: Mapping[str, Sequence[Any]]) -> Scores:
        """Score completions, with everything that the functions ask for.

        Args:
            columns: Lists of N by name: ``completion, answer, question``, and those that the pool
                was made with.

        Raises:
            RewardError: As :meth:`score`.
            TypeError: As :meth:`score`.
            ValueError: As :meth:`score`.
        """
        jobs = self._jobs(columns)
        values: dict[str, list[float | None]] = {
            reward.name: [None] * len(columns["completion"]) for reward in self._rewards
        }
        failures: list[RewardError] = []
        with closing(self._executor.as_completed([job.call for job in jobs])) as outcomes:
            for outcome in outcomes:
                job = jobs[outcome.index]
                scored: Sequence[Any]
                if outcome.error is None:
                    scored = _numbers(job, outcome.value, columns)
                else:
                    failures.append(self._failure(job, outcome, columns))
                    scored = [self.failure_reward] * len(job.rows)
                for row, number in zip(job.rows, scored, strict=True):
                    values[job.reward.name][row] = number
        if failures:
            message = "%d of %d reward calls failed and got failure_reward=%s. The first: %s"
            logger.warning(message, len(failures), len(jobs), self.failure_reward, failures[0])
        return self._scores(values, columns)

    def close(self) -> None:
        """Stop the thread that coroutines run on; a later ``score`` starts another one."""
        self._executor.close()

    def _jobs(self, columns: Mapping[str, Sequence[Any]]) -> list[_Job]:
        rows = range(len(columns["completion"]))
        jobs = []
        for reward in self._rewards:
            function, arguments = reward.function, reward.arguments
            if not reward.batched:
                for row in rows:
                    values = {name: columns[name][row] for name in arguments.columns}
                    jobs.append(_Job(reward, [row], arguments.bind(function, values)))
            elif rows:
                # Copies: one function may change what another is given.
                lists = {name: list(columns[name]) for name in arguments.columns}
                jobs.append(_Job(reward, rows, arguments.bind(function, lists)))
        return jobs

    def _failure(
        self, job: _Job, outcome: CallOutcome, columns: Mapping[str, Sequence[Any]]
    ) -> RewardError:
        """Count a failure; raise it where there is no ``failure_reward``."""
        self.failures += 1
        self.timeouts += outcome.timed_out
        error = outcome.error
        message = (
            f"{job.reward.label} failed with {type(error).__name__}: {error}\n"
            f"{_shown(columns, job.rows[0])}"
        )
        if job.reward.batched:
            message += f"\n  and {len(job.rows) - 1} more in the same call"
        if self.failure_reward is None:
            raise RewardError(
                f"{message}\n  Set failure_reward to give such completions a reward instead, or "
                "raise reward_timeout if the function is slow."
            ) from error
        return RewardError(message)

    def _scores(
        self, values: Mapping[str, Sequence[float | None]], columns: Mapping[str, Sequence[Any]]
    ) -> Scores:
        total = []
        for row in range(len(columns["completion"])):
            parts = [
                reward.weight * number
                for reward in self._rewards
                if (number := values[reward.name][row]) is not None
            ]
            require(
                bool(parts),
                f"no reward applies to this row: {', '.join(values)} returned None; give every row "
                f"at least one, such as 0.0\n{_shown(columns, row)}",
            )
            total.append(sum(parts))
        return Scores(total, {name: list(values[name]) for name in self.names})


def _numbers(job: _Job, value: Any, columns: Mapping[str, Sequence[Any]]) -> list[float | None]:
    """What a call returned: one number per row, or None where the reward does not apply."""
    reward, returned = job.reward, [value]
    if reward.batched:
        remedy = "a batched reward returns a list with one number per completion"
        if isinstance(value, torch.Tensor | np.ndarray) and value.ndim == 1:
            value = value.tolist()
        require(
            isinstance(value, list | tuple),
            f"{reward.label} returned {shorten(value)} of type {type(value).__name__}; {remedy}",
            TypeError,
        )
        require(
            len(value) == len(job.rows),
            f"{reward.label} returned {len(value)} rewards for {len(job.rows)} completions; "
            f"{remedy}",
        )
        returned = list(value)
    numbers: list[float | None] = []
    for row, number in zip(job.rows, returned, strict=True):
        if number is None and reward.optional:
            numbers.append(None)
            continue
        remedy = f"return one finite number, such as float(correct)\n{_shown(columns, row)}"
        numbers.append(finite_number(f"{reward.label} returned", number, remedy))
    return numbers


def _shown(columns: Mapping[str, Sequence[Any]], row: int) -> str:
    question, completion = columns["question"][row], columns["completion"][row]
    return f"  question: {shorten(question)}\n  completion: {shorten(completion)}"
