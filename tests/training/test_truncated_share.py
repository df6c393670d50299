"""How much was cut off: the column ``truncated_share``, and the warning that names it."""

from __future__ import annotations

import csv
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from training_fakes import FakeAgent, FakeGym

from agilerl.training.collectors.experience import Experience, remedy_for_flat_rewards
from agilerl.training.train_llm import finetune_llm_reasoning
from agilerl.typing import ActionResult


class CutOffAgent(FakeAgent):
    """Says that the first ``cut_off`` completions of each group reached the limit."""

    def __init__(self, cut_off: int, **options: Any) -> None:
        super().__init__(**options)
        self.cut_off = cut_off
        self.told: list[torch.Tensor] = []

    def get_action(self, obs: list[dict[str, Any]], training: bool = True) -> ActionResult:
        action = super().get_action(obs, training)
        reasons = [
            ["length" if row < self.cut_off else "stop" for row in range(len(group))]
            for group in action.completion_ids
        ]
        return replace(action, finish_reasons=reasons)

    def learn(self, *args: Any, truncated: Any = None, **options: Any) -> dict[str, float]:
        self.told.append(truncated)
        return super().learn(*args, **options)


def metrics(agent: FakeAgent, folder: Path, **options: Any) -> list[dict[str, str]]:
    options = {"max_steps": 4, "verbose": False, "checkpoint_path": folder, **options}
    finetune_llm_reasoning([agent], FakeGym(rows=100), **options)
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_share_is_a_column_and_learn_is_told(tmp_path: Path) -> None:
    agent = CutOffAgent(1, group_size=4)
    rows = metrics(agent, tmp_path / "r")
    assert [row["truncated_share"] for row in rows] == ["", "0.25", "0.25"]
    assert [each.tolist() for each in agent.told] == [[[True, False, False, False]] * 2] * 2


def test_it_is_empty_where_the_agent_does_not_say(tmp_path: Path) -> None:
    assert [row["truncated_share"] for row in metrics(FakeAgent(), tmp_path / "r")] == [""] * 3


@pytest.mark.parametrize("cut_off", [2, 1])
def test_the_warning_names_it_where_most_were_cut_off(
    cut_off: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    agent = CutOffAgent(cut_off, right_of_group=0)
    with caplog.at_level(logging.WARNING, "agilerl"):
        metrics(agent, tmp_path / "r", max_steps=20)
    (warned,) = (record.getMessage() for record in caplog.records)
    assert "GSPO agent 0 learns nothing" in warned
    named = "The likely cause: 100% of its completions were cut off" in warned
    assert named == ("Raise max_output_tokens" in warned) == (cut_off == 2)
    assert ("make the task easier" in warned) == (cut_off == 1)


def test_of_episodes_it_names_the_turns() -> None:
    played = Experience(([], [], None), torch.zeros(1, 2), 2, 2, 0.0, 0.0)
    played.metrics.update(turns_mean=3.0, truncated_share=0.75)
    assert "75% of its episodes were cut off" in remedy_for_flat_rewards(played, 1.0)
    assert "Raise max_turns" in remedy_for_flat_rewards(played, 1.0)
