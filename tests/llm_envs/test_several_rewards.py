"""Lists and dicts of reward functions: totals, weights, rows they do not apply to, batched ones."""

from __future__ import annotations

import asyncio
import functools
import math
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from agilerl.llm_envs import RewardError, RewardPool
from agilerl.llm_envs.rewards.pool import Scores
from agilerl.rewards import batched_reward


def length(completion: str) -> float:
    return len(completion)


def is_answer(completion: str, answer: str) -> float:
    return float(completion == answer)


async def polite(completion: str, question: str) -> float | None:
    await asyncio.sleep(0.001)
    return float("please" in completion) if question == "polite?" else None


@batched_reward
def longest(completions: list[str]) -> list[float]:
    most = max(map(len, completions))
    return [float(len(completion) == most) for completion in completions]


COLUMNS = {
    "completion": ["aa", "please", "b"],
    "answer": ["aa", "x", "b"],
    "question": ["q", "polite?", "polite?"],
}


def scores(pool: RewardPool) -> Scores:
    return pool.score_columns(COLUMNS)


def test_the_total_is_the_weighted_sum_of_what_applies() -> None:
    pool = RewardPool([is_answer, length, polite, longest], reward_weights=[10, 0.5, 2, 100])
    scored = scores(pool)
    assert scored.by_name == {
        "is_answer": [1.0, 0.0, 1.0],
        "length": [2.0, 6.0, 1.0],
        "polite": [None, 1.0, 0.0],
        "longest": [0.0, 1.0, 0.0],
    }
    assert scored.total == [10 + 1, 3 + 2 + 100, 10 + 0.5]
    pool.close()


def test_weights_by_name_and_by_default() -> None:
    functions = {"correct": is_answer, "long": length}
    assert scores(RewardPool(functions)).total == [3.0, 6.0, 2.0]
    assert scores(RewardPool(functions, reward_weights={"long": -1})).total == [-1.0, -6.0, 0.0]
    assert scores(RewardPool(functions, reward_weights=[0, 2])).total == [4.0, 12.0, 2.0]
    weights = {"length": 2.0}
    assert scores(RewardPool([length], reward_weights=weights)).total == [4.0, 12.0, 2.0]


def test_a_single_function_has_no_part() -> None:
    assert scores(RewardPool(length)) == Scores([2.0, 6.0, 1.0], {}, [None] * 3)
    assert scores(RewardPool([length])).by_name == {"length": [2.0, 6.0, 1.0]}


def test_names() -> None:
    class Judge:
        def __call__(self, completion: str) -> float:
            return 0.0

    pool = RewardPool([length, functools.partial(is_answer, answer="aa"), Judge()])
    assert pool.names == ["length", "is_answer", "Judge"]
    assert RewardPool(length).names == []


def test_a_row_that_nothing_applies_to_is_named() -> None:
    with pytest.raises(ValueError, match=r"(?s)no reward applies.*polite returned None.*'aa'"):
        scores(RewardPool([polite]))
    with pytest.raises(TypeError, match="reward_fn returned None of type NoneType"):
        scores(RewardPool(polite))


def test_messages_name_the_reward() -> None:
    with pytest.raises(TypeError, match=r"(?s)reward_fn 'b' returned '1'.*completion: 'aa'"):
        scores(RewardPool({"a": length, "b": lambda completion: "1"}))

    def fails(completion: str) -> float:
        raise KeyError(completion)

    with pytest.raises(RewardError, match="reward_fn 'fails' failed with KeyError"):
        scores(RewardPool([length, fails]))
    pool = RewardPool([length, fails], on_failure=-1.0, max_failure_share=1.0)
    assert scores(pool).total == [1.0, 5.0, 0.0]
    assert scores(pool).by_name["fails"] == [-1.0] * 3
    assert pool.failures == 6


# --- batched ------------------------------------------------------------------------------------


def test_a_batched_function_is_called_once_with_lists() -> None:
    calls = []

    @batched_reward
    def score(completion: list[str], answer: list[str], **others: list[Any]) -> torch.Tensor:
        calls.append((completion, answer, others))
        return torch.tensor([1.0, 2.0, 3.0])

    pool = RewardPool(score)
    assert scores(pool).total == [1.0, 2.0, 3.0]
    assert calls == [(COLUMNS["completion"], COLUMNS["answer"], {"question": COLUMNS["question"]})]
    assert pool.score([], [], []) == []
    assert len(calls) == 1


