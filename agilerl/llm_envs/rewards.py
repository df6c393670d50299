"""Running a reward function: many calls at a time, each with a time limit, never a hang.

Every :meth:`RewardPool.score` starts a few daemon threads of its own and is done with them when it
returns, so a thread that a hung call holds can delay neither the next batch nor the exit of the
interpreter. Coroutines run on one event loop, in a thread that the pool keeps, because clients
(HTTP sessions, semaphores) belong to the loop that they were first used on.

A thread can be given up, not killed: a call that hangs goes on in the background, and one that
never lets go of the interpreter lock (a catastrophic regular expression) cannot be timed out.
``signal.alarm`` works in the main thread only, so libraries that time themselves with it fail here.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeAlias

from agilerl.llm_envs.base import check_reward_fn, checked_int, finite_number, shorten

logger = logging.getLogger(__name__)

RewardFunction: TypeAlias = Callable[[str, Any, str], "float | Awaitable[float]"]
"""``reward_fn(completion, answer, question)``, called with these three by position."""

_STUCK_LOOP_SECONDS = 1.0


class RewardError(RuntimeError):
    """A reward call raised or ran out of time; ``__cause__`` is what happened."""


class RewardPool:
    """Scores completions with a reward function, a bounded number of calls at a time.

    Args:
        reward_fn: ``reward_fn(completion, answer, question)``, plain or ``async``, returns one
            finite number. It runs in threads: several calls at the same time.
        reward_timeout: Seconds that one call may take, counted from its own start.
        failure_reward: The reward of a completion whose call raises or runs out of time. None
            raises :class:`RewardError` instead. It never stands in for a wrong return value.
        reward_workers: Calls that run at the same time, at most.

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
        check_reward_fn(reward_fn)
        self.reward_fn = reward_fn
        remedy = "pass the seconds that one call may take, such as 60.0 or 3600.0"
        self.reward_timeout = finite_number("reward_timeout is", reward_timeout, remedy)
        if self.reward_timeout <= 0:
            raise ValueError(f"reward_timeout is {reward_timeout!r}; {remedy}")
        if failure_reward is not None:
            remedy = "pass one finite number, or None to raise on failure"
            failure_reward = finite_number("failure_reward is", failure_reward, remedy)
        self.failure_reward = failure_reward
        self.reward_workers = checked_int("reward_workers", reward_workers)
        self.failures = 0
        """Calls so far that raised or ran out of time."""
        self.timeouts = 0
        """Those of them that ran out of time."""
        self._loop: _LoopThread | None = None
        self._loop_lock = threading.Lock()

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
        rows = zip(completions, answers, questions, strict=True)
        batch = _Batch(_Call(index, *row) for index, row in enumerate(rows))
        for _ in range(min(self.reward_workers, len(completions))):
            self._start_worker(batch)
        try:
            return self._collect(batch, len(completions))
        finally:
            batch.stop()

    def close(self) -> None:
        """Stop the thread that coroutines run on; a later ``score`` starts another one."""
        with self._loop_lock:
            if self._loop is not None:
                self._loop.stop()
                self._loop = None

    def _collect(self, batch: _Batch, count: int) -> list[float]:
        """Wait for ``count`` results, giving up each call that is over its time."""
        rewards: dict[int, float] = {}
        failures: list[RewardError] = []
        while len(rewards) < count:
            try:
                done = [batch.done.get(timeout=batch.seconds_left(self.reward_timeout))]
            except queue.Empty:
                done = [self._give_up(batch, c) for c in batch.pop_overdue(self.reward_timeout)]
            for call, value, error in done:
                if error is None:
                    rewards[call.index] = _check_reward(value, call)
                    continue
                failures.append(self._failure(call, error))
                if self.failure_reward is None:
                    raise failures[-1] from error
                rewards[call.index] = self.failure_reward
        if failures:
            message = "%d of %d reward calls failed and got failure_reward=%s. The first: %s"
            logger.warning(message, len(failures), count, self.failure_reward, failures[0])
        return [rewards[index] for index in range(count)]

    def _failure(self, call: _Call, error: BaseException) -> RewardError:
        self.failures += 1
        message = f"reward_fn failed with {type(error).__name__}: {error}\n{call.shown()}"
        if self.failure_reward is None:
            message += (
                "\n  To go on, set failure_reward, the reward of such completions; reward_timeout "
                "gives slow calls more time."
            )
        return RewardError(message)

    def _give_up(self, batch: _Batch, call: _Call) -> _Result:
        """Leave an overdue call to its thread and put another worker in its place."""
        self.timeouts += 1
        if call.future is not None:
            call.future.cancel()
            self._replace_stuck_loop()
        if batch.waiting:
            self._start_worker(batch)
        return call, None, TimeoutError(f"no result after reward_timeout={self.reward_timeout:g} s")

    def _start_worker(self, batch: _Batch) -> None:
        threading.Thread(target=self._work, args=(batch,), name="reward", daemon=True).start()

    def _work(self, batch: _Batch) -> None:
        """Make calls until none waits, or until the one in hand was given up."""
        while (call := batch.take()) is not None:
            value, error = None, None
            try:
                value = self.reward_fn(call.completion, call.answer, call.question)
                if inspect.isawaitable(value):
                    call.future = self._event_loop().submit(value)
                    value = call.future.result()
            # Whatever user code raises, sys.exit() included, belongs to this completion.
            except BaseException as exc:  # noqa: BLE001
                error = exc
            if not batch.finish(call, value, error):
                return

    def _event_loop(self) -> _LoopThread:
        with self._loop_lock:
            if self._loop is None:
                self._loop = _LoopThread()
            return self._loop

    def _replace_stuck_loop(self) -> None:
        """Forget an event loop that a blocking call inside a coroutine holds up."""
        with self._loop_lock:
            if self._loop is not None and not self._loop.answers(_STUCK_LOOP_SECONDS):
                logger.warning("An async reward_fn blocks its event loop: it has to await.")
                self._loop = None


