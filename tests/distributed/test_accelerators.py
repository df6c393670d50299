"""Accelerators of a single process, and those that are refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from agents_and_batches import data, make_agent, weights

from agilerl.llm.engine.local import LocalEngine


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    AcceleratorState._reset_state(reset_partial_state=True)
    yield Accelerator(cpu=True, gradient_accumulation_steps=4)
    AcceleratorState._reset_state(reset_partial_state=True)


def test_one_process_with_an_accelerator_is_as_without(accelerator: Accelerator) -> None:
    agent, alone = make_agent(accelerator), make_agent()
    assert type(agent.engine) is LocalEngine
    assert agent.device == "cpu"
    for each in (agent, alone):
        data().learned_by(each)
        each.unwrap_models()
        data().learned_by(each)  # nobody to learn apart from
        each.wrap_models()
        data().learned_by(each)
    assert torch.equal(weights(agent), weights(alone))


def test_accumulation_steps_count_without_a_micro_batch_size(accelerator: Accelerator) -> None:
    agent = make_agent(accelerator, batch_size=10, micro_batch_size_per_gpu=None)
    assert agent.update_config().micro_batch_size == 3
    agent.micro_batch_size_per_gpu = 64
    assert agent.update_config().micro_batch_size == 10


def test_mixed_precision_has_no_effect_and_says_so() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    mixed = Accelerator(cpu=True, mixed_precision="bf16")
    with pytest.warns(UserWarning, match=r"no effect: mixed_precision"):
        make_agent(mixed)
    AcceleratorState._reset_state(reset_partial_state=True)
