"""Which rows of one or several requests are generated together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

import torch

from agilerl.llm.config import SamplingConfig
from agilerl.llm.generation import Completions, GenerationRequest, new_token_limit
from agilerl.llm.generation.decode import BatchCompletions, DecodingLoop, PromptBatch
from agilerl.llm.generation.kv_cache.growing_cache import CACHE_BLOCK, GrowingCache
from agilerl.llm.generation.kv_cache.prefix_cache import PrefixCache
from agilerl.llm.generation.random_numbers import BLOCK, Uniforms

# Sequences of a chunk where its size is not set.
DEFAULT_CHUNK_ROWS = 256


def chunk_prompts(sampling: SamplingConfig, samples: int) -> int:
    """Prompts that are generated at a time, each ``samples`` times."""
    return sampling.chunk_size or max(1, DEFAULT_CHUNK_ROWS // samples)


class RequestBatch:
    """The rows of some requests and their completions.

    The prompts of one request are generated a chunk at a time; several requests are one chunk.
    Equal prompts of a request are run once if they are in one chunk.

    Args:
        requests: By the number of the adapter that each runs with.
        sampling: Of all of them.

    Raises:
        ValueError: If a prompt leaves no room for output.
    """

    def __init__(self, requests: Mapping[int, GenerationRequest], sampling: SamplingConfig) -> None:
        self.requests, self.sampling = requests, sampling
        # By prompt.
        self.prompts: list[torch.Tensor] = []
        self.adapters: list[int] = []
        self.rows_of: list[range] = []
        # By row: its prompt, the first of the request with the same ids.
        self.rows: list[int] = []
        # By adapter.
        self.rows_of_request: dict[int, range] = {}
        self.uniforms: dict[int, Uniforms] = {}
        for number, request in requests.items():
            self._add(number, request)
        self.limits = [new_token_limit(prompt, sampling) for prompt in self.prompts]
        self.tokens: list[torch.Tensor] = [torch.empty(0, dtype=torch.long)] * len(self.rows)
        self.logps: list[torch.Tensor] = [torch.empty(0)] * len(self.rows)
        self.chunk_size = len(self.prompts)
        if len(requests) == 1:
            (request,) = requests.values()
            self.chunk_size = chunk_prompts(sampling, request.samples_per_prompt)

    def _add(self, number: int, request: GenerationRequest) -> None:
        samples, first = request.samples_per_prompt, dict[bytes, int]()
        start = len(self.rows)
        for given in request.prompts:
            prompt = given.to("cpu", torch.long)
            place = first.setdefault(prompt.numpy().tobytes(), len(self.prompts))
            self.prompts.append(prompt)
            self.adapters.append(number)
            self.rows_of.append(range(len(self.rows), len(self.rows) + samples))
            self.rows += [place] * samples
        rows = self.rows_of_request[number] = range(start, len(self.rows))
        if not self.sampling.greedy:
            longest = max(new_token_limit(prompt, self.sampling) for prompt in request.prompts)
            self.uniforms[number] = Uniforms(len(rows), longest, request.rng)

    @property
    def fits_one_chunk(self) -> bool:
        """Whether all rows may be held at once."""
        return len(self.prompts) <= self.chunk_size

    def complete(self, loop: DecodingLoop) -> None:
        """Complete all rows, every prompt run whole."""
        for chunk in self._chunks():
            self._store(chunk, loop.run(self._batch(chunk)))

    def complete_cached(self, loop: DecodingLoop, cache: PrefixCache, *, share: bool) -> None:
        """Complete all rows, running only what is new of prompts that continue a cached row.

        Those go first and in a batch of their own: one prompt without a prefix would make all
        others run whole, and the cache is free once they have started. Afterwards the cache holds
        these rows.

        Args:
            loop: Completes batches.
            cache: With the rows that may be continued.
            share: See :meth:`PrefixCache.take`.
        """
        cached = {
            prompt: cache.find(self.prompts[prompt], self.adapters[prompt])
            for prompt in set(self.rows)
        }
        continuing = [i for i, prompt in enumerate(self.rows) if cached[prompt] is not None]
        new = [i for i, prompt in enumerate(self.rows) if cached[prompt] is None]
        batches: list[tuple[list[int], GrowingCache | None]] = []
        if continuing:
            prompts = self._distinct(continuing)
            prefixes = [row for prompt in prompts if (row := cached[prompt]) is not None]
            lengths = [len(self.prompts[prompt]) for prompt in prompts]
            room = min(CACHE_BLOCK, max(self.limits[prompt] for prompt in prompts))
            batches.append((continuing, cache.take(prefixes, lengths, room, share=share)))
        cache.clear()
        if new:
            batches.append((new, None))
        for chunk, prefix in batches:
            completed = loop.run(self._batch(chunk), prefix, keep_cache=True)
            self._store(chunk, completed)
            self._cache(chunk, completed, cache)

    def completions(self) -> dict[int, Completions]:
        """Those of each request."""
        made = {}
        for number, rows in self.rows_of_request.items():
            logps = [self.logps[row] for row in rows] if self.sampling.return_logps else None
            made[number] = Completions([self.tokens[row] for row in rows], logps)
        return made

    def _cache(self, chunk: Sequence[int], completed: BatchCompletions, cache: PrefixCache) -> None:
        """Keep a batch's rows, by prompt and completion."""
        prompts = [self.prompts[self.rows[i]] for i in chunk]
        shared = None if completed.prompts is None else cache.add_prompts(completed.prompts)
        own = [len(prompt) for prompt in prompts]
        if shared is not None:
            own = [n - segment.length for n, segment in zip(own, shared, strict=True)]
        for block in completed.cached:
            cache.add(
                block.layers,
                # The last token was sampled, but never run.
                [torch.cat([prompts[n], completed.tokens[n][:-1]]) for n in block.rows],
                [max(own) - own[n] for n in block.rows],
                [self.adapters[self.rows[chunk[n]]] for n in block.rows],
                None if shared is None else [shared[n] for n in block.rows],
            )

    def _distinct(self, chunk: Sequence[int]) -> list[int]:
        """The prompts behind some rows, each once, in the order of the rows."""
        return list(dict.fromkeys(self.rows[i] for i in chunk))

    def _batch(self, chunk: Sequence[int]) -> PromptBatch:
        distinct = self._distinct(chunk)
        index = {prompt: n for n, prompt in enumerate(distinct)}
        return PromptBatch(
            [self.prompts[prompt] for prompt in distinct],
            [index[self.rows[i]] for i in chunk],
            [self.limits[self.rows[i]] for i in chunk],
            lambda number: self._draw(number, chunk),
            [self.adapters[prompt] for prompt in distinct],
        )

    def _draw(self, number: int, chunk: Sequence[int]) -> torch.Tensor | None:
        """Block ``number`` of the random numbers of some rows; see :class:`PromptBatch`."""
        if self.sampling.greedy:
            return None
        drawn = torch.zeros(len(chunk), BLOCK)
        for adapter, rows in self.rows_of_request.items():
            places = [n for n, row in enumerate(chunk) if row in rows]
            numbers = self.uniforms[adapter].block(number, [chunk[n] - rows.start for n in places])
            drawn[places, : numbers.shape[1]] = numbers
        return drawn

    def _store(self, chunk: Sequence[int], completed: BatchCompletions) -> None:
        for n, i in enumerate(chunk):
            self.tokens[i] = completed.tokens[n]
            if completed.logps is not None:
                self.logps[i] = completed.logps[n]

    def _chunks(self) -> Iterator[list[int]]:
        """Rows of ``chunk_size`` prompts at a time, by length; equal lengths only if unpadded."""
        length = [len(prompt) for prompt in self.prompts]
        # Then by ids: equal prompts are run once if they are in one chunk.
        order = sorted(
            range(len(length)),
            key=lambda prompt: (length[prompt], self.rows[self.rows_of[prompt][0]]),
        )
        runs = [order]
        if not self.sampling.left_padding:
            runs = [list(run) for _, run in groupby(order, key=length.__getitem__)]
        for run in runs:
            for start in range(0, len(run), self.chunk_size):
                chunk = run[start : start + self.chunk_size]
                if len(self.requests) > 1:
                    chunk.sort()  # by adapter
                yield [row for prompt in chunk for row in self.rows_of[prompt]]
