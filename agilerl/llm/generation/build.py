"""Builds an agent's generator."""

from __future__ import annotations

from collections.abc import Callable

from agilerl.llm.generation import Generator
from agilerl.llm.generation.hf import HFGenerator
from agilerl.llm.policy import Policy

GENERATORS: dict[str, Callable[[Policy], Generator]] = {"hf": HFGenerator}
"""By backend. What a backend demands of a model is checked when its generator is built."""


def build_generator(policy: Policy, *, use_vllm: bool = False) -> Generator:
    """The generator for an agent's arguments, in sync with its policy.

    Raises:
        ValueError: If the backend cannot serve the policy's model.
    """
    return GENERATORS["vllm" if use_vllm else "hf"](policy)
