"""The page's code runs from top to bottom and prints what the page shows."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "training.md").read_text()


@pytest.mark.process
def test_code_and_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", PAGE, flags=re.DOTALL)
    assert sum(bool(shown) for _, shown in blocks) == len(blocks) - 1 == 4
    names: dict[str, Any] = {"__name__": "page"}
    for code, shown in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, "training.md", "exec"), names)
        assert printed.getvalue() == shown
