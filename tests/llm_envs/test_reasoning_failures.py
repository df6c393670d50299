"""Completions whose rewards fail: in training steps, and in evaluations."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agilerl.llm_envs import ReasoningGym, RewardError
from agilerl.typing import ActionResult, ReasoningPrompts

MakeEnv = Callable[..., ReasoningGym]
Complete = Callable[..., list[torch.Tensor]]


def length(completion: str) -> float:
    return float(len(completion))


def fails_on_b(completion: str) -> float:
    if "b" in completion:
        raise ConnectionError("no judge")
    return 1.0


TEXTS = [["a", "b"], ["aa", "aaa"], ["ab", "a"]]


def test_what_was_dropped_is_said_beside_the_rewards(
    make_env: MakeEnv, complete: Complete, caplog: pytest.LogCaptureFixture
) -> None:
    env = make_env(reward_fn=[length, fails_on_b], on_failure="drop")
    assert env.last_sample_mask is None and env.last_failures == []
    with caplog.at_level(logging.WARNING, "agilerl"):
        _, rewards = env.step(complete(env.reset(), TEXTS))
    assert rewards.tolist() == [[2.0, 0.0], [3.0, 4.0], [0.0, 2.0]]
    assert env.last_sample_mask is not None
    assert env.last_sample_mask.tolist() == [[True, False], [True, True], [False, True]]
    reason = "reward_fn 'fails_on_b' failed with ConnectionError: no judge"
    assert env.last_failures == [[None, reason], [None, None], [reason, None]]
    assert env.last_rewards["length"].tolist() == [[1.0, 1.0], [2.0, 3.0], [2.0, 1.0]]
    assert math.isnan(env.last_rewards["fails_on_b"][0, 1])
    (record,) = caplog.records  # one for the step
    assert record.getMessage().startswith(
        f"2 of 6 completions failed and are left out. The first: {reason}"
    )
    assert "completion: 'b'" in record.getMessage()

    env.step(complete(env.reset(), [["a", "a"]] * 3))
    assert bool(env.last_sample_mask.all())
    assert env.last_failures == [[None, None]] * 3
    assert len(caplog.records) == 1


def test_too_many_failures_end_the_step_and_lose_nothing(
    make_env: MakeEnv, complete: Complete
) -> None:
    env = make_env(reward_fn=fails_on_b, on_failure="drop", max_failure_share=0.3)
    prompts, questions = env.reset(), env.questions
    with pytest.raises(RewardError, match=r"(?s)2 of 6 completions .*=0.3.*no judge.*'b'"):
        env.step(complete(prompts, TEXTS))
    assert env.questions == questions


def answers(complete: Complete, *texts: str) -> Callable[[list[ReasoningPrompts]], ActionResult]:
    """Answers the test rows with these texts, in their order."""
    waiting = list(texts)

    def act(prompts: list[ReasoningPrompts]) -> ActionResult:
        return ActionResult(complete(prompts, [[waiting.pop(0)] for _ in prompts]), [])

    return act


def test_an_evaluation_is_over_what_was_scored(make_env: MakeEnv, complete: Complete) -> None:
    """Not by its batches: all that the last one holds has failed."""
    env = make_env(reward_fn=[length, fails_on_b], on_failure="drop", eval_batch_size=2)
    waiting = env.reset()
    evaluation = env.evaluate(answers(complete, "a", "b", "aa", "a", "b"))
    assert evaluation.rewards.tolist() == [2.0, 3.0, 2.0]
    assert evaluation.completions == ["a", "aa", "a"]
    assert evaluation.questions == ["100+100?", "102+102?", "103+103?"]
    assert evaluation.answers == ["200", "204", "206"]
    assert len(evaluation.failures) == 2
    assert "no judge" in evaluation.failures[0]
    assert evaluation.failure_limit == 2.5
    assert [p["text"] for p in env.reset()] == [p["text"] for p in waiting]


def test_a_failure_that_has_a_reward_stays(make_env: MakeEnv, complete: Complete) -> None:
    env = make_env(reward_fn=fails_on_b, on_failure=-1.0)
    evaluation = env.evaluate(answers(complete, *"abaab"))
    assert evaluation.rewards.tolist() == [1.0, -1.0, 1.0, 1.0, -1.0]
    assert len(evaluation.questions) == 5
    assert len(evaluation.failures) == 2


@pytest.mark.parametrize("on_failure", ["drop", 0.0])
def test_an_evaluation_that_mostly_fails_ends_early(
    make_env: MakeEnv, complete: Complete, on_failure: Any
) -> None:
    env = make_env(reward_fn=fails_on_b, on_failure=on_failure, eval_batch_size=2)
    with pytest.raises(RewardError, match=r"evaluation 3 of 5 completions .*0.5.*no judge") as info:
        env.evaluate(answers(complete, *"bbba"))
    assert "completion: 'b'" in str(info.value)
    assert info.value.__cause__ is not None
    with pytest.raises(RewardError, match="no judge"):
        make_env(reward_fn=fails_on_b).evaluate(answers(complete, *"aaaab"))


def test_a_process_of_several_does_not_decide_alone(make_env: MakeEnv, complete: Complete) -> None:
    """``agent.test`` does, by the failures of all."""
    second = SimpleNamespace(process_index=1, num_processes=2)
    env = make_env(reward_fn=fails_on_b, on_failure="drop", accelerator=second)
    evaluation = env.evaluate(answers(complete, "b", "b"))
    assert evaluation.rewards.shape == (0,)
    assert len(evaluation.failures) == 2
    assert evaluation.failure_limit == 1.0
