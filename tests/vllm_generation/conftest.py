"""Agents on the bundled model that generate with real vLLM; a worker has one engine for all."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel
from vllm_agents import agent_on

from agilerl.algorithms import GRPO
from agilerl.testing import load_bundled_model

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = importlib.util.find_spec("vllm") is None
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.process)
            if missing:
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed"))


@pytest.fixture(scope="session")
def base() -> PreTrainedModel:
    model, _ = load_bundled_model()
    return model


@pytest.fixture(scope="session")
def keeper(base: PreTrainedModel) -> Iterator[GRPO]:
    """An agent that lives as long as the tests, so that the engine does."""
    agent = agent_on(base)
    yield agent
    agent.clean_up()


@pytest.fixture
def make_agent(base: PreTrainedModel, keeper: GRPO) -> Iterator[Callable[..., GRPO]]:
    """Agents on the shared engine, cleaned up after the test."""
    made: list[GRPO] = []

    def make(**arguments: Any) -> GRPO:
        made.append(agent_on(base, **arguments))
        return made[-1]

    yield make
    for agent in made:
        agent.clean_up()
