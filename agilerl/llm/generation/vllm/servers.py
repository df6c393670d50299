"""Several vLLM servers as one engine: requests go to the least busy of those that answer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

import httpx
import tenacity

from agilerl.checks import require
from agilerl.llm.generation.vllm.config import VLLMConfig
from agilerl.llm.generation.vllm.engine import Answer, EngineError, Request, StagedAdapter
from agilerl.llm.generation.vllm.server_client import (
    GoneError,
    RefusedError,
    Server,
    UnavailableError,
)

logger = logging.getLogger(__name__)
T = TypeVar("T")

OUTSTANDING = 128
"""Requests that servers have at a time, times the number of servers; each holds a connection. The
others wait here, and go to whichever server is done first."""
CONNECT_SECONDS = 10.0
"""A server that has not accepted a connection within it is not reachable."""
ASIDE_SECONDS = 10.0
"""What is waited for answers that a rollout could do without: whether a dropped server is back, and
that an old adapter is removed."""


class ServerPool:
    """vLLM servers of one base model as an :class:`.engine.Engine`.

    A server that cannot be reached, fails or makes no progress is dropped, and its requests go to
    the others. It is tried again with the next adapter.

    Args:
        config: The servers' addresses, timeouts and retries.
        max_model_len: Longest row that they must take, in tokens.

    Raises:
        EngineError: A server is not reachable within ``startup_timeout``, or refuses.
        ValueError: A server takes shorter rows only.
    """

    def __init__(self, config: VLLMConfig, max_model_len: int) -> None:
        assert config.server_urls is not None
        self._config = config
        key = os.environ.get("VLLM_API_KEY")
        client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else None,
            timeout=httpx.Timeout(None, connect=min(CONNECT_SECONDS, config.request_timeout)),
            # A transport of its own, for the environment's proxies are for other networks. vLLM
            # closes connections that were idle for 5 s.
            transport=httpx.AsyncHTTPTransport(
                limits=httpx.Limits(max_connections=None, keepalive_expiry=2.0)
            ),
        )
        self._servers = [Server(url.rstrip("/"), client) for url in config.server_urls]
        runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = runner.get_loop()
        thread = threading.Thread(
            target=_run_loop, args=(runner, client), name="vllm-servers", daemon=True
        )
        thread.start()
        self.close = weakref.finalize(self, self._loop.call_soon_threadsafe, self._loop.stop)
        try:
            self._run(_together(self._ready(server, max_model_len) for server in self._servers))
        except BaseException:
            self.close()
            raise

    @property
    def ended(self) -> bool:
        """Whether all servers were dropped."""
        return all(server.dropped is not None for server in self._servers)

    @property
    def sleep_level(self) -> int:
        """Servers never sleep."""
        return 0

    def awake(self) -> AbstractContextManager[None]:
        """Servers always hold their memory."""
        return contextlib.nullcontext()

    def load_adapter(self, adapter: StagedAdapter) -> None:
        """Have all servers serve an adapter, and those that were dropped if they are back."""
        self._run(self._load(adapter))

    def unload_adapter(self, adapter: StagedAdapter) -> None:
        """Have them serve it no longer; what they cached of it, its name alone would find."""
        serving = [server for server in self._servers if adapter.name in server.adapters]
        self._run(_together(_unload_from(server, adapter) for server in serving))

    def complete(self, requests: Sequence[Request]) -> list[Answer]:
        """Answers in the order of the requests; see :class:`.engine.Engine`."""
        return self._run(self._complete(requests))

    def complete_on_each(self, request: Request) -> dict[str, Answer]:
        """The answer of every server."""
        return self._run(self._complete_on_each(request))

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:  # Ctrl-C: servers stop generating when a connection closes
            future.cancel()
            raise

    async def _ready(self, server: Server, max_model_len: int) -> None:
        """Wait for a server; all are waited for, as a wrong address would go unnoticed."""
        limit = self._config.startup_timeout
        retrying = tenacity.AsyncRetrying(
            stop=tenacity.stop_after_delay(limit),
            wait=tenacity.wait_fixed(min(1.0, limit / 10)),
            retry=tenacity.retry_if_exception_type(UnavailableError),
            before_sleep=partial(_log_waiting, server.url),
            reraise=True,
        )
        try:
            await retrying(_soon, server.check_health)
            length = await _soon(server.max_model_len)
        except UnavailableError as error:
            raise EngineError(
                f"waited startup_timeout={limit:g} s for the vLLM server {server.url}, but it "
                f"{error}"
            ) from error
        require(
            length >= max_model_len,
            f"the vLLM server {server.url} takes rows of up to {length} tokens, but the agent's "
            f"are of up to {max_model_len}; start it with --max-model-len {max_model_len}, or "
            "lower the agent's max_model_len",
        )

    async def _load(self, adapter: StagedAdapter) -> None:
        await _together(self._load_on(server, adapter) for server in self._servers)
        self._serving(adapter)

    async def _load_on(self, server: Server, adapter: StagedAdapter) -> None:
        load = partial(server.load_adapter, adapter.name, adapter.path)
        if server.dropped is not None:
            with contextlib.suppress(UnavailableError, RefusedError):
                await _soon(load)
                logger.warning("the vLLM server %s is back", server.url)
                server.dropped = None
            return
        try:
            await self._retried(server, load)
        except UnavailableError as error:
            self._drop(server, error)
        except RefusedError as error:
            raise RefusedError(
                f"{error}. To load adapters, servers need --enable-lora, --max-lora-rank, the "
                "environment variable VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, and the directory "
                "vllm_config.lora_staging_dir under the same path as here"
            ) from error

    async def _complete(self, requests: Sequence[Request]) -> list[Answer]:
        slots = asyncio.Semaphore(OUTSTANDING * len(self._servers))

        async def answer(request: Request) -> Answer:
            async with slots:
                while True:
                    server = min(self._serving(request.adapter), key=lambda s: s.outstanding)
                    found = await self._answer_of(server, request)
                    if found is not None:
                        return found

        return await _together(answer(request) for request in requests)

    async def _complete_on_each(self, request: Request) -> dict[str, Answer]:
        servers = self._serving(request.adapter)
        answers = await _together(self._answer_of(server, request) for server in servers)
        self._serving(request.adapter)
        found = zip(servers, answers, strict=True)
        return {f"the vLLM server {s.url}": answer for s, answer in found if answer is not None}

    async def _answer_of(self, server: Server, request: Request) -> Answer | None:
        """None: the server was dropped."""
        server.outstanding += 1
        try:
            return await self._retried(server, partial(server.complete, request))
        except UnavailableError as error:
            self._drop(server, error)
            return None
        finally:
            server.outstanding -= 1

    async def _retried(self, server: Server, attempt: Callable[[], Awaitable[T]]) -> T:
        """The outcome of an attempt, which is repeated while the server is unavailable."""

        def worth_while(error: BaseException) -> bool:
            unavailable = isinstance(error, UnavailableError) and not isinstance(error, GoneError)
            return unavailable and server.dropped is None  # by another request, meanwhile

        retrying = tenacity.AsyncRetrying(
            stop=tenacity.stop_after_attempt(1 + self._config.max_retries),
            wait=tenacity.wait_random_exponential(multiplier=0.5, max=10),
            retry=tenacity.retry_if_exception(worth_while),
            reraise=True,
        )
        outcome: T = await retrying(self._watched, server, attempt)
        return outcome

    async def _watched(self, server: Server, attempt: Callable[[], Awaitable[T]]) -> T:
        """An attempt, given up when the server has made no progress for ``request_timeout``.

        With any request: in a server many wait for their turn.
        """
        limit, started = self._config.request_timeout, self._loop.time()
        task = asyncio.ensure_future(attempt())
        try:
            while not task.done():
                left = max(started, server.last_sign) + limit - self._loop.time()
                if left <= 0:
                    raise GoneError(f"made no progress for request_timeout={limit:g} s")
                await asyncio.wait({task}, timeout=left)
            return task.result()
        finally:
            task.cancel()

    def _serving(self, adapter: StagedAdapter) -> list[Server]:
        found = [server for server in self._servers if adapter.name in server.adapters]
        states = (f"{s.url} {s.dropped or 'came back later'}" for s in self._servers)
        require(
            len(found) > 0,
            f"no vLLM server is left that serves {adapter.name}: {'; '.join(states)}",
            EngineError,
        )
        return found

    def _drop(self, server: Server, error: UnavailableError) -> None:
        if server.dropped is not None:
            return
        server.dropped = str(error)
        server.adapters.clear()
        left = [server.url for server in self._servers if server.dropped is None]
        logger.warning(
            "the vLLM server %s is dropped: it %s. Left: %s",
            server.url,
            error,
            ", ".join(left) or "none",
        )


def _run_loop(runner: asyncio.Runner, client: httpx.AsyncClient) -> None:
    with runner:  # ends what is left of the loop's tasks
        runner.get_loop().run_forever()
        runner.run(client.aclose())


async def _together(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All outcomes; the first failure ends the rest."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def _soon(attempt: Callable[[], Awaitable[T]]) -> T:
    """A single attempt that is not waited for long."""
    try:
        async with asyncio.timeout(ASIDE_SECONDS):
            return await attempt()
    except TimeoutError as error:
        raise UnavailableError(f"did not answer within {ASIDE_SECONDS:g} s") from error


async def _unload_from(server: Server, adapter: StagedAdapter) -> None:
    try:
        await _soon(partial(server.unload_adapter, adapter.name))
    except (UnavailableError, RefusedError) as error:
        # It died or was restarted, which the next request finds out.
        logger.info("the vLLM server %s did not unload %s: %s", server.url, adapter.name, error)


def _log_waiting(url: str, state: tenacity.RetryCallState) -> None:
    if state.attempt_number % 30 == 1 and state.outcome is not None:
        logger.warning("waiting for the vLLM server %s: it %s", url, state.outcome.exception())
