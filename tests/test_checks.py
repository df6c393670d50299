"""Checks name argument, value and what is allowed; warnings come once, and at the caller."""

from __future__ import annotations

import logging
import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from agilerl.checks import (
    COUNT,
    FLAG,
    OPTIONAL_COUNT,
    InstanceOf,
    Number,
    OneOf,
    finite_number,
    require,
    shorten,
    warn,
    warn_once,
)


@pytest.mark.parametrize(
    ("check", "value", "error", "message"),
    [
        (COUNT, 0, ValueError, "x is 0; it must be at least 1"),
        (COUNT, 1.0, TypeError, "x is 1.0; it must be an integer"),
        (COUNT, True, TypeError, "x is True; it must be an integer"),
        (COUNT, None, TypeError, "x is None; it must be an integer"),
        (OPTIONAL_COUNT, "1", TypeError, "x is '1'; it must be an integer or None"),
        (Number(0, 1), 1.5, ValueError, "x is 1.5; it must be at least 0 and at most 1"),
        (Number(0, open_low=True), 0, ValueError, "x is 0; it must be above 0"),
        (Number(0), math.inf, ValueError, "x is inf; it must be at least 0 and finite"),
        (Number(-math.inf), math.nan, ValueError, "x is nan; it must be finite"),
        (Number(0, finite=False), math.nan, ValueError, "x is nan; it must be at least 0"),
        (OneOf((None, "a")), "b", ValueError, "x is 'b'; it must be one of None, 'a'"),
        (FLAG, 1, TypeError, "x is 1; it must be True or False"),
        (InstanceOf(dict, "a dict"), [], TypeError, "x is []; it must be a dict or None"),
    ],
)
def test_messages(check: Any, value: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        check("x", value)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("check", "value"),
    [
        (COUNT, 1),
        (OPTIONAL_COUNT, None),
        (Number(0, 1), 1),
        (Number(0, finite=False), math.inf),
        (OneOf((None, "a")), None),
        (InstanceOf(dict, "a dict"), None),
    ],
)
def test_what_is_allowed(check: Any, value: Any) -> None:
    check("x", value)


def test_require() -> None:
    require(True, "fine")
    with pytest.raises(KeyError, match="broken"):
        require(False, "broken", KeyError)


def test_a_warning_is_logged_once_per_message_and_key(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("agilerl.test_checks")
    for number, key in ((1, None), (1, None), (2, None), (1, "a"), (1, "a")):
        warn_once(logger, "given %d times", number, per=key)
    assert [r.getMessage() for r in caplog.records] == [
        "given 1 times",
        "given 2 times",
        "given 1 times",
    ]


def test_a_warning_points_at_the_first_frame_outside_the_package() -> None:
    inside: dict[str, Any] = {"__name__": "agilerl.anything", "warn": warn}
    exec("def outer():\n    inner()\ndef inner():\n    warn('careful', FutureWarning)", inside)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        inside["outer"]()
    (warning,) = caught
    assert warning.filename == __file__ and warning.category is FutureWarning


@pytest.mark.parametrize("value", [True, 1, np.float32(1), np.bool_(True), torch.tensor(1.0)])
def test_numbers_of_any_kind(value: Any) -> None:
    number = finite_number("reward_fn returned", value, "return a float")
    assert type(number) is float
    assert number == 1.0


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ("1", TypeError, "reward_fn returned '1' of type str; return a float"),
        (torch.ones(2), TypeError, "reward_fn returned tensor([1., 1.]) of type Tensor"),
        (math.nan, ValueError, "reward_fn returned nan, which is not a finite float32"),
        (10**400, ValueError, "reward_fn returned 1000"),
    ],
)
def test_what_is_no_finite_number(value: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        finite_number("reward_fn returned", value, "return a float")
    assert str(caught.value).startswith(message)
    assert str(caught.value).endswith("return a float")


def test_long_values_are_shortened() -> None:
    assert shorten("x") == "'x'"
    assert shorten("x" * 1000) == "'" + "x" * 499 + "... (1002 characters)"
