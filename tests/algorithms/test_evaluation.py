"""``agent.test``: what it takes, and that its figures are those of greedy answers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from agent_helpers import TOKENIZER, make_agent, prompts, randomise
from datasets import Dataset

from agilerl.llm_envs import ReasoningGym, TokenObservationWrapper
from agilerl.typing import Act, Evaluation


class Lengths:
    """A user's own environment: the reward is the length of the answer."""

    def evaluate(self, act: Act, loop: int = 1) -> Evaluation:
        asked = prompts("a", "bcd")
        rows = [ids for _ in range(loop) for ids in act(asked).completion_ids]
        return Evaluation(torch.tensor([float(ids.shape[1]) for ids in rows]))


class Counting:
    """A text environment of two turns; every answer earns its length."""

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self.turn = 0
        return f"seed {seed}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.turn += 1
        return "go on", float(len(action)), self.turn == 2, False, {}


class Bare:
    """A multi-turn environment of the user's that has no ``evaluate``."""

    def __init__(self) -> None:
        self._env = TokenObservationWrapper(Counting(), TOKENIZER, max_turns=2)
        self.reset, self.step = self._env.reset, self._env.step
        self.get_episode_data, self.close = self._env.get_episode_data, self._env.close


def test_an_environment_of_the_users_own() -> None:
    agent = randomise(make_agent())
    lengths = [float(ids.shape[1]) for ids in agent.get_action(prompts("a", "bcd"), False)[0]]
    rewards = agent.test(Lengths(), loop=2)
    assert rewards.tolist() == lengths * 2
    assert rewards.dtype.name == "float32"
    assert agent.fitness == [pytest.approx(sum(lengths) / 2)]


def test_the_adapter_is_merged_once_and_nothing_else_changes() -> None:
    """Greedy answers batch by batch, each with a merge of its own, score the same."""
    agent = randomise(make_agent())
    rows = Dataset.from_dict({"question": list("abcdefg"), "answer": [""] * 7})

    def reward_fn(completion: str, answer: str, question: str) -> float:
        return sum(map(ord, completion)) / 1000

    env = ReasoningGym(
        rows, rows, TOKENIZER, reward_fn, [{"role": "user", "content": "{question}"}],
        eval_batch_size=3,
    )  # fmt: skip
    alone = env.evaluate(lambda obs: agent.get_action(obs, training=False))
    assert len(set(alone.rewards.tolist())) > 1
    assert agent.test(env, loop=2).tolist() == alone.rewards.tolist() * 2


def test_a_multi_turn_environment_needs_no_evaluate() -> None:
    agent = randomise(make_agent(max_model_len=256))
    env = TokenObservationWrapper(Counting(), TOKENIZER, max_turns=2)
    assert agent.test(Bare(), loop=3).tolist() == agent.test(env, loop=3).tolist()


def test_what_cannot_be_evaluated_is_refused_by_name() -> None:
    class Wrong:
        def evaluate(self, act: Act, loop: int = 1) -> Any:
            return [1.0]

    agent = make_agent()
    with pytest.raises(TypeError, match=r"of type Counting, which has no evaluate\(act, loop\)"):
        agent.test(Counting())
    with pytest.raises(TypeError, match="evaluate of Wrong returned a list"):
        agent.test(Wrong())
    with pytest.raises(ValueError, match="loop is 0"):
        agent.test(Lengths(), loop=0)
    assert agent.fitness == []
