"""Batched generation on the training model itself.

Prompts are sorted by length and completed a chunk at a time. Each distinct prompt is prefilled once
and its cache expanded over its group; rows that have finished leave the batch; the cache grows in
blocks, in place. The uniform numbers behind the draws are laid out by row and position before
anything runs, so a completion depends neither on the chunk size nor on the rows it shares a batch
with (beyond rounding).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from agilerl.llm.config import SamplingConfig
from agilerl.llm.generation import Completions
from agilerl.llm.generation.sampling import next_tokens, penalise
from agilerl.llm.logprobs import LogitHead
from agilerl.llm.policy import Policy

_NO_CACHE = (
    "{} cannot be continued from keys and values alone (linear attention, Mamba and other "
    "recurrent layers are not supported); use a model with attention in every layer"
)
DEFAULT_CHUNK_SIZE = 256
# Tokens by which the cache grows when it is full.
CACHE_BLOCK = 64
# Finished rows leave once they are this share of the batch; moving the cache for each one would
# cost more.
COMPACT_SHARE = 0.25


class _GrowingLayer(DynamicLayer):
    """Keys and values in a buffer with room to spare: a step writes one column."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self.is_initialized = True
        self.length = keys.shape[-2]
        self.key_buffer, self.value_buffer = _with_room(keys), _with_room(values)
        # The originals would only double the prompts' memory; dtype and device are read off these.
        self.keys, self.values = self.key_buffer[:, :, :0], self.value_buffer[:, :, :0]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        end = self.length + key_states.shape[-2]
        if end > self.key_buffer.shape[-2]:
            self.key_buffer, self.value_buffer = (
                _with_room(self.key_buffer),
                _with_room(self.value_buffer),
            )
        self.key_buffer[:, :, self.length : end] = key_states
        self.value_buffer[:, :, self.length : end] = value_states
        self.length = end
        return self.key_buffer[:, :, :end], self.value_buffer[:, :, :end]

    def get_seq_length(self) -> int:
        return self.length

    def select(self, rows: torch.Tensor) -> None:
        self.key_buffer = self.key_buffer.index_select(0, rows)
        self.value_buffer = self.value_buffer.index_select(0, rows)


