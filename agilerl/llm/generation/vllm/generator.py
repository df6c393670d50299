"""The generator that samples from a vLLM engine: adapter sync, sessions, requests."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple

import torch

from agilerl.checks import require
from agilerl.llm.config import SamplingConfig
from agilerl.llm.generation import Completions, GenerationRequest, JointLimits, new_token_limit
from agilerl.llm.generation.stop_sequences import required_tokenizer
from agilerl.llm.generation.vllm import probe
from agilerl.llm.generation.vllm.adapter_files import AdapterFiles, current_tensors
from agilerl.llm.generation.vllm.config import VLLMConfig
from agilerl.llm.generation.vllm.engine import (
    Answer,
    Engine,
    EngineError,
    Request,
    StagedAdapter,
    sampling_parameters,
)
from agilerl.llm.policy import Policy


class _Sync(NamedTuple):
    """What brings an engine to a policy's present weights."""

    digest: str
    """Of these weights."""
    tensors: dict[str, torch.Tensor] | None
    """To be served; None: they are already."""
    expected: probe.Expected | None
    """To be compared with what the engine computes; None: nothing is."""


class VLLMGenerator:
    """Generates with a vLLM engine, which gets a policy's adapter before a rollout if it changed.

    Args:
        policy: Whose weights and role to generate with, until :meth:`sync` names another.
        engine: Serves the policy's base.
        config: Timeouts, penalties and the probe's tolerance.
        offload_base: Move the trainer's base to host memory while an engine that sleeps works.
        model_name: That the base was loaded by.

    Attributes:
        sync_seconds: What the start of the last session took: waking the engine (its share, where
            several generators woke it), bringing it the adapter, the probe.
        probe_difference: What the last probe found, in nats; nan before the first.
    """

    differs_from_trainer = True

    def __init__(
        self,
        policy: Policy,
        engine: Engine,
        config: VLLMConfig,
        *,
        offload_base: bool = False,
        model_name: str | None = None,
    ) -> None:
        self.policy, self.engine, self.config = policy, engine, config
        # It makes room for an engine that sleeps otherwise.
        sleeps, whole = engine.sleep_level > 0, policy.base.partition is None
        self._offload_base = offload_base and sleeps and whole
        self._model_name = model_name
        size = sum(p.nbytes for role in policy.roles for p in policy.parameters(role).values())
        self._files = AdapterFiles(config.lora_staging_dir, size)
        self._served: StagedAdapter | None = None
        self._served_digest: str | None = None
        self._last_probe: dict[str, tuple[probe.Expected, Answer]] = {}
        self._in_session = False
        self.sync_seconds, self.probe_difference = 0.0, float("nan")

    def sync(self, policy: Policy) -> None:
        """Generate with ``policy`` from now on; its adapter goes to the engine when needed.

        Raises:
            RuntimeError: In a session of another policy.
        """
        require(
            not self._in_session or policy is self.policy,
            "within a session the generator keeps its policy; leave it first",
            RuntimeError,
        )
        policy.set_role(policy.role)
        self.policy = policy

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """Wake the engine and bring it the adapter as it is now; may be nested.

        Raises:
            EngineError: The engine died or hangs.
            PolicyMismatchError: What it samples is not what is trained.
        """
        if self._in_session:
            yield
            return
        with _serving([self]):
            yield

    def _planned_sync(self) -> _Sync:
        """What is to be done before this generator may sample; needs the base on its device."""
        tensors, digest = current_tensors(self.policy)
        # A wake is no reason to trust what was served before; from level 2 nothing comes back.
        sleep_level = self.engine.sleep_level
        changed = digest != self._served_digest or sleep_level == 2
        probing = self.config.probes and (changed or sleep_level > 0)
        expected = probe.expected_logprobs(self.policy) if probing else None
        return _Sync(digest, tensors if changed else None, expected)

    def _run_sync(self, sync: _Sync) -> None:
        started = time.perf_counter()
        if sync.tensors is not None:
            self._serve(sync.tensors)
        if sync.expected is not None:
            self._probe(sync.expected)
        self.sync_seconds += time.perf_counter() - started

    def _serve(self, tensors: dict[str, torch.Tensor]) -> None:
        """Have the engine serve a new version of the adapter in place of the last."""
        adapter = self._files.write(self.policy, tensors)
        self.engine.load_adapter(adapter)
        if self._served is not None:
            self.engine.unload_adapter(self._served)
            self._files.remove(self._served)
        self._served = adapter

    def _probe(self, expected: probe.Expected) -> None:
        """Compare what the engine computes with what the trainer does."""
        assert self._served is not None
        base = self.policy.base.model
        sequence = probe.probe_sequence(base.config.get_text_config().vocab_size)
        request = Request(sequence, probe.probe_parameters(), self._served)
        answers = self.engine.complete_on_each(request)
        dtype = str(base.dtype).removeprefix("torch.")
        last = self._last_probe
        self.probe_difference = max(
            probe.compare(name, expected, answer, self.config, dtype, last.get(name))
            for name, answer in answers.items()
        )
        self._last_probe = {name: (expected, answer) for name, answer in answers.items()}

    def generate(
        self,
        prompts: Sequence[torch.Tensor],
        samples_per_prompt: int,
        sampling: SamplingConfig,
        rng: torch.Generator,
    ) -> Completions:
        """Complete ``prompts``; see :class:`agilerl.llm.generation.Generator`.

        Each prompt is one request, so its keys and values are computed once. Its seed is drawn from
        ``rng``: what is sampled depends neither on the order in which the engine works nor, with
        servers, on which of them does.

        Raises:
            ValueError: If a prompt leaves no room for output; or there are stop sequences, but no
                tokenizer beside the model.
            EngineError: The engine died or hangs.
        """
        request = GenerationRequest(prompts, samples_per_prompt, sampling, rng)
        with self.session():
            return _completions(self.engine.complete(self._requests(request)))

    def _requests(self, request: GenerationRequest) -> list[Request]:
        """One request to the engine per prompt; in a session."""
        sampling = request.sampling
        if sampling.stop_sequences:  # which vLLM ignores without a tokenizer
            names = self._model_name, self.policy.base.model.name_or_path
            required_tokenizer("stop_sequences", sampling.stop_sequences, *names)
        limits = [new_token_limit(prompt, sampling) for prompt in request.prompts]
        seeds = [0] * len(limits)
        if not sampling.greedy:
            seeds = torch.randint(2**31, (len(limits),), generator=request.rng).tolist()
        assert self._served is not None
        parameters = partial(sampling_parameters, sampling, self.config, request.samples_per_prompt)
        return [
            Request(prompt.tolist(), parameters(limit, seed), self._served)
            for prompt, limit, seed in zip(request.prompts, limits, seeds, strict=True)
        ]

    def joint_limits(self, sampling: SamplingConfig, samples_per_prompt: int) -> JointLimits | None:
        """See :class:`agilerl.llm.generation.Generator`: the others on its engine."""
        return JointLimits(("vllm", id(self.engine)), None)

    def join(self, others: Sequence[VLLMGenerator]) -> JointVLLMGenerator:
        """See :class:`agilerl.llm.generation.Generator`."""
        return JointVLLMGenerator([self, *others])

    def close(self) -> None:
        """Have the engine forget the adapter; it ends with the last generator that uses it."""
        if self._served is not None:
            served, self._served, self._served_digest = self._served, None, None
            with contextlib.suppress(EngineError):  # it may have died, which was reported
                self.engine.unload_adapter(served)
        self._files.close()
        del self.engine


