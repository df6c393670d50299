"""Several rewards in ``metrics.csv`` and ``completions.jsonl``, of one process and of two."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from forking import on_two_ranks
from test_training_with_reasoning_gym import TOKENIZER, WritingAgent, rows

from agilerl.distributed import Ranks
from agilerl.llm_envs import ReasoningGym
from agilerl.training.collectors.experience import (
    Experience,
    gather_statistics,
    named_reward_statistics,
)
from agilerl.training.train_llm import finetune_llm_reasoning

NAN = math.nan


def brief(completion: str) -> float:
    return float(completion == "no")


def says_yes(completion: str, answer: str) -> float | None:
    return float(completion == answer) if answer == "yes" else None


def trained(folder: Path, reward_fn: Any, **options: Any) -> tuple[dict[str, str], list[Any]]:
    """The last row and the samples of one iteration: three questions, each answered yes and no."""
    env = ReasoningGym(
        rows("train", ["yes", "no", "no"]),
        rows("test", ["yes"]),
        TOKENIZER,
        reward_fn,
        [{"role": "user", "content": "{question}"}],
        data_batch_size_per_gpu=3,
        **options,
    )
    finetune_llm_reasoning(
        [WritingAgent()], env, max_steps=3, checkpoint_path=folder, verbose=False
    )
    with (folder / "metrics.csv").open(newline="") as file:
        row = [row for row in csv.DictReader(file) if row["reward_mean"]][-1]
    lines = (folder / "completions.jsonl").read_text().splitlines()
    return row, [json.loads(line) for line in lines]


def test_columns_and_samples(tmp_path: Path) -> None:
    row, samples = trained(tmp_path, [brief, says_yes], reward_weights={"says_yes": 2.0})
    assert float(row["rewards/brief/mean"]) == 0.5
    assert float(row["rewards/brief/std"]) == 0.5
    # Over the two completions that it applies to.
    assert float(row["rewards/says_yes/mean"]) == 0.5
    assert float(row["reward_mean"]) == pytest.approx((3 * 1 + 2) / 6)
    assert len(samples) == 3
    for sample in samples:
        applies = sample["answer"] == "yes"
        assert sample["rewards"] == {"brief": 0.0, "says_yes": 1.0 if applies else None}
        assert sample["reward"] == (2.0 if applies else 0.0)


def test_a_single_function_has_the_columns_it_had(tmp_path: Path) -> None:
    row, samples = trained(tmp_path, brief)
    assert not [name for name in row if name.startswith("rewards/")]
    assert all("rewards" not in sample for sample in samples)


def test_a_reward_that_applies_nowhere_has_no_value(tmp_path: Path) -> None:
    row, samples = trained(tmp_path, {"brief": brief, "never": lambda completion: None})
    assert not [name for name in row if "never" in name]
    assert samples[0]["rewards"]["never"] is None


def test_statistics() -> None:
    named = {"a": torch.tensor([[1.0, 2.0], [NAN, 6.0]]), "b": torch.full((2, 2), NAN)}
    expected = {"rewards/a/mean": 3.0, "rewards/a/std": pytest.approx((14 / 3) ** 0.5)}
    assert named_reward_statistics(collected(**named)) == expected


def collected(**named: torch.Tensor) -> Experience:
    zeros = torch.zeros(named["a"].shape)
    return Experience(([], [], zeros), zeros, 1, 1, 1.0, 1.0, named_rewards=named)


@pytest.mark.process
def test_means_of_two_processes_are_over_all_rows_that_apply(tmp_path: Path) -> None:
    def action(ranks: Ranks) -> dict[str, float]:
        own = [[[1.0, 2.0], [NAN, NAN]], [[NAN, 6.0]]][ranks.rank]
        return named_reward_statistics(gather_statistics(collected(a=torch.tensor(own)), ranks))

    (first, second) = on_two_ranks(tmp_path / "ranks", action)
    assert first == second
    assert first["rewards/a/mean"] == 3.0
    assert first["rewards/a/std"] == pytest.approx((14 / 3) ** 0.5)
