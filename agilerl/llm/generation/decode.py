"""The decoding loop: a batch of prompts in, one completion per row out.

Each distinct prompt is run once and its cache expanded over its rows; rows that have finished leave
the batch; the cache grows in blocks, in place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from transformers.cache_utils import Cache

from agilerl.llm.config import SamplingConfig
from agilerl.llm.generation.attention import single_query_attention
from agilerl.llm.generation.cache import CACHE_BLOCK, GrowingLayer, LayerTensors
from agilerl.llm.generation.sampling import next_tokens, penalise, scaled_logps
from agilerl.llm.head import LogitHead

# Finished rows leave once they are this share of the batch; moving the cache for each one would
# cost more.
COMPACT_SHARE = 0.25


class CachedRows(NamedTuple):
    """The keys and values of rows that left the batch together."""

    rows: list[int]
    """Which rows of the batch."""
    layers: list[LayerTensors]
    """Per layer, keys and values ``(n, heads, columns, head size)``. Prompts end in column
    ``max(prompt lengths) - 1``, completions follow; the last token of one has no column yet."""


@dataclass(frozen=True)
class Decoded:
    """What a batch came to."""

    tokens: list[torch.Tensor]
    """Per row, the 1-D completion."""
    logps: list[torch.Tensor] | None
    """Per row, the 1-D float32 log-probs of its tokens, if asked for."""
    cached: list[CachedRows]
    """Every row's keys and values, if asked for."""


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
    alive: torch.Tensor
    """``(N,)`` bool: not finished yet. A finished row may run along; its tokens are dropped."""
    seen: torch.Tensor | None
    """``(N, V)`` bool, tokens in prompt or completion; only kept for a repetition penalty."""

    def select(self, rows: torch.Tensor) -> _Rows:
        return _Rows(
            ids=self.ids[rows],
            mask=self.mask[rows],
            positions=self.positions[rows],
            limits=self.limits[rows],
            alive=self.alive[rows],
            seen=None if self.seen is None else self.seen[rows],
        )


class Decode:
    """The loop, with one model and one way of sampling."""

    def __init__(
        self, decoder: nn.Module, head: LogitHead, device: torch.device, sampling: SamplingConfig
    ) -> None:
        self.decoder, self.head, self.device, self.sampling = decoder, head, device, sampling
        self.eos = torch.tensor(sampling.eos_token_ids, device=device)

    def run(
        self,
        prompts: Sequence[torch.Tensor],
        prompt_index: Sequence[int],
        limits: Sequence[int],
        uniforms: torch.Tensor,
        *,
        cache: Cache | None = None,
        keep: bool = False,
    ) -> Decoded:
        """Complete one batch.

        Args:
            prompts: The distinct 1-D prompts.
            prompt_index: Row i continues ``prompts[prompt_index[i]]``
            limits: by at most ``limits[i]`` tokens,
            uniforms: drawn with row i of these ``(N, steps)`` numbers in [0, 1).
            cache: First columns of the right-aligned prompts, which are then not run again.
            keep: Also return keys and values.

        Raises:
            RuntimeError: If the model's logits are not finite.
        """
        cache = _empty_cache(max(limits)) if cache is None else cache
        rows, logits = self._read(prompts, prompt_index, limits, cache)
        uniforms = uniforms.to(self.device)
        output = _Output(len(limits), max(limits), self.sampling, self.device)
        cached: list[CachedRows] = []
        for step in range(max(limits)):
            token = next_tokens(
                penalise(logits, rows.seen, step, self.sampling),
                uniforms[rows.ids, min(step, uniforms.shape[1] - 1)],
                self.sampling,
            )
            output.add(rows, step, token, logits)
            rows.alive = rows.alive & ~torch.isin(token, self.eos) & (step + 1 < rows.limits)
            running = int(rows.alive.sum())
            if running == 0:
                break
            if running <= (1 - COMPACT_SHARE) * len(rows.ids):
                if keep:
                    cached.append(_finished(rows, cache))
                live = rows.alive.nonzero().squeeze(1)
                rows, token = rows.select(live), token[live]
                for layer in _layers(cache):
                    layer.select(live)
            logits = self._step(rows, cache, token)
        tokens, logps = output.rows()
        if keep:
            cached.append(_remaining(rows, cache))
        return Decoded(tokens, logps, cached)

    def _read(
        self,
        prompts: Sequence[torch.Tensor],
        prompt_index: Sequence[int],
        limits: Sequence[int],
        cache: Cache,
    ) -> tuple[_Rows, torch.Tensor]:
        """Run what ``cache`` lacks of each prompt; expand it and the first logits over the rows."""
        device = self.device
        width, cached = max(len(prompt) for prompt in prompts), cache.get_seq_length()
        ids = torch.full((len(prompts), width), self.sampling.pad_token_id, dtype=torch.long)
        mask = torch.zeros(len(prompts), width, dtype=torch.bool)
        for i, prompt in enumerate(prompts):
            ids[i, width - len(prompt) :] = prompt
            mask[i, width - len(prompt) :] = True
        ids, mask = ids.to(device), mask.to(device)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        hidden = self._decode(ids[:, cached:], mask, positions[:, cached:], cache)
        logits = self.head.logits(hidden[:, -1])

        index = torch.tensor(prompt_index, device=device)
        if list(prompt_index) != list(range(len(prompts))):
            for layer in _layers(cache):
                layer.select(index)
        seen = None
        if self.sampling.repetition_penalty != 1.0:
            seen = torch.zeros(len(prompts), logits.shape[1], dtype=torch.bool, device=device)
            for i, prompt in enumerate(prompts):
                seen[i, prompt.to(device)] = True
            seen = seen[index]
        rows = _Rows(
            ids=torch.arange(len(prompt_index), device=device),
            mask=mask[index],
            positions=mask.sum(1)[index],
            limits=torch.tensor(limits, device=device),
            alive=torch.ones(len(prompt_index), dtype=torch.bool, device=device),
            seen=seen,
        )
        return rows, logits[index]

    def _step(self, rows: _Rows, cache: Cache, token: torch.Tensor) -> torch.Tensor:
        """Feed one token per row and return the next logits ``(N, V)``."""
        if rows.seen is not None:
            rows.seen.scatter_(1, token[:, None], True)
        rows.mask = torch.cat([rows.mask, rows.mask.new_ones(len(token), 1)], dim=1)
        hidden = self._decode(token[:, None], rows.mask, rows.positions[:, None], cache)
        # A finished row stays where it is: a step further may be past the model's last position.
        rows.positions = rows.positions + rows.alive.long()
        return self.head.logits(hidden[:, -1])

    def _decode(
        self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: Cache
    ) -> torch.Tensor:
        kwargs = {}
        if self.sampling.left_padding:
            kwargs = {"attention_mask": mask.long(), "position_ids": positions}
        single = ids.shape[1] == 1
        with single_query_attention(self.decoder) if single else contextlib.nullcontext():
            output = self.decoder(input_ids=ids, past_key_values=cache, use_cache=True, **kwargs)
        return output.last_hidden_state


