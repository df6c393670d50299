"""Batched generation on the training model itself.

Prompts are sorted by length and completed a chunk at a time; equal prompts of a chunk are run once,
and their keys and values are kept once. The uniform numbers behind the draws are laid out by row
and position, so a completion depends neither on the chunk size nor on the rows it shares a batch
with (beyond rounding).

In a session the keys and values of the rows generated last are kept, and of a prompt that continues
one only the new tokens are run. Rows that shared a prompt go on sharing it.

On a base that ZeRO stage 3 partitions, it is gathered once for a rollout, or, without
``gather_for_generation``, layer by layer for every token: that costs a gather of every layer and of
the head per token, one small all-reduce, and the LoRA branches, as nothing is merged. All ranks are
then as slow as the one with most tokens to generate.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from tokenizers import Tokenizer

from agilerl.llm.config import SamplingConfig
from agilerl.llm.generation import Completions, GenerationRequest, JointLimits
from agilerl.llm.generation.batching import RequestBatch, chunk_prompts
from agilerl.llm.generation.cached_decoder import CachedDecoder
from agilerl.llm.generation.decode import DecodingLoop
from agilerl.llm.generation.kv_cache.prefix_cache import PrefixCache
from agilerl.llm.generation.merged_weights import rollout_head, rollout_weights
from agilerl.llm.generation.mixed_adapters import RowAdapters, mixed_adapters, mixing_key
from agilerl.llm.generation.probe import decoding_support
from agilerl.llm.generation.stop_sequences import required_tokenizer
from agilerl.llm.policy import Policy

# Completions of several agents at a time where the size of a chunk is not set. On a CPU more are
# not faster, but take the memory of their keys and values.
JOINT_ROWS_ON_CPU = 64


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
        request = GenerationRequest(prompts, samples_per_prompt, sampling, rng)
        with rollout_weights(self.policy):
            return self.complete({0: request}, self._prefix_cache)[0]

    def joint_limits(self, sampling: SamplingConfig, samples_per_prompt: int) -> JointLimits | None:
        """See :class:`agilerl.llm.generation.Generator`; as many rows as one may have at a time."""
        key = mixing_key(self.policy)
        if key is None:
            return None
        rows = chunk_prompts(sampling, samples_per_prompt) * samples_per_prompt
        if sampling.chunk_size is None and self.policy.device.type == "cpu":
            rows = JOINT_ROWS_ON_CPU
        same = id(self.policy.base), key, replace(sampling, chunk_size=None)
        return JointLimits(same, rows)

    def join(self, others: Sequence[HFGenerator]) -> JointHFGenerator:
        """See :class:`agilerl.llm.generation.Generator`."""
        return JointHFGenerator([self, *others])

    @torch.no_grad()
    def complete(
        self,
        requests: Mapping[int, GenerationRequest],
        prefix_cache: PrefixCache | None,
        row_adapters: RowAdapters | None = None,
    ) -> dict[int, Completions]:
        """Complete requests with the weights that the base has now.

        Args:
            requests: By the number of the adapter; their sampling is the same.
            prefix_cache: A session's.
            row_adapters: Where several adapters are mixed.
        """
        policy, support = self.policy, self._support
        sampling = next(iter(requests.values())).sampling
        if not support.left_padding:
            sampling = replace(sampling, left_padding=False)
        batch = RequestBatch(requests, sampling)
        decoder = CachedDecoder(
            policy.base.decoder,
            left_padding=sampling.left_padding,
            single_query=support.single_query,
            row_adapters=row_adapters,
        )
        loop = DecodingLoop(
            decoder,
            rollout_head(policy),
            policy.device,
            sampling,
            self._tokenizer(sampling),
            shared_prefix=support.shared_prefix,
        )
        if prefix_cache is None:
            batch.complete(loop)
        elif batch.fits_one_chunk and sampling.left_padding:
            batch.complete_cached(loop, prefix_cache, share=support.shared_turns)
        else:
            prefix_cache.clear()
            batch.complete(loop)
        return batch.completions()

    def _tokenizer(self, sampling: SamplingConfig) -> Tokenizer | None:
        texts = sampling.stop_sequences
        names = self._model_name, self.policy.base.model.name_or_path
        if not texts:
            return None
        return required_tokenizer("stop_sequences", texts, *names).backend_tokenizer

    def close(self) -> None:
        """Nothing is held outside of sessions."""


class JointHFGenerator:
    """Generates with several policies of one base, each row with the adapter of its policy.

    The adapters are not merged; see :mod:`agilerl.llm.generation.mixed_adapters`.
    """

    def __init__(self, generators: Sequence[HFGenerator]) -> None:
        self._generators = generators
        self._prefix_cache: PrefixCache | None = None
        self._row_adapters: RowAdapters | None = None

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """Keep rows for prompts that continue them, as :meth:`HFGenerator.session` does."""
        with self._mixed():
            self._prefix_cache = PrefixCache()
            try:
                yield
            finally:
                self._prefix_cache = None

    def generate(self, requests: Mapping[int, GenerationRequest]) -> dict[int, Completions]:
        """See :class:`agilerl.llm.generation.JointGenerator`."""
        with self._mixed() as rows:
            return self._generators[0].complete(requests, self._prefix_cache, rows)

    @contextlib.contextmanager
    def _mixed(self) -> Iterator[RowAdapters]:
        if self._row_adapters is not None:
            yield self._row_adapters
            return
        with mixed_adapters([generator.policy for generator in self._generators]) as rows:
            self._row_adapters = rows
            try:
                yield rows
            finally:
                self._row_adapters = None
