"""Functions as tools: checked, described as text, and as the JSON schemas of chat templates."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers.utils import get_json_schema
from transformers.utils.chat_template_utils import (
    DocstringParsingException,
    TypeHintParsingException,
)

from agilerl.checks import InstanceOf, require, shorten

_HOW_TO_CALL = """\
You can use tools. To call one, write
<tool_call>{"name": "the tool", "arguments": {"argument": "value"}}</tool_call>
and wait for its result, which comes as <tool_response>. A reply without a call is your answer."""


def checked_tools(tools: Any) -> dict[str, Callable[..., Any]]:
    """Functions by name that can be called with keyword arguments.

    Raises:
        TypeError: Not a dict of functions; a function with an argument by position only.
        ValueError: No tool.
    """
    InstanceOf(Mapping, "a dict of functions by name", optional=False)("tools", tools)
    require(len(tools) > 0, "tools is empty; pass at least one, such as {'search': search}")
    for name, tool in tools.items():
        require(
            isinstance(name, str) and callable(tool),
            f"tools has {name!r}: {shorten(tool)}; pass functions by name",
            TypeError,
        )
        signature = signature_of(tool)
        for parameter in signature.parameters.values() if signature else ():
            require(
                parameter.kind is not parameter.POSITIONAL_ONLY,
                f"tools[{name!r}] takes {parameter.name!r} by position only, but tools are called "
                f"with keywords; wrap it: def {name}({parameter.name}): ...",
                TypeError,
            )
    return dict(tools)


def describe_tools(tools: Mapping[str, Callable[..., Any]]) -> str:
    """Instructions: how to call, and each tool's signature and first docstring paragraph."""
    lines = [_HOW_TO_CALL, "", "Tools:"]
    for name, tool in tools.items():
        signature = signature_of(tool)
        shown = "(...)" if signature is None else str(signature)
        paragraph = (inspect.getdoc(tool) or "").split("\n\n")[0]
        lines.append(f"- {name}{shown}: {' '.join(paragraph.split())}".rstrip(": "))
    return "\n".join(lines)


def tool_schemas(tools: Sequence[Any] | Mapping[str, Any]) -> list[dict[str, Any]]:
    """The JSON schemas of tools, as ``apply_chat_template`` takes them.

    Args:
        tools: Functions with type hints and docstrings in Google's style, or schemas; or functions
            by the name that they are called by.

    Raises:
        TypeError: Neither a function nor a schema.
        ValueError: A function without type hints or docstring.
    """
    if isinstance(tools, Mapping):
        schemas = [_schema(f"tools[{name!r}]", tool) for name, tool in tools.items()]
        return [
            {**schema, "function": {**schema["function"], "name": name}}
            for name, schema in zip(tools, schemas, strict=True)
        ]
    is_list = isinstance(tools, Sequence) and not isinstance(tools, str)
    require(
        is_list, f"tools is {shorten(tools)}; it must be a list of functions or schemas", TypeError
    )
    return [_schema(f"tools[{number}]", tool) for number, tool in enumerate(tools)]


def _schema(name: str, tool: Any) -> dict[str, Any]:
    if isinstance(tool, Mapping):
        function = tool.get("function", tool)
        require(
            isinstance(function, Mapping) and isinstance(function.get("name"), str),
            f"{name} is {shorten(tool)}, a schema without a name; pass "
            '{"type": "function", "function": {"name": ..., "description": ..., '
            '"parameters": {...}}}',
        )
        return {"type": "function", "function": dict(function)}
    require(
        inspect.isroutine(tool),
        f"{name} is {shorten(tool)}; it must be a function or a JSON schema",
        TypeError,
    )
    try:
        schema: dict[str, Any] = get_json_schema(tool)
    except (DocstringParsingException, TypeHintParsingException) as error:
        raise ValueError(
            f"{name}: {error}. A chat template shows a function's type hints and its docstring, "
            "which has to describe every argument under 'Args:'; or pass a JSON schema"
        ) from error
    return schema


def signature_of(tool: Callable[..., Any]) -> inspect.Signature | None:
    """A function's signature, if it has one."""
    try:
        return inspect.signature(tool, eval_str=True)
    except NameError:  # An annotation that only type checkers can see.
        return inspect.signature(tool)
    except (TypeError, ValueError):  # Some builtins have none.
        return None