class Model:
    batched = True

    def __call__(self, completions: list[str]) -> np.ndarray:
        return np.array([len(completion) for completion in completions])

    def score(self, completions: list[str]) -> list[float]:
        return [float(len(completion)) for completion in completions]

    @batched_reward
    def marked(self, completions: list[str]) -> list[float]:
        return self.score(completions)


def by_position(texts: list[str], truths: list[str], tasks: list[str]) -> list[float]:
    return [float(text == truth) for text, truth in zip(texts, truths, strict=True)]


async def asynchronous(completions: list[str]) -> list[float | None]:
    await asyncio.sleep(0.001)
    return [None if completion == "b" else 1.0 for completion in completions]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (Model(), [2.0, 6.0, 1.0]),
        (Model().marked, [2.0, 6.0, 1.0]),
        (batched_reward(Model().score), [2.0, 6.0, 1.0]),
        (functools.partial(longest), [0.0, 1.0, 0.0]),
        (batched_reward(by_position), [1.0, 0.0, 1.0]),
        (batched_reward(asynchronous), [1.0, 1.0, None]),
    ],
)
def test_what_can_be_marked(function: Any, expected: list[float | None]) -> None:
    pool = RewardPool({"it": function, "always": lambda completion: 0.0})
    assert scores(pool).by_name["it"] == expected
    pool.close()


def test_batched_functions_cannot_change_what_others_get() -> None:
    @batched_reward
    def clears(completions: list[str]) -> list[float]:
        number = len(completions)
        completions.clear()
        return [0.0] * number

    assert scores(RewardPool([clears, longest])).total == [0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (1.0, TypeError, "'f' returned 1.0 of type float; a batched reward returns a list"),
        ("123", TypeError, "of type str"),
        (torch.zeros(3, 1), TypeError, "of type Tensor"),
        ([1.0, 2.0], ValueError, "returned 2 rewards for 3 completions"),
        ([1.0, math.nan, 2.0], ValueError, "(?s)'f' returned nan.*'please'"),
        ([1.0, "x", 2.0], TypeError, "'f' returned 'x'"),
    ],
)
def test_wrong_lists(value: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        scores(RewardPool({"f": batched_reward(lambda completions: value)}))


def test_the_timeout_is_for_the_whole_batch() -> None:
    release = threading.Event()

    @batched_reward
    def hangs(completions: list[str]) -> list[float]:
        release.wait(30)
        return [0.0] * len(completions)

    started = time.perf_counter()
    pool = RewardPool([length, hangs], 0.3, on_failure=-1.0, max_failure_share=1.0)
    assert scores(pool).total == [1.0, 5.0, 0.0]
    assert time.perf_counter() - started < 5.0
    assert (pool.failures, pool.timeouts) == (1, 1)
    with pytest.raises(RewardError, match=r"(?s)no result after.*and 2 more in the same call"):
        scores(RewardPool([hangs], reward_timeout=0.1))
    release.set()


# --- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reward_fn", "weights", "error", "message"),
    [
        ([], None, ValueError, r"reward_fn is \[\]; pass a function"),
        ({}, None, ValueError, "reward_fn is {}"),
        ([length, length], None, ValueError, "several functions called length; pass a dict"),
        ([lambda x, y, z: 0, lambda x, y, z: 1], None, ValueError, "called <lambda>"),
        ([length, 1.0], None, TypeError, "reward_fn 'float' is 1.0; pass a function"),
        ({1: length}, None, TypeError, "has the key 1; keys are the names"),
        ({"": length}, None, TypeError, "has the key ''"),
        ([length], [1.0, 2.0], ValueError, "has 2 numbers for the 1 rewards length"),
        ([length], {"lenght": 1.0}, ValueError, "'lenght', .*did you mean 'length'"),
        ([length], ["1"], TypeError, "reward_weights of 'length' is '1'"),
        ([length], [math.inf], ValueError, "reward_weights of 'length' is inf"),
        ([length], 2.0, TypeError, "reward_weights is 2.0; it must be a list"),
        (length, [1.0], TypeError, "reward_fn is not a list or a dict"),
        (
            [lambda completion, tests: 0.0],
            None,
            TypeError,
            "reward_fn '<lambda>' has the .*'tests'",
        ),
    ],
)
def test_refused(reward_fn: Any, weights: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        RewardPool(reward_fn, reward_weights=weights)


def test_columns_are_those_that_are_asked_for() -> None:
    pool = RewardPool([length, lambda tests: 0.0], columns=["tests", "images"])
    assert pool.columns == {"completion", "tests"}
    assert RewardPool(lambda **all_of_them: 0.0, columns=["images"]).columns >= {"images"}
