"""The script of ``docs/checkpoints.md`` does what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from resume_helpers import checkpoints_in, rows_of

PAGE = Path(__file__).parents[2] / "docs" / "checkpoints.md"


def test_the_script_runs_and_runs_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = PAGE.read_text(encoding="utf-8")
    code = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[0]
    first: dict[str, object] = {}
    exec(code, first)
    rows = rows_of(tmp_path / "run")
    assert "iteration_00000004" in checkpoints_in(tmp_path / "run")
    second: dict[str, object] = {}
    exec(code, second)
    assert rows_of(tmp_path / "run") == rows
    histories = [[(agent.scores, agent.fitness) for agent in names["pop"]]
                 for names in (first, second)]  # fmt: skip
    assert histories[0] == histories[1]
