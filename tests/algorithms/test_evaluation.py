"""``agent.test``: what it takes, and that its figures are those of greedy answers."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from agent_helpers import TOKENIZER, make_agent, prompts, randomise
from datasets import Dataset

from agilerl.algorithms.core import llm_algorithm
from agilerl.algorithms.core.evaluation import scores_of_all_ranks
from agilerl.distributed import Ranks
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
    assert agent.steps == [agent.total_steps]


def test_each_rank_samples_with_random_numbers_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise ranks with the same rows, as episodes of the same seed, would answer the same."""
    agent, answers = randomise(make_agent()), []

    class Kept(Lengths):
        def evaluate(self, act: Act, loop: int = 1) -> Evaluation:
            answers.append(torch.cat(act(prompts("a", "b")).completion_ids).tolist())
            return Evaluation(torch.zeros(1))

    for rank in (0, 0, 1):
        ranks = Ranks()
        ranks.rank = rank
        monkeypatch.setattr(llm_algorithm, "ranks_of", lambda accelerator, ranks=ranks: ranks)
        agent.fitness = []
        agent.test(Kept(), samples=4)
    first, again, other = answers
    assert first == again
    assert first != other


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


class Failing:
    """Two rows are scored, and some more fail."""

    def __init__(self, scored: int = 2, failed: int = 1, limit: float = 1.5) -> None:
        rewards, failures = torch.ones(scored), ["judge is down"] * failed
        self.evaluation = Evaluation(rewards, failures=failures, failure_limit=limit)

    def evaluate(self, act: Act, loop: int = 1) -> Evaluation:
        return self.evaluation


def test_what_failed_leaves_fitness(caplog: pytest.LogCaptureFixture) -> None:
    agent = make_agent()
    with caplog.at_level(logging.WARNING, "agilerl"):
        assert agent.test(Failing()).tolist() == [1.0, 1.0]
    assert agent.fitness == [1.0]
    assert "1 of the evaluation's answers failed. The first: judge is down" in caplog.text
    with pytest.raises(RuntimeError, match=r"2 of the .* answers.*the 1.5 that may.*judge is down"):
        agent.test(Failing(failed=2))
    with pytest.raises(RuntimeError, match=r"none of .* was scored.*judge is down"):
        agent.test(Failing(scored=0, failed=1, limit=2.0))
    assert agent.fitness == [1.0]


class TwoRanks(Ranks):
    """Rank 1 of two, which knows what rank 0 found."""

    rank, world_size = 1, 2

    def __init__(self, other: Evaluation) -> None:
        self.other = other

    def gather(self, value: Any) -> list[Any]:
        other = self.other
        return [(other.rewards.numpy(), other.failures, other.failure_limit), value]


def test_ranks_are_weighed_by_what_is_left() -> None:
    """A rank whose answers all failed has as many to spare as the other did not need."""
    nothing_left = Failing(scored=0, failed=2, limit=1.0).evaluation
    found = scores_of_all_ranks(nothing_left, TwoRanks(Failing(3, 0, 1.5).evaluation))
    assert found.tolist() == [1.0, 1.0, 1.0]
    with pytest.raises(RuntimeError, match="3 of the"):
        scores_of_all_ranks(nothing_left, TwoRanks(Failing(2, 1, 1.5).evaluation))
