"""The reward functions of an environment: one, or several by name with their weights."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from agilerl.checks import finite_number, require, shorten
from agilerl.llm_envs.rewards.arguments import RewardArguments, read_arguments

RewardFunction: TypeAlias = Callable[..., Any]
"""``reward_fn(completion, answer, question)``, or with the arguments that its parameters name;
returns a number or None, or an awaitable of it. One marked as batched takes and returns lists."""
RewardFunctions: TypeAlias = (
    RewardFunction | Sequence[RewardFunction] | Mapping[str, RewardFunction]
)
"""What ``reward_fn`` may be: one function, a list of them, or a dict by name."""

_REMEDY = (
    "pass a function reward_fn(completion, answer, question) that returns a float, a list of such "
    "functions, or a dict of them by name"
)


@dataclass(frozen=True)
class Reward:
    """One of the reward functions."""

    label: str
    """What messages call it."""
    name: str
    function: Callable[..., Any]
    arguments: RewardArguments
    weight: float
    batched: bool
    """Whether one call scores all completions, with lists as arguments."""
    optional: bool
    """Whether it may return None for rows that it does not apply to."""


def read_rewards(reward_fn: Any, reward_weights: Any, offered: Collection[str]) -> list[Reward]:
    """Check what the user passed, and read what each function is to be called with.

    Args:
        reward_fn: One function, a list of functions or a dict by name.
        reward_weights: A list in the order of the functions, a dict by name, or None: 1 each.
        offered: The columns that functions may ask for.

    Raises:
        TypeError: No function; an unknown parameter; weights for a single function.
        ValueError: No functions, two of one name; weights that do not fit.
    """
    if isinstance(reward_fn, Mapping | list | tuple):
        functions = _by_name(reward_fn)
        weights = _weights(reward_weights, functions)
        return [
            _read(f"reward_fn {name!r}", name, function, weights[name], offered, optional=True)
            for name, function in functions.items()
        ]
    require(
        reward_weights is None,
        f"reward_weights is {shorten(reward_weights)}, but reward_fn is not a list or a dict of "
        "functions; leave it unset, or pass reward_fn=[...]",
        TypeError,
    )
    return [_read("reward_fn", "reward_fn", reward_fn, 1.0, offered, optional=False)]


def reward_name(function: Any) -> str:
    """``__name__`` of a function (of a partial, the function in it), else the name of its class."""
    while isinstance(function, functools.partial):
        function = function.func
    name: str = getattr(function, "__name__", type(function).__name__)
    return name


def is_batched(function: Any) -> bool:
    """Whether a function is marked as one that takes and returns lists."""
    while isinstance(function, functools.partial) and not hasattr(function, "batched"):
        function = function.func
    return getattr(function, "batched", False) is True


def _read(
    label: str, name: str, function: Any, weight: float, offered: Collection[str], optional: bool
) -> Reward:
    require(callable(function), f"{label} is {shorten(function)}; {_REMEDY}", TypeError)
    batched = is_batched(function)
    arguments = read_arguments(label, function, offered, batched)
    return Reward(label, name, function, arguments, weight, batched, optional)


def _by_name(reward_fn: Mapping[str, Any] | Sequence[Any]) -> dict[str, Any]:
    require(len(reward_fn) > 0, f"reward_fn is {reward_fn!r}; {_REMEDY}")
    if not isinstance(reward_fn, Mapping):
        names = [reward_name(function) for function in reward_fn]
        twice = sorted({name for name in names if names.count(name) > 1})
        require(
            not twice,
            f"reward_fn has several functions called {', '.join(twice)}; pass a dict by name, such "
            f"as {{'{twice[0] if twice else ''}_1': ..., ...}}",
        )
        return dict(zip(names, reward_fn, strict=True))
    for name in reward_fn:
        require(
            isinstance(name, str) and name != "",
            f"reward_fn has the key {name!r}; keys are the names of the rewards",
            TypeError,
        )
    return dict(reward_fn)


def _weights(reward_weights: Any, names: Collection[str]) -> dict[str, float]:
    given: Mapping[str, Any] = {}
    if isinstance(reward_weights, Mapping):
        given = reward_weights
        for name in given:
            close = difflib.get_close_matches(str(name), names, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            require(
                name in names,
                f"reward_weights has {name!r}, which is no reward{hint}; they are "
                f"{', '.join(names)}",
            )
    elif reward_weights is not None:
        require(
            isinstance(reward_weights, list | tuple),
            f"reward_weights is {shorten(reward_weights)}; it must be a list in the order of the "
            "functions, or a dict by name",
            TypeError,
        )
        require(
            len(reward_weights) == len(names),
            f"reward_weights has {len(reward_weights)} numbers for the {len(names)} rewards "
            f"{', '.join(names)}; give one each",
        )
        given = dict(zip(names, reward_weights, strict=True))
    remedy = "pass one finite number for each reward"
    return {
        name: finite_number(f"reward_weights of {name!r} is", given.get(name, 1.0), remedy)
        for name in names
    }
