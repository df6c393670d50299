"""Coroutines of user code, on an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any


def then(value: Any, function: Callable[[Any], Any]) -> Any:
    """``function(value)``; where ``value`` is awaitable, an awaitable of that of its result."""

    async def awaited() -> Any:
        return function(await value)

    return awaited() if inspect.isawaitable(value) else function(value)


class EventLoopThread:
    """An asyncio event loop in a daemon thread.

    Args:
        name: What messages and the thread call what is awaited.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._run, name=f"{name}-loop", daemon=True).start()

    def submit(
        self, awaitable: Awaitable[Any], ended: threading.Event | None = None
    ) -> Future[Any]:
        """Begin to await on the loop.

        Args:
            awaitable: What to await.
            ended: Set when that has ended, its cleanup after a cancellation included.

        Returns:
            Its result. Cancelling this cancels what is awaited.
        """
        return asyncio.run_coroutine_threadsafe(self._wait_for(awaitable, ended), self._loop)

    def wait_for(self, awaitable: Awaitable[Any]) -> Any:
        """Await on the loop, and wait here for the result."""
        future = self.submit(awaitable)
        try:
            return future.result()
        finally:
            future.cancel()  # Where the waiting was interrupted.

    def answers(self, seconds: float) -> bool:
        """Whether the loop runs what it is given within some seconds."""
        responded = threading.Event()
        self._loop.call_soon_threadsafe(responded.set)
        return responded.wait(seconds)

    def stop(self) -> None:
        """Cancel what is awaited, and end the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _wait_for(self, awaitable: Awaitable[Any], ended: threading.Event | None) -> Any:
        try:
            return await awaitable
        except (SystemExit, KeyboardInterrupt) as exc:
            # asyncio lets these two through, which would end the loop for every other call.
            raise RuntimeError(f"{self._name} raised {exc!r}") from exc
        finally:
            if ended is not None:
                ended.set()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self._loop.close()
