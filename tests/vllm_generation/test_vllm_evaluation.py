"""Evaluations that a real engine answers: sampled ones, and one that is stopped."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from agilerl.algorithms import GRPO
from agilerl.algorithms.core.evaluation import EvaluationStopped
from agilerl.llm_envs import ReasoningGym
from agilerl.testing import byte_tokenizer
from agilerl.training.evaluation import WatchedEnv
from agilerl.training.protocols import EvaluationPlan


def make_env() -> ReasoningGym:
    return ReasoningGym(
        [{"question": "t"}],
        [{"question": question} for question in ("abc", "dog", "sun")],
        byte_tokenizer(),
        lambda completion: float(sum(completion.encode()) % 97),
        [{"role": "user", "content": "{question}"}],
        eval_batch_size=1,
    )


def test_sampled_answers(make_agent: Callable[..., GRPO]) -> None:
    env = make_env()
    sampled = [make_agent(temperature=1.2).test(env, samples=3) for _ in range(2)]
    assert sampled[0].shape == (9,)
    assert sampled[0].tolist() == sampled[1].tolist()
    assert len(set(sampled[0].tolist())) > 3
    cold = make_agent(temperature=1e-3)
    greedy = cold.test(env)
    assert cold.test(env, samples=2).reshape(3, 2).T.tolist() == [greedy.tolist()] * 2


def test_a_stopped_evaluation_leaves_the_engine_usable(make_agent: Callable[..., GRPO]) -> None:
    agent, env = make_agent(), make_env()
    whole = agent.test(env)
    calls: list[None] = []

    def stop_in_second() -> None:
        calls.append(None)
        if len(calls) == 2:
            raise EvaluationStopped

    with pytest.raises(EvaluationStopped):
        agent.test(WatchedEnv(env, EvaluationPlan(stop_in_second)))
    assert len(agent.fitness) == 1
    assert agent.test(env).tolist() == whole.tolist()
