from __future__ import annotations

import asyncio
import functools
import math
import signal
import subprocess
import sys
import threading
import time
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from agilerl.llm_envs import RewardError, RewardPool
from agilerl.rewards import batched_reward


def score(pool: RewardPool, completions: list[str]) -> list[float]:
    return pool.score(completions, ["a"] * len(completions), ["q"] * len(completions))


def test_every_call_gets_its_own_arguments_and_place() -> None:
    def reward_fn(completion: str, answer: int, question: str) -> float:
        time.sleep(0.02 if completion == "0" else 0.0)  # The first to start is the last to end.
        return int(completion) * 100 + answer * 10 + len(question)

    pool = RewardPool(reward_fn)
    assert pool.score(["0", "1", "2"], [0, 5, 7], ["", "x", "xx"]) == [0.0, 151.0, 272.0]
    assert pool.score([], [], []) == []


def test_async_functions() -> None:
    async def reward_fn(completion: str, answer: Any, question: str) -> float:
        await asyncio.sleep(0.001)
        return len(completion)

    class Scorer:
        async def __call__(self, completion: str, answer: Any, question: str) -> float:
            return await reward_fn(completion, answer, question)

    def plain(completion: str, answer: Any, question: str) -> Any:
        return reward_fn(completion, answer, question)

    for function in (reward_fn, Scorer(), functools.partial(reward_fn), plain):
        pool = RewardPool(function)
        assert score(pool, ["x" * n for n in range(40)]) == list(range(40))
        pool.close()


def test_async_functions_share_one_event_loop() -> None:
    """A client made on one loop does not work on another."""
    loops = set()

    async def reward_fn(completion: str, answer: Any, question: str) -> float:
        loops.add(id(asyncio.get_running_loop()))
        return 0.0

    pool = RewardPool(reward_fn)
    for _ in range(3):
        score(pool, ["x"] * 8)
    assert len(loops) == 1


def test_works_inside_a_running_event_loop() -> None:
    async def reward_fn(completion: str, answer: Any, question: str) -> float:
        return 1.0

    async def notebook_cell() -> list[float]:
        return score(RewardPool(reward_fn), ["x"])

    assert asyncio.run(notebook_cell()) == [1.0]


@pytest.mark.parametrize("is_async", [False, True])
def test_calls_run_at_the_same_time_but_no_more_than_asked(is_async: bool) -> None:
    lock, now, most = threading.Lock(), 0, 0

    def count(step: int) -> None:
        nonlocal now, most
        with lock:
            now += step
            most = max(most, now)

    def reward_fn(completion: str, answer: Any, question: str) -> float:
        count(1)
        time.sleep(0.02)
        count(-1)
        return 0.0

    async def async_reward_fn(completion: str, answer: Any, question: str) -> float:
        count(1)
        await asyncio.sleep(0.02)
        count(-1)
        return 0.0

    score(RewardPool(async_reward_fn if is_async else reward_fn, reward_workers=5), ["x"] * 20)
    assert most == 5


def test_tiny_functions_stay_cheap() -> None:
    pool = RewardPool(lambda completion, answer, question: float(answer in completion))
    seconds = []
    for _ in range(5):
        start = time.process_time()  # what else runs on the machine does not count
        score(pool, ["x"] * 256)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.05


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 1.0),
        (True, 1.0),
        (-2.5, -2.5),
        (Fraction(1, 4), 0.25),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3.0),
        (np.bool_(True), 1.0),
        (np.array(2.0), 2.0),
        (torch.tensor(1.5), 1.5),
        (torch.tensor(True), 1.0),
        (torch.tensor(2.0, requires_grad=True), 2.0),
    ],
)
def test_numbers_of_every_kind(value: Any, expected: float) -> None:
    (reward,) = score(RewardPool(lambda *args: value), ["x"])
    assert reward == expected
    assert type(reward) is float


