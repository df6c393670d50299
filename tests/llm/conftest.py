"""A policy in float64, made once and overwritten with the same numbers for every test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from model_families import make_family
from rollout_helpers import (
    lora,
    random_policy,
    randomise_all,
)

from agilerl.llm.policy import Policy


@pytest.fixture(scope="module")
def shared_policy(request: pytest.FixtureRequest) -> Iterator[Policy]:
    """GPT-2 computes in float64 throughout; families with RMSNorm have a float32 step inside."""
    family = getattr(request, "param", "gpt2")
    made = random_policy(make_family(family, torch.float64), lora(fan_in_fan_out=family == "gpt2"))
    assert made.base.row_layout == "packed"
    yield made
    made.release()


@pytest.fixture
def policy(shared_policy: Policy) -> Policy:
    randomise_all(shared_policy)
    return shared_policy