def _with_room(tensor: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(tensor, (0, 0, 0, CACHE_BLOCK))


@dataclass
class _Rows:
    """The rows in the batch; the first axis of every tensor."""

    ids: torch.Tensor
    """``(N,)`` index into the chunk's rows."""
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


@contextlib.contextmanager
def _single_query_attention(decoder: nn.Module) -> Iterator[None]:
    """On a CPU, let single queries attend through plain matrix products.

    The fused CPU kernel is made for blocks of queries: for one query per row it takes ten times as
    long.
    """
    config: Any = decoder.config
    before = config._attn_implementation
    if before == "sdpa" and next(decoder.parameters()).device.type == "cpu":
        config._attn_implementation = "eager"
    try:
        yield
    finally:
        config._attn_implementation = before


@torch.no_grad()
def check_cache(model: PreTrainedModel) -> None:
    """Check on a few tokens that a model continues exactly from the keys and values of a prefix.

    Raises:
        ValueError: It does not, as where layers keep another state (linear attention, Mamba).
    """
    decoder = model.base_model
    vocab = model.config.get_text_config().vocab_size
    ids = (torch.arange(1, 7, device=next(model.parameters()).device) % vocab)[None]
    cache = Cache(layer_class_to_replicate=DynamicLayer)
    try:
        whole = decoder(input_ids=ids, use_cache=False).last_hidden_state[:, -1]
        decoder(input_ids=ids[:, :-1], past_key_values=cache, use_cache=True)
        resumed = decoder(input_ids=ids[:, -1:], past_key_values=cache, use_cache=True)
        difference = (resumed.last_hidden_state[:, -1] - whole).abs().max()
        tolerance = 1e-3 if whole.dtype in (torch.float32, torch.float64) else 5e-2
        exact = bool(difference <= tolerance * whole.abs().max())
    except Exception as error:
        raise ValueError(_NO_CACHE.format(type(model).__name__)) from error
    if not exact:
        raise ValueError(_NO_CACHE.format(type(model).__name__))


class HFGenerator:
    """Generates with a policy's own model, its actor adapter folded in where that is exact."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

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
            ValueError: If a prompt leaves no room for output.
            RuntimeError: If the model's logits are not finite.
        """
        limits = [new_token_limit(prompt, sampling) for prompt in prompts]
        rows = [index for index in range(len(prompts)) for _ in range(samples_per_prompt)]
        width = 1 if sampling.greedy else max(limits)
        uniforms = torch.rand(len(rows), width, generator=None if sampling.greedy else rng)
        tokens: list[torch.Tensor] = [torch.empty(0, dtype=torch.long)] * len(rows)
        with self.policy.rollout_weights():
            decode = _Decode(
                self.policy.base.decoder, self.policy.head(), self.policy.device, sampling
            )
            for chunk in _chunks(rows, prompts, sampling):
                first = sorted({rows[i] for i in chunk})
                place = {prompt: n for n, prompt in enumerate(first)}
                done = decode.run(
                    [prompts[i] for i in first],
                    [place[rows[i]] for i in chunk],
                    [limits[rows[i]] for i in chunk],
                    uniforms[chunk],
                )
                for i, completion in zip(chunk, done, strict=True):
                    tokens[i] = completion
        return Completions(tokens)


class _Decode:
    """The decoding loop over one chunk."""

    def __init__(
        self, decoder: nn.Module, head: LogitHead, device: torch.device, sampling: SamplingConfig
    ) -> None:
        self.decoder, self.head, self.device, self.sampling = decoder, head, device, sampling
        self.eos = torch.tensor(sampling.eos_token_ids, device=device)

    def run(
        self,
        prompts: list[torch.Tensor],
        prompt_index: list[int],
        limits: list[int],
        uniforms: torch.Tensor,
    ) -> list[torch.Tensor]:
        """Complete one chunk.

        Row i continues ``prompts[prompt_index[i]]`` by at most ``limits[i]`` tokens.
        """
        rows, cache, logits = self._prefill(prompts, prompt_index, limits)
        uniforms = uniforms.to(self.device)
        output = torch.full(
            (len(limits), max(limits)), self.sampling.pad_token_id, device=self.device
        )
        lengths = torch.zeros(len(limits), dtype=torch.long, device=self.device)
        broken = torch.zeros((), dtype=torch.bool, device=self.device)
        for step in range(max(limits)):
            broken |= ~(logits < torch.inf).all()
            logits = penalise(logits, rows.seen, step, self.sampling)
            token = next_tokens(
                logits, uniforms[rows.ids, min(step, uniforms.shape[1] - 1)], self.sampling
            )
            output[rows.ids, step] = token
            lengths[rows.ids] += rows.alive
            rows.alive = rows.alive & ~torch.isin(token, self.eos) & (step + 1 < rows.limits)
            running = int(rows.alive.sum())
            if running == 0:
                break
            if running <= (1 - COMPACT_SHARE) * len(rows.ids):
                live = rows.alive.nonzero().squeeze(1)
                rows, token = rows.select(live), token[live]
                for layer in cache.layers:
                    layer.select(live)
            logits = self._step(rows, cache, token)
        if broken:
            raise RuntimeError(
                "the model's logits held NaN or inf during generation: its weights are broken (was "
                "the learning rate too high?) or its dtype overflows"
            )
        return [output[i, :n].cpu() for i, n in enumerate(lengths.tolist())]

    def _prefill(
        self, prompts: list[torch.Tensor], prompt_index: list[int], limits: list[int]
    ) -> tuple[_Rows, Cache, torch.Tensor]:
        """Run each prompt once, left-padded; expand its cache and first logits over its rows."""
        device = self.device
        width = max(len(prompt) for prompt in prompts)
        ids = torch.full((len(prompts), width), self.sampling.pad_token_id, dtype=torch.long)
        mask = torch.zeros(len(prompts), width, dtype=torch.bool)
        for i, prompt in enumerate(prompts):
            ids[i, width - len(prompt) :] = prompt
            mask[i, width - len(prompt) :] = True
        ids, mask = ids.to(device), mask.to(device)
        cache = Cache(layer_class_to_replicate=DynamicLayer)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        hidden = self._decode(ids, mask, positions, cache)
        logits = self.head.logits(hidden[:, -1])

        index = torch.tensor(prompt_index, device=device)
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
        layers = [
            _GrowingLayer(layer.keys.index_select(0, index), layer.values.index_select(0, index))
            for layer in cache.layers
        ]
        return rows, Cache(layers=layers), logits[index]

    def _step(self, rows: _Rows, cache: Cache, token: torch.Tensor) -> torch.Tensor:
        """Feed one token per row and return the next logits ``(N, V)``."""
        if rows.seen is not None:
            rows.seen.scatter_(1, token[:, None], True)
        rows.mask = torch.cat([rows.mask, rows.mask.new_ones(len(token), 1)], dim=1)
        with _single_query_attention(self.decoder):
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
        output = self.decoder(input_ids=ids, past_key_values=cache, use_cache=True, **kwargs)
        return output.last_hidden_state


def new_token_limit(prompt: torch.Tensor, sampling: SamplingConfig) -> int:
    """Most tokens a prompt may be completed by.

    Raises:
        ValueError: If there is no room for a single one.
    """
    room = sampling.max_model_len - len(prompt)
    if room < 1 or len(prompt) == 0:
        raise ValueError(
            f"a prompt of {len(prompt)} tokens leaves no room for output within max_model_len "
            f"{sampling.max_model_len}: raise max_model_len, or filter prompts (ReasoningGym's "
            "max_context_length)"
        )
    return room if sampling.max_new_tokens is None else min(room, sampling.max_new_tokens)


def _chunks(
    rows: list[int], prompts: Sequence[torch.Tensor], sampling: SamplingConfig
) -> Iterator[list[int]]:
    """Row indices by prompt length, ``chunk_size`` at a time; equal lengths only if unpadded."""
    size = sampling.chunk_size or DEFAULT_CHUNK_SIZE
    order = sorted(range(len(rows)), key=lambda i: len(prompts[rows[i]]))
    chunk: list[int] = []
    for i in order:
        other_length = bool(chunk) and len(prompts[rows[chunk[0]]]) != len(prompts[rows[i]])
        if len(chunk) == size or (other_length and not sampling.left_padding):
            yield chunk
            chunk = []
        chunk.append(i)
    if chunk:
        yield chunk
