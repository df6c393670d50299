"""A tool for arithmetic: an expression is parsed, never run."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

from agilerl.checks import InstanceOf, require

_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
_LONGEST = 500
_LARGEST = 10**300


def calculator(expression: str) -> int | float:
    """The value of an arithmetic expression, such as (2 + 3) * 4**2.

    Numbers, parentheses and ``+ - * / // % **``; no names and no functions. No number on the way
    may be beyond 1e300, so that nothing takes long.

    Args:
        expression: The expression.

    Raises:
        TypeError: ``expression`` is not text.
        ValueError: It is something else than arithmetic, too long, or has no finite real value.
        ZeroDivisionError: It divides by zero.
    """
    InstanceOf(str, "text", optional=False)("expression", expression)
    require(
        len(expression) <= _LONGEST,
        f"expression has {len(expression)} characters; at most {_LONGEST} are read",
    )
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(f"cannot read {expression!r} as arithmetic") from error
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) < 2**53
    return int(value) if is_whole else value


def _value(node: ast.AST) -> int | float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _checked(node.value)
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return _checked(_OPERATORS[type(node.op)](_value(node.operand)))
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow):
            _check_power(left, right)
        return _checked(_OPERATORS[type(node.op)](left, right))
    raise ValueError(f"{ast.unparse(node)!r} is not allowed; use numbers, () and + - * / // % **")


def _check_power(base: int | float, exponent: int | float) -> None:
    """Before it is computed: an integer power may have any number of digits."""
    digits = abs(exponent * math.log10(abs(base))) if base else 0
    require(digits <= math.log10(_LARGEST), f"{base}**{exponent} is beyond what is computed here")


def _checked(value: Any) -> int | float:
    require(not isinstance(value, complex), "the result is not a real number")
    # No NaN is <= anything.
    require(abs(value) <= _LARGEST, "a number on the way is beyond 1e300")
    number: int | float = value
    return number
