"""Coroutines of user code, on an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeAlias

Wait: TypeAlias = Callable[[Awaitable[Any]], Any]
"""Waits for an awaitable, in the calling thread, and returns its result."""


class _WaitOfThread(threading.local):
    wait: Wait | None = None


_of_thread = _WaitOfThread()


@contextmanager
def waiting_with(wait: Wait) -> Iterator[None]:
    """Within it, :func:`awaited` of this thread waits with this function."""
    _of_thread.wait = wait
    try:
        yield
    finally:
        _of_thread.wait = None


def awaited(value: Any, make_wait: Callable[[], Wait] | None = None) -> Any:
    """The value; of an awaitable its result.

    Args:
        value: What user code returned, async or not.
        make_wait: Gives a function that waits, for threads without :func:`waiting_with`.
    """
    if not inspect.isawaitable(value):
        return value
    wait = _of_thread.wait
    if wait is None:
        assert make_wait is not None
        wait = make_wait()
    return wait(value)


class AwaitedCall:
    """Something that is awaited on the event loop of another thread."""

    def __init__(self, coroutine: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._coroutine, self._loop = coroutine, loop
        self._task: asyncio.Task[Any] | None = None
        self._outcome: Future[Any] = Future()
        loop.call_soon_threadsafe(self._start)

    def result(self) -> Any:
        """Wait until it has ended, its cleanup after a cancellation included.

        Raises:
            asyncio.CancelledError: It was cancelled.
            BaseException: What it raised.
        """
        return self._outcome.result()

    def cancel(self) -> None:
        """Cancel it on its loop, without waiting for that."""
        if not self._outcome.done():
            self._loop.call_soon_threadsafe(self._cancel)

    def _start(self) -> None:
        self._task = self._loop.create_task(self._coroutine)
        self._task.add_done_callback(self._settle)

    def _cancel(self) -> None:
        assert self._task is not None
        self._task.cancel()

    def _settle(self, task: asyncio.Task[Any]) -> None:
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is None:
            self._outcome.set_result(task.result())
        else:
            self._outcome.set_exception(error)


class EventLoopThread:
    """An asyncio event loop in a daemon thread.

    Args:
        name: What messages and the thread call what is awaited.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._run, name=f"{name}-loop", daemon=True).start()

    def submit(self, awaitable: Awaitable[Any]) -> AwaitedCall:
        """Begin to await on the loop."""
        return AwaitedCall(self._wait_for(awaitable), self._loop)

    def wait_for(self, awaitable: Awaitable[Any]) -> Any:
        """Await on the loop, and wait here for the result."""
        call = self.submit(awaitable)
        try:
            return call.result()
        finally:
            call.cancel()  # Where the waiting was interrupted.

    def answers(self, seconds: float) -> bool:
        """Whether the loop runs what it is given within some seconds."""
        responded = threading.Event()
        self._loop.call_soon_threadsafe(responded.set)
        return responded.wait(seconds)

    def stop(self) -> None:
        """Cancel what is awaited, and end the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _wait_for(self, awaitable: Awaitable[Any]) -> Any:
        try:
            return await awaitable
        except (SystemExit, KeyboardInterrupt) as exc:
            # asyncio lets these two through, which would end the loop for every other call.
            raise RuntimeError(f"{self._name} raised {exc!r}") from exc

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self._loop.close()
