"""Batched generation on the training model itself.

Prompts are sorted by length and completed a chunk at a time, equal ones run once. The uniform
numbers behind the draws are laid out by row and position before anything runs, so a completion
depends neither on the chunk size nor on the rows it shares a batch with (beyond rounding).

Between the turns of conversations the keys and values of what was read and written are kept, and
only a prompt's new tokens are run.

On a base that ZeRO stage 3 partitions, it is put together once for a rollout, or, without
``gather_for_generation``, layer by layer for every token: that costs a gather of every layer and of
the head per token, one small all-reduce, and the LoRA branches, as nothing is folded. All ranks are
then as slow as the one with most tokens to generate.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from agilerl.llm.config import SamplingConfig
from agilerl.llm.generation import Completions
from agilerl.llm.generation.cache import CACHE_BLOCK, KeptRows, Place, id_bytes
from agilerl.llm.generation.decode import Decode, Decoded
from agilerl.llm.policy import Policy
from agilerl.llm.probes import equal_up_to_rounding

_NO_CACHE = (
    "{} cannot be continued from keys and values alone (linear attention, Mamba and other "
    "recurrent layers are not supported); use a model with attention in every layer"
)
DEFAULT_CHUNK_SIZE = 256


@torch.no_grad()
def check_cache(model: PreTrainedModel) -> None:
    """Check on a few tokens that a model continues exactly from the keys and values of a prefix.

    Args:
        model: In evaluation mode: with dropout no two forwards are the same.

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
        exact = equal_up_to_rounding(resumed.last_hidden_state[:, -1], whole)
    except Exception as error:
        raise ValueError(_NO_CACHE.format(type(model).__name__)) from error
    if not exact:
        raise ValueError(_NO_CACHE.format(type(model).__name__))


class HFGenerator:
    """Generates with a policy's own model, its actor adapter folded in where that is exact."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._conversing = False
        # With the adapter it came from: another one's keys and values would be wrong silently.
        self._kept: tuple[str, KeptRows] | None = None

    @contextlib.contextmanager
    def conversations(self) -> Iterator[None]:
        """Within it prompts may continue earlier rows; may be nested.

        See :class:`agilerl.llm.generation.Generator`. Rows are kept until the next ``generate``,
        if all of its rows fit one chunk and prompts are left-padded; otherwise every prompt is run
        whole. Takes the memory of one chunk's keys and values while it lasts.
        """
        if self._conversing:
            yield
            return
        self._conversing = True
        try:
            yield
        finally:
            self._conversing, self._kept = False, None

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
        prompts = [prompt.to("cpu", torch.long) for prompt in prompts]
        limits = [new_token_limit(prompt, sampling) for prompt in prompts]
        rows = [first for first in _first_equal(prompts) for _ in range(samples_per_prompt)]
        width = 1 if sampling.greedy else max(limits)
        uniforms = torch.rand(len(rows), width, generator=None if sampling.greedy else rng)
        call = _Call(prompts, limits, rows, uniforms, sampling)
        kept = self._take_kept()
        slot = self.policy.slot(self.policy.role)
        with self.policy.rollout_weights():
            decode = Decode(
                self.policy.base.decoder, self.policy.rollout_head(), self.policy.device, sampling
            )
            if self._conversing and call.fits_one_chunk:
                self._kept = slot, call.converse(decode, kept)
            else:
                kept.clear()
                call.complete(decode)
        return Completions(call.tokens, call.logps if sampling.return_logps else None)

    def _take_kept(self) -> KeptRows:
        """The rows kept for the adapter in use, which are this generator's no more."""
        slot, kept = self._kept or (None, KeptRows())
        self._kept = None
        return kept if slot == self.policy.slot(self.policy.role) else KeptRows()


