"""Short training runs of the bundled models, with any generator, that must show learning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig

from agilerl.algorithms import GRPO
from agilerl.llm_envs import ReasoningGym, SyncMultiTurnVecEnv, TokenObservationWrapper
from agilerl.testing import (
    SPELL_BACKWARD_CONVERSATION,
    guess_the_number_env,
    load_bundled_model,
    spell_backward_correct,
    spell_backward_datasets,
)
from agilerl.training.train_llm import finetune_llm_multiturn

SETTINGS: dict[str, Any] = {
    "group_size": 8,
    "lr": 1e-3,
    "beta": 0.0,
    "max_grad_norm": 1.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "gradient_checkpointing": False,
}
ITERATIONS = 40
HELD_OUT = 150
HELD_OUT_SEEDS = range(1_000_000_000, 1_000_000_064)


def speller(agent_class: type[GRPO] = GRPO, **arguments: Any) -> GRPO:
    """An agent on the bundled model for :func:`learn_to_spell`."""
    model, tokenizer = load_bundled_model()
    settings = SETTINGS | {
        "actor_network": model,
        "pad_token_id": tokenizer.pad_token_id,
        "pad_token": tokenizer.pad_token,
        "batch_size": 64,
        "max_output_tokens": 10,
    }
    return agent_class(**(settings | arguments))


def learn_to_spell(agent: GRPO, *, shuffle: bool = False) -> tuple[float, float]:
    """Share of right answers to held-out questions, sampled, before and after training."""
    _, tokenizer = load_bundled_model()
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
    before = sampled_accuracy(agent, env)
    rng = torch.Generator().manual_seed(0)
    prompts = env.reset()
    for _ in range(ITERATIONS):
        action = agent.get_action(prompts)
        prompts, rewards = env.step(action.completion_ids)
        if shuffle:
            order = torch.randperm(rewards.numel(), generator=rng)
            rewards = rewards.flatten()[order].view_as(rewards)
        agent.learn((*action, rewards), sampling_logps=action.sampling_logps)
    after = sampled_accuracy(agent, env)
    env.close()
    return before, after


def sampled_accuracy(agent: GRPO, env: ReasoningGym) -> float:
    """Mean over eight samples per held-out question: far less noisy than one greedy answer."""
    with env.eval_mode():
        result = agent.get_action(env.reset())
        return float(env.step(result.completion_ids)[1].mean())


def player(credit: str = "trajectory", **arguments: Any) -> GRPO:
    """An agent on the bundled model for :func:`learn_to_guess`."""
    model, tokenizer = load_bundled_model("guess_the_number")
    settings = SETTINGS | {
        "actor_network": model,
        "pad_token_id": tokenizer.pad_token_id,
        "pad_token": tokenizer.pad_token,
        "advantage_granularity": credit,
        "lora_config": LoraConfig(r=32, lora_alpha=64, target_modules="all-linear"),
        "batch_size": 128,
        "max_output_tokens": 12,
        "max_model_len": 512,
    }
    return GRPO(**(settings | arguments))


def learn_to_guess(agent: GRPO, folder: Path) -> tuple[float, float]:
    """Share of held-out games won, sampled, before and after training."""
    _, tokenizer = load_bundled_model("guess_the_number")

    def make_env() -> TokenObservationWrapper:
        return TokenObservationWrapper(guess_the_number_env(), tokenizer, max_turns=3)

    def share_won() -> float:
        """Sampled, four times each, so that no single likeliest guess decides it."""
        env = SyncMultiTurnVecEnv(make_env, len(HELD_OUT_SEEDS), 4, env_config={})
        with agent.rollout():
            episodes = env.play(
                lambda prompts: agent.get_action(prompts, repeat_prompts=False), HELD_OUT_SEEDS
            )
        env.close()
        return float((episodes.returns >= 1.0).float().mean())

    before = share_won()
    finetune_llm_multiturn(
        [agent],
        max_turns=3,
        env_factory=make_env,
        max_steps=None,
        num_epochs=1,
        train_seeds=16 * 12,
        groups_per_iteration=16,
        evaluation_episodes=1,
        checkpoint_path=folder,
        verbose=False,
    )
    return before, share_won()