class JointVLLMGenerator:
    """Generates for several policies in one call of the engine, each request with its adapter.

    The engine runs at most ``vllm_config.max_loras`` adapters at the same time.
    """

    def __init__(self, generators: Sequence[VLLMGenerator]) -> None:
        self._generators, self._in_session = generators, False

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """Wake the engine and bring it all adapters, as :meth:`VLLMGenerator.session` does."""
        with _serving(self._generators):
            self._in_session = True
            try:
                yield
            finally:
                self._in_session = False

    def generate(self, requests: Mapping[int, GenerationRequest]) -> dict[int, Completions]:
        """See :class:`agilerl.llm.generation.JointGenerator`."""
        with contextlib.nullcontext() if self._in_session else self.session():
            of = {n: self._generators[n]._requests(request) for n, request in requests.items()}
            answers = iter(
                self._generators[0].engine.complete([each for some in of.values() for each in some])
            )
            return {n: _completions(list(islice(answers, len(some)))) for n, some in of.items()}


@contextlib.contextmanager
def _serving(generators: Sequence[VLLMGenerator]) -> Iterator[None]:
    """Within it the engine that generators share is awake and serves their adapters as they are."""
    started, engine = time.perf_counter(), generators[0].engine
    # Before the base leaves the device.
    syncs = [generator._planned_sync() for generator in generators]
    offload = any(generator._offload_base for generator in generators)
    base = generators[0].policy.base
    with base.offloaded() if offload else contextlib.nullcontext(), engine.awake():
        for generator in generators:
            generator._served_digest = None  # until all of it has worked
            generator.sync_seconds = (time.perf_counter() - started) / len(generators)
        try:
            for generator, sync in zip(generators, syncs, strict=True):
                generator._run_sync(sync)
                generator._in_session = True
            yield
        finally:
            for generator in generators:
                generator._in_session = False
    for generator, sync in zip(generators, syncs, strict=True):
        generator._served_digest = sync.digest


def _completions(answers: Sequence[Answer]) -> Completions:
    samples = [sample for answer in answers for sample in answer.samples]
    tokens = [torch.tensor(sample.token_ids, dtype=torch.long) for sample in samples]
    if any(sample.logps is None for sample in samples):
        return Completions(tokens)
    return Completions(tokens, [torch.tensor(sample.logps or []) for sample in samples])
