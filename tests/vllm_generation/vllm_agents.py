"""Agents of the tests with real vLLM, their prompts and training."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from agilerl.algorithms import GRPO
from agilerl.utils.algo_utils import VLLMConfig

CONFIG = VLLMConfig(max_num_seqs=64, max_loras=2, startup_timeout=300, request_timeout=120)


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


def twin_with_hf(agent: GRPO, base: PreTrainedModel) -> GRPO:
    """An agent with the same adapter that generates with transformers."""
    twin = agent_on(base, use_vllm=False, vllm_config=None)
    for role in agent.policy.roles:
        for mine, theirs in zip(
            twin.policy.parameters(role).values(),
            agent.policy.parameters(role).values(),
            strict=True,
        ):
            mine.data.copy_(theirs)
    return twin
