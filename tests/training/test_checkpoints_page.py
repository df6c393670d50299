"""The scripts of ``docs/checkpoints.md`` do what the page says, and so do checkpoints on disk."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from resume_helpers import checkpoints_in, rows_of

from agilerl.algorithms import GRPO
from agilerl.testing import tiny_model

PAGE = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text(encoding="utf-8")
SCRIPTS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


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
    # The next script has more rows, of which the longer run uses every one.
    with pytest.raises(ValueError, match="allow_appended_rows=True goes on with them"):
        exec(SCRIPTS[1].replace("allow_appended_rows=True,", ""), second)
    exec(SCRIPTS[1], second)
    assert rows_of(tmp_path / "run")[: len(rows)] == rows
    lines = (tmp_path / "run" / "completions.jsonl").read_text().splitlines()
    asked = [(line["iteration"], line["question"]) for line in map(json.loads, lines)]
    assert {question for iteration, question in asked if iteration <= 4} == {"a?", "b?", "c?"}
    assert {question for _, question in asked} == {"a?", "b?", "c?", "e?", "f?"}


def test_saving_and_loading_one_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(SCRIPTS[2], names)
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
    exec(SCRIPTS[2], names)
    names["model"].save_pretrained("sft_adapter")
    names["agent"] = GRPO(actor_network=tiny_model(), **names["settings"])
    exec(SCRIPTS[3], names)
    roles = [names["agent"].policy.parameters(role) for role in ("actor", "reference")]
    trained = names["again"].policy.parameters().values()
    for parameters in roles:
        assert all(map(torch.equal, parameters.values(), trained))


@pytest.mark.parametrize("save_optimizer", [True, False])
@pytest.mark.parametrize("lora_only", [True, False])
def test_what_lies_on_disk_is_what_the_page_says(
    lora_only: bool, save_optimizer: bool, tmp_path: Path
) -> None:
    (line,) = re.findall(rf"^\| {lora_only} \| {save_optimizer} \| no \|.*$", PAGE, re.MULTILINE)
    settings = {"pad_token_id": 256, "pad_token": "<|pad|>"}
    agent = GRPO(actor_network=tiny_model(hidden_size=32, layers=1), **settings)
    agent.save_checkpoint(tmp_path / "run", lora_only, save_optimizer)
    saved = torch.load(tmp_path / "run" / "attributes.pt", weights_only=True)
    folders = {entry.name for entry in (tmp_path / "run").iterdir() if entry.is_dir()}
    assert folders == ({"actor", "reference"} if lora_only else set())
    parts = {"attributes": "arguments", "full actor": "actor_state_dict", "optimizer": "optimizer"}
    held = ", ".join(name for name, key in parts.items() if key in saved)
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[3:] == ["PEFT directories" if folders else "", held, ""]


def test_zero_only_moves_the_optimizer_out_of_the_attributes() -> None:
    row = r"^\| (True|False) \| (True|False) \| (yes|no) \| (.*) \|$"
    lines = re.findall(row, PAGE, re.MULTILINE)
    cells = {line[:3]: [cell.strip() for cell in line[3].split("|")] for line in lines}
    assert len(cells) == 8
    for (lora_only, save_optimizer, zero), (adapters, attributes, shards) in cells.items():
        if zero == "yes":
            alone = cells[lora_only, save_optimizer, "no"]
            assert [adapters, attributes] == [alone[0], alone[1].removesuffix(", optimizer")]
            saved = save_optimizer == "True"
            assert shards == ("optimizer, one file per process" if saved else "")