@pytest.mark.parametrize("on_failure", ["raise", "drop", -1.0])
@pytest.mark.parametrize(
    ("value", "error"),
    [
        (None, TypeError),
        ("1.0", TypeError),
        ([1.0], TypeError),
        (torch.tensor([1.0]), TypeError),
        (np.array([1.0, 2.0]), TypeError),
        (1j, TypeError),
        (math.nan, ValueError),
        (-math.inf, ValueError),
        (torch.tensor(math.nan), ValueError),
        (10**400, ValueError),
        (1e39, ValueError),
    ],
)
def test_a_wrong_return_value_is_an_error_at_once(
    value: Any, error: type[Exception], on_failure: Any
) -> None:
    pool = RewardPool(lambda *args: value, on_failure=on_failure, failure_retries=1)
    with pytest.raises(error, match=r"(?s)reward_fn returned .*return one finite.*the completion"):
        score(pool, ["the completion"])
    assert pool.failures == 0


def test_a_wrong_return_value_of_an_async_function() -> None:
    async def reward_fn(completion: str, answer: Any, question: str) -> None:
        return None

    with pytest.raises(TypeError, match="reward_fn returned None of type NoneType"):
        score(RewardPool(reward_fn, on_failure=0.0), ["x"])  # type: ignore[arg-type]


def fails_on_b(completion: str, answer: Any, question: str) -> float:
    if completion.startswith("b"):
        raise ZeroDivisionError("no such number")
    return 1.0


async def fails_on_b_async(completion: str, answer: Any, question: str) -> float:
    return fails_on_b(completion, answer, question)


@pytest.mark.parametrize("reward_fn", [fails_on_b, fails_on_b_async])
def test_an_exception_is_raised_with_the_completion(reward_fn: Any) -> None:
    long = "b" * 2000
    with pytest.raises(RewardError) as caught:
        RewardPool(reward_fn).score(["a", long], [0, 0], ["easy", "hard?"])
    message = str(caught.value)
    assert "ZeroDivisionError: no such number" in message
    assert "'hard?'" in message
    assert "bbbb" in message
    assert "2002 characters" in message
    assert 'on_failure="drop"' in message
    assert len(message) < 1000
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert caught.value.__cause__.__traceback__ is not None


@pytest.mark.parametrize("reward_fn", [fails_on_b, fails_on_b_async])
@pytest.mark.parametrize(("on_failure", "reward"), [("drop", 0.0), (-0.5, -0.5)])
def test_an_exception_drops_or_gives_a_reward(
    reward_fn: Any, on_failure: Any, reward: float
) -> None:
    pool = RewardPool(reward_fn, on_failure=on_failure)
    assert score(pool, ["a", "b", "c", "bb"]) == [1.0, reward, 1.0, reward]
    assert (pool.failures, pool.timeouts) == (2, 0)
    scores = pool.score_columns({"completion": ["b", "a"], "answer": [0, 0], "question": ["", ""]})
    assert scores.total == [reward, 1.0]
    assert scores.failures == ["reward_fn failed with ZeroDivisionError: no such number", None]
    assert "completion: 'b'" in str(scores.first_failure)


@pytest.mark.parametrize("on_failure", ["drop", 1.0])
def test_too_many_failures_end_the_step_at_once(on_failure: Any) -> None:
    calls = []

    def fails_late(completion: str) -> float:
        calls.append(completion)
        time.sleep(0.01)
        return fails_on_b(completion, None, "")

    pool = RewardPool(fails_late, on_failure=on_failure, reward_workers=1)
    with pytest.raises(RewardError, match=r"(?s)3 of 4 .* max_failure_share=0.5.*'b1'") as caught:
        score(pool, ["b1", "b2", "b3", "a"])
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert score(pool, ["b", "a", "a", "b"])[1] == 1.0
    strict = RewardPool(fails_on_b, on_failure=on_failure, max_failure_share=0.0)
    with pytest.raises(RewardError, match="1 of 8"):
        score(strict, ["b", *"aaaaaaa"])
    everything = RewardPool(fails_on_b, on_failure=on_failure, max_failure_share=1.0)
    score(everything, ["b", "b"])
    calls.clear()
    with pytest.raises(RewardError):
        score(pool, ["b"] * 200)
    assert len(calls) < 110


def test_a_completion_is_dropped_if_one_of_its_rewards_fails() -> None:
    def length(completion: str) -> float:
        return len(completion)

    pool = RewardPool(
        {"length": length, "fails": lambda completion: fails_on_b(completion, None, "")},
        on_failure="drop",
    )
    scores = pool.score_columns(
        {"completion": ["aa", "bb", "a"], "answer": [0] * 3, "question": [""] * 3}
    )
    assert scores.total == [3.0, 0.0, 2.0]
    assert scores.by_name == {"length": [2.0, 2.0, 1.0], "fails": [1.0, None, 1.0]}
    assert [reason is not None for reason in scores.failures] == [False, True, False]


