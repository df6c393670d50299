"""Marks functions that score all completions of a batch in one call."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])


def batched_reward(function: F) -> F:
    """Mark a reward function that gets lists, one entry per completion, and returns a list.

    Its parameters may be in the plural (``completions``, ``answers``, ``questions``,
    ``finish_reasons``, ``infos``). An object whose class has ``batched = True`` is marked too::

        @batched_reward
        def length(completions):
            return [len(completion) / 100 for completion in completions]
    """
    # A method has no attributes of its own.
    marked: Any = functools.partial(function) if inspect.ismethod(function) else function
    marked.batched = True
    return cast(F, marked)
