"""Builds an agent's generator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from agilerl.distributed import Ranks
from agilerl.llm.generation import Generator
from agilerl.llm.generation.hf import HFGenerator
from agilerl.llm.generation.stop_sequences import required_tokenizer
from agilerl.llm.generation.vllm.build import build_vllm_generator
from agilerl.llm.generation.vllm.config import VLLMConfig
from agilerl.llm.policy import Policy


@dataclass(frozen=True)
class GeneratorSettings:
    """What of an agent's arguments its generator is built from."""

    backend: str = "hf"
    """A key of :data:`GENERATORS`."""
    vllm: VLLMConfig | None = None
    """None: the defaults."""
    model_name: str | None = None
    """That the base was loaded by."""
    stop_sequences: tuple[str, ...] = ()
    max_model_len: int | None = None
    """Longest row; None: what the model's configuration says."""
    offload_base: bool = False
    """Move the trainer's base to host memory while another model generates."""
    seed: int = 0


GENERATORS: dict[str, Callable[[Policy, GeneratorSettings, Ranks], Generator]] = {
    "hf": lambda policy, settings, ranks: HFGenerator(policy, settings.model_name),
    "vllm": lambda policy, settings, ranks: build_vllm_generator(
        policy,
        settings.vllm or VLLMConfig(),
        ranks,
        model_name=settings.model_name,
        max_model_len=settings.max_model_len,
        offload_base=settings.offload_base,
        seed=settings.seed,
    ),
}
"""By backend. What a backend demands of a model is checked when its generator is built."""


def build_generator(policy: Policy, settings: GeneratorSettings, ranks: Ranks) -> Generator:
    """The generator for an agent's arguments; all ranks together.

    Raises:
        ValueError: If the backend cannot serve the policy's model, or the model has no tokenizer
            to find stop sequences with.
        EngineError: If an engine does not start.
    """
    if settings.stop_sequences:
        names = settings.model_name, policy.base.model.name_or_path
        required_tokenizer("stop_sequences", settings.stop_sequences, *names)
    return GENERATORS[settings.backend](policy, settings, ranks)