@pytest.mark.parametrize("batched", [False, True])
def test_what_fails_is_tried_again(batched: bool) -> None:
    """The second call gets arguments of its own."""
    attempts: list[Any] = []

    def flaky(completion: Any) -> Any:
        attempts.append(str(completion))
        if batched:
            completion.append("changed")
        if str(completion).count("b") and attempts.count(attempts[-1]) < 3:
            raise ConnectionError("server down")
        return [1.0] * len(completion[:-1]) if batched else 1.0

    reward_fn = batched_reward(flaky) if batched else flaky
    pool = RewardPool(reward_fn, failure_retries=2)
    assert score(pool, ["a", "b", "b2"]) == [1.0] * 3
    assert len(attempts) == (3 if batched else 7)
    assert pool.failures == 0
    attempts.clear()
    with pytest.raises(RewardError, match="ConnectionError"):
        score(RewardPool(reward_fn, failure_retries=1), ["a", "b"])
    assert len(attempts) == (2 if batched else 3)


def guarded(completion: str) -> float:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(0)
    return 1.0


def guarded_by_a_library(completion: str) -> float:
    """As math_verify, which raises an error of its own."""
    try:
        return guarded(completion)
    except ValueError as error:
        raise ValueError("threads are not supported") from error


@pytest.mark.parametrize("reward_fn", [guarded, guarded_by_a_library])
@pytest.mark.parametrize("on_failure", ["raise", "drop"])
def test_a_function_that_times_itself_by_a_signal_gets_a_hint(
    reward_fn: Any, on_failure: Any
) -> None:
    with pytest.raises(RewardError, match=r"(?s)threads.*timeout_seconds=None.*reward_timeout"):
        score(RewardPool(reward_fn, on_failure=on_failure), ["a"])


@pytest.mark.parametrize("raised", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()])
@pytest.mark.parametrize("is_async", [False, True])
def test_code_under_test_cannot_end_the_process_or_the_pool(
    raised: BaseException, is_async: bool
) -> None:
    def reward_fn(completion: str, answer: Any, question: str) -> float:
        if completion == "b":
            raise raised
        return 1.0

    async def async_reward_fn(completion: str, answer: Any, question: str) -> float:
        return reward_fn(completion, answer, question)

    pool = RewardPool(async_reward_fn if is_async else reward_fn, on_failure=0.0)
    for _ in range(3):
        assert score(pool, ["a", "b", "c"]) == [1.0, 0.0, 1.0]
    assert pool.timeouts == 0


def hangs_on_h(completion: str, answer: Any, question: str) -> float:
    if completion == "h":
        time.sleep(30)
    return 1.0


async def hangs_on_h_async(completion: str, answer: Any, question: str) -> float:
    if completion == "h":
        await asyncio.sleep(30)
    return 1.0


async def blocks_on_h_async(completion: str, answer: Any, question: str) -> float:
    return hangs_on_h(completion, answer, question)


@pytest.mark.parametrize("reward_fn", [hangs_on_h, hangs_on_h_async])
def test_a_hang_costs_the_timeout_and_nobody_else(reward_fn: Any) -> None:
    """More hangs than workers: each lost worker is replaced and every other call is scored."""
    pool = RewardPool(reward_fn, reward_timeout=1.0, on_failure=-1.0, reward_workers=2)
    start = time.perf_counter()
    assert score(pool, list("hhxhxx")) == [-1.0, -1.0, 1.0, -1.0, 1.0, 1.0]
    assert time.perf_counter() - start < 10.0
    assert (pool.failures, pool.timeouts) == (3, 3)
    assert score(pool, ["x"] * 4) == [1.0] * 4


def test_the_time_counts_from_the_start_of_the_call_itself() -> None:
    """Six calls of 0.2 s through one worker take 1.2 s in all; none takes 1 s itself."""

    def reward_fn(completion: str, answer: Any, question: str) -> float:
        time.sleep(0.2)
        return 1.0

    pool = RewardPool(reward_fn, reward_timeout=1.0, reward_workers=1)
    assert score(pool, ["x"] * 6) == [1.0] * 6


