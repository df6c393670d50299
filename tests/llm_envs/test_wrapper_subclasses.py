"""Subclasses of the wrapper: in a batch their methods are called as they are alone."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
import torch
from test_async_environments import TOKENIZER, Local, Remote, act

from agilerl.llm_envs import SyncMultiTurnVecEnv, TokenObservationWrapper
from agilerl.llm_envs.event_loop import awaited
from agilerl.llm_envs.timeouts import TimeoutExecutor


class Shaped(TokenObservationWrapper):
    """Adds 1 to every reward, and knows what was called."""

    def __init__(self, env: Any) -> None:
        super().__init__(env, TOKENIZER, 4)
        self.calls: list[str] = []

    def reset(self, seed: int | None = None) -> Any:
        self.calls.append("reset")
        prompt, info = super().reset(seed)
        return prompt, {**info, "shaped": True}

    def step(self, full_completion_ids: torch.Tensor) -> Any:
        self.calls.append("step")
        prompt, reward, *rest = super().step(full_completion_ids)
        return prompt, reward + 1.0, *rest

    def close(self) -> None:
        self.calls.append("close")
        super().close()


@pytest.mark.parametrize("text_env", [Local, Remote])
def test_overridden_methods_are_called_in_a_batch(text_env: Any) -> None:
    made: list[Shaped] = []

    def make() -> Shaped:
        made.append(Shaped(text_env()))
        return made[-1]

    env = SyncMultiTurnVecEnv(make, 2, evaluation_episodes=2)
    episodes = env.play(act, [0, 1])
    assert not episodes.failed.any()
    assert episodes.rewards.tolist() == [[2, 3, 4, 0]] * 2
    # The same as one that is evaluated alone.
    alone = Shaped(text_env())
    assert alone.evaluate(act, 2).rewards.tolist() == env.evaluate(act).rewards.tolist() == [9, 9]
    alone.close()
    env.close()
    assert [wrapper.calls for wrapper in made] == [[*["reset", *["step"] * 3] * 2, "close"]] * 2
    if text_env is Remote:
        clients = [wrapper.env.client for wrapper in made]  # type: ignore[attr-defined]
        assert clients[0].loop is clients[1].loop
    env.close()


def test_a_delegating_environment_shares_the_event_loop_too() -> None:
    class Delegating:
        def __init__(self) -> None:
            self.wrapper = TokenObservationWrapper(Remote(), TOKENIZER, 4)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.wrapper, name)

        def reset(self, seed: int | None = None) -> Any:
            return self.wrapper.reset(seed)

        def step(self, full_completion_ids: torch.Tensor) -> Any:
            return self.wrapper.step(full_completion_ids)

        def get_episode_data(self) -> Any:
            return self.wrapper.get_episode_data()

        def close(self) -> None:
            self.wrapper.close()

    before = set(threading.enumerate())  # a loop of another test may be about to end
    env = SyncMultiTurnVecEnv(Delegating, 3)
    assert env.play(act, [1, 2, 3]).returns.tolist() == [6, 6, 6]
    begun = set(threading.enumerate()) - before
    assert sum(thread.name == "environment-loop" for thread in begun) == 1
    env.close()


def test_what_goes_on_to_await_after_its_time_is_cancelled_again() -> None:
    begun, cancelled = 0, 0

    async def slow() -> None:
        nonlocal begun, cancelled
        begun += 1
        try:
            await asyncio.sleep(60)
        finally:
            cancelled += 1

    def call() -> None:
        try:
            awaited(slow())
        finally:
            awaited(slow())

    executor = TimeoutExecutor(0.3)
    unfinished: set[int] = set()
    start = time.monotonic()
    (outcome,) = executor.as_completed([call], unfinished=unfinished)
    assert outcome.timed_out
    assert not unfinished  # it ended, and at once
    assert time.monotonic() - start < 5
    assert begun == cancelled >= 1
    executor.close()


def test_the_wrappers_event_loop_ends_though_close_raises() -> None:
    class Gone(Local):
        async def reset(self, seed: int | None = None) -> Any:  # type: ignore[override]
            return super().reset(seed)

        async def close(self) -> None:
            raise ConnectionError("gone")

    before = set(threading.enumerate())
    wrapper = TokenObservationWrapper(Gone(), TOKENIZER, 4)
    wrapper.reset()
    (loop,) = set(threading.enumerate()) - before
    with pytest.raises(ConnectionError, match="gone"):
        wrapper.close()
    loop.join(5)
    assert not loop.is_alive()
