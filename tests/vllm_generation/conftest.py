"""Agents on the bundled model that generate with real vLLM; a worker has one engine for all."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from agilerl.algorithms import GRPO
from agilerl.testing import load_bundled_model
from agilerl.utils.algo_utils import VLLMConfig

HERE = Path(__file__).parent
CONFIG = VLLMConfig(max_num_seqs=64, max_loras=2, startup_timeout=300, request_timeout=120)


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


def agent_on(base: PreTrainedModel, **arguments: Any) -> GRPO:
    given = {
        "pad_token_id": 256,
        "pad_token": "<|pad|>",
        "actor_network": base,
        "use_vllm": True,
        "vllm_config": CONFIG,
        "max_model_len": 128,
        "max_output_tokens": 12,
        "group_size": 4,
        "lr": 5e-3,
        "beta": 0.0,
        "batch_size": 8,
    }
    return GRPO(**(given | arguments))


def prompts_of(*lengths: int, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    rng = torch.Generator().manual_seed(seed)
    rows = [torch.randint(5, 250, (1, length), generator=rng) for length in lengths]
    return [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in rows]


def train(agent: GRPO, steps: int = 1, seed: int = 0) -> dict[str, float]:
    """Steps on random rewards, so that the adapter becomes another one."""
    rng = torch.Generator().manual_seed(seed)
    found: dict[str, float] = {}
    for step in range(steps):
        action = agent.get_action(prompts_of(5, 9, seed=seed + step))
        rewards = torch.rand(2, agent.group_size, generator=rng)
        found = agent.learn((*action, rewards), sampling_logps=action.sampling_logps)
    return found
