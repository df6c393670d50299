"""What a reward function is called with, decided by its signature."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from agilerl.llm_envs.rewards.arguments import read_arguments

OFFERED = ("completion", "answer", "question", "completion_ids", "finish_reason", "info", "tests")
VALUES = {name: f"<{name}>" for name in OFFERED}


def given(function: Callable[..., Any], batched: bool = False) -> Any:
    """What the function returns when it is called as it asks to be."""
    return read_arguments("reward_fn", function, OFFERED, batched).bind(function, VALUES)()


def swapped(answer: str, completion: str) -> Any:
    return completion, answer


def everything(completion: str, **kwargs: Any) -> Any:
    return completion, kwargs


def by_keyword(*, tests: str, finish_reason: str) -> Any:
    return tests, finish_reason


def with_default(completion: str, tolerance: float = 0.5) -> Any:
    return completion, tolerance


class Scorer:
    def __call__(self, completion: str, info: str) -> Any:
        return completion, info

    def method(self, question: str) -> Any:
        return question


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (swapped, ("<completion>", "<answer>")),
        (lambda completion_ids: completion_ids, "<completion_ids>"),
        (by_keyword, ("<tests>", "<finish_reason>")),
        (with_default, ("<completion>", 0.5)),
        (Scorer(), ("<completion>", "<info>")),
        (Scorer().method, "<question>"),
        (partial(with_default, tolerance=2.0), ("<completion>", 2.0)),
        # What a partial has set stays, also where there is a column of the name.
        (partial(swapped, answer="mine"), ("<completion>", "mine")),
        (partial(everything, answer="mine"), None),
    ],
)
def test_by_name(function: Callable[..., Any], expected: Any) -> None:
    if expected is None:
        others = {name: VALUES[name] for name in OFFERED if name not in ("completion", "answer")}
        expected = ("<completion>", others | {"answer": "mine"})
    assert given(function) == expected


def test_double_star_gets_everything() -> None:
    completion, others = given(everything)
    assert {"completion": completion} | others == VALUES
    assert given(lambda **kwargs: kwargs) == VALUES


@pytest.mark.parametrize(
    "function",
    [
        lambda text, truth, task: (text, truth, task),
        lambda text, truth, task, k=3: (text, truth, task),
        lambda text, truth, task, /: (text, truth, task),
        lambda *args: args,
        lambda *args, **kwargs: args,
        lambda completion, *args: (completion, *args),
        lambda completion, _, __: (completion, _, __),
        lambda completion, _answer, question: (completion, _answer, question),
        lambda completions, answers, questions: (completions, answers, questions),
        partial(lambda scale, text, truth, task: (text, truth, task), 2.0),
    ],
)
def test_by_position(function: Callable[..., Any]) -> None:
    assert given(function) == ("<completion>", "<answer>", "<question>")


def test_a_builtin_without_signature_is_called_by_position() -> None:
    assert read_arguments("reward_fn", max, OFFERED, False).positional == OFFERED[:3]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda completion, anwser: 0.0, "'anwser' .*did you mean 'answer'"),
        (lambda completion, difficulty: 0.0, "has the unknown parameter 'difficulty'[.]"),
        (lambda completion, answer, q: 0.0, "'q'"),
        (lambda completion, test=None: 0.0, "'test' .*did you mean 'tests'"),
        (lambda completions, answer: 0.0, "did you mean 'completion'.*batched_reward"),
        (lambda text, **kwargs: 0.0, "'text'"),
        (lambda text: 0.0, "three arguments"),
        (lambda: 0.0, "three arguments .*none"),
        (lambda a, b, c, d: 0.0, "three arguments"),
        (lambda a, b, c, *, d: 0.0, "three arguments"),
        # None of the names is known, but one is nearly, and stands where another is given.
        (lambda prompts, completions, truths: 0.0, "'completions' where the answer is given"),
    ],
)
def test_refused(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(TypeError, match=message) as caught:
        read_arguments("reward_fn", function, OFFERED, batched=False)
    assert ", ".join(OFFERED) in str(caught.value)


def test_the_plural_in_functions_that_get_lists() -> None:
    def function(completions: Any, answer: Any, finish_reasons: Any, infos: Any) -> Any:
        return completions, answer, finish_reasons, infos

    expected = ("<completion>", "<answer>", "<finish_reason>", "<info>")
    assert given(function, batched=True) == expected
    # A column of the name comes first.
    arguments = read_arguments("f", lambda answers: 0, [*OFFERED, "answers"], batched=True)
    assert arguments.columns == {"answers"}
    # TRL's reward functions take what they do not name as keywords.
    completion, others = given(lambda completions, **kwargs: (completions, kwargs), batched=True)
    assert {"completion": completion} | others == VALUES
