"""Rewards for the length of a completion."""

from __future__ import annotations

from collections.abc import Callable

from agilerl.checks import COUNT, require


def soft_overlong_penalty(max_length: int, cache_length: int) -> Callable[[list[int]], float]:
    """Make the soft overlong punishment of DAPO (arXiv 2503.14476, equation 13).

    For a completion of ``n`` tokens, the end-of-sequence token included, with ``s = max_length -
    cache_length``: 0 up to ``s``; then it falls linearly, ``(s - n) / cache_length``, to -1 at
    ``max_length``; beyond that it is -1. To be added to a reward of correctness.

    Args:
        max_length: Tokens from which on the penalty is whole: usually ``max_output_tokens``.
        cache_length: Tokens before that over which it grows, at most ``max_length``.

    Returns:
        A reward function.

    Raises:
        TypeError: A length that is no integer.
        ValueError: A length below 1, ``cache_length`` above ``max_length``.
    """
    COUNT("max_length", max_length)
    COUNT("cache_length", cache_length)
    require(
        cache_length <= max_length,
        f"cache_length is {cache_length}; it must be at most max_length, {max_length}",
    )

    def soft_overlong_penalty(completion_ids: list[int]) -> float:
        over = len(completion_ids) - (max_length - cache_length)
        return 0.0 - min(max(over / cache_length, 0.0), 1.0)

    return soft_overlong_penalty
