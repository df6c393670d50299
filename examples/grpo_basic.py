"""The library in one screen: GRPO on a reasoning task with the bundled tiny model.

python examples/grpo_basic.py
"""

from __future__ import annotations

from agilerl.algorithms import GRPO
from agilerl.llm_envs import ReasoningGym
from agilerl.testing import (
    SPELL_BACKWARD_CONVERSATION,
    load_bundled_model,
    spell_backward_correct,
    spell_backward_datasets,
)
from agilerl.training.train_llm import finetune_llm_reasoning

if __name__ == "__main__":
    model, tokenizer = load_bundled_model()
    train, test = spell_backward_datasets(train_size=4096, test_size=200)
    env = ReasoningGym(
        train_dataset=train,
        test_dataset=test,
        tokenizer=tokenizer,
        reward_fn=spell_backward_correct,
        conversation_template=SPELL_BACKWARD_CONVERSATION,
        data_batch_size_per_gpu=32,
    )
    agent = GRPO(
        actor_network=model,
        pad_token_id=tokenizer.pad_token_id,
        pad_token=tokenizer.pad_token,
        batch_size=256,
        group_size=8,
        lr=5e-4,
        beta=0.0,
        max_output_tokens=10,
        gradient_checkpointing=False,
    )
    finetune_llm_reasoning([agent], env=env, max_steps=32 * 60, evaluation_interval=20)
    print(f"held-out accuracy: {agent.fitness[0]:.2f} -> {agent.fitness[-1]:.2f}")
    agent.save_checkpoint("runs/basic_checkpoint")
