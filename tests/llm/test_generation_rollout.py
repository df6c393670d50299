"""``agent.rollout()``: several turns with the same weights, from the agent's side."""

from __future__ import annotations

import pytest
import torch

from agilerl.algorithms import GRPO
from agilerl.testing import byte_tokenizer, tiny_model

TOKENIZER = byte_tokenizer()


def agent_of() -> GRPO:
    made = GRPO(
        pad_token_id=TOKENIZER.pad_token_id,
        pad_token=TOKENIZER.pad_token,
        actor_network=tiny_model(hidden_size=32),
        max_output_tokens=5,
        max_model_len=128,
        gradient_checkpointing=False,
    )
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made.policy.parameters().values():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=rng))
    return made


def three_turns(agent: GRPO, training: bool) -> list[torch.Tensor]:
    agent.rng.manual_seed(0)
    rows = [torch.tensor([ids]) for ids in TOKENIZER(["one", "two, longer"])["input_ids"]]
    for _ in range(3):
        obs = [
            {"input_ids": ids, "attention_mask": torch.ones_like(ids), "text": ""} for ids in rows
        ]
        result = agent.get_action(obs, training=training, repeat_prompts=False)
        rows = [torch.cat([ids, torch.tensor([[65, 66]])], 1) for ids in result.completion_ids]
    return rows


@pytest.mark.parametrize("training", [True, False])
def test_turns_in_a_rollout_are_those_outside(training: bool) -> None:
    agent, widths = agent_of(), []
    outside = three_turns(agent, training)
    handle = agent.policy.base.decoder.register_forward_pre_hook(
        lambda _, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    with agent.rollout(), agent.rollout():
        inside = three_turns(agent, training)
    handle.remove()
    assert all(torch.equal(a, b) for a, b in zip(outside, inside, strict=True))
    assert sorted(widths, reverse=True)[1] < 11  # one whole read, of the first prompts


def test_the_adapter_is_merged_once_and_taken_out() -> None:
    agent = agent_of()

    def layers() -> list[torch.nn.Module]:
        return [m for m in agent.policy.base.model.modules() if isinstance(m, torch.nn.Linear)]

    before, inside = layers(), []
    with agent.rollout():
        inside.append(layers())
        with agent.rollout():
            three_turns(agent, True)
            inside.append(layers())
        inside.append(layers())
        three_turns(agent, True)
        inside.append(layers())
    assert all(merged == inside[0] for merged in inside)
    assert len(inside[0]) < len(before)  # no LoRA branches
    assert layers() == before
