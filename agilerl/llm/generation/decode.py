"""The decoding loop: a batch of prompts in, one completion per row out.

Each distinct prompt is run once, and its rows share its keys and values or, where the model does
not allow it, get copies. Rows that have finished leave the batch; cache and output
grow in blocks with what is generated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from tokenizers import Tokenizer

from agilerl.llm.causal_lm import LogitHead
from agilerl.llm.config import SamplingConfig
from agilerl.llm.generation.cached_decoder import CachedDecoder, LeftPadded
from agilerl.llm.generation.kv_cache.growing_cache import CACHE_BLOCK, GrowingCache, LayerTensors
from agilerl.llm.generation.kv_cache.shared_prefix import CachedPrompts, SharedPrefixCache
from agilerl.llm.generation.random_numbers import BLOCK
from agilerl.llm.generation.sampled_tokens import SampledTokens
from agilerl.llm.generation.sampling import next_tokens, penalise
from agilerl.llm.generation.single_token.tiled_head import TiledHead
from agilerl.llm.generation.stop_sequences import StopSequenceMatcher

# Finished rows leave once they are this share of the batch; moving the cache for each one would
# cost more.
COMPACT_SHARE = 0.25


@dataclass(frozen=True)
class PromptBatch:
    """What one batch is to complete."""

    prompts: Sequence[torch.Tensor]
    """The distinct 1-D prompts."""
    prompt_index: Sequence[int]
    """Row i continues ``prompts[prompt_index[i]]``."""
    limits: Sequence[int]
    """Most tokens row i may generate."""
    uniforms: Callable[[int], torch.Tensor | None]
    """Block n of the numbers that the rows are drawn with: ``(N, <= BLOCK)`` in [0, 1), or None
    where decoding is greedy."""
    adapters: Sequence[int]
    """The adapter of each prompt; of one policy it is 0."""


class CachedRows(NamedTuple):
    """The keys and values of rows that left the batch together."""

    rows: list[int]
    """Which rows of the batch."""
    layers: list[LayerTensors]
    """Per layer, keys and values ``(n, heads, columns, head size)``, where rows share prompts only
    of what comes after these. The prompts of all rows, or what is left of them, end in the same
    column; completions follow; the last token of one has no column yet."""


@dataclass(frozen=True)
class BatchCompletions:
    """The completions of one batch."""

    tokens: list[torch.Tensor]
    """Per row, the 1-D completion."""
    logps: list[torch.Tensor] | None
    """Per row, the 1-D float32 log-probs of its tokens, if asked for."""
    cached: list[CachedRows]
    """Every row's keys and values, if asked for."""
    prompts: CachedPrompts | None
    """Those that the cached rows share, if they do."""


@dataclass
class _Rows:
    """The rows in the batch; the first axis of every tensor."""

    ids: torch.Tensor
    """``(N,)`` index into the rows the batch started with."""
    mask: torch.Tensor
    """``(N, L)`` bool, True on the real tokens in the cache."""
    positions: torch.Tensor
    """``(N,)`` position of the next token."""
    limits: torch.Tensor
    """``(N,)`` most tokens this row may generate."""
    adapters: torch.Tensor
    """``(N,)`` the adapter it runs with; all 0 where they do not differ."""
    unfinished: torch.Tensor
    """``(N,)`` bool. A finished row may stay in the batch; its further tokens are dropped."""
    seen: torch.Tensor | None
    """``(N, L)`` ids of the tokens in prompt and completion; only for a repetition penalty."""

    def select(self, rows: torch.Tensor) -> _Rows:
        return _Rows(
            ids=self.ids[rows],
            mask=self.mask[rows],
            positions=self.positions[rows],
            limits=self.limits[rows],
            adapters=self.adapters[rows],
            unfinished=self.unfinished[rows],
            seen=None if self.seen is None else self.seen[rows],
        )


