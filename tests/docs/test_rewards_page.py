"""The page's code runs from top to bottom and prints what the page shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from documentation_page import run_page

import agilerl.rewards

PAGE = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()


@pytest.mark.process
def test_code_and_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_page(PAGE, shown=6)


@pytest.mark.parametrize("name", agilerl.rewards.__all__)
def test_every_name_is_on_the_page(name: str) -> None:
    assert re.search(rf"\b{name}\b", PAGE)
