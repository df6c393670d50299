"""The page's code runs from top to bottom and prints what the page shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from documentation_page import run_page

from agilerl.llm.advantages import group_relative_per_turn

PAGE = (Path(__file__).parents[2] / "docs" / "multiturn.md").read_text()


def test_code_and_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_page(PAGE, shown=4)


def test_the_worked_example_of_turn_credit() -> None:
    rows = re.findall(r"^episode \d(.{27})(.*)$", PAGE, flags=re.MULTILINE)
    read = [[[int(n) for n in half.split()] for half in row] for row in rows]
    assert [len(rewards) for rewards, _ in read] == [3, 2, 1]
    rewards, advantages = (
        torch.tensor([row[side] + [0] * (3 - len(row[side])) for row in read], dtype=torch.float)
        for side in (0, 1)
    )
    played = torch.tensor([[True, True, True], [True, True, False], [True, False, False]])
    assert torch.equal(group_relative_per_turn(rewards, played, 3, "mean_only"), advantages)
