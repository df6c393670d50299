"""Tiny real agents and a fixed batch of rollouts to train them on."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig
from transformers import PreTrainedModel

from agilerl.algorithms import GRPO
from agilerl.testing import byte_tokenizer, tiny_model

TOKENIZER = byte_tokenizer()
SETTINGS: dict[str, Any] = {
    "pad_token_id": TOKENIZER.pad_token_id,
    "pad_token": TOKENIZER.pad_token,
    "max_output_tokens": 6,
    "max_model_len": 64,
    "group_size": 4,
    "batch_size": 4,
    "update_epochs": 2,
    "lr": 1e-2,
    "gradient_checkpointing": False,
}
LENGTHS = (6, 3, 5, 2, 4, 6, 1, 6)
"""Generated tokens of each row of :func:`fixed_rollouts`."""


def small_model(**changes: Any) -> PreTrainedModel:
    return tiny_model(**({"hidden_size": 32, "layers": 2} | changes))


def make_agent(
    cls: type[GRPO] = GRPO, model: PreTrainedModel | None = None, **changes: Any
) -> GRPO:
    """An agent on a model of its own, unless one is given or named."""
    if model is None and "actor_network" not in changes and "model_name" not in changes:
        model = small_model()
    network = {} if model is None else {"actor_network": model}
    return cls(**(SETTINGS | network | changes))


def lora(**changes: Any) -> LoraConfig:
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    return LoraConfig(task_type="CAUSAL_LM", **(settings | changes))


def prompts(*texts: str) -> list[dict[str, Any]]:
    return [dict(TOKENIZER(text, return_tensors="pt")) | {"text": text} for text in texts]


@torch.no_grad()
def randomise(agent: GRPO, role: str = "actor", seed: int = 1, scale: float = 0.1) -> GRPO:
    """Give an adapter random weights, so that it differs from the base."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in agent.policy.parameters(role).values():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return agent


def weights(agent: GRPO, role: str = "actor") -> torch.Tensor:
    """All weights of a role's adapter in one vector."""
    return torch.cat([p.detach().flatten() for p in agent.policy.parameters(role).values()]).clone()


def fixed_rollouts() -> tuple[torch.Tensor, torch.Tensor]:
    """Two prompts of five tokens with four completions each, of the lengths above."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randint(97, 123, (2, 5), generator=generator).repeat_interleave(4, 0)
    rest = torch.randint(97, 123, (8, 6), generator=generator)
    position = torch.arange(10)
    mask = (position >= 4) & (position < 4 + torch.tensor(LENGTHS)[:, None])
    return torch.cat([start, rest], dim=1), mask


REWARDS = torch.tensor([[1.0, 0.0, 0.5, 0.2], [0.0, 0.3, 2.0, 0.1]])
FLAT = REWARDS.flatten()


def train(agent: GRPO, rewards: Any = FLAT, **extra: Any) -> dict[str, float]:
    return agent.learn((*fixed_rollouts(), rewards), **extra)


def trained(
    cls: type[GRPO] = GRPO, rewards: Any = FLAT, extra: Any = None, **changes: Any
) -> tuple[torch.Tensor, dict[str, float]]:
    """Actor weights and metrics after one ``learn`` of a fresh agent whose actor has moved already.

    Two epochs of two mini-batches: at a single optimizer step all losses are the same update.
    """
    agent = randomise(make_agent(cls, **changes))
    metrics = train(agent, rewards, **(extra or {}))
    return weights(agent), metrics
