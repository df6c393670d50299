"""What becomes of completions whose rewards, and of episodes whose environments, fail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

from agilerl.checks import Number, finite_number, require
from agilerl.typing import Evaluation

_SHOWN_CHARACTERS = 500

OnFailure: TypeAlias = Literal["raise", "drop"] | float
"""``"raise"``: the error ends the step; ``"drop"``: what failed is left out; a number: it gets this
reward."""


class WrongRewardError(TypeError, ValueError):
    """A reward function within an environment returned something that is no reward.

    A mistake in the function, so that ``on_failure`` does not apply.
    """


@dataclass(frozen=True)
class FailurePolicy:
    """The arguments of those names, checked."""

    on_failure: OnFailure
    max_failure_share: float
    failure_retries: int

    def __post_init__(self) -> None:
        remedy = "pass 'raise', 'drop', or one finite number"
        if isinstance(self.on_failure, str):
            known = self.on_failure in {"raise", "drop"}
            require(known, f"on_failure is {self.on_failure!r}; {remedy}")
        else:
            number = finite_number("on_failure is", self.on_failure, remedy)
            object.__setattr__(self, "on_failure", number)
        Number(0, 1)("max_failure_share", self.max_failure_share)
        Number(0, integer=True)("failure_retries", self.failure_retries)

    @property
    def drops(self) -> bool:
        """Whether what failed is left out."""
        return self.on_failure == "drop"

    @property
    def reward(self) -> float:
        """The reward of what failed, which is to be ignored where that is left out."""
        return 0.0 if isinstance(self.on_failure, str) else self.on_failure

    def limit(self, total: int) -> float:
        """How many of ``total`` may fail: none if the first one is raised."""
        return 0.0 if self.on_failure == "raise" else self.max_failure_share * total

    def excess(self, failed: int, total: int, what: str) -> str:
        """Says that more of ``total`` failed than may; empty if not."""
        if self.on_failure == "raise":
            return f"{failed} of {total} {what} have failed" if failed else ""
        return excess(failed, total, what, self.max_failure_share)

    @property
    def outcome(self) -> str:
        """What became of what failed, for messages."""
        return "are left out" if self.drops else f"got on_failure={self.on_failure}"


def excess(failed: int, total: int, what: str, max_failure_share: float) -> str:
    """Says that more than ``max_failure_share`` of ``total`` failed; empty if not."""
    if failed <= max_failure_share * total:
        return ""
    share = f"more than max_failure_share={max_failure_share:g}"
    return f"{failed} of {total} {what} have failed, {share}"


def reason(error: BaseException) -> str:
    """An exception in a few words."""
    text = str(error)
    if len(text) > _SHOWN_CHARACTERS:
        text = f"{text[:_SHOWN_CHARACTERS]}..."
    return f"{type(error).__name__}: {text}"


class EvaluationRows:
    """The answers of an evaluation, without those that are left out.

    Args:
        policy: What becomes of those that failed.
        what: What messages call them.
    """

    def __init__(self, policy: FailurePolicy, what: str) -> None:
        self._policy, self._what = policy, what
        self._rewards: list[float] = []
        self._questions: list[str] = []
        self._answers: list[Any] = []
        self._completions: list[str] = []
        self._failures: list[str] = []
        self._rows: list[int] = []
        self._sets: list[str] = []
        self._final_answers: list[str | None] = []

    def add(
        self,
        reward: float,
        question: str,
        completion: str,
        failure: str | None,
        row: int,
        *,
        answers: Sequence[Any] = (),
        sets: Sequence[str] = (),
        final_answers: Sequence[str | None] = (),
    ) -> None:
        """Add one.

        Args:
            reward: Its reward.
            question: What it answers.
            completion: Its text.
            failure: Why it failed, if it did.
            row: Which of the held-out rows it answers.
            answers: Its reference answer, if there is one.
            sets: The name of its test set, if it has one.
            final_answers: What it gives as its answer, if that can be told.
        """
        if failure is not None:
            self._failures.append(failure)
            if self._policy.drops:
                return
        self._rewards.append(reward)
        self._questions.append(question)
        self._completions.append(completion)
        self._rows.append(row)
        self._answers += answers
        self._sets += sets
        self._final_answers += final_answers

    def excess(self, total: int) -> str:
        """Says that too many of ``total`` failed; empty if not."""
        excess = self._policy.excess(len(self._failures), total, self._what)
        return f"In the evaluation {excess}" if excess else ""

    def result(self, total: int) -> Evaluation:
        """The evaluation, of ``total`` answers in all."""
        return Evaluation(
            torch.tensor(self._rewards, dtype=torch.float32),
            self._questions,
            self._answers,
            self._completions,
            self._failures,
            self._policy.limit(total),
            self._rows,
            self._sets,
            self._final_answers,
        )
