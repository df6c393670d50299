"""Text environments whose methods are coroutines, alone and many at a time."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
from typing import Any

import pytest
import torch

from agilerl.llm_envs import SyncMultiTurnVecEnv, TokenObservationWrapper
from agilerl.llm_envs.timeouts import TimeoutExecutor
from agilerl.testing import byte_tokenizer
from agilerl.typing import ActionResult, ReasoningPrompts

TOKENIZER = byte_tokenizer()


class Client:
    """As an HTTP session: it belongs to the event loop that it was made on."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()

    async def ask(self, text: str) -> str:
        assert asyncio.get_running_loop() is self.loop
        await asyncio.sleep(0)
        return text.upper()

    async def close(self) -> None:
        assert asyncio.get_running_loop() is self.loop


class Remote:
    """Three turns of upper case."""

    def __init__(self) -> None:
        self.client: Client | None = None
        self.turn = 0
        self.closed_on: Any = None

    async def reset(self, seed: int | None = None) -> Any:
        self.client, self.turn = self.client or Client(), 0
        return await self.client.ask(f"start {seed}"), {"seed": seed}

    async def step(self, action: str) -> Any:
        assert self.client is not None
        self.turn += 1
        return await self.client.ask(action), float(self.turn), self.turn == 3, False, {}

    async def close(self) -> None:
        if self.client is not None:
            await self.client.close()
        self.closed_on = threading.current_thread().name


class Local:
    """The same without a client."""

    def __init__(self) -> None:
        self.turn = 0

    def reset(self, seed: int | None = None) -> Any:
        self.turn = 0
        return f"START {seed}", {"seed": seed}

    def step(self, action: str) -> Any:
        self.turn += 1
        return action.upper(), float(self.turn), self.turn == 3, False, {}


def act(prompts: list[ReasoningPrompts]) -> ActionResult:
    ids = torch.tensor([[*TOKENIZER.encode("ab"), TOKENIZER.eos_token_id]])
    return ActionResult([torch.cat([p["input_ids"], ids], 1) for p in prompts], [])


def vec_env(make: Any, batch_size: int = 3, **kwargs: Any) -> SyncMultiTurnVecEnv:
    return SyncMultiTurnVecEnv(
        lambda: TokenObservationWrapper(make(), TOKENIZER, 4), batch_size, **kwargs
    )


def test_alone_the_methods_wait() -> None:
    remote = Remote()
    wrapper = TokenObservationWrapper(remote, TOKENIZER, 4)
    evaluation = wrapper.evaluate(act, loop=2)
    assert evaluation.rewards.tolist() == [6, 6]
    plain = TokenObservationWrapper(Local(), TOKENIZER, 4).evaluate(act, loop=2)
    assert (evaluation.questions, evaluation.completions) == (plain.questions, plain.completions)
    threads = threading.active_count()
    wrapper.close()
    assert remote.closed_on == "environment-loop"
    deadline = time.monotonic() + 5
    while threading.active_count() == threads and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == threads - 1


def test_what_a_coroutine_raises_arrives() -> None:
    class Gone(Local):
        async def step(self, action: str) -> Any:  # type: ignore[override]
            raise ConnectionError("gone")

    wrapper = TokenObservationWrapper(Gone(), TOKENIZER, 4)
    prompt, _ = wrapper.reset(seed=1)
    with pytest.raises(ConnectionError, match="gone"):
        wrapper.step(act([prompt]).completion_ids[0])
    assert int(wrapper.get_episode_data()[1].sum()) == 3  # what was sampled is kept
    wrapper.close()


def test_many_at_a_time_give_the_same_as_plain_ones() -> None:
    made: list[Remote] = []

    def make() -> Remote:
        made.append(Remote())
        return made[-1]

    env, plain = vec_env(make), vec_env(Local)
    for _ in range(2):  # the second batch has the clients of the first one
        ours, theirs = env.play(act, [1, 2, 3]), plain.play(act, [1, 2, 3])
        assert not ours.failed.any()
        assert torch.equal(ours.rewards, theirs.rewards)
        assert (ours.infos, ours.transcripts) == (theirs.infos, theirs.transcripts)
        for a, b in zip(ours.token_ids, theirs.token_ids, strict=True):
            assert torch.equal(a, b)
    assert len({remote.client.loop for remote in made if remote.client}) == 1
    env.close()
    assert [remote.closed_on for remote in made] == ["environment-loop"] * 3


