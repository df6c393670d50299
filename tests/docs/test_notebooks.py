"""The notebooks run from the first cell to the last, with less training than as committed."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

pytestmark = [pytest.mark.slow, pytest.mark.process]

TUTORIALS = Path(__file__).parents[2] / "docs" / "tutorials"


@pytest.mark.parametrize("notebook", sorted(TUTORIALS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebook_runs(notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ITERATIONS", "2")
    content = nbformat.read(notebook, as_version=4)
    client = NotebookClient(
        content,
        timeout=600,
        startup_timeout=300,
        resources={"metadata": {"path": str(tmp_path)}},
    )
    client.execute()
    assert any(
        "image/png" in output.get("data", {})
        for cell in content.cells
        for output in cell.get("outputs", [])
    )