def test_a_timeout_is_raised() -> None:
    pool = RewardPool(hangs_on_h, reward_timeout=0.5)
    with pytest.raises(
        RewardError, match=r"(?s)no result after reward_timeout=0.5 s.*'h'"
    ) as caught:
        score(pool, ["x", "h"])
    assert isinstance(caught.value.__cause__, TimeoutError)
    assert score(pool, ["x"]) == [1.0]


def test_a_timed_out_coroutine_is_cancelled() -> None:
    cancelled = threading.Event()

    async def reward_fn(completion: str, answer: Any, question: str) -> float:
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return 1.0

    score(RewardPool(reward_fn, 0.1, on_failure=0.0, max_failure_share=1.0), ["x"])
    assert cancelled.wait(10.0)


def test_a_coroutine_that_blocks_its_loop_is_left_behind() -> None:
    pool = RewardPool(blocks_on_h_async, 1.0, on_failure=-1.0, max_failure_share=1.0)
    assert score(pool, ["h"]) == [-1.0]
    assert score(pool, ["x", "x"]) == [1.0, 1.0]


def test_an_error_stops_the_calls_that_have_not_begun() -> None:
    started = []

    def reward_fn(completion: str, answer: Any, question: str) -> float:
        started.append(completion)
        time.sleep(0.01)
        raise ValueError("first")

    with pytest.raises(RewardError):
        score(RewardPool(reward_fn, reward_workers=2), ["x"] * 200)
    time.sleep(0.1)
    assert len(started) < 10


def test_threads_end_with_the_call() -> None:
    before = set(threading.enumerate())
    score(RewardPool(lambda *args: 1.0), ["x"] * 64)
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=2.0)
        assert not thread.is_alive()


def test_close_and_go_on() -> None:
    pool = RewardPool(fails_on_b_async)
    assert score(pool, ["a"]) == [1.0]
    pool.close()
    pool.close()
    assert score(pool, ["a"]) == [1.0]


HANGING_SCRIPT = """
import asyncio, time
from agilerl.llm_envs.rewards import RewardPool

def sleeps(completion, answer, question):
    time.sleep(600)

async def awaits(completion, answer, question):
    await asyncio.sleep(600)

async def blocks(completion, answer, question):
    time.sleep(600)

def spins(completion, answer, question):
    while True:
        pass

for reward_fn in (sleeps, awaits, blocks, spins):
    pool = RewardPool(reward_fn, 0.2, on_failure=-1.0, max_failure_share=1.0)
    print(pool.score("c", "a", "q"))
"""


@pytest.mark.process
def test_the_interpreter_exits_while_rewards_hang() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HANGING_SCRIPT],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[-1.0]\n" * 4


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        ({"reward_fn": None}, TypeError, "reward_fn is None; pass a function"),
        ({"reward_fn": lambda text: 1.0}, TypeError, "three arguments"),
        ({"reward_timeout": 0}, ValueError, "reward_timeout is 0"),
        ({"reward_timeout": math.inf}, ValueError, "reward_timeout is inf"),
        ({"reward_timeout": None}, TypeError, "reward_timeout is None"),
        ({"on_failure": math.nan}, ValueError, "on_failure is nan"),
        ({"on_failure": "0"}, ValueError, "on_failure is '0'; pass 'raise', 'drop'"),
        ({"on_failure": None}, TypeError, "on_failure is None"),
        ({"max_failure_share": 1.5}, ValueError, "max_failure_share is 1.5"),
        ({"failure_retries": -1}, ValueError, "failure_retries is -1"),
        ({"reward_workers": 0}, ValueError, "reward_workers is 0; it must be at least 1"),
        ({"reward_workers": 2.0}, TypeError, "reward_workers is .*must be an integer"),
        ({"reward_workers": True}, TypeError, "reward_workers is True"),
    ],
)
def test_bad_arguments(kwargs: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        RewardPool(**{"reward_fn": fails_on_b, **kwargs})


def test_arguments_of_different_lengths() -> None:
    with pytest.raises(ValueError, match="shorter"):
        RewardPool(fails_on_b).score(["a", "b"], ["x"], ["q", "q"])
