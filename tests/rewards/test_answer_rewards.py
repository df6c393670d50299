from __future__ import annotations

import re
import time
from typing import Any

import pytest

from agilerl.rewards import (
    boxed_answer,
    exact_match,
    extract_boxed,
    format_matches,
    soft_overlong_penalty,
)


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [("4", "4", 1.0), (" 4\n", 4, 1.0), ("4", " 4 ", 1.0), ("4.", "4", 0.0), ("", "4", 0.0)],
)
def test_exact_match(completion: str, answer: Any, reward: float) -> None:
    assert exact_match(completion, answer) == reward


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"so \boxed{4}.", "4"),
        (r"\boxed{1} no, \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}} }", r"\{1, 2\}"),
        (r"\boxed{\}}", r"\}"),
        (r"\boxed{a} and \boxed{b", "a"),  # cut off
        (r"\boxed{}", ""),
        (r"\boxed{a \boxed{b}", "b"),
        (r"\boxed{a \boxed{b} c}", "b"),
        (r"\\boxed{4}", "4"),  # as in JSON
        (r"} \boxed{4}", "4"),
        (r"\boxed 4", None),
        ("boxed{4}", None),
        ("", None),
    ],
)
def test_the_last_box(text: str, content: str | None) -> None:
    assert extract_boxed(text) == content


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        (r"\boxed{ 1 , 2 }", "1,2", 1.0),
        (r"\boxed{4}", 4, 1.0),
        (r"\boxed{\frac{1}{2}}", "0.5", 0.0),
        ("4", "4", 0.0),
        ("None", "None", 0.0),
    ],
)
def test_boxed_answer(completion: str, answer: Any, reward: float) -> None:
    assert boxed_answer(completion, answer) == reward


def test_a_long_completion_without_a_closing_brace_is_quick() -> None:
    started = time.process_time()
    assert extract_boxed(r"\boxed{" * 10_000 + "x" * 10_000) is None
    assert time.process_time() - started < 1.0


def test_format_matches() -> None:
    reward = format_matches(r"<think>.*</think>\s*<answer>.*</answer>")
    assert reward.__name__ == "format_matches"
    assert reward("<think>a\nb</think>\n<answer>4</answer>\n") == 1.0
    assert reward("well, <think></think><answer></answer>") == 0.0
    assert format_matches("a", re.IGNORECASE)("A") == 1.0
    with pytest.raises(ValueError, match=r"pattern is '[(]', which is no regular expression"):
        format_matches("(")


@pytest.mark.parametrize(
    ("length", "penalty"),
    # Equation 13 by hand, with the paper's 16384 expected tokens and 4096 of soft punish cache.
    [(1, 0.0), (16384, 0.0), (16385, -1 / 4096), (18432, -0.5), (20480, -1.0), (20481, -1.0)],
)
def test_the_paper_s_overlong_penalty(length: int, penalty: float) -> None:
    assert soft_overlong_penalty(20480, 4096)(completion_ids=[0] * length) == penalty


@pytest.mark.parametrize(
    ("max_length", "cache_length", "error", "message"),
    [
        (0, 1, ValueError, "max_length is 0"),
        (10, 0, ValueError, "cache_length is 0"),
        (10, 11, ValueError, "cache_length is 11; it must be at most max_length, 10"),
        (10.0, 1, TypeError, "max_length is 10.0; it must be an integer"),
    ],
)
def test_lengths_that_are_refused(
    max_length: Any, cache_length: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        soft_overlong_penalty(max_length, cache_length)
