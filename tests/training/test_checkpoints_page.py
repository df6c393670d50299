"""The scripts of ``docs/checkpoints.md`` do what the page says, and its grid is the code's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from resume_helpers import checkpoints_in, rows_of

from agilerl.algorithms import GRPO
from agilerl.llm.checkpoint.grid import (
    GRID,
    adapter_folders,
    full_actor,
    sharded_optimizer,
    whole_optimizer,
)
from agilerl.testing import tiny_model

PAGE = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text(encoding="utf-8")
SCRIPTS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
CONTENT = {
    adapter_folders: (3, "PEFT directories"),
    full_actor: (4, "full actor"),
    whole_optimizer: (4, "optimizer"),
    sharded_optimizer: (5, "optimizer, one file per process"),
}


def test_the_script_runs_and_runs_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = SCRIPTS[0]
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


def test_saving_and_loading_one_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(SCRIPTS[1], names)
    ids = names["completion_ids"][0]
    with torch.no_grad():
        logits = [model(input_ids=ids).logits for model in
                  (names["agent"].actor, names["again"].actor, names["model"])]  # fmt: skip
    torch.testing.assert_close(logits[0], logits[1])
    torch.testing.assert_close(logits[0], logits[2])


def test_a_stage_starts_from_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(SCRIPTS[1], names)
    names["model"].save_pretrained("sft_adapter")
    names["agent"] = GRPO(actor_network=tiny_model(), **names["settings"])
    exec(SCRIPTS[2], names)
    roles = [names["agent"].policy.parameters(role) for role in ("actor", "reference")]
    trained = names["again"].policy.parameters().values()
    for parameters in roles:
        assert all(map(torch.equal, parameters.values(), trained))


def test_the_grid_is_that_of_the_code() -> None:
    lines = re.findall(r"^\| (True|False) \| (True|False) \| (yes|no) .*$", PAGE, re.MULTILINE)
    assert len(lines) == len(GRID) == 8
    for line in re.findall(r"^\| (?:True|False) \| .*$", PAGE, re.MULTILINE):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        key = (cells[0] == "True", cells[1] == "True", cells[2] == "yes")
        wanted = {3: "", 4: "attributes", 5: ""}
        for part in GRID[key]:
            column, text = CONTENT[part]
            wanted[column] += (", " if wanted[column] else "") + text
        assert {column: cells[column] for column in wanted} == wanted, line
