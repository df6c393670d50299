"""One vLLM server, spoken to over HTTP: token ids in, token ids and log-probs out."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Iterator
from typing import Any

import httpx
from pydantic import BaseModel, ValidationError

from agilerl.checks import shorten
from agilerl.llm.generation.vllm.engine import Answer, EngineError, Request, Sample

STREAM_INTERVAL = 64
"""Tokens of a completion after which a server sends them."""
_NOT_NOW = (httpx.codes.REQUEST_TIMEOUT, httpx.codes.TOO_MANY_REQUESTS)


class UnavailableError(Exception):
    """A server did not answer, or not with what was asked for; another attempt may succeed.

    The message continues a sentence that starts with the server.
    """


class GoneError(UnavailableError):
    """Likewise, and another attempt on this server is not worth while."""


class RefusedError(EngineError):
    """A server answered that it does not do what it was asked for."""


class Server:
    """A vLLM server, and what its pool knows of it.

    Args:
        url: Its address, without a path.
        client: Of the event loop that everything here runs in.

    Attributes:
        adapters: Names of those it serves.
        outstanding: Requests for completions that it has not answered.
        last_sign: When it last sent a part of a completion, by the loop's clock.
        dropped: Why it is not used; None: it is.
    """

    def __init__(self, url: str, client: httpx.AsyncClient) -> None:
        self.url, self._client = url, client
        self.adapters: set[str] = set()
        self.outstanding = 0
        self.last_sign = -math.inf
        self.dropped: str | None = None

    async def max_model_len(self) -> int:
        """Longest row that it takes, in tokens."""
        with _failures():
            models = _Models.model_validate_json(await self._send("GET", "/v1/models"))
        # Of the base model; adapters, which are listed too, say None.
        return max((found.max_model_len or 0 for found in models.data), default=0)

    async def check_health(self) -> None:
        """Raise if it does not work."""
        await self._send("GET", "/health")

    async def load_adapter(self, name: str, path: str) -> None:
        """Serve the adapter in a directory under a name; again, if it already does."""
        try:
            body = {"lora_name": name, "lora_path": path}
            await self._send("POST", "/v1/load_lora_adapter", body)
        except RefusedError as error:
            if "already been loaded" not in str(error):  # by an attempt whose answer was lost
                raise
        self.adapters.add(name)

    async def unload_adapter(self, name: str) -> None:
        """Serve it no longer."""
        self.adapters.discard(name)
        await self._send("POST", "/v1/unload_lora_adapter", {"lora_name": name})

    async def complete(self, request: Request) -> Answer:
        """What it samples; streamed, so that it is seen to make progress."""
        streamed = _Streamed(request)
        url, rest = f"{self.url}/v1/completions", b""
        with _failures():
            async with self._client.stream("POST", url, json=_body(request)) as response:
                if response.status_code == httpx.codes.NOT_FOUND:
                    raise GoneError("does not know the adapter any more: it was restarted")
                if not response.is_success:
                    await response.aread()
                    self._raise_for(response.status_code, response.text)
                async for data in response.aiter_bytes():
                    self.last_sign = asyncio.get_running_loop().time()
                    # By hand: httpx ends lines at characters that JSON leaves in texts, too.
                    *lines, rest = (rest + data).split(b"\n")
                    for line in lines:
                        if line.startswith(b"data: {"):
                            self._add(streamed, line.removeprefix(b"data: "))
        return streamed.answer()

    def _add(self, streamed: _Streamed, data: bytes) -> None:
        chunk = _Chunk.model_validate_json(data)
        if chunk.error is not None:
            self._raise_for(chunk.error.code, chunk.error.message)
        for choice in chunk.choices:
            streamed.add(choice)

    async def _send(self, method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
        with _failures():
            response = await self._client.request(method, self.url + path, json=body)
        if not response.is_success:
            self._raise_for(response.status_code, f"{method} {path}: {response.text}")
        return response.content

    def _raise_for(self, status: int, message: str) -> None:
        if status >= httpx.codes.INTERNAL_SERVER_ERROR or status in _NOT_NOW:
            raise UnavailableError(f"answered {status}: {shorten(message)}")
        raise RefusedError(f"the vLLM server {self.url} refused ({status}): {shorten(message)}")


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    try:
        yield
    except httpx.TransportError as error:
        raise UnavailableError(f"is not reachable: {error!r}") from error
    except ValidationError as error:
        raise UnavailableError(f"answered something else than vLLM would: {error}") from error


def _body(request: Request) -> dict[str, Any]:
    parameters = {name: value for name, value in request.parameters.items() if value is not None}
    # A stream has the prompt's log-probs only before those of a completion.
    echo = parameters.pop("prompt_logprobs", None) is not None
    return {
        "model": request.adapter.name,
        "prompt": request.prompt,
        **parameters,
        "echo": echo,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,  # names tokens without a tokenizer
        "stream": True,
        "stream_interval": STREAM_INTERVAL,
    }


class _Streamed:
    """Puts the completions of a request together from the parts in which they arrive."""

    def __init__(self, request: Request) -> None:
        n, self._parameters = request.parameters["n"], request.parameters
        self._prompt_length = len(request.prompt)
        self._token_ids: list[list[int]] = [[] for _ in range(n)]
        self._logps: list[list[float]] = [[] for _ in range(n)]
        self._ended = [False] * n

    def add(self, choice: _Choice) -> None:
        self._token_ids[choice.index] += choice.token_ids
        if choice.logprobs is not None:
            logps = choice.logprobs.token_logprobs
            self._logps[choice.index] += [math.nan if x is None else x for x in logps]
        if choice.finish_reason in ("stop", "length"):
            self._ended[choice.index] = True
        elif choice.finish_reason is not None:
            raise UnavailableError(f"ended a completion by {choice.finish_reason!r}")

    def answer(self) -> Answer:
        if not all(self._ended):
            raise UnavailableError("ended its answer early")
        prompt_logps = None
        if self._parameters.get("prompt_logprobs") is not None:
            prompt_logps = self._logps[0][1 : self._prompt_length]
            self._logps = [logps[self._prompt_length :] for logps in self._logps]
        scored = self._parameters.get("logprobs") is not None
        pairs = zip(self._token_ids, self._logps, strict=True)
        samples = [Sample(ids, logps if scored else None) for ids, logps in pairs]
        return Answer(samples, prompt_logps)


class _Logprobs(BaseModel):
    token_logprobs: list[float | None]
    """None: not a number, or the first token of a prompt."""


class _Choice(BaseModel):
    index: int
    token_ids: list[int]
    """New ones; never the prompt's."""
    logprobs: _Logprobs | None = None
    """Of the new tokens; in the first part after those of the prompt, if it is echoed."""
    finish_reason: str | None = None


class _Error(BaseModel):
    message: str
    code: int


class _Chunk(BaseModel):
    choices: list[_Choice] = []
    error: _Error | None = None


class _Model(BaseModel):
    max_model_len: int | None


class _Models(BaseModel):
    data: list[_Model]
