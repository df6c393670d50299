"""Calls of reward functions on a batch of completions, in threads, each with a timeout."""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from agilerl.checks import require
from agilerl.llm_envs.failures import FailurePolicy, OnFailure
from agilerl.llm_envs.rewards.arguments import BY_POSITION
from agilerl.llm_envs.rewards.calls import RewardCall, needs_main_thread, shown
from agilerl.llm_envs.rewards.functions import RewardFunctions, read_rewards
from agilerl.llm_envs.timeouts import CallOutcome, TimeoutExecutor


class RewardError(RuntimeError):
    """Reward calls raised or ran out of time; ``__cause__`` is the first one's exception."""


@dataclass(frozen=True)
class Scores:
    """The rewards of some completions.

    Of two, with the weights 1 and 0.5, where the second reward does not apply to the first one::

        total     [1.0, 0.25]
        by_name   {"correct": [1.0, 0.0], "polite": [None, 0.5]}
        failures  [None, None]
    """

    total: list[float]
    """The weighted sum over the rewards that apply; 0 for a completion that was dropped."""
    by_name: dict[str, list[float | None]]
    """Each without its weight, None where it does not apply or the completion was dropped for it;
    empty for a single function."""
    failures: list[str | None]
    """Why a completion failed: one of its calls raised or ran out of time. None for others."""
    first_failure: RewardError | None = None
    """The first of them, with question and completion."""