@dataclass
class _Call:
    """One completion to score."""

    index: int
    completion: str
    answer: Any
    question: str
    started: float = 0.0
    """``time.monotonic()`` when a worker took it."""
    future: Future[Any] | None = None
    """What the worker waits for when ``reward_fn`` is async."""

    def shown(self) -> str:
        return f"  question: {shorten(self.question)}\n  completion: {shorten(self.completion)}"


_Result: TypeAlias = tuple[_Call, Any, BaseException | None]


class _Batch:
    """The calls of one ``score``, shared with its workers: waiting, then running, then done."""

    def __init__(self, calls: Iterable[_Call]) -> None:
        self.waiting = deque(calls)
        self.running: dict[int, _Call] = {}
        self.done: queue.SimpleQueue[_Result] = queue.SimpleQueue()
        self._lock = threading.Lock()

    def take(self) -> _Call | None:
        with self._lock:
            if not self.waiting:
                return None
            call = self.waiting.popleft()
            call.started = time.monotonic()
            self.running[call.index] = call
            return call

    def finish(self, call: _Call, value: Any, error: BaseException | None) -> bool:
        """Hand in a result; False if the call was given up and its worker replaced."""
        with self._lock:
            if self.running.pop(call.index, None) is None:
                return False
        self.done.put((call, value, error))
        return True

    def seconds_left(self, timeout: float) -> float:
        """How long to wait until a call can be over its time."""
        now = time.monotonic()
        with self._lock:
            first = min((call.started for call in self.running.values()), default=now)
        return min(max(first + timeout - now, 0.0), threading.TIMEOUT_MAX)

    def pop_overdue(self, timeout: float) -> list[_Call]:
        """Give up the calls that are over their time."""
        now = time.monotonic()
        with self._lock:
            overdue = [c for c in self.running.values() if now - c.started >= timeout]
            for call in overdue:
                del self.running[call.index]
        return overdue

    def stop(self) -> None:
        """Let workers end after the call in hand, and cancel coroutines."""
        with self._lock:
            self.waiting.clear()
            abandoned = list(self.running.values())
            self.running.clear()
        for call in abandoned:
            if call.future is not None:
                call.future.cancel()


class _LoopThread:
    """An asyncio event loop in a daemon thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._run, name="reward-loop", daemon=True).start()

    def submit(self, awaitable: Awaitable[Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(_wait_for(awaitable), self._loop)

    def answers(self, seconds: float) -> bool:
        beat = threading.Event()
        self._loop.call_soon_threadsafe(beat.set)
        return beat.wait(seconds)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self._loop.close()


async def _wait_for(awaitable: Awaitable[Any]) -> Any:
    try:
        return await awaitable
    except (SystemExit, KeyboardInterrupt) as exc:
        # asyncio lets these two through, which would end the loop for every other call.
        raise RuntimeError(f"reward_fn raised {exc!r}") from exc


def _check_reward(value: Any, call: _Call) -> float:
    remedy = f"return one finite number, such as float(correct)\n{call.shown()}"
    return finite_number("reward_fn returned", value, remedy)
