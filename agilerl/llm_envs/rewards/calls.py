"""One call of a reward function: what it is given, what it may return, and why it failed."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from agilerl.checks import finite_number, require, shorten
from agilerl.llm_envs.failures import reason
from agilerl.llm_envs.rewards.functions import Reward

_THREAD_HINT = (
    "\n  Rewards run in threads, where SIGALRM does not work: switch the function's own time limit "
    "off, such as parsing_timeout=None and timeout_seconds=None of math_verify, and set "
    "reward_timeout instead."
)
_IMMUTABLE = frozenset({str, bytes, int, float, complex, bool, type(None)})
_COPIED = (Mapping, list, set, tuple, np.ndarray, torch.Tensor)


@dataclass(frozen=True)
class RewardCall:
    """One call: of a batched function for all rows, of another for one."""

    reward: Reward
    rows: Sequence[int]

    def function(self, columns: Mapping[str, Sequence[Any]]) -> Callable[[], Any]:
        """Calls the function with arguments of its own."""
        function, arguments = self.reward.function, self.reward.arguments

        def call() -> Any:
            # A function may change what it is given, which other calls and the user's rows share.
            # Copied when the call begins, so that the copies of waiting calls take no memory.
            values: dict[str, Any]
            if self.reward.batched:
                values = {name: own_copy(list(columns[name])) for name in arguments.columns}
            else:
                (row,) = self.rows
                values = {name: own_copy(columns[name][row]) for name in arguments.columns}
            return arguments.bind(function, values)()

        return call

    def numbers(self, value: Any, columns: Mapping[str, Sequence[Any]]) -> list[float | None]:
        """What it returned: one number per row, or None where the reward does not apply.

        Raises:
            TypeError: If it returned something else.
            ValueError: For another number of rewards than rows, or one that is not finite.
        """
        reward, returned = self.reward, [value]
        if reward.batched:
            remedy = "a batched reward returns a list with one number per completion"
            if isinstance(value, torch.Tensor | np.ndarray) and value.ndim == 1:
                value = value.tolist()
            require(
                isinstance(value, list | tuple),
                f"{reward.label} returned {shorten(value)} of type {type(value).__name__}; "
                f"{remedy}",
                TypeError,
            )
            require(
                len(value) == len(self.rows),
                f"{reward.label} returned {len(value)} rewards for {len(self.rows)} completions; "
                f"{remedy}",
            )
            returned = list(value)
        numbers: list[float | None] = []
        for row, number in zip(self.rows, returned, strict=True):
            if number is None and reward.optional:
                numbers.append(None)
                continue
            remedy = f"return one finite number, such as float(correct)\n{shown(columns, row)}"
            numbers.append(finite_number(f"{reward.label} returned", number, remedy))
        return numbers

    def failure(self, error: BaseException, columns: Mapping[str, Sequence[Any]]) -> str:
        """Why it failed, what to do if that is known, and the completion."""
        hint = _THREAD_HINT if needs_main_thread(error) else ""
        more = f"\n  and {len(self.rows) - 1} more in the same call" if self.reward.batched else ""
        failed = f"{self.reward.label} failed with {reason(error)}{hint}"
        return f"{failed}\n{shown(columns, self.rows[0])}{more}"


def own_copy(value: Any) -> Any:
    """A value that may be changed: containers, arrays and tensors are copied with what they hold.

    Other objects are shared, and so is a container of a further class that cannot be copied.
    """
    if type(value) in _IMMUTABLE:
        return value
    if type(value) is list:
        # Token ids and texts are many: looking at their types is faster than copying each.
        plain = set(map(type, value)) <= _IMMUTABLE
        return list(value) if plain else [own_copy(each) for each in value]
    if type(value) is dict:
        return {key: own_copy(each) for key, each in value.items()}
    if type(value) is tuple:
        return tuple(own_copy(each) for each in value)
    if isinstance(value, _COPIED):
        with contextlib.suppress(Exception):  # what it holds may raise anything
            return copy.deepcopy(value)
    return value


def shown(columns: Mapping[str, Sequence[Any]], row: int) -> str:
    """Question and completion of a row, as messages show them."""
    question, completion = columns["question"][row], columns["completion"][row]
    return f"  question: {shorten(question)}\n  completion: {shorten(completion)}"


def needs_main_thread(error: BaseException | None) -> bool:
    """Whether a function tried to set a signal handler, which works in the main thread only."""
    while error is not None:
        if isinstance(error, ValueError) and "signal only works in main thread" in str(error):
            return True
        error = error.__cause__ or error.__context__  # math_verify raises one of its own from it
    return False
