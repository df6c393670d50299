"""When a run is saved, what counts as a failed save, and what may be in a checkpoint."""

from __future__ import annotations

import csv
import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from resume_helpers import checkpoints_in, files_up_to
from safetensors import SafetensorError
from safetensors.torch import save_file
from training_fakes import FakeAgent, FakeGym

from agilerl.training import bounds
from agilerl.training.checkpoint.run_checkpoint import complete_checkpoints
from agilerl.training.checkpoint.run_state import check_plain
from agilerl.training.checkpoint.saver import is_no_room
from agilerl.training.collectors.reasoning_collector import ReasoningCollector
from agilerl.training.options import TrainingOptions
from agilerl.training.population import Population
from agilerl.training.run import run_training
from agilerl.training.train_llm import finetune_llm_reasoning


def train(agent: FakeAgent, env: FakeGym | None = None, **options: Any) -> None:
    given = {"max_steps": 10, "checkpoint_path": "c", "checkpoint_steps": 1, "verbose": False}
    finetune_llm_reasoning([agent], env or FakeGym(rows=99), **(given | options))


@pytest.mark.parametrize("bound", [{"max_steps": 10}, {"max_steps": None, "num_epochs": 1}])
def test_the_end_is_saved_though_off_the_interval(bound: dict[str, Any]) -> None:
    rows = 10 if "num_epochs" in bound else 99
    train(FakeAgent(), FakeGym(rows=rows), checkpoint_steps=3, **bound)
    assert checkpoints_in(Path("c"))[-2:] == ["iteration_00000003", "iteration_00000005"]


def test_a_run_without_checkpoint_steps_saves_nothing_at_the_end() -> None:
    train(FakeAgent(), checkpoint_steps=None)
    assert checkpoints_in(Path("c")) == []


def test_an_end_that_cannot_be_saved_costs_the_checkpoint_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(agent: FakeAgent) -> None:
        if len(agent.learned) == 5:
            raise OSError(28, "No space left on device")

    agent = FakeAgent(on_save=full)
    train(agent, checkpoint_steps=3)
    assert len(agent.learned) == 5
    assert checkpoints_in(Path("c")) == ["iteration_00000003"]
    assert "checkpoint of iteration 5 could NOT be saved" in caplog.text
    assert "Free disk space" in caplog.text


def test_a_signal_during_the_save_at_the_end_is_heeded(capfd: pytest.CaptureFixture[str]) -> None:
    def signalled(agent: FakeAgent) -> None:
        if len(agent.learned) == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as ended:
        train(FakeAgent(on_save=signalled), checkpoint_steps=3)
    assert ended.value.code == 143
    assert "Saved to c/iteration_00000005" in capfd.readouterr().out


def test_a_stop_removes_old_checkpoints_too() -> None:
    def signalled(agent: FakeAgent) -> None:
        if len(agent.learned) == 2:
            os.kill(os.getpid(), signal.SIGINT)

    train(FakeAgent(on_learn=signalled), keep_checkpoints=1)
    best = "iteration_00000001"
    assert checkpoints_in(Path("c")) == [best, "iteration_00000003"]


