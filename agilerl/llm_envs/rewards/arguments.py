"""What a reward function is given, read off its signature once, before anything is trained."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from agilerl.checks import require

BY_POSITION = ("completion", "answer", "question")
"""What a function gets whose parameters name nothing."""

_PLURALS = {
    f"{name}s": name
    for name in ("completion", "answer", "question", "finish_reason", "info", "prompt")
}
"""Further names in functions that get lists."""

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True)
class RewardArguments:
    """Which columns a function is called with."""

    positional: tuple[str, ...] = ()
    """Columns given by position."""
    keywords: Mapping[str, str] = field(default_factory=dict)
    """Columns by the parameter that gets each."""
    collected: frozenset[str] = frozenset()
    """Those of them that only ``**kwargs`` gets."""

    @property
    def columns(self) -> set[str]:
        """The columns that are needed."""
        return {*self.positional, *self.keywords.values()}

    @property
    def named(self) -> set[str]:
        """The columns that are asked for by name or position."""
        return self.columns - self.collected

    def bind(self, function: Callable[..., Any], values: Mapping[str, Any]) -> Callable[[], Any]:
        """The call of ``function`` with its share of ``values``, by column."""
        return functools.partial(
            function,
            *(values[column] for column in self.positional),
            **{parameter: values[column] for parameter, column in self.keywords.items()},
        )


def read_arguments(
    label: str, function: Callable[..., Any], offered: Collection[str], batched: bool
) -> RewardArguments:
    """Decide what a function is called with.

    Parameters are matched with columns by name. ``**kwargs`` gets every column. A function none of
    whose parameters names a column, or one with positional-only parameters or ``*args``, is called
    with completion, answer and question by position. There a parameter may also start with an
    underscore, as unused ones do. What ``functools.partial`` has set is left alone.

    Args:
        label: What messages call the function.
        function: The reward function.
        offered: The columns that there are.
        batched: Whether it gets lists, which its parameters may then name in the plural.

    Raises:
        TypeError: A required parameter that names no column; an optional one that nearly does; a
            function that is called by position and does not take three arguments.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:  # Some builtins have no signature; the first call will show.
        return RewardArguments(positional=BY_POSITION)
    fixed = function.keywords if isinstance(function, functools.partial) else {}
    own = [p for p in parameters if p.name not in fixed]
    names = {name: name for name in offered}
    if batched:
        names = {many: one for many, one in _PLURALS.items() if one in names} | names
    takes_all = any(p.kind is p.VAR_KEYWORD for p in own)
    known = {p.name: names[p.name] for p in own if p.kind in _NAMED and p.name in names}
    if _is_positional(own, known, takes_all):
        _check_positional(label, function, own, offered)
        return RewardArguments(positional=BY_POSITION)
    for parameter in own:
        if parameter.kind in _NAMED and parameter.name not in names:
            _check_unknown(label, parameter, names, offered, batched)
    collected: dict[str, str] = {}
    if takes_all:
        given = {*known.values(), *fixed}
        collected = {name: name for name in offered if name not in given}
    return RewardArguments(keywords=known | collected, collected=frozenset(collected))


def _is_positional(
    parameters: list[inspect.Parameter], known: Mapping[str, str], takes_all: bool
) -> bool:
    if any(p.kind in _POSITIONAL for p in parameters) or not (known or takes_all):
        return True
    first = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD][:3]
    unused = [name.startswith("_") for name in first]
    in_place = [name == place for name, place in zip(first, BY_POSITION, strict=False)]
    return len(first) == 3 and any(unused) and all(map(any, zip(unused, in_place, strict=True)))


def _check_positional(
    label: str,
    function: Callable[..., Any],
    parameters: list[inspect.Parameter],
    offered: Collection[str],
) -> None:
    """Check that three arguments fit, and that no name says that another one is meant."""
    try:
        inspect.signature(function).bind("", "", "")
    except TypeError as error:
        shown = ", ".join(repr(p.name) for p in parameters if p.kind in _NAMED) or "none"
        raise TypeError(
            f"{label} cannot be called with three arguments ({error}), and its parameters "
            f"({shown}) are unknown: {_what_there_is(offered)}; pass a function "
            "such as reward_fn(completion, answer, question) that returns a float"
        ) from error
    for parameter, place in zip(parameters, BY_POSITION, strict=False):
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            meant = _closest(parameter.name, offered)
            require(
                meant in (None, place),
                f"{label} has the parameter {parameter.name!r} where the {place} is given; name it "
                f"{meant!r} if that is meant, or {place!r}. {_what_there_is(offered)}",
                TypeError,
            )


def _check_unknown(
    label: str,
    parameter: inspect.Parameter,
    names: Collection[str],
    offered: Collection[str],
    batched: bool,
) -> None:
    meant = _closest(parameter.name, names)
    if parameter.default is not parameter.empty and meant is None:
        return
    hint = "" if meant is None else f" (did you mean {meant!r}?)"
    if parameter.name in _PLURALS and not batched:
        lists = "a function that takes lists is marked with @agilerl.rewards.batched_reward"
        hint = f" (did you mean {_PLURALS[parameter.name]!r}? {lists})"
    raise TypeError(
        f"{label} has the unknown parameter {parameter.name!r}{hint}. "
        f"{_what_there_is(offered)}; rename it, or set it with functools.partial"
    )


def _closest(name: str, names: Collection[str]) -> str | None:
    found = difflib.get_close_matches(name, names, n=1, cutoff=0.75)
    return found[0] if found else None


def _what_there_is(offered: Collection[str]) -> str:
    return f"A reward may ask for {', '.join(offered)}"
