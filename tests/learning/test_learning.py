"""The bundled model learns its task, and does not when its rewards are shuffled."""

from __future__ import annotations

import pytest
import torch

from agilerl.algorithms import CISPO, GRPO, GSPO
from agilerl.llm_envs import ReasoningGym
from agilerl.testing import (
    SPELL_BACKWARD_CONVERSATION,
    load_bundled_model,
    spell_backward_correct,
    spell_backward_datasets,
)

pytestmark = pytest.mark.slow

ITERATIONS = 40
HELD_OUT = 150


def train(
    agent_class: type[GRPO], clip_coef: object, *, shuffle: bool = False
) -> tuple[float, float]:
    """Share of right answers to held-out questions, sampled, before and after training."""
    model, tokenizer = load_bundled_model()
    train_set, test_set = spell_backward_datasets(train_size=16 * ITERATIONS, test_size=HELD_OUT)
    env = ReasoningGym(
        train_dataset=train_set,
        test_dataset=test_set,
        tokenizer=tokenizer,
        reward_fn=spell_backward_correct,
        conversation_template=SPELL_BACKWARD_CONVERSATION,
        data_batch_size_per_gpu=16,
        eval_batch_size=HELD_OUT,
    )
    agent = agent_class(
        actor_network=model,
        pad_token_id=tokenizer.pad_token_id,
        pad_token=tokenizer.pad_token,
        batch_size=64,
        group_size=8,
        lr=1e-3,
        beta=0.0,
        clip_coef=clip_coef,
        max_grad_norm=1.0,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        max_output_tokens=10,
        gradient_checkpointing=False,
    )
    before = sampled_accuracy(agent, env)
    rng = torch.Generator().manual_seed(0)
    prompts = env.reset()
    for _ in range(ITERATIONS):
        ids, masks = agent.get_action(prompts)
        prompts, rewards = env.step(ids)
        if shuffle:
            order = torch.randperm(rewards.numel(), generator=rng)
            rewards = rewards.flatten()[order].view_as(rewards)
        agent.learn((ids, masks, rewards))
    after = sampled_accuracy(agent, env)
    env.close()
    return before, after


def sampled_accuracy(agent: GRPO, env: ReasoningGym) -> float:
    """Mean over eight samples per held-out question: far less noisy than one greedy answer."""
    with env.eval_mode():
        result = agent.get_action(env.reset())
        return float(env.step(result.completion_ids)[1].mean())


@pytest.mark.parametrize(
    ("agent_class", "clip_coef"), [(GRPO, 0.2), (GSPO, (0.8, 1.25)), (CISPO, (0.0, 5.0))]
)
def test_reward_rises(agent_class: type[GRPO], clip_coef: object) -> None:
    before, after = train(agent_class, clip_coef)
    assert after > before + 0.03


def test_shuffled_rewards_teach_nothing() -> None:
    before, after = train(GRPO, 0.2, shuffle=True)
    assert after < before + 0.02