class DecodingLoop:
    """Completes batches with one model and one way of sampling.

    Args:
        model: Runs tokens against cached keys and values.
        head: From hidden states to logits.
        device: The model's.
        sampling: How tokens are drawn.
        tokenizer: Finds the stop sequences; None: there are none.
        shared_prefix: Whether the model may run against a :class:`SharedPrefixCache`.
    """

    def __init__(
        self,
        model: CachedDecoder,
        head: LogitHead,
        device: torch.device,
        sampling: SamplingConfig,
        tokenizer: Tokenizer | None = None,
        *,
        shared_prefix: bool = False,
    ) -> None:
        self.model, self.device, self.sampling = model, device, sampling
        self.head, self.shared_prefix = TiledHead(head), shared_prefix
        self.tokenizer = tokenizer
        self.eos = torch.tensor(sampling.eos_token_ids, device=device)

    def run(
        self, batch: PromptBatch, cache: GrowingCache | None = None, *, keep_cache: bool = False
    ) -> BatchCompletions:
        """Complete one batch.

        Args:
            batch: The prompts, and how often and how far each is completed.
            cache: The first columns of the prompts, which are then not run again.
            keep_cache: Also return keys and values.

        Raises:
            RuntimeError: If the model's logits are not finite.
        """
        longest = max(batch.limits)
        rows, logits, cache = self._prefill(batch, cache)
        prompts = None
        if keep_cache and isinstance(cache, SharedPrefixCache):
            prompts = cache.keep_prompts()
        output = SampledTokens(len(batch.limits), longest, self.sampling, self.device)
        stops = self._stop_sequences(batch)
        cached: list[CachedRows] = []
        uniforms: torch.Tensor | None = None
        for step in range(longest):
            column = step % BLOCK
            if column == 0 and (block := batch.uniforms(step // BLOCK)) is not None:
                uniforms = block.to(self.device)
            # Log-probs are of the logits as the model made them.
            drawn_from = logits.clone() if self.sampling.return_logps else logits
            token, largest = next_tokens(
                penalise(drawn_from, rows.seen, step, self.sampling),
                None if uniforms is None else uniforms[rows.ids, column],
                self.sampling,
            )
            output.add(rows.ids, rows.unfinished, step, token, logits, largest)
            rows.unfinished &= ~torch.isin(token, self.eos) & (step + 1 < rows.limits)
            if stops is not None:
                _end_stopped(rows, token, step, stops)
            left = int(rows.unfinished.sum())
            if left == 0:
                break
            if left <= (1 - COMPACT_SHARE) * len(rows.ids):
                if keep_cache:
                    cached.append(_finished(rows, cache))
                rows, token = _compact(rows, token, cache)
                self.model.assign(rows.adapters)
            logits = self._step(rows, token, cache)
        if keep_cache:
            cached.append(_remaining(rows, cache))
        return BatchCompletions(*output.rows(), cached, prompts)

    def _stop_sequences(self, batch: PromptBatch) -> StopSequenceMatcher | None:
        if self.tokenizer is None:
            return None
        prompts = [batch.prompts[index] for index in batch.prompt_index]
        settings = self.sampling
        return StopSequenceMatcher(
            self.tokenizer, settings.stop_sequences, prompts, settings.min_new_tokens
        )

    def _prefill(
        self, batch: PromptBatch, cache: GrowingCache | None
    ) -> tuple[_Rows, torch.Tensor, GrowingCache]:
        """Run what ``cache`` lacks of each prompt; the rows, their logits ``(N, V)`` and cache."""
        count, room = len(batch.prompts), min(CACHE_BLOCK, max(batch.limits))
        distinct = list(batch.prompt_index) == list(range(count))
        # Rows that a session gives all their columns would be copied to share them.
        shares = self.shared_prefix and not distinct and cache is None
        if cache is None:
            cache = GrowingCache(0 if shares else room)
        padded = self._columns(batch.prompts, cache)
        new = padded.mask.shape[1] - cache.get_seq_length()
        adapters = torch.tensor(batch.adapters, device=self.device)
        self.model.assign(adapters)
        hidden = self.model.hidden(
            padded.ids[:, -new:], padded.mask, padded.positions[:, -new:], cache
        )
        logits = self.head.logits(hidden[:, -1])
        index = torch.tensor(batch.prompt_index, device=self.device)
        if isinstance(cache, SharedPrefixCache):
            cache.end_prefill()
        if shares:
            cache = SharedPrefixCache.of_prompts(cache, index, list(map(len, batch.prompts)), room)
        elif not distinct:
            cache.select(index)
        seen = None
        if self.sampling.repetition_penalty != 1.0:
            whole = LeftPadded.of(batch.prompts, self.sampling.pad_token_id, self.device)
            # Padding repeats a token of the prompt.
            seen = torch.where(whole.mask, whole.ids, whole.ids[:, -1:])[index]
        rows = _Rows(
            ids=torch.arange(len(index), device=self.device),
            mask=padded.mask[index],
            positions=padded.mask.sum(1)[index],
            limits=torch.tensor(batch.limits, device=self.device),
            adapters=adapters[index],
            unfinished=torch.ones(len(index), dtype=torch.bool, device=self.device),
            seen=seen,
        )
        self.model.assign(rows.adapters)
        return rows, logits[index], cache

    def _columns(self, prompts: Sequence[torch.Tensor], cache: GrowingCache) -> LeftPadded:
        """The prompts in the columns of a cache; of shared ones, which it holds, the mask only."""
        pad = self.sampling.pad_token_id
        if not isinstance(cache, SharedPrefixCache):
            return LeftPadded.of(prompts, pad, self.device)
        shared = cache.lengths_of_rows()
        own = [prompt[n:] for prompt, n in zip(prompts, shared.tolist(), strict=True)]
        ids, mask, positions = LeftPadded.of(own, pad, self.device)
        mask = torch.cat([cache.prompt_mask(), mask], dim=1)
        return LeftPadded(ids, mask, positions + shared[:, None])

    def _step(self, rows: _Rows, token: torch.Tensor, cache: GrowingCache) -> torch.Tensor:
        """Feed one token per row and return the next logits ``(N, V)``."""
        if rows.seen is not None:
            rows.seen = torch.cat([rows.seen, token[:, None]], dim=1)
        rows.mask = torch.cat([rows.mask, rows.mask.new_ones(len(token), 1)], dim=1)
        hidden = self.model.hidden(token[:, None], rows.mask, rows.positions[:, None], cache)
        # A finished row's position stays: one further may be past the model's last.
        rows.positions = rows.positions + rows.unfinished.long()
        return self.head.logits(hidden[:, -1])


def _end_stopped(rows: _Rows, token: torch.Tensor, step: int, stops: StopSequenceMatcher) -> None:
    """Finish the rows whose tokens ``(N,)`` complete a stop sequence."""
    live = rows.unfinished.nonzero().squeeze(1)
    stopped = stops.completes(rows.ids[live].tolist(), token[live].tolist(), step)
    rows.unfinished[live] = ~torch.tensor(stopped, dtype=torch.bool, device=token.device)


def _compact(rows: _Rows, token: torch.Tensor, cache: GrowingCache) -> tuple[_Rows, torch.Tensor]:
    """Rows, their last tokens and their cache without the finished ones."""
    live = rows.unfinished.nonzero().squeeze(1)
    cache.select(live)
    return rows.select(live), token[live]


def _finished(rows: _Rows, cache: GrowingCache) -> CachedRows:
    """Copies of the finished rows, which are about to leave."""
    done = (~rows.unfinished).nonzero().squeeze(1)
    return CachedRows(
        rows.ids[done].tolist(), [layer.copy_of(done) for layer in cache.growing_layers]
    )


def _remaining(rows: _Rows, cache: GrowingCache) -> CachedRows:
    """All rows still in the batch: its buffers, not copied."""
    buffers = [(layer.key_buffer, layer.value_buffer) for layer in cache.growing_layers]
    return CachedRows(rows.ids.tolist(), buffers)
