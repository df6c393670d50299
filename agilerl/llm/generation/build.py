"""Which generator an agent gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from agilerl.llm.generation import Generator
from agilerl.llm.generation.hf import HFGenerator
from agilerl.llm.policy import Policy

Backend = Literal["hf"]

GENERATORS: dict[Backend, Callable[[Policy], Generator]] = {"hf": HFGenerator}
"""By backend. What a backend demands of a model is checked when its generator is built."""


def build_generator(policy: Policy, backend: Backend = "hf") -> Generator:
    """The generator of a backend, in sync with a policy.

    Raises:
        ValueError: If the backend cannot serve the policy's model.
    """
    return GENERATORS[backend](policy)
