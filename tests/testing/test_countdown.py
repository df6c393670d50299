"""Countdown's rows, and the batches that its model is warmed up on."""

from __future__ import annotations

import itertools
from random import Random

import pytest
import torch

from agilerl.testing import calculator, countdown_model, countdown_rows
from agilerl.testing.countdown import _warm_up_batch
from agilerl.testing.tokenizer import byte_tokenizer


def test_targets_can_be_reached_and_tasks_differ() -> None:
    rows = countdown_rows(30, numbers=2, largest=6, operators="*-", seed=1)
    for row in rows:
        a, b = row["nums"]
        assert 1 <= a <= 6
        assert 1 <= b <= 6
        assert row["target"] in {a * b, a - b, b - a}
    assert len({(*sorted(row["nums"]), row["target"]) for row in rows}) == len(rows) == 30
    assert rows != countdown_rows(30, numbers=2, largest=6, operators="*-", seed=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": 0}, "size"),
        ({"operators": "+^"}, r"operators is '\+\^'"),
        ({"size": 100, "numbers": 2, "largest": 2}, "different tasks found of size=100"),
    ],
)
def test_what_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        countdown_rows(**{"size": 2, **arguments})


def test_the_warm_up_is_on_equations_that_are_sometimes_right() -> None:
    tokenizer = byte_tokenizer()
    right = 0
    batch = _warm_up_batch(tokenizer, Random(0))
    for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
        prompt = tokenizer.decode(ids[(labels == -100) & (ids != tokenizer.pad_token_id)])
        answer = tokenizer.decode(labels[labels != -100])
        assert answer.startswith("<answer>")
        assert answer.endswith("</answer><|im_end|>")
        target = int(prompt.split(" = ")[1].split("<")[0])
        numbers = [int(digit) for digit in prompt.split("]")[0] if digit.isdigit()]
        equation = answer.split(">")[1].split("<")[0]
        assert sorted(int(digit) for digit in equation if digit.isdigit()) == sorted(numbers)
        right += calculator(equation) == target
    assert 10 < right < 50


def test_the_model_is_given_by_the_seed() -> None:
    first, again = (countdown_model(steps=2, seed=3)[0].state_dict() for _ in range(2))
    assert all(itertools.starmap(torch.equal, zip(first.values(), again.values(), strict=True)))
