"""Constructors of variants: the parent's signature with one argument pinned."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any


def pin_argument(init: Callable[..., None], **pinned: Any) -> Callable[..., None]:
    """``init`` with some arguments fixed and gone from its signature; all others stay explicit.

    Sixty arguments forwarded by hand would be sixty chances to forget one; the signature that
    ``inspect`` and ``help`` show is the real one.
    """
    signature = inspect.signature(init)
    parameters = [p for name, p in signature.parameters.items() if name not in pinned]
    visible = signature.replace(parameters=parameters)

    @functools.wraps(init)
    def pinned_init(*args: Any, **kwargs: Any) -> None:
        for name in pinned.keys() & kwargs:
            raise TypeError(
                f"{name} is {kwargs[name]!r}, but {type(args[0]).__name__} pins it to "
                f"{pinned[name]!r}; leave it out, or use GRPO"
            )
        init(**visible.bind(*args, **kwargs).arguments, **pinned)

    pinned_init.__signature__ = visible  # type: ignore[attr-defined]
    return pinned_init
