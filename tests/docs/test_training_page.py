"""The page's code runs from top to bottom and prints what the page shows."""

from __future__ import annotations

from pathlib import Path

import pytest
from documentation_page import run_page

PAGE = (Path(__file__).parents[2] / "docs" / "training.md").read_text()


@pytest.mark.process
def test_code_and_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_page(PAGE, blocks=7, shown=6)
