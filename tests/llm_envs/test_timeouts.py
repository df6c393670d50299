"""The pool itself; async functions, exits and hangs at exit are in test_rewards.py."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import closing
from functools import partial
from typing import Any

import pytest

from agilerl.llm_envs.timeouts import TimeoutExecutor


def test_outcomes_come_in_the_order_given() -> None:
    first_may_end = threading.Event()

    def call(index: int) -> int:
        if index == 0:
            assert first_may_end.wait(5)
        if index == 3:
            first_may_end.set()
        return index * 10

    outcomes = TimeoutExecutor(5.0, workers=2).run([partial(call, i) for i in range(4)])
    assert [(o.index, o.value, o.error) for o in outcomes] == [(i, i * 10, None) for i in range(4)]
    assert TimeoutExecutor(1.0).run([]) == []


def test_an_exception_belongs_to_its_call() -> None:
    def fails() -> None:
        raise KeyError("x")

    good, bad = TimeoutExecutor(5.0).run([lambda: 1, fails])
    assert good.value == 1
    assert isinstance(bad.error, KeyError)
    assert bad.value is None
    assert not bad.timed_out


def test_one_worker_runs_one_call_at_a_time_in_order() -> None:
    seen: list[tuple[int, int]] = []
    running: list[int] = []

    def call(index: int) -> None:
        running.append(index)
        time.sleep(0.002)
        seen.append((index, len(running)))
        running.remove(index)

    TimeoutExecutor(5.0, workers=1).run([partial(call, i) for i in range(10)])
    assert seen == [(i, 1) for i in range(10)]


def test_calls_over_their_time_are_given_up_and_the_rest_is_made() -> None:
    never = threading.Event()
    calls = [never.wait, lambda: 1, never.wait, lambda: 2, lambda: 3]
    outcomes = TimeoutExecutor(0.5, workers=1, timeout_name="step_timeout").run(calls)
    assert [o.timed_out for o in outcomes] == [True, False, True, False, False]
    assert [o.value for o in outcomes] == [None, 1, None, 2, 3]
    assert isinstance(outcomes[0].error, TimeoutError)
    assert str(outcomes[0].error) == "no result after step_timeout=0.5 s"
    never.set()


def test_a_late_result_is_dropped() -> None:
    release, late = threading.Event(), []

    def call() -> str:
        release.wait()
        late.append(True)
        return "late"

    executor = TimeoutExecutor(0.05)
    (outcome,) = executor.run([call])
    assert outcome.timed_out
    release.set()
    assert executor.run([lambda: "new"])[0].value == "new"
    assert outcome.value is None


def test_awaitables_are_awaited() -> None:
    async def call(value: int) -> int:
        await asyncio.sleep(0.001)
        return value

    executor = TimeoutExecutor(5.0, workers=4)
    assert [o.value for o in executor.run([partial(call, i) for i in range(8)])] == list(range(8))
    executor.close()


def test_closing_the_generator_drops_what_has_not_begun() -> None:
    started: list[int] = []

    def call(index: int) -> int:
        started.append(index)
        time.sleep(0.005)
        return index

    calls = [partial(call, i) for i in range(100)]
    with closing(TimeoutExecutor(5.0, workers=2).as_completed(calls)) as outcomes:
        next(outcomes)
    time.sleep(0.05)
    assert len(started) < 10


def test_unfinished_calls_are_those_given_up_and_those_in_hand() -> None:
    release, third = threading.Event(), threading.Event()

    def last() -> None:
        third.set()
        release.wait()

    unfinished: set[int] = set()
    calls = [lambda: 1, release.wait, last, lambda: 3]
    executor = TimeoutExecutor(0.5, workers=1)
    with closing(executor.as_completed(calls, unfinished=unfinished)) as outcomes:
        assert [next(outcomes).index for _ in range(2)] == [0, 1]
        assert third.wait(5)
        assert unfinished == set()
    assert unfinished == {1, 2}
    release.set()
    done: set[int] = set()
    assert len(list(executor.as_completed([lambda: 1], unfinished=done))) == 1
    assert done == set()


def test_workers_and_seconds_of_a_run_of_its_own() -> None:
    barrier, never = threading.Barrier(4), threading.Event()
    executor = TimeoutExecutor(5.0, workers=1)
    assert all(o.error is None for o in executor.run([lambda: barrier.wait(5)] * 4, workers=4))
    (outcome,) = executor.run([never.wait], seconds=0.05)
    assert str(outcome.error) == "no result after 0.05 s"
    never.set()


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        ({"timeout": 0}, ValueError, "tool_timeout is 0; it must be above 0"),
        ({"timeout": "60"}, TypeError, "tool_timeout is '60'"),
        ({"workers": 0}, ValueError, "max_workers is 0; it must be at least 1"),
        ({"workers": 1.5}, TypeError, "max_workers is .*must be an integer"),
    ],
)
def test_bad_arguments(kwargs: dict[str, Any], error: type[Exception], match: str) -> None:
    names = {"timeout_name": "tool_timeout", "workers_name": "max_workers"}
    with pytest.raises(error, match=match):
        TimeoutExecutor(**{"timeout": 1.0, **names, **kwargs})