class _Call:
    """The rows of one ``generate``: which are run together, and what they come to."""

    def __init__(
        self,
        prompts: Sequence[torch.Tensor],
        limits: Sequence[int],
        rows: Sequence[int],
        uniforms: torch.Tensor,
        sampling: SamplingConfig,
    ) -> None:
        self.prompts, self.limits, self.rows = prompts, limits, rows
        self.uniforms, self.sampling = uniforms, sampling
        self.size = sampling.chunk_size or DEFAULT_CHUNK_SIZE
        self.tokens: list[torch.Tensor] = [torch.empty(0, dtype=torch.long)] * len(rows)
        self.logps: list[torch.Tensor] = [torch.empty(0)] * len(rows)

    @property
    def fits_one_chunk(self) -> bool:
        """Whether all rows may be held at once, aligned as kept rows are."""
        return len(self.rows) <= self.size and self.sampling.left_padding

    def complete(self, decode: Decode) -> None:
        """Complete all rows, every prompt run whole."""
        for chunk in self._chunks():
            self._run(decode, chunk)

    def converse(self, decode: Decode, kept: KeptRows) -> KeptRows:
        """Complete all rows, running only what is new of prompts that continue a kept row.

        Those go first and in a batch of their own: one prompt without a past would make all others
        run whole, and what is kept is free once they have started. Returns this call's rows.
        """
        places = {row: kept.find(self.prompts[row]) for row in set(self.rows)}
        going_on = [i for i, row in enumerate(self.rows) if places[row] is not None]
        fresh = [i for i, row in enumerate(self.rows) if places[row] is None]
        if not going_on:
            kept.clear()
        made = KeptRows()
        for chunk in filter(None, (going_on, fresh)):
            past = [place for row in self._distinct(chunk) if (place := places[row]) is not None]
            done = self._run(decode, chunk, self._cache(kept, chunk, past) if past else None, True)
            width = max(len(self.prompts[self.rows[i]]) for i in chunk)
            for part in done.cached:
                own = [(self.prompts[self.rows[chunk[n]]], done.tokens[n]) for n in part.rows]
                made.add(
                    part.layers,
                    # The last token was sampled, but never run.
                    [torch.cat([prompt, completion[:-1]]) for prompt, completion in own],
                    [width - len(prompt) for prompt, _ in own],
                )
        return made

    def _cache(self, kept: KeptRows, chunk: Sequence[int], past: Sequence[Place]) -> Cache:
        lengths = [len(self.prompts[row]) for row in self._distinct(chunk)]
        room = min(CACHE_BLOCK, max(self.limits[self.rows[i]] for i in chunk))
        return kept.take(past, lengths, room)

    def _distinct(self, chunk: Sequence[int]) -> list[int]:
        """The prompts behind some rows, each once."""
        return sorted({self.rows[i] for i in chunk})

    def _run(
        self, decode: Decode, chunk: Sequence[int], cache: Cache | None = None, keep: bool = False
    ) -> Decoded:
        distinct = self._distinct(chunk)
        place = {prompt: n for n, prompt in enumerate(distinct)}
        done = decode.run(
            [self.prompts[i] for i in distinct],
            [place[self.rows[i]] for i in chunk],
            [self.limits[self.rows[i]] for i in chunk],
            self.uniforms[list(chunk)],
            cache=cache,
            keep=keep,
        )
        for n, i in enumerate(chunk):
            self.tokens[i] = done.tokens[n]
            if done.logps is not None:
                self.logps[i] = done.logps[n]
        return done

    def _chunks(self) -> Iterator[list[int]]:
        """Rows by prompt length, ``size`` at a time; equal lengths only if unpadded."""
        length = [len(self.prompts[row]) for row in self.rows]
        # Then by prompt: rows of one share its cache, wherever they stand in the call.
        order = sorted(range(len(self.rows)), key=lambda i: (length[i], self.rows[i]))
        chunk: list[int] = []
        for i in order:
            other_length = bool(chunk) and length[chunk[0]] != length[i]
            if len(chunk) == self.size or (other_length and not self.sampling.left_padding):
                yield chunk
                chunk = []
            chunk.append(i)
        if chunk:
            yield chunk


def _first_equal(prompts: Sequence[torch.Tensor]) -> list[int]:
    """For each prompt, the place of the first one with the same ids."""
    first: dict[bytes, int] = {}
    return [first.setdefault(id_bytes(prompt), i) for i, prompt in enumerate(prompts)]


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
