"""A base that was made in memory, not loaded from anywhere."""

from __future__ import annotations

import torch
from vllm_agents import agent_on, prompts_of, train

from agilerl.testing import tiny_model


def test_it_is_written_for_vllm_without_the_adapters_on_it() -> None:
    base = tiny_model(hidden_size=128)  # vLLM attends with heads of 32 and more on a CPU
    assert not base.name_or_path
    twin = agent_on(base, use_vllm=False, vllm_config=None)
    agent = agent_on(base)
    train(agent, 2)
    for mine, theirs in zip(
        twin.policy.parameters("actor").values(),
        agent.policy.parameters("actor").values(),
        strict=True,
    ):
        mine.data.copy_(theirs)
    prompts = prompts_of(3, 20)
    for row, expected in zip(
        agent.get_action(prompts, training=False).completion_ids,
        twin.get_action(prompts, training=False).completion_ids,
        strict=True,
    ):
        assert torch.equal(row, expected)
    agent.clean_up()
    twin.clean_up()
