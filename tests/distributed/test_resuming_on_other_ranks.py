"""A run goes on with another number of processes: from the same state, place and counters."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from case_settings import each_setting, settings_of
from training_runs import reasoning, sums, write_result

from agilerl.llm_envs.dataset import TrainingBatchSampler

pytestmark = [pytest.mark.slow, pytest.mark.process]

SETTINGS = settings_of("another_number_of_ranks")


def of_all(run: Path, rank: int = 0) -> Any:
    """Weights, optimizer, fitness, scores and steps of a run's agent."""
    return json.loads(run.with_name(f"{run.name}_{rank}.json").read_text())["of_all"]


def steps(run: Path) -> list[int]:
    """After every iteration."""
    with (run / "metrics.csv").open() as file:
        return [int(row["steps"]) for row in csv.DictReader(file)]


def asked(run: Path, iteration: int) -> list[str]:
    """Questions that rank 0 got in an iteration."""
    lines = map(json.loads, (run / "completions.jsonl").read_text().splitlines())
    return [line["question"] for line in lines if line["iteration"] == iteration]


def following(position: tuple[int, int], batches: int, processes: int) -> list[list[str]]:
    """Questions of rank 0's next batches after an ``(epoch, offset)``."""
    order = TrainingBatchSampler(7, batch_size=2, seed=42, num_replicas=processes)
    order.epoch, order.offset = position
    questions = []
    for _ in range(batches):
        questions.append([sums(7)["question"][row] for row in order.current()])
        order.advance()
    return questions


@pytest.mark.parametrize("setting", SETTINGS)
def test_one_process_goes_on_with_the_run_of_two(
    folder: Path, setting: str, tmp_path: Path
) -> None:
    of_two, run = folder / f"two-{setting}", tmp_path / "run"
    shutil.copytree(of_two, run)
    write_result(run, reasoning(run, None, iterations=3))
    assert of_all(run) == of_all(of_two) == of_all(of_two, rank=1)
    assert steps(run) == [0, 4, 7, 11]
    agent = reasoning(run, None, iterations=4)
    assert steps(run) == [0, 4, 7, 11, 13, 14]
    assert [asked(run, i) for i in (4, 5)] == following((1, 4), batches=2, processes=1)
    assert len(agent.scores) == 5


@pytest.mark.parametrize("setting", SETTINGS)
def test_two_processes_go_on_with_the_run_of_one(folder: Path, setting: str) -> None:
    run = folder / f"one-{setting}"
    for rank in (0, 1):
        assert of_all(run.with_name(f"{run.name}_taken_over"), rank) == of_all(run)
    assert steps(run) == [0, 2, 4, 7, 11, 14]
    assert [asked(run, i) for i in (3, 4, 5)] == following((0, 4), batches=3, processes=2)


@each_setting("appended_rows")
def test_rows_are_appended_on_all_ranks(ranks: list[Any], folder: Path) -> None:
    """To 7, of which 4 were trained on: then come the other 3, and the 3 that were appended."""
    for rank in ranks:
        assert "allow_appended_rows=True goes on with them" in rank["refusal"]
    run = folder / "appended"
    assert of_all(run) == of_all(run, rank=1)
    assert steps(run) == [0, 4, 7, 10, 14]
    assert [asked(run, i) for i in (1, 2)] == following((0, 0), batches=2, processes=2)
    assert {*asked(run, 3)} < {"7+7?", "8+8?", "9+9?"}
    assert len(asked(run, 3)) == 2


@each_setting("set_back")
def test_agents_are_set_back_exactly_and_batches_have_to_divide(ranks: list[Any]) -> None:
    for rank in ranks:
        for same_weights, rate, peak in rank["found"].values():
            assert same_weights and peak == 5e-3
            assert rate == pytest.approx(5e-3)  # the end of the warm-up
        assert "cannot be resumed here: its batch_size is 15" in rank["refusal"]
        assert "over all 2 processes" in rank["refusal"]
