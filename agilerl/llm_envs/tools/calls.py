"""Calls of tools in the text of a model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, TypeAlias

from agilerl.checks import require, shorten

ParseCalls: TypeAlias = Callable[[str], list[dict[str, Any]]]
"""From a reply to its calls: ``{"name": ..., "arguments": {...}}``, bare or as ``"function"`` of a
dict, or ``{"error": ...}``, which is told to the model."""

CALL_FORMAT = 'a call is {"name": ..., "arguments": {...}}'

# The closing tag may be missing: generation stops there, or the model was cut off.
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


def tagged_calls(reply: str) -> list[dict[str, Any]]:
    """The calls in the format that the templates of Hermes and Qwen teach.

    ``<tool_call>{"name": "search", "arguments": {"query": "tides"}}</tool_call>``
    """
    return [_read(request) for request in _CALL.findall(reply)]


def _read(request: str) -> dict[str, Any]:
    try:
        call = json.loads(request)
    except (ValueError, RecursionError) as error:
        return {"error": f"not valid JSON: {error}"}
    return call if isinstance(call, dict) else {"error": CALL_FORMAT}


def calls_in(reply: str, parse_calls: ParseCalls) -> list[dict[str, Any]]:
    """The calls that a parser finds; what it raises is told to the model.

    Raises:
        TypeError: It returned something else than a list of dicts.
    """
    try:
        found = parse_calls(reply)
    except Exception as error:  # noqa: BLE001 - malformed calls are the model's mistake
        return [{"error": f"{type(error).__name__}: {error}"}]
    require(
        isinstance(found, list) and all(isinstance(call, dict) for call in found),
        f"parse_calls returned {shorten(found)}; it must return a list of dicts with name and "
        "arguments, [] for a reply without a call",
        TypeError,
    )
    calls = [call.get("function", call) for call in found]
    return [call if isinstance(call, dict) else {"error": CALL_FORMAT} for call in calls]
