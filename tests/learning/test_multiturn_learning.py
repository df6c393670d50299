"""The bundled player learns to read the hints over several turns, with either kind of credit."""

from __future__ import annotations

from pathlib import Path

import pytest
from peft import LoraConfig

from agilerl.algorithms import GRPO
from agilerl.llm_envs import SyncMultiTurnVecEnv, TokenObservationWrapper
from agilerl.testing import guess_the_number_env, load_bundled_model
from agilerl.training.train_llm import finetune_llm_multiturn

HELD_OUT_SEEDS = range(1_000_000_000, 1_000_000_064)


@pytest.mark.slow
@pytest.mark.parametrize("credit", ["trajectory", "turn"])
def test_more_games_are_won(credit: str, tmp_path: Path) -> None:
    model, tokenizer = load_bundled_model("guess_the_number")
    agent = GRPO(
        actor_network=model,
        pad_token_id=tokenizer.pad_token_id,
        pad_token=tokenizer.pad_token,
        advantage_granularity=credit,
        lora_config=LoraConfig(r=32, lora_alpha=64, target_modules="all-linear"),
        batch_size=128,
        group_size=8,
        lr=1e-3,
        beta=0.0,
        max_grad_norm=1.0,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        max_output_tokens=12,
        max_model_len=512,
        gradient_checkpointing=False,
    )

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
        checkpoint_path=tmp_path / "run",
        verbose=False,
    )
    assert share_won() > before + 0.1