@pytest.mark.parametrize("workers", [1, 3, 8])
def test_max_workers_bounds_what_is_awaited_at_a_time(workers: int) -> None:
    running, most = 0, 0

    class Counted(Local):
        async def step(self, action: str) -> Any:  # type: ignore[override]
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.02)
            running -= 1
            return super().step(action)

    env = vec_env(Counted, batch_size=8, max_workers=workers)
    assert not env.play(act, range(8)).failed.any()
    assert most == workers
    env.close()


def test_a_step_is_cancelled_at_its_timeout() -> None:
    cancelled = threading.Event()

    class Slow(Local):
        async def step(self, action: str) -> Any:  # type: ignore[override]
            if self.slow:
                try:
                    await asyncio.sleep(60)
                finally:
                    cancelled.set()
            return super().step(action)

        def reset(self, seed: int | None = None) -> Any:
            self.slow = seed == 2
            return super().reset(seed)

        async def close(self) -> None:
            closed.append(self.slow)

    closed: list[bool] = []
    env = vec_env(Slow, step_timeout=1.5)
    episodes = env.play(act, [1, 2, 3])
    assert episodes.failed.tolist() == [False, True, False]
    assert cancelled.is_set()
    assert (env.failures, env.timeouts) == (1, 1)
    assert not env.play(act, [1, 1, 1]).failed.any()
    env.close()
    # Unlike a thread, a coroutine that was cancelled does not run on: it is closed.
    assert sorted(closed) == [False, False, False, True]


def test_one_that_does_not_end_when_it_is_cancelled_is_not_closed() -> None:
    closed: list[int] = []

    class Stubborn(Local):
        async def step(self, action: str) -> Any:  # type: ignore[override]
            while self.seed == 2 and not released.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(0.01)
            return super().step(action)

        def reset(self, seed: int | None = None) -> Any:
            self.seed = seed
            return super().reset(seed)

        def close(self) -> None:
            closed.append(self.seed)

    released = threading.Event()
    env = vec_env(Stubborn, step_timeout=1.5)
    assert env.play(act, [1, 2, 3]).failed.tolist() == [False, True, False]
    env.close()
    released.set()
    assert sorted(closed) == [1, 3]


def test_several_that_do_not_end_share_the_time_that_they_are_waited_for() -> None:
    async def stubborn() -> None:
        while not released.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)

    released = threading.Event()
    unfinished: set[int] = set()
    executor = TimeoutExecutor(0.1, workers=8)
    start = time.monotonic()
    outcomes = list(executor.as_completed([stubborn] * 8, unfinished=unfinished))
    assert time.monotonic() - start < 6
    released.set()
    assert [outcome.timed_out for outcome in outcomes] == [True] * 8
    assert unfinished == set(range(8))
    executor.close()


def test_an_interrupt_while_waiting_cancels() -> None:
    """Ctrl-C in a notebook."""
    cancelled = threading.Event()

    class Slow(Local):
        async def step(self, action: str) -> Any:  # type: ignore[override]
            ident = threading.main_thread().ident
            assert ident is not None
            try:
                await asyncio.sleep(0.5)  # the main thread waits by now
                signal.pthread_kill(ident, signal.SIGINT)
                await asyncio.sleep(60)
            finally:
                cancelled.set()

    wrapper = TokenObservationWrapper(Slow(), TOKENIZER, 4)
    prompt, _ = wrapper.reset(seed=1)
    with pytest.raises(KeyboardInterrupt):
        wrapper.step(act([prompt]).completion_ids[0])
    assert cancelled.wait(5)
    with pytest.raises(RuntimeError, match="call reset"):
        wrapper.step(act([prompt]).completion_ids[0])
    wrapper.close()


def test_a_coroutine_that_blocks_its_loop_costs_its_own_episode() -> None:
    release = threading.Event()

    class Blocks(Local):
        async def step(self, action: str) -> Any:  # type: ignore[override]
            if self.blocks:
                release.wait(30)
            return super().step(action)

        def reset(self, seed: int | None = None) -> Any:
            self.blocks = seed == 2
            return super().reset(seed)

    env = vec_env(Blocks, step_timeout=1.5, max_workers=1)
    assert env.play(act, [1, 2, 3]).failed.tolist() == [False, True, False]
    release.set()
    env.close()
