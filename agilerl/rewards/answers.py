r"""Rewards of 1 or 0 for an answer or a format."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

_BRACES = re.compile(r"\\boxed\{|\\[{}]|[{}]")


def exact_match(completion: str, answer: Any) -> float:
    """Reward the answer and nothing else; white space around it does not count.

    Returns:
        1.0 where the completion is the answer (as text), else 0.0.
    """
    return float(completion.strip() == str(answer).strip())


def boxed_answer(completion: str, answer: Any) -> float:
    r"""Reward the answer in ``\boxed{...}``; the last box counts.

    The texts are compared, without white space: ``\frac{1}{2}`` is not ``0.5``.

    Returns:
        1.0 where the content of the box is the answer, else 0.0, also without a box.
    """
    boxed = extract_boxed(completion)
    return float(boxed is not None and _without_space(boxed) == _without_space(str(answer)))


def extract_boxed(text: str) -> str | None:
    r"""The content of the last ``\boxed{...}`` whose braces are balanced; None without one.

    Braces may be nested; those after a backslash do not count.
    """
    opened: list[re.Match[str]] = []
    last, content = -1, None
    for token in _BRACES.finditer(text):
        if token.group() in ("{", "\\boxed{"):
            opened.append(token)
        elif token.group() == "}" and opened:
            opening = opened.pop()
            if opening.group() != "{" and opening.start() > last:
                last, content = opening.start(), text[opening.end() : token.start()]
    return content


def format_matches(pattern: str, flags: int = re.DOTALL) -> Callable[[str], float]:
    """Make a reward for completions that match a regular expression as a whole.

    White space around the completion does not count. A call that backtracks without end cannot be
    timed out: avoid nested repetitions such as ``(a+)+``.

    Args:
        pattern: The regular expression.
        flags: Of :mod:`re`; by default ``.`` matches line breaks too.

    Returns:
        A reward function: 1.0 where the completion matches, else 0.0.

    Raises:
        ValueError: ``pattern`` is no regular expression.
    """
    try:
        compiled = re.compile(pattern, flags)
    except re.error as error:
        raise ValueError(
            f"pattern is {pattern!r}, which is no regular expression: {error}"
        ) from None

    def format_matches(completion: str) -> float:
        return float(compiled.fullmatch(completion.strip()) is not None)

    return format_matches


def _without_space(text: str) -> str:
    return "".join(text.split())
