"""The page's code runs from top to bottom and prints what the page shows."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest

import agilerl.rewards

PAGE = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()


@pytest.mark.process
def test_code_and_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    block = r"^(````?)python\n(.*?)^\1$(?:\n\n```text\n(.*?)^```$)?"
    blocks = re.findall(block, PAGE, flags=re.DOTALL | re.MULTILINE)
    assert sum(bool(shown) for _, _, shown in blocks) == 6
    names: dict[str, Any] = {"__name__": "page"}
    for _, code, shown in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, "rewards.md", "exec"), names)
        assert printed.getvalue() == shown


@pytest.mark.parametrize("name", agilerl.rewards.__all__)
def test_every_name_is_on_the_page(name: str) -> None:
    assert re.search(rf"\b{name}\b", PAGE)