class _Output:
    """Sampled tokens and, if asked for, their log-probs: one line per row of the batch."""

    def __init__(
        self, rows: int, width: int, sampling: SamplingConfig, device: torch.device
    ) -> None:
        self.temperature = sampling.temperature
        self.tokens = torch.full((rows, width), sampling.pad_token_id, device=device)
        self.logps = torch.zeros(rows, width, device=device) if sampling.return_logps else None
        self.lengths = torch.zeros(rows, dtype=torch.long, device=device)
        self.broken = torch.zeros((), dtype=torch.bool, device=device)

    def add(self, rows: _Rows, step: int, token: torch.Tensor, logits: torch.Tensor) -> None:
        """Note a step: tokens ``(N,)`` and the ``(N, V)`` logits as the model made them."""
        self.broken |= ~(logits < torch.inf).all()
        self.tokens[rows.ids, step] = token
        if self.logps is not None:
            self.logps[rows.ids, step] = scaled_logps(logits, token, self.temperature)
        self.lengths[rows.ids] += rows.alive

    def rows(self) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
        """Per row tokens and log-probs.

        Raises:
            RuntimeError: If any logits were not finite.
        """
        if self.broken:
            raise RuntimeError(
                "the model's logits held NaN or inf during generation: its weights are broken (was "
                "the learning rate too high?) or its dtype overflows"
            )
        lengths = self.lengths.tolist()
        tokens = [self.tokens[i, :n].cpu() for i, n in enumerate(lengths)]
        if self.logps is None:
            return tokens, None
        return tokens, [self.logps[i, :n].cpu() for i, n in enumerate(lengths)]


def _layers(cache: Cache) -> list[GrowingLayer]:
    return cast("list[GrowingLayer]", cache.layers)


def _empty_cache(new_tokens: int) -> Cache:
    room = min(CACHE_BLOCK, new_tokens)
    return Cache(layer_class_to_replicate=cast(Any, partial(GrowingLayer, room)))


def _finished(rows: _Rows, cache: Cache) -> CachedRows:
    """Copies of the finished rows, which are about to leave."""
    done = (~rows.alive).nonzero().squeeze(1)
    return CachedRows(rows.ids[done].tolist(), [layer.copy_of(done) for layer in _layers(cache)])


def _remaining(rows: _Rows, cache: Cache) -> CachedRows:
    """All rows still in the batch: its buffers, not copied."""
    buffers = [(layer.key_buffer, layer.value_buffer) for layer in _layers(cache)]
    return CachedRows(rows.ids.tolist(), buffers)
