"""GEM's games, unmodified, through the wrapper and the vector environment."""

from __future__ import annotations

from typing import Any

import gem
import pytest
import torch

from agilerl.algorithms import GRPO
from agilerl.llm_envs import SyncMultiTurnVecEnv, TokenObservationWrapper
from agilerl.testing import byte_tokenizer, tiny_model

TOKENIZER = byte_tokenizer()
GAMES = [
    "game:GuessTheNumber-v0-easy",
    "game:Mastermind-v0-easy",
    "game:Minesweeper-v0-easy",
    "game:Game2048-v0-easy",
    "game:FifteenPuzzle-v0-easy",
    "game:TowerofHanoi-v0-easy",
    "game:Sudoku-v0-easy",
]


def wrapped(game: str, **arguments: Any) -> TokenObservationWrapper:
    return TokenObservationWrapper(gem.make(game), TOKENIZER, **({"max_turns": 5} | arguments))


def some_action(env: Any) -> str:
    try:
        return str(env.sample_random_action())
    except NotImplementedError:
        return "\\boxed{1 1 1}"


@pytest.mark.parametrize("game", GAMES)
def test_a_game_by_a_random_player(game: str) -> None:
    """The row is the text of the conversation, and the rewards are the game's."""
    env = wrapped(game)
    prompt, info = env.reset(seed=1)
    expected, rewards, done = prompt["text"], [], False
    while not done:
        action = some_action(env.env)
        last = expected + action + "<|im_end|>"
        ids = torch.tensor([[*TOKENIZER(action)["input_ids"], TOKENIZER.eos_token_id]])
        prompt, reward, terminated, truncated, info = env.step(
            torch.cat([prompt["input_ids"], ids], dim=1)
        )
        rewards.append(reward)
        done = terminated or truncated
        expected = prompt["text"]
        assert done or expected.endswith(f"{info['suffix']}<|im_end|>\n<|im_start|>assistant\n")
    ids, mask, turn_ids, turn_rewards = env.get_episode_data()
    assert TOKENIZER.decode(ids[0]) == last
    assert turn_rewards.tolist()[: len(rewards)] == pytest.approx(rewards)
    assert int(turn_ids.max()) == len(rewards) - 1
    assert torch.equal(mask, turn_ids >= 0)


@pytest.mark.parametrize("game", GAMES)
def test_a_game_by_a_model_in_groups(game: str) -> None:
    """Groups see the same game; an untrained model's words are an invalid move, not a crash."""
    agent = GRPO(
        actor_network=tiny_model(hidden_size=32, layers=1),
        pad_token_id=TOKENIZER.pad_token_id,
        pad_token=TOKENIZER.pad_token,
        max_output_tokens=4,
        max_model_len=2000,
        group_size=2,
    )
    env = SyncMultiTurnVecEnv(wrapped, 2, 2, env_config={"game": game, "max_model_len": 2000})
    with agent.rollout():
        episodes = env.play(lambda obs: agent.get_action(obs, repeat_prompts=False), [3, 4])
    env.close()
    assert not episodes.failed.any()
    assert episodes.rewards.isfinite().all()
    assert episodes.first_prompts[0] == episodes.first_prompts[1]
    assert episodes.first_prompts[2] == episodes.first_prompts[3]