class RewardPool:
    """Scores completions with reward functions, a bounded number of calls at a time.

    Args:
        reward_fn: One function, a list of functions or a dict by name, plain or ``async``. Each is
            given the columns that its parameters name; ``completion, answer, question`` by position
            where they name none. It returns one finite number, or, in a list or dict, None where it
            does not apply. One marked with ``agilerl.rewards.batched_reward`` is called once, with
            lists. They run in threads: several calls at the same time.
        reward_timeout: Seconds that one call may take, counted from its own start.
        reward_workers: Largest number of calls at the same time.
        reward_weights: Factor of each reward in the total: a list in the order of the functions, or
            a dict by name; 1 where there is none.
        columns: Columns that functions may ask for beside ``completion, answer, question``.
        on_failure: What becomes of a completion for which a call raises or runs out of time:
            ``"raise"`` raises :class:`RewardError`; ``"drop"`` leaves it out, if one of its rewards
            failed; a number is what that call returns. A wrong return value always raises.
        max_failure_share: Largest share of completions that may fail; above it
            :class:`RewardError` is raised whatever ``on_failure`` says.
        failure_retries: Further calls of a function that raised or ran out of time, before it
            counts as failed.

    Raises:
        TypeError: An argument of the wrong type; a function with a parameter that is no column.
        ValueError: An argument out of range; two functions of one name.
    """

    def __init__(
        self,
        reward_fn: RewardFunctions,
        reward_timeout: float = 60.0,
        reward_workers: int = 16,
        *,
        on_failure: OnFailure = "raise",
        max_failure_share: float = 0.5,
        failure_retries: int = 0,
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
        self.policy = FailurePolicy(on_failure, max_failure_share, failure_retries)
        self._executor = TimeoutExecutor(
            reward_timeout,
            reward_workers,
            name="reward_fn",
            timeout_name="reward_timeout",
            workers_name="reward_workers",
        )
        self.failures = 0
        """Calls so far that raised or ran out of time, the last attempt too."""
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
            One reward per completion, in the order given; 0 for those that are dropped.

        Raises:
            RewardError: A call raised or ran out of time and ``on_failure`` is ``"raise"``, or too
                many did.
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

    def score_columns(
        self, columns: Mapping[str, Sequence[Any]], *, bounded: bool = True
    ) -> Scores:
        """Score completions, with everything that the functions ask for.

        Args:
            columns: Lists of N by name: ``completion, answer, question``, and those that the pool
                was made with.
            bounded: Whether ``max_failure_share`` is that of these completions; False: they are
                part of an evaluation, as a whole of which it holds.

        Raises:
            RewardError: As :meth:`score`.
            TypeError: As :meth:`score`.
            ValueError: As :meth:`score`.
        """
        count = len(columns["completion"])
        values: dict[str, list[float | None]] = {
            reward.name: [None] * count for reward in self._rewards
        }
        failures: list[str | None] = [None] * count
        first: RewardError | None = None
        calls = self._calls(count)
        for _ in range(self.policy.failure_retries):
            calls = [call for call, _ in self._run(calls, columns, values)]
        with closing(self._run(calls, columns, values)) as failed:
            for call, outcome in failed:
                error = self._failure(call, outcome, columns)
                first = first or error
                for row in call.rows:
                    failures[row] = failures[row] or str(error).partition("\n")[0]
                    values[call.reward.name][row] = (
                        None if self.policy.drops else self.policy.reward
                    )
                excess = self.policy.excess(count - failures.count(None), count, "completions")
                if bounded and excess:
                    raise RewardError(f"{excess}. The first: {first}") from first.__cause__
        total = self._totals(values, failures, columns)
        by_name = {name: values[name] for name in self.names}
        return Scores(total, by_name, failures, first)

    def close(self) -> None:
        """Stop the thread that coroutines run on; a later ``score`` starts another one."""
        self._executor.close()

    def _calls(self, count: int) -> list[RewardCall]:
        rows = range(count)
        calls = []
        for reward in self._rewards:
            if not reward.batched:
                calls += [RewardCall(reward, [row]) for row in rows]
            elif rows:
                calls.append(RewardCall(reward, rows))
        return calls

    def _run(
        self,
        calls: Sequence[RewardCall],
        columns: Mapping[str, Sequence[Any]],
        values: Mapping[str, list[float | None]],
    ) -> Generator[tuple[RewardCall, CallOutcome], None, None]:
        """Make some calls; what they return is put into ``values``, and those that fail come out.

        Closing the generator cancels the calls that have not begun.
        """
        functions = [call.function(columns) for call in calls]
        with closing(self._executor.as_completed(functions)) as outcomes:
            for outcome in outcomes:
                call = calls[outcome.index]
                if outcome.error is not None:
                    yield call, outcome
                    continue
                numbers = call.numbers(outcome.value, columns)
                for row, number in zip(call.rows, numbers, strict=True):
                    values[call.reward.name][row] = number

    def _failure(
        self, call: RewardCall, outcome: CallOutcome, columns: Mapping[str, Sequence[Any]]
    ) -> RewardError:
        """Count a failure; raise it if ``on_failure`` says so."""
        self.failures += 1
        self.timeouts += outcome.timed_out
        assert outcome.error is not None
        message = call.failure(outcome.error, columns)
        if self.policy.on_failure != "raise":
            error = RewardError(message)
            error.__cause__ = outcome.error
            return error
        if not needs_main_thread(outcome.error):
            message += (
                '\n  Mend the function; or set on_failure="drop" to leave such completions out, or '
                "to a number to give them that reward; raise reward_timeout if it is slow."
            )
        raise RewardError(message) from outcome.error

    def _totals(
        self,
        values: Mapping[str, Sequence[float | None]],
        failures: Sequence[str | None],
        columns: Mapping[str, Sequence[Any]],
    ) -> list[float]:
        total = []
        for row, failure in enumerate(failures):
            if failure is not None and self.policy.drops:
                total.append(self.policy.reward)
                continue
            parts = [
                reward.weight * number
                for reward in self._rewards
                if (number := values[reward.name][row]) is not None
            ]
            require(
                bool(parts),
                f"no reward applies to this row: {', '.join(values)} returned None; give every row "
                f"at least one, such as 0.0\n{shown(columns, row)}",
            )
            total.append(sum(parts))
        return total
