"""Calls of user code in threads, each with a timeout.

Rewards, environments and tools are called through a :class:`TimeoutExecutor`. Every batch of calls
starts a few daemon threads of its own, which end with it, so that a hung call delays neither the
next batch nor the exit of the interpreter. Coroutines, those that a call returns and those that it
waits for with :func:`~agilerl.llm_envs.event_loop.awaited`, run on one event loop, in a thread that
the executor keeps, because clients (HTTP sessions, semaphores) belong to the loop that they were
first used on.

A thread can be abandoned, not killed: a call that hangs goes on in the background, and one that
never releases the interpreter lock (a catastrophic regular expression) cannot be timed out.
``signal.alarm`` works in the main thread only, so libraries that time themselves with it fail here.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from agilerl.checks import COUNT, Number
from agilerl.llm_envs.event_loop import AwaitedCall, EventLoopThread, awaited, waiting_with

logger = logging.getLogger(__name__)

_STUCK_LOOP_SECONDS = 1.0


@dataclass(frozen=True)
class CallOutcome:
    """How one call ended."""

    index: int
    """Which of the calls given."""
    value: Any = None
    """What it returned, awaited if it was awaitable."""
    error: BaseException | None = None
    """What it raised instead; a ``TimeoutError`` if it ran out of time."""
    timed_out: bool = False
    """It ran out of time, so it may still be running."""


class TimeoutExecutor:
    """Runs functions in threads, a bounded number at a time, each with a timeout.

    Args:
        timeout: Seconds that one call may take, counted from its own start.
        workers: Largest number of calls at the same time.
        name: What messages and threads call the functions.
        timeout_name: The argument of the owner that ``timeout`` comes from, for messages.
        workers_name: The argument of the owner that ``workers`` comes from, for messages.

    Raises:
        TypeError: An argument of the wrong type.
        ValueError: An argument out of range.
    """

    def __init__(
        self,
        timeout: float,
        workers: int = 1,
        *,
        name: str = "function",
        timeout_name: str = "timeout",
        workers_name: str = "workers",
    ) -> None:
        Number(0, open_low=True)(timeout_name, timeout)
        COUNT(workers_name, workers)
        self.timeout = float(timeout)
        self.workers = workers
        self._name = name
        self._timeout_name = timeout_name
        self._loop: EventLoopThread | None = None
        self._loop_lock = threading.Lock()

    def run(
        self,
        calls: Sequence[Callable[[], Any]],
        *,
        workers: int | None = None,
        seconds: float | None = None,
    ) -> list[CallOutcome]:
        """Run all calls; their outcomes in the order given. What a call raises is in its outcome.

        Args:
            calls: What to call.
            workers: Calls at the same time; None: the executor's.
            seconds: Timeout of one call; None: the executor's.
        """
        with closing(self.as_completed(calls, workers=workers, seconds=seconds)) as outcomes:
            return sorted(outcomes, key=lambda outcome: outcome.index)

    def as_completed(
        self,
        calls: Sequence[Callable[[], Any]],
        *,
        workers: int | None = None,
        seconds: float | None = None,
        unfinished: set[int] | None = None,
    ) -> Generator[CallOutcome, None, None]:
        """Outcomes as calls complete. Closing the generator cancels the calls that have not begun.

        Args:
            calls: What to call.
            workers: Calls at the same time; None: the executor's.
            seconds: Timeout of one call; None: the executor's.
            unfinished: Receives the indices of calls that may still be running when this ends:
                those that timed out (but not coroutines that ended when they were cancelled), and
                those under way when it is closed or interrupted.
        """
        timeout = self.timeout if seconds is None else seconds
        batch = _Batch(_Call(index, function) for index, function in enumerate(calls))
        try:
            for _ in range(min(workers or self.workers, len(calls))):
                self._start_worker(batch)
            left = len(calls)
            while left:
                try:
                    outcomes = [batch.done.get(timeout=batch.seconds_left(timeout))]
                except queue.Empty:
                    outcomes = self._abandon(batch, batch.pop_overdue(timeout), timeout)
                left -= len(outcomes)
                yield from outcomes
        finally:
            batch.stop()
            if unfinished is not None:
                unfinished |= batch.abandoned

    def close(self) -> None:
        """Stop the thread that coroutines run on; later calls start another one."""
        with self._loop_lock:
            if self._loop is not None:
                self._loop.stop()
                self._loop = None

    def _abandon(
        self, batch: _Batch, overdue: Sequence[_Call], timeout: float
    ) -> list[CallOutcome]:
        """Abandon calls with their threads and start other workers for the rest."""
        for call in overdue:
            call.cancel()
        coroutines = [call for call in overdue if call.awaited is not None]
        deadline = time.monotonic() + _STUCK_LOOP_SECONDS
        for call in coroutines:
            if call.ended.wait(max(deadline - time.monotonic(), 0.0)):
                batch.abandoned.discard(call.index)
        if not all(call.ended.is_set() for call in coroutines):
            self._replace_stuck_loop()
        for _ in range(min(len(overdue), len(batch.waiting))):
            self._start_worker(batch)
        name = f"{self._timeout_name}=" if timeout == self.timeout else ""
        message = f"no result after {name}{timeout:g} s"
        return [
            CallOutcome(call.index, error=TimeoutError(message), timed_out=True) for call in overdue
        ]

    def _start_worker(self, batch: _Batch) -> None:
        threading.Thread(target=self._work, args=(batch,), name=self._name, daemon=True).start()

    def _work(self, batch: _Batch) -> None:
        """Run calls until none waits, or until the present one was abandoned."""
        while (call := batch.take()) is not None:
            value, error = None, None
            try:
                with waiting_with(partial(self._wait_for, call)):
                    value = awaited(call.function())
            # Whatever user code raises, sys.exit() included, is this call's outcome.
            except BaseException as exc:  # noqa: BLE001
                value, error = None, exc
            call.ended.set()
            if not batch.finish(call, value, error):
                return

    def _wait_for(self, call: _Call, awaitable: Awaitable[Any]) -> Any:
        """Await for a call, in its thread."""
        call.awaited = self._event_loop().submit(awaitable)
        if call.cancelled:  # Read after the line above, and written before cancel() reads that.
            call.awaited.cancel()
        return call.awaited.result()

    def _event_loop(self) -> EventLoopThread:
        with self._loop_lock:
            if self._loop is None:
                self._loop = EventLoopThread(self._name)
            return self._loop

    def _replace_stuck_loop(self) -> None:
        """Abandon an event loop that a blocking call inside a coroutine holds up."""
        with self._loop_lock:
            if self._loop is not None and not self._loop.answers(_STUCK_LOOP_SECONDS):
                logger.warning("An async %s blocks its event loop; it must await.", self._name)
                self._loop = None


@dataclass
class _Call:
    """One call to run."""

    index: int
    function: Callable[[], Any]
    started: float = 0.0
    """``time.monotonic()`` when a worker took it."""
    awaited: AwaitedCall | None = None
    """What its worker waits for, or last waited for, if the function is async or calls what is."""
    cancelled: bool = False
    ended: threading.Event = field(default_factory=threading.Event)
    """Set when its worker is done with it."""

    def cancel(self) -> None:
        """Cancel what it awaits, and what it goes on to await."""
        self.cancelled = True
        if self.awaited is not None:
            self.awaited.cancel()


class _Batch:
    """Calls run together, shared with their workers: waiting, then running, then done."""

    def __init__(self, calls: Iterable[_Call]) -> None:
        self.waiting = deque(calls)
        self.running: dict[int, _Call] = {}
        self.abandoned: set[int] = set()
        self.done: queue.SimpleQueue[CallOutcome] = queue.SimpleQueue()
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
        """Report a result; False if the call was abandoned and its worker replaced."""
        with self._lock:
            if self.running.pop(call.index, None) is None:
                return False
        self.done.put(CallOutcome(call.index, value, error))
        return True

    def seconds_left(self, timeout: float) -> float:
        """How long to wait until a call can be over its time."""
        now = time.monotonic()
        with self._lock:
            first = min((call.started for call in self.running.values()), default=now)
        return min(max(first + timeout - now, 0.0), threading.TIMEOUT_MAX)

    def pop_overdue(self, timeout: float) -> list[_Call]:
        """Abandon the calls that are over their time."""
        now = time.monotonic()
        with self._lock:
            overdue = [c for c in self.running.values() if now - c.started >= timeout]
            for call in overdue:
                del self.running[call.index]
                self.abandoned.add(call.index)
        return overdue

    def stop(self) -> None:
        """Let workers end after their present call, and cancel coroutines."""
        with self._lock:
            self.waiting.clear()
            abandoned = list(self.running.values())
            self.abandoned.update(self.running)
            self.running.clear()
        for call in abandoned:
            call.cancel()
