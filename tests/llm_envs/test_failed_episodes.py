"""Episodes whose environments fail: dropped, given a reward or raised; tried again; counted."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from test_vector import Game, act, seeds_of

from agilerl.llm_envs import (
    EVALUATION_SEED_START,
    EnvironmentFailure,
    SyncMultiTurnVecEnv,
    TokenObservationWrapper,
    ToolEnv,
)
from agilerl.testing import byte_tokenizer, calculator
from agilerl.typing import ActionResult, ReasoningPrompts

HELD_OUT = EVALUATION_SEED_START


def failing(seeds: Iterable[int]) -> Callable[[], Game]:
    """Environments that fail in the first turn of these seeds."""
    bad = set(seeds)

    class Fails(Game):
        def step(self, full_completion_ids: torch.Tensor) -> Any:
            if self.seed in bad:
                raise ConnectionError("the game server is gone")
            return super().step(full_completion_ids)

    return Fails


def test_they_are_dropped_unless_said_otherwise(caplog: pytest.LogCaptureFixture) -> None:
    env = SyncMultiTurnVecEnv(failing([8]), 2, 2)
    with caplog.at_level(logging.WARNING, "agilerl"):
        episodes = env.play(act, [8, 5])
    assert episodes.sample_mask.tolist() == [False, False, True, True]
    assert episodes.failed.tolist() == [True, True, False, False]
    reason = "in turn 0: ConnectionError: the game server is gone"
    assert episodes.failures == [reason, reason, None, None]
    (record,) = caplog.records
    assert "2 of 4 episodes failed and are left out. The first: episode 0 (" in record.message
    assert (env.failures, env.timeouts) == (2, 0)
    assert env.play(act, [5, 5]).sample_mask.all()
    assert env.failures == 2


def test_a_failure_with_a_reward_stays() -> None:
    episodes = SyncMultiTurnVecEnv(failing([8]), 2, on_failure=-2.0).play(act, [8, 5])
    assert episodes.sample_mask.all()
    assert episodes.failed.tolist() == [True, False]
    assert float(episodes.returns[0]) == -2.0


def test_the_first_is_raised() -> None:
    env = SyncMultiTurnVecEnv(failing([8]), 4, on_failure="raise", max_workers=1)
    with pytest.raises(EnvironmentFailure, match=r"1 of 4 episodes have failed\. The first: ") as e:
        env.play(act, [8, 5, 5, 5])
    assert isinstance(e.value.__cause__, ConnectionError)


@pytest.mark.parametrize(("share", "ends"), [(0.25, False), (0.24, True), (0.0, True)])
def test_the_share_that_may_fail(share: float, ends: bool) -> None:
    env = SyncMultiTurnVecEnv(failing([8]), 4, max_failure_share=share)
    if ends:
        with pytest.raises(EnvironmentFailure, match=f"1 of 4 .*max_failure_share={share:g}"):
            env.play(act, [8, 5, 5, 5])
    else:
        assert env.play(act, [8, 5, 5, 5]).sample_mask.sum() == 3
    everything = SyncMultiTurnVecEnv(failing([8]), 2, max_failure_share=1.0)
    assert not everything.play(act, [8, 8]).sample_mask.any()


@pytest.mark.parametrize("where", ["make", "reset"])
def test_a_beginning_is_tried_again_in_a_new_environment(where: str) -> None:
    made: list[Any] = []

    class Flaky(Game):
        number = 0

        def reset(self, seed: int | None = None) -> Any:
            if where == "reset" and self.number in (1, 3):
                raise ConnectionError("no server yet")
            return super().reset(seed)

    def make() -> Game:
        env = Flaky()
        env.number = len(made)
        made.append(env)
        if where == "make" and env.number in (1, 3):
            raise ConnectionError("no server yet")
        return env

    env = SyncMultiTurnVecEnv(make, 3, failure_retries=2, max_workers=1)
    prompts = env.reset([3, 4, 5])
    assert seeds_of(prompts) == [3, 4, 5]
    assert len(made) == 5  # the fourth took the second one's place, and the fifth its
    while prompts:
        prompts = env.step(act(prompts).completion_ids)
    assert not env.episodes().failed.any()
    assert (env.failures, env.timeouts) == (0, 0)

    made.clear()
    once = SyncMultiTurnVecEnv(make, 3, failure_retries=1, max_workers=1)
    assert once.play(act, [3, 4, 5]).failed.tolist() == [False, True, False]
    assert once.failures == 1


def test_a_dead_beginning_is_an_error_after_its_retries() -> None:
    attempts = []

    class Dead(Game):
        def reset(self, seed: int | None = None) -> Any:
            attempts.append(seed)
            raise ConnectionError("no server")

    env = SyncMultiTurnVecEnv(Dead, 4, failure_retries=2)
    with pytest.raises(EnvironmentFailure, match="3 of 4 episodes have failed"):
        env.reset([1, 2, 3, 4])
    assert 4 + 4 + 3 <= len(attempts) <= 4 + 4 + 4  # the last may have begun meanwhile
    assert env.failures == 3


def test_a_step_is_not_tried_again() -> None:
    env = SyncMultiTurnVecEnv(failing([8]), 2, failure_retries=5)
    assert env.play(act, [8, 5]).failed.tolist() == [True, False]


def evaluation_env(bad: Iterable[int], **options: Any) -> SyncMultiTurnVecEnv:
    """Six episodes, two at a time; those of some numbers fail."""
    factory = failing([HELD_OUT + number for number in bad])
    return SyncMultiTurnVecEnv(factory, 2, evaluation_episodes=6, **options)


def test_an_evaluation_is_over_what_was_played(caplog: pytest.LogCaptureFixture) -> None:
    """All of its last batch have failed."""
    whole = evaluation_env([]).evaluate(act)
    with caplog.at_level(logging.WARNING, "agilerl"):
        evaluation = evaluation_env([4, 5]).evaluate(act, loop=2)
    assert evaluation.rewards.tolist() == whole.rewards.tolist()[:4] * 2
    assert evaluation.questions == whole.questions[:4] * 2
    assert evaluation.completions == whole.completions[:4] * 2
    assert evaluation.failures == ["in turn 0: ConnectionError: the game server is gone"] * 4
    assert evaluation.failure_limit == 6.0
    assert not caplog.records  # agent.test says it, once

    assert len(evaluation_env([4, 5], on_failure=0.0).evaluate(act).rewards) == 6
    for on_failure in ("drop", 0.0):
        with pytest.raises(EnvironmentFailure, match=r"4 of 6 episodes .*max_failure_share"):
            evaluation_env([0, 1, 2, 3, 4, 5], on_failure=on_failure).evaluate(act)
    with pytest.raises(EnvironmentFailure, match=r"1 of 6 episodes have failed\."):
        evaluation_env([5], on_failure="raise").evaluate(act)


def test_an_evaluation_that_mostly_fails_is_cancelled_over_its_batches() -> None:
    steps = []

    class Gone(Game):
        def step(self, full_completion_ids: torch.Tensor) -> Any:
            steps.append(self.seed)
            if len(steps) > 20:
                time.sleep(0.05)
            raise ConnectionError("the game server is gone")

    env = SyncMultiTurnVecEnv(Gone, 20, evaluation_episodes=40, max_workers=1)
    with pytest.raises(EnvironmentFailure, match="21 of 40 episodes"):
        env.evaluate(act)
    assert 21 <= len(steps) < 30  # some may have begun when the next one failed


def test_a_process_of_which_nothing_is_left_does_not_decide_alone() -> None:
    env = evaluation_env([1, 4], process_index=1, num_processes=3)
    evaluation = env.evaluate(act)
    assert (len(evaluation.rewards), len(evaluation.failures)) == (0, 2)
    assert evaluation.failure_limit == 1.0


def test_a_tools_reward_that_fails_drops_the_episode() -> None:
    tokenizer = byte_tokenizer()

    def reward_fn(completion: str, answer: str, question: str) -> float:
        if answer == "4":
            raise ConnectionError("judge is down")
        return float(completion == answer)

    def make() -> TokenObservationWrapper:
        tasks = [{"question": "2+2?", "answer": "4"}, {"question": "2+3?", "answer": "5"}]
        env = ToolEnv(tasks, {"calculator": calculator}, reward_fn, failure_retries=1)
        return TokenObservationWrapper(env, tokenizer, max_turns=2)

    def answer(prompts: list[ReasoningPrompts]) -> ActionResult:
        ids = torch.tensor([tokenizer.encode("5")])
        return ActionResult([torch.cat([p["input_ids"], ids], 1) for p in prompts], [])

    episodes = SyncMultiTurnVecEnv(make, 2).play(answer, [0, 1])
    assert episodes.sample_mask.tolist() == [False, True]
    reason = "RewardError: reward_fn failed with ConnectionError: judge is down"
    assert episodes.failures[0] == f"in turn 0: {reason}"
    assert episodes.returns.tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"on_failure": "ignore"}, ValueError, "on_failure is 'ignore'; pass 'raise', 'drop'"),
        ({"max_failure_share": -0.1}, ValueError, "max_failure_share is -0.1"),
        ({"failure_retries": 0.5}, TypeError, "failure_retries is 0.5"),
    ],
)
def test_bad_arguments(arguments: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        SyncMultiTurnVecEnv(Game, 2, **arguments)


@pytest.mark.parametrize("where", ["make", "reset"])
@pytest.mark.parametrize("on_failure", ["raise", "drop"])
def test_beginnings_that_hang_are_not_tried_again_for_ever(where: str, on_failure: Any) -> None:
    attempts = []
    released = threading.Event()

    class Hangs(Game):
        def reset(self, seed: int | None = None) -> Any:
            if where == "reset":
                attempts.append(seed)
                released.wait(30)
            return super().reset(seed)

    def make() -> Game:
        if where == "make":
            attempts.append(None)
            released.wait(30)
        return Hangs()

    env = SyncMultiTurnVecEnv(
        make, 8, failure_retries=3, step_timeout=0.1, max_workers=1, on_failure=on_failure
    )
    with pytest.raises(EnvironmentFailure, match="5 of 8 episodes have failed"):
        env.reset(range(8))
    released.set()
    assert 5 <= len(attempts) <= 6  # the last may have begun meanwhile
    assert env.timeouts == 5


def test_one_that_hangs_is_tried_again() -> None:
    numbers = iter(range(9))
    released = threading.Event()

    class Hangs(Game):
        def reset(self, seed: int | None = None) -> Any:
            if next(numbers) == 1:
                released.wait(30)
            return super().reset(seed)

    env = SyncMultiTurnVecEnv(
        Hangs, 2, failure_retries=1, step_timeout=0.5, on_failure="raise", max_failure_share=0.0
    )
    assert seeds_of(env.reset([3, 4])) == [3, 4]
    released.set()


@pytest.mark.parametrize("value", [None, float("nan")])
@pytest.mark.parametrize("evaluation", [True, False])
def test_a_tools_reward_that_is_none_is_raised(value: Any, evaluation: bool) -> None:
    """As everywhere: a mistake in the function, which is no failure of the episode."""
    tokenizer = byte_tokenizer()

    def make() -> TokenObservationWrapper:
        tasks = [{"question": "2+2?", "answer": "4"}, {"question": "2+3?", "answer": "5"}]
        env = ToolEnv(
            tasks,
            {"calculator": calculator},
            lambda completion, answer, question: value if answer == "4" else 1.0,
        )
        return TokenObservationWrapper(env, tokenizer, max_turns=2)

    def answer(prompts: list[ReasoningPrompts]) -> ActionResult:
        ids = torch.tensor([tokenizer.encode("5")])
        return ActionResult([torch.cat([p["input_ids"], ids], 1) for p in prompts], [])

    env = SyncMultiTurnVecEnv(make, 2, max_failure_share=1.0)
    with pytest.raises((TypeError, ValueError), match="reward_fn"):
        env.evaluate(answer) if evaluation else env.play(answer, [0, 1])
    env.close()
