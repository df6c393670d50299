"""Argument checks in one style: a message names the argument, its value and what is allowed.

A check is called with the name and the value of an argument::

    Number(1, integer=True)("group_size", 0)
    # ValueError: group_size is 0; it must be at least 1

For conditions that no check covers, give :func:`require` the message.
"""

from __future__ import annotations

import logging
import math
import sys
import warnings
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch

_SHOWN_CHARACTERS = 500
_LARGEST_FLOAT32 = float(torch.finfo(torch.float32).max)

_warned: set[tuple[str, Hashable]] = set()


def require(holds: bool, message: str, error: type[Exception] = ValueError) -> None:
    """Raise ``error`` with ``message`` unless a condition holds."""
    if not holds:
        raise error(message)


def shorten(value: Any) -> str:
    """``repr(value)``, cut to a length that fits into a message."""
    text = repr(value)
    if len(text) <= _SHOWN_CHARACTERS:
        return text
    return f"{text[:_SHOWN_CHARACTERS]}... ({len(text)} characters)"


def finite_number(what: str, value: Any, remedy: str) -> float:
    """What a user's function returned, as a float that float32 can hold.

    Args:
        what: Starts the message, such as ``"reward_fn returned"``.
        value: A number; 0-d tensors and numpy scalars count as such.
        remedy: Ends the message.

    Raises:
        TypeError: Not one real number.
        ValueError: NaN, infinite or beyond float32.
    """
    number = value
    if isinstance(value, torch.Tensor | np.ndarray | np.generic) and value.ndim == 0:
        number = value.item()
    if not isinstance(number, Real):
        raise TypeError(f"{what} {shorten(value)} of type {type(value).__name__}; {remedy}")
    # Compared before the conversion, which fails on an int beyond any float; no NaN is <= anything.
    size: Any = abs(number)
    require(
        size <= _LARGEST_FLOAT32,
        f"{what} {shorten(value)}, which is not a finite float32; {remedy}",
    )
    return float(number)


def unpacked(method: str, outcome: Any, names: tuple[str, ...]) -> tuple[Any, ...]:
    """What a user's method returned, as a tuple with one value for each name.

    Raises:
        TypeError: It returned something else.
    """
    if not isinstance(outcome, tuple | list) or len(outcome) != len(names):
        raise TypeError(f"{method} must return ({', '.join(names)}), got {shorten(outcome)}")
    return tuple(outcome)


def warn_once(logger: logging.Logger, message: str, *args: Any, per: Hashable = None) -> None:
    """Log a warning, but only the first time in this process that the formatted message occurs.

    Args:
        logger: The logger.
        message: %-format string.
        *args: Its arguments.
        per: Log the same message once for each value of this.
    """
    _log_once(logger, logging.WARNING, message, args, per)


def inform_once(logger: logging.Logger, message: str, *args: Any) -> None:
    """:func:`warn_once` at level INFO."""
    _log_once(logger, logging.INFO, message, args, None)


def _log_once(
    logger: logging.Logger, level: int, message: str, args: tuple[Any, ...], per: Hashable
) -> None:
    key = (message % args, per)
    if key not in _warned:
        _warned.add(key)
        logger.log(level, message, *args)


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Issue a Python warning that points at the first frame outside this package."""
    frame, level = sys._getframe(1), 2
    # By module name: a dataclass's generated constructor has no file.
    while frame.f_back is not None and frame.f_globals["__name__"].startswith("agilerl."):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


@dataclass(frozen=True)
class Number:
    """A real number (or integer) within limits."""

    low: float
    high: float = math.inf
    integer: bool = False
    optional: bool = False
    open_low: bool = False
    finite: bool = True
    open_high: bool = False
    word: str | None = None
    """A string that may stand in place of the number."""

    def __call__(self, name: str, value: Any) -> None:
        """Raise TypeError or ValueError unless ``value`` fits."""
        if value is None and self.optional:
            return
        if isinstance(value, str) and value == self.word:
            return
        kind, word = (Integral, "an integer") if self.integer else (Real, "a number")
        also = "" if self.word is None else f" or {self.word!r}"
        also += " or None" if self.optional else ""
        require(
            isinstance(value, kind) and not isinstance(value, bool),
            f"{name} is {value!r}; it must be {word}{also}",
            TypeError,
        )
        inside = self.low < value if self.open_low else self.low <= value
        inside &= value < self.high if self.open_high else value <= self.high
        finite = self.integer or not self.finite or math.isfinite(value)
        least = "above" if self.open_low else "at least"
        allowed = [] if math.isinf(self.low) else [f"{least} {self.low:g}"]
        most = "below" if self.open_high else "at most"
        allowed += [] if math.isinf(self.high) else [f"{most} {self.high:g}"]
        allowed += [] if finite else ["finite"]
        require(
            inside and finite,
            f"{name} is {value}; it must be {' and '.join(allowed)}",
        )


@dataclass(frozen=True)
class OneOf:
    """One of a few values."""

    allowed: tuple[Any, ...]
    remedies: Mapping[str, str] = field(default_factory=dict)
    """What to say, besides, of values that other libraries have."""

    def __call__(self, name: str, value: Any) -> None:
        """Raise ValueError unless ``value`` is one of them."""
        allowed = ", ".join(map(repr, self.allowed))
        remedy = self.remedies.get(value) if isinstance(value, str) else None
        require(
            value in self.allowed,
            f"{name} is {value!r}; it must be one of {allowed}" + (f". {remedy}" if remedy else ""),
        )


@dataclass(frozen=True)
class InstanceOf:
    """An instance of a class; None too, unless ``optional`` is False."""

    kind: type | tuple[type, ...]
    description: str
    optional: bool = True

    def __call__(self, name: str, value: Any) -> None:
        """Raise TypeError unless ``value`` is one."""
        if not (value is None and self.optional) and not isinstance(value, self.kind):
            also = " or None" if self.optional else ""
            raise TypeError(f"{name} is {shorten(value)}; it must be {self.description}{also}")


FLAG = InstanceOf(bool, "True or False", optional=False)
COUNT = Number(1, integer=True)
OPTIONAL_COUNT = Number(1, integer=True, optional=True)
COUNT_OR_AUTO = Number(1, integer=True, optional=True, word="auto")


def as_device(name: str, value: Any) -> torch.device:
    """A device that agents run on, of this machine or another.

    Raises:
        TypeError: It is neither a string nor a ``torch.device``.
        ValueError: It is neither a CPU nor a CUDA device.
    """
    remedy = "it must be 'cpu', 'cuda', 'cuda:<n>' or a torch.device"
    require(isinstance(value, str | torch.device), f"{name} is {value!r}; {remedy}", TypeError)
    try:
        device = torch.device(value)
    except RuntimeError as error:
        raise ValueError(f"{name} is {value!r}; {remedy}") from error
    require(device.type in ("cpu", "cuda"), f"{name} is {str(value)!r}; {remedy}")
    return device


def missing_members(value: object, protocol: type) -> list[str]:
    """Members of a protocol that an object of the user lacks, not counting its bases'.

    Unlike ``isinstance``, which from Python 3.12 on ignores ``__getattr__``, this accepts wrappers
    that delegate to what they wrap.
    """
    names = dict.fromkeys([*vars(protocol), *protocol.__annotations__])
    members = [name for name in names if name == "__len__" or not name.startswith("_")]
    return [name for name in members if not hasattr(value, name)]