def test_when_time_is_up_the_last_iteration_is_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time that runs out while a checkpoint is written is up for the next iteration."""
    # Only saving takes time, so that no slow machine can use it up before.
    now = [0.0]
    monkeypatch.setattr(bounds, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def slowly(agent: FakeAgent) -> None:
        now[0] += 0.6

    agent = FakeAgent(on_save=slowly)
    options = TrainingOptions(
        max_steps=90,
        max_wall_seconds=0.5,
        evaluation_interval=99,
        checkpoint_steps=1,
        checkpoint_path=tmp_path,
        verbose=False,
    )
    population = Population([agent], [ReasoningCollector(FakeGym(rows=99))])
    run_training(population, options, "digits")
    with (tmp_path / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [bool(row["fitness"]) for row in rows] == [True, False, True]


def test_an_end_whose_save_fails_costs_no_agents() -> None:
    def fail_once(agent: FakeAgent) -> None:
        agent.on_save = lambda agent: None
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError) as caught:
        train(FakeAgent(on_save=fail_once), checkpoint_steps=99)
    assert "saved to c/crashed_in_iteration_00000005" in caught.value.__notes__[0]


@pytest.mark.parametrize("number", [28, 122, 27, 13, None])
def test_the_remedy_fits_the_error(number: int | None, caplog: pytest.LogCaptureFixture) -> None:
    def cannot(agent: FakeAgent) -> None:
        if len(agent.learned) == 1:
            raise OSError("no number") if number is None else OSError(number, "cannot")

    train(FakeAgent(on_save=cannot))
    assert "checkpoint of iteration 1 could NOT be saved" in caplog.text
    assert ("Free disk space" in caplog.text) == (number in (28, 122, 27))


def test_a_full_disk_is_known_by_what_safetensors_says(tmp_path: Path) -> None:
    with files_up_to(1000), pytest.raises(SafetensorError, match="os error") as full:
        save_file({"x": torch.zeros(4096)}, tmp_path / "x")
    with pytest.raises(SafetensorError, match="os error") as missing:
        save_file({"x": torch.zeros(4096)}, tmp_path / "nowhere" / "x")
    assert [is_no_room(caught.value) for caught in (full, missing)] == [True, False]


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), FileExistsError("in the way")])
def test_what_is_no_failed_write_ends_the_run(error: Exception) -> None:
    def raise_it(agent: FakeAgent) -> None:
        if len(agent.learned) == 2:
            raise error

    with pytest.raises(type(error), match=str(error)):
        train(FakeAgent(on_save=raise_it))


class NumpyGym(FakeGym):
    """Its position is NumPy's from the ``first``-th position on."""

    first = 0

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if self.position >= self.first:
            state["position"] = np.int64(state["position"])
        return state


def test_a_state_that_json_would_change_is_refused_before_training() -> None:
    agent = FakeAgent()
    with pytest.raises(
        TypeError, match=r"environment\.position\.position is .*of type int64.*int\(x\)"
    ):
        train(agent, NumpyGym(rows=99))
    assert not agent.learned
    assert not Path("c").exists()


def test_one_that_comes_later_ends_the_run_and_the_agents_are_saved() -> None:
    env = NumpyGym(rows=99)
    env.first = 6
    with pytest.raises(TypeError, match=r"run_state\.environments\[0\]\.position\.position is"):
        train(FakeAgent(), env)
    assert [path.name for path in complete_checkpoints("c")] == ["iteration_00000001"]
    assert Path("c/crashed_in_iteration_00000002/agent_0/agent.json").is_file()


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({"a": [1, {"b": {3}}]}, r"x\.a\[1\]\.b is \{3\}"),
        ({"a": {1: 2}}, r"A key of x\.a is 1"),
        ({"a": np.float32(1)}, r"x\.a is"),
    ],
)
def test_what_json_does_not_know_is_named(content: Any, named: str) -> None:
    with pytest.raises(TypeError, match=named):
        check_plain(content, "x")


def test_plain_content_comes_back_as_it_was() -> None:
    content = {"a": [None, True, 1, -2.5, "\ud800", float("inf")], "b": {}, "c": np.float64(0.1)}
    check_plain(content, "x")
    assert json.loads(json.dumps(content)) == content


def test_a_tilde_is_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    paths = {"checkpoint_path": "~/run", "elite_path": "~/elite", "save_elite": True}
    train(FakeAgent(), max_steps=2, **paths)
    assert [path.parent for path in complete_checkpoints("~/run")] == [tmp_path / "home/run"]
    again = FakeAgent()
    options = TrainingOptions(max_steps=4, resume_from="~/run", **paths)
    assert options.resume_from == options.checkpoint_path == tmp_path / "home" / "run"
    assert options.elite_path == tmp_path / "home" / "elite"
    assert (tmp_path / "home" / "elite" / "agent.json").is_file()
    with pytest.raises(FileNotFoundError, match="home/nowhere"):
        train(again, resume_from="~/nowhere")
    assert not Path("~").exists()
