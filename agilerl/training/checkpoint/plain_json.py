"""JSON that gives back what was put in, or says at once what it would not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def check_plain(content: Any, name: str) -> None:
    """Check that JSON gives ``content`` back as it is; tuples may come back as lists.

    Args:
        content: What is to be written.
        name: What to call it in the error.

    Raises:
        TypeError: Naming the first part of ``content`` that JSON does not know.
    """
    if content is None or isinstance(content, str | int | float):
        return
    if isinstance(content, dict):
        for key, value in content.items():
            if not isinstance(key, str):
                raise TypeError(_refusal(f"A key of {name}", key))
            check_plain(value, f"{name}.{key}")
    elif isinstance(content, list | tuple):
        for number, value in enumerate(content):
            check_plain(value, f"{name}[{number}]")
    else:
        raise TypeError(_refusal(name, content))


def write_json(path: Path, content: Mapping[str, Any], *, exact: bool) -> None:
    """Write ``content``.

    Args:
        path: The file.
        content: What to write.
        exact: Whether it will be read back; else values that JSON does not know become their text.

    Raises:
        TypeError: If ``exact``, naming the first value that JSON does not know.
    """
    if exact:
        check_plain(content, path.stem)
    text = json.dumps(content, indent=2, default=str, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8", errors="backslashreplace")


def _refusal(name: str, value: Any) -> str:
    return (
        f"{name} is {value!r} of type {type(value).__name__}, and a resumed run would get it back "
        "from JSON as something else or not at all: have state_dict() give text, numbers, bools, "
        "None, and lists and dicts (with text as keys) of these: int(x) for an integer of NumPy, "
        "x.tolist() for an array."
    )
