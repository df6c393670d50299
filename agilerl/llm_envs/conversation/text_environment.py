"""What a text environment returns, checked; what it says, as messages of a conversation."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from agilerl.checks import InstanceOf, OneOf, finite_number, require, shorten, unpacked
from agilerl.typing import TextEnv

ROLES = ("system", "user", "assistant", "tool")


def takes_seed(env: TextEnv) -> bool:
    """Whether its ``reset`` has a parameter for the seed."""
    try:
        parameters = inspect.signature(env.reset).parameters.values()
    except (TypeError, ValueError):
        return True  # Some builtins have no signature.
    return any(p.name == "seed" or p.kind is p.VAR_KEYWORD for p in parameters)


def reset_outcome(outcome: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The messages and the info that ``reset`` returned.

    Raises:
        TypeError: Something else than two values, text or messages of text, an info.
        ValueError: No message; a role that is unknown or not allowed at its place; a prefix or
            suffix around messages.
    """
    observation, info = _unpacked("reset", outcome, ("observation", "info"))
    return _messages("reset", observation, info, over=False), dict(info)


def step_outcome(
    outcome: Any,
) -> tuple[list[dict[str, Any]], float, bool, bool, dict[str, Any]]:
    """The messages, reward, terminated, truncated and info that ``step`` returned.

    Raises:
        TypeError: As :func:`reset_outcome`.
        ValueError: As there; the reward is not finite.
    """
    names = ("observation", "reward", "terminated", "truncated", "info")
    observation, reward, terminated, truncated, info = _unpacked("step", outcome, names)
    number = finite_number(
        "the environment's step returned the reward", reward, "return one finite number"
    )
    messages = _messages("step", observation, info, over=bool(terminated or truncated))
    return messages, number, bool(terminated), bool(truncated), dict(info)


def _unpacked(method: str, outcome: Any, names: tuple[str, ...]) -> tuple[Any, ...]:
    """One value for each name; an info that is None counts as empty."""
    method = f"the environment's {method}"
    *values, info = unpacked(method, outcome, names)
    InstanceOf(Mapping, "a dict")(f"the info that {method} returned", info)
    return (*values, info or {})


def _messages(
    method: str, observation: Any, info: Mapping[str, Any], over: bool
) -> list[dict[str, Any]]:
    """The messages of an observation; text is one of the user. None are needed when it is over."""
    what = f"the observation that the environment's {method} returned"
    prefix, suffix = (info.get(key) or "" for key in ("prefix", "suffix"))
    if isinstance(observation, str):
        return [{"role": "user", "content": f"{prefix}{observation}{suffix}"}]
    is_list = isinstance(observation, Sequence) and not isinstance(observation, bytes)
    require(
        is_list,
        f"{what} is {shorten(observation)}; it must be text or a list of messages",
        TypeError,
    )
    require(over or len(observation) > 0, f"{what} is an empty list; return at least one message")
    require(
        not (prefix or suffix),
        f"{what} is a list of messages, but info has a prefix or suffix, which go around a text: "
        "write them into the messages",
    )
    for number, message in enumerate(observation):
        _check_message(f"message {number} of {what}", message)
    roles = [message["role"] for message in observation]
    if method == "step":
        require(
            not {"assistant", "system"} & set(roles),
            f"{what} has messages of the roles {roles}; those of a step are the user's or a tool's",
        )
    require(
        "system" not in roles[1:],
        f"{what} has messages of the roles {roles}; a system message can only be the first",
    )
    require(
        over or roles[-1] in {"user", "tool"},
        f"{what} has messages of the roles {roles}; the last one, which the model answers, must be "
        "the user's or a tool's",
    )
    return [dict(message) for message in observation]


def _check_message(what: str, message: Any) -> None:
    InstanceOf(Mapping, "a dict with role and content", optional=False)(what, message)
    OneOf(ROLES)(f"the role of {what}", message.get("role"))
    InstanceOf(str, "text", optional=False)(f"the content of {what}", message.get("content"))


def contents(messages: Sequence[Mapping[str, Any]]) -> str:
    """Their contents, one after the other."""
    return "".join(message["content"] for message in messages)


def without_tool_role(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with those of tools as the user's: successive ones as a single message."""
    shown: list[dict[str, Any]] = []
    after_tool = False
    for message in messages:
        if message["role"] != "tool":
            shown.append(message)
            after_tool = False
            continue
        response = f"<tool_response>\n{message['content']}\n</tool_response>"
        if after_tool:
            shown[-1]["content"] += f"\n{response}"
        else:
            shown.append({"role": "user", "content": response})
        after_tool = True
    return shown
