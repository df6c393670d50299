"""The notebooks run from the first cell to the last, with less training than as committed."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from agilerl.algorithms import GRPO
from agilerl.testing import load_bundled_model

TUTORIALS = Path(__file__).parents[2] / "docs" / "tutorials"
NOTEBOOKS = sorted(TUTORIALS.glob("*.ipynb"))


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def shown_by(cell: Any) -> set[str]:
    """What kinds of output a cell has; stderr, where progress bars go, is none."""
    kinds = set()
    for output in cell.outputs:
        if output.output_type == "stream":
            kinds |= {output.name} - {"stderr"}
        else:
            kinds |= set(output.get("data", {output.output_type: None}))
    return kinds


def text_of(notebook: Any, source: str) -> str:
    """What the only cell whose source has ``source`` prints."""
    (cell,) = [cell for cell in code_cells(notebook) if source in cell.source]
    return "".join(output.text for output in cell.outputs if output.get("name") == "stdout")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_notebook_was_run_in_one_go_and_is_small(path: Path) -> None:
    content = path.read_text()
    assert len(content) < 300_000
    assert not [
        folder for folder in ("/home/", "/root/", "/tmp/", "site-packages") if folder in content
    ]
    cells = code_cells(nbformat.reads(content, as_version=4))
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"]


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ITERATIONS", "2")
    stored = nbformat.read(path, as_version=4)
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=600,
        startup_timeout=300,
        resources={"metadata": {"path": str(tmp_path)}},
    )
    client.execute()
    for cell, before in zip(code_cells(notebook), code_cells(stored), strict=True):
        assert shown_by(cell) == shown_by(before), cell.source
    assert any("image/png" in shown_by(cell) for cell in code_cells(notebook))
    if path.stem in CHECKS:
        CHECKS[path.stem](notebook, tmp_path / "runs")


def check_evolution(notebook: Any, runs: Path) -> None:
    """The notebook on evolution shows what it says, and its run left what it names."""
    generations = generations_of(runs / "evolution")
    # The run ended after 8 iterations; resumed, it made the generation that was due there.
    assert [each["iteration"] for each in generations] == [2, 4, 6, 8]
    members = [member for each in generations for member in each["members"]]
    assert any(member["parent"] != member["agent"] for member in members)
    for each in generations:
        best = max(each["members"], key=lambda member: member["fitness"])
        assert (best["parent"], best["mutation"]) == (best["agent"], None)
    for member in members:
        assert 1e-5 <= member["hyperparameters"]["lr"] <= 1e-2
        assert 0.1 <= member["hyperparameters"]["clip_coef"] <= 0.4
        if (member["mutation"] or "").startswith("lr"):
            old, new = map(float, member["mutation"].removeprefix("lr ").split(" -> "))
            assert new in (pytest.approx(old / 2, rel=1e-3), pytest.approx(old * 2, rel=1e-3), 1e-2)
    # The resumed run shows the generations of the first one and its own.
    first = text_of(notebook, "def show_lineage")
    resumed = text_of(notebook, "resume_from")
    assert resumed.startswith(first) and "after iteration 8" in resumed.removeprefix(first)

    with (runs / "evolution" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    expected = [(iteration, agent) for iteration in range(11) for agent in range(4)]
    assert sorted((int(row["iteration"]), int(row["agent"])) for row in rows) == expected
    fitness = {
        (int(row["iteration"]), int(row["agent"])): float(row["fitness"])
        for row in rows
        if row["fitness"]
    }
    for each in generations:
        for member in each["members"]:
            in_metrics = fitness[each["iteration"], member["agent"]]
            assert member["fitness"] == pytest.approx(in_metrics)
    elite = GRPO.load(runs / "evolution" / "elite", actor_network=load_bundled_model()[0])
    assert elite.fitness[-1] == pytest.approx(max(fitness.values()))
    elite.clean_up()

    for generation in generations_of(runs / "pbt"):
        replaced = [m for m in generation["members"] if m["parent"] != m["agent"]]
        assert len(replaced) <= 1
        for member in generation["members"]:
            assert (member["mutation"] is not None) == (member in replaced)
    pictures = [cell for cell in code_cells(notebook) if "image/png" in shown_by(cell)]
    assert len(pictures) == 3
    assert {file.name for file in (runs / "evolution").glob("*.png")} == {
        "family_tree.png",
        "hyperparameters.png",
    }
    assert "agents on the same base: True" in text_of(notebook, "agents on the same base")
    question, answer = text_of(notebook, "elite.get_action").splitlines()
    assert question.startswith("Spell this word backward") and answer


def generations_of(run: Path) -> list[dict[str, Any]]:
    generations: list[dict[str, Any]] = json.loads((run / "lineage.json").read_text())[
        "generations"
    ]
    return generations


CHECKS: dict[str, Callable[[Any, Path], None]] = {"evolutionary_hpo": check_evolution}
"""What a notebook's run is checked for besides its outputs."""
