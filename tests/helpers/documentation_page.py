"""Running the code of a documentation page."""

from __future__ import annotations

import contextlib
import io
import re
from typing import Any

# A block with fences in it has four backticks; what it prints may follow as text.
BLOCK = re.compile(
    r"^(````?)python\n(.*?)^\1$(?:\n\n```text\n(.*?)^```$)?", re.DOTALL | re.MULTILINE
)


def run_page(page: str, *, blocks: int | None = None, shown: int) -> dict[str, Any]:
    """Run a page's Python code from top to bottom; each block must print what the page shows.

    Args:
        page: Its text.
        blocks: How many blocks it has; None: any number.
        shown: How many of them are followed by what they print.

    Returns:
        The names that the code has defined.
    """
    found = [(code, output) for _, code, output in BLOCK.findall(page)]
    assert blocks in (None, len(found))
    assert sum(bool(output) for _, output in found) == shown
    names: dict[str, Any] = {"__name__": "page"}
    for code, output in found:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, "page", "exec"), names)
        assert printed.getvalue() == output
    return names
