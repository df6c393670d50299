"""Batched generation on the training model itself.

Prompts are sorted by length and completed a chunk at a time; equal prompts of a chunk are run once.
The uniform numbers behind the draws are laid out by row and position, so a completion depends
neither on the chunk size nor on the rows it shares a batch with (beyond rounding).

In a session the keys and values of the rows generated last are kept, and of a prompt that continues
one only the new tokens are run.

On a base that ZeRO stage 3 partitions, it is gathered once for a rollout, or, without
``gather_for_generation``, layer by layer for every token: that costs a gather of every layer and of
the head per token, one small all-reduce, and the LoRA branches, as nothing is merged. All ranks are
then as slow as the one with most tokens to generate.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

import torch
from tokenizers import Tokenizer
from transformers.cache_utils import Cache

from agilerl.llm.config import SamplingConfig
from agilerl.llm.generation import Completions, new_token_limit
from agilerl.llm.generation.cached_decoder import CachedDecoder
from agilerl.llm.generation.decode import BatchCompletions, DecodingLoop, PromptBatch
from agilerl.llm.generation.kv_cache import CACHE_BLOCK
from agilerl.llm.generation.merged_weights import rollout_head, rollout_weights
from agilerl.llm.generation.prefix_cache import PrefixCache, id_bytes
from agilerl.llm.generation.probe import decoding_support
from agilerl.llm.generation.random_numbers import Uniforms
from agilerl.llm.generation.stop_sequences import required_tokenizer
from agilerl.llm.policy import Policy

# Sequences of a chunk where its size is not set.
DEFAULT_CHUNK_ROWS = 256


class HFGenerator:
    """Generates with a policy's own model, its adapter merged where that is exact.

    Args:
        policy: Whose weights and role to generate with, until :meth:`sync` names another.
        model_name: That the base was loaded by; its tokenizer finds stop sequences.

    Raises:
        ValueError: If the model cannot be continued from keys and values.
    """

    differs_from_trainer = False

    def __init__(self, policy: Policy, model_name: str | None = None) -> None:
        self.policy, self._model_name = policy, model_name
        self._support = decoding_support(policy)
        # Only in a session: while weights stay the same, its entries stay valid.
        self._prefix_cache: PrefixCache | None = None

    def sync(self, policy: Policy) -> None:
        """Generate with ``policy`` from now on; its weights are read where they are.

        Raises:
            RuntimeError: In a session of another policy, or with another adapter of its base.
        """
        if self._prefix_cache is not None and policy is not self.policy:
            raise RuntimeError("within a session the generator keeps its policy; leave it first")
        policy.set_role(policy.role)
        self.policy, self._support = policy, decoding_support(policy)

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """Merge the adapter once and keep rows for prompts that continue them; may be nested.

        Rows are kept until the next ``generate``, if all of its rows fit one chunk and prompts are
        left-padded; otherwise every prompt is run whole. Takes the memory of one chunk's keys and
        values while it lasts. See :func:`rollout_weights` for a partitioned base.
        """
        if self._prefix_cache is not None:
            yield
            return
        with rollout_weights(self.policy):
            self._prefix_cache = PrefixCache()
            try:
                yield
            finally:
                self._prefix_cache = None

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[torch.Tensor],
        samples_per_prompt: int,
        sampling: SamplingConfig,
        rng: torch.Generator,
    ) -> Completions:
        """Complete ``prompts``; see :class:`agilerl.llm.generation.Generator`.

        Raises:
            ValueError: If a prompt leaves no room for output; or there are stop sequences, but no
                tokenizer beside the model.
            RuntimeError: If the model's logits are not finite.
        """
        policy, support = self.policy, self._support
        if not support.left_padding:
            sampling = replace(sampling, left_padding=False)
        request = _Request(prompts, samples_per_prompt, sampling, rng)
        with rollout_weights(policy):
            decoder = CachedDecoder(
                policy.base.decoder,
                left_padding=sampling.left_padding,
                single_query=support.single_query,
            )
            loop = DecodingLoop(
                decoder, rollout_head(policy), policy.device, sampling, self._tokenizer(sampling)
            )
            if self._prefix_cache is None:
                request.complete(loop)
            elif request.fits_one_chunk and sampling.left_padding:
                request.complete_cached(loop, self._prefix_cache)
            else:
                self._prefix_cache.clear()
                request.complete(loop)
        return Completions(request.tokens, request.logps if sampling.return_logps else None)

    def _tokenizer(self, sampling: SamplingConfig) -> Tokenizer | None:
        texts, names = (
            sampling.stop_sequences,
            (self._model_name, self.policy.base.model.name_or_path),
        )
        if not texts:
            return None
        return required_tokenizer("stop_sequences", texts, *names).backend_tokenizer

    def close(self) -> None:
        """Nothing is held outside of sessions."""


class _Request:
    """The rows of one ``generate``: which are run together, and their completions."""

    def __init__(
        self,
        prompts: Sequence[torch.Tensor],
        samples: int,
        sampling: SamplingConfig,
        rng: torch.Generator,
    ) -> None:
        self.prompts = [prompt.to("cpu", torch.long) for prompt in prompts]
        self.limits = [new_token_limit(prompt, sampling) for prompt in self.prompts]
        self.samples, self.sampling = samples, sampling
        self.chunk_size = sampling.chunk_size or max(1, DEFAULT_CHUNK_ROWS // samples)
        # Per row, its prompt: the first one with the same ids.
        self.rows = [first for first in _first_equal(self.prompts) for _ in range(samples)]
        greedy = sampling.greedy
        self.uniforms = None if greedy else Uniforms(len(self.rows), max(self.limits), rng)
        self.tokens: list[torch.Tensor] = [torch.empty(0, dtype=torch.long)] * len(self.rows)
        self.logps: list[torch.Tensor] = [torch.empty(0)] * len(self.rows)

    @property
    def fits_one_chunk(self) -> bool:
        """Whether all rows may be held at once."""
        return len(self.prompts) <= self.chunk_size

    def complete(self, loop: DecodingLoop) -> None:
        """Complete all rows, every prompt run whole."""
        for chunk in self._chunks():
            self._store(chunk, loop.run(self._batch(chunk)))

    def complete_cached(self, loop: DecodingLoop, cache: PrefixCache) -> None:
        """Complete all rows, running only what is new of prompts that continue a cached row.

        Those go first and in a batch of their own: one prompt without a prefix would make all
        others run whole, and the cache is free once they have started. Afterwards the cache holds
        this request's rows.
        """
        cached = {prompt: cache.find(self.prompts[prompt]) for prompt in set(self.rows)}
        continuing = [i for i, prompt in enumerate(self.rows) if cached[prompt] is not None]
        new = [i for i, prompt in enumerate(self.rows) if cached[prompt] is None]
        batches: list[tuple[list[int], Cache | None]] = []
        if continuing:
            prompts = self._distinct(continuing)
            prefixes = [row for prompt in prompts if (row := cached[prompt]) is not None]
            lengths = [len(self.prompts[prompt]) for prompt in prompts]
            room = min(CACHE_BLOCK, max(self.limits[prompt] for prompt in prompts))
            batches.append((continuing, cache.take(prefixes, lengths, room)))
        cache.clear()
        if new:
            batches.append((new, None))
        for chunk, prefix in batches:
            completed = loop.run(self._batch(chunk), prefix, keep_cache=True)
            self._store(chunk, completed)
            self._cache(chunk, completed, cache)

    def _cache(self, chunk: Sequence[int], completed: BatchCompletions, cache: PrefixCache) -> None:
        """Keep a batch's rows, by prompt and completion."""
        width = max(len(self.prompts[self.rows[i]]) for i in chunk)
        for block in completed.cached:
            prompts = [self.prompts[self.rows[chunk[n]]] for n in block.rows]
            # The last token was sampled, but never run.
            completions = [completed.tokens[n][:-1] for n in block.rows]
            cache.add(
                block.layers,
                [torch.cat(pair) for pair in zip(prompts, completions, strict=True)],
                [width - len(prompt) for prompt in prompts],
            )

    def _distinct(self, chunk: Sequence[int]) -> list[int]:
        """The prompts behind some rows, each once."""
        return sorted({self.rows[i] for i in chunk})

    def _batch(self, chunk: Sequence[int]) -> PromptBatch:
        distinct, uniforms = self._distinct(chunk), self.uniforms
        index = {prompt: n for n, prompt in enumerate(distinct)}
        return PromptBatch(
            [self.prompts[prompt] for prompt in distinct],
            [index[self.rows[i]] for i in chunk],
            [self.limits[self.rows[i]] for i in chunk],
            lambda number: None if uniforms is None else uniforms.block(number, list(chunk)),
        )

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
            key=lambda prompt: (length[prompt], self.rows[prompt * self.samples]),
        )
        runs = [order]
        if not self.sampling.left_padding:
            runs = [list(run) for _, run in groupby(order, key=length.__getitem__)]
        for run in runs:
            for start in range(0, len(run), self.chunk_size):
                chunk = run[start : start + self.chunk_size]
                yield [p * self.samples + sample for p in chunk for sample in range(self.samples)]


def _first_equal(prompts: Sequence[torch.Tensor]) -> list[int]:
    """For each prompt, the index of the first one with the same ids."""
    first: dict[bytes, int] = {}
    return [first.setdefault(id_bytes(prompt), i) for i, prompt in enumerate(prompts)]
