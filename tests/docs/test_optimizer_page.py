"""The page's code runs as it is there, and prints what the page says."""

from __future__ import annotations

from pathlib import Path

import pytest
from documentation_page import run_page

PAGE = (Path(__file__).parents[2] / "docs" / "optimizer.md").read_text()


def test_code_and_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_page(PAGE, blocks=3, shown=2)
