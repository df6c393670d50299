"""Trackers: what they are given, and that none of them can cost the run."""

from __future__ import annotations

import json
import logging
import os
import re
import sqlite3
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from interpreters import python
from training_fakes import FakeAgent, FakeGym

from agilerl.training.trackers import (
    CompletionTable,
    MLflowTracker,
    TrackedRun,
    TrackerWaits,
    TrackioTracker,
)
from agilerl.training.train_llm import finetune_llm_reasoning

TABLE = CompletionTable(
    "agent_0/training",
    "title",
    ["shown as", "prompt", "reward"],
    [["best", "a|b\n<x>", 1.0], ["worst", "é", None]],
)


class Recorder:
    """Keeps what it is given; fails in the call of this number to a method."""

    run_id = "recorded"

    def __init__(self, fails_in: str = "", number: int = 1) -> None:
        self.fails_in, self.number = fails_in, number
        self.calls: list[tuple[Any, ...]] = []

    def start(self, run: TrackedRun) -> None:
        self.calls.append(("start", run))

    def write(self, iteration: int, values: Mapping[str, float]) -> None:
        self._called("write", iteration, values)

    def write_completions(self, iteration: int, table: CompletionTable) -> None:
        self._called("write_completions", iteration, table)

    def close(self, status: str) -> None:
        self._called("close", status)

    def of(self, method: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == method]

    def _called(self, method: str, *arguments: Any) -> None:
        self.calls.append((method, *arguments))
        if method == self.fails_in and len(self.of(method)) == self.number:
            raise RuntimeError("tracker server is gone")


def train(path: Path, trackers: list[Any], **options: Any) -> FakeAgent:
    agent = FakeAgent(skill=[1, 2, 3])
    options = {"verbose": False, "max_steps": 4, "evaluation_interval": 1, **options}
    finetune_llm_reasoning(
        [agent], FakeGym(rows=12), trackers=trackers, checkpoint_path=path, **options
    )
    return agent


def test_a_tracker_of_the_user(tmp_path: Path) -> None:
    tracker = Recorder()
    train(tmp_path / "r", [tracker])
    ((run,),) = tracker.of("start")
    assert run.directory == tmp_path / "r" and run.name.startswith("GSPO-digits-")
    assert run.config["arguments"]["max_steps"] == 4
    assert run.resumed_at is run.run_id is None
    assert run.config["hyperparameters"] == {"agent_0": {"group_size": 2, "lr": 1e-4}}
    assert [iteration for iteration, _ in tracker.of("write")] == [0, 1, 2]
    rows = [values for _, values in tracker.of("write") if "agent_0/reward_mean" in values]
    assert [row["agent_0/reward_mean"] for row in rows] == [0.5, 0.5]
    best = [
        (i, values["best/fitness"]) for i, values in tracker.of("write") if "best/agent" in values
    ]
    assert best == [(0, pytest.approx(1 / 3)), (1, pytest.approx(2 / 3)), (2, 1.0)]
    assert not tracker.of("write_completions")
    assert tracker.calls[-1] == ("close", "finished")


def test_it_gets_the_values_of_all_agents_at_once(tmp_path: Path) -> None:
    tracker, agents = Recorder(), [FakeAgent(0), FakeAgent(3)]
    options = {"max_steps": 4, "verbose": False, "checkpoint_path": tmp_path}
    finetune_llm_reasoning(agents, FakeGym(), trackers=[tracker], **options)
    assert [iteration for iteration, _ in tracker.of("write")] == [0, 1, 2]
    for _, values in tracker.of("write"):
        assert {"agent_0/steps", "agent_3/steps"} <= values.keys()
    ((run,),) = tracker.of("start")
    assert run.config["hyperparameters"].keys() == {"agent_0", "agent_3"}


def test_one_whose_class_is_a_plain_dataclass(tmp_path: Path) -> None:
    @dataclass
    class Unhashable(Recorder):
        calls: list[tuple[Any, ...]] = field(default_factory=list)
        fails_in: str = "write"
        number: int = 2

    tracker = Unhashable()
    assert len(train(tmp_path / "r", [tracker]).learned) == 2
    assert len(tracker.of("write")) == 2 and tracker.calls[-1] == ("close", "failed")


def test_those_that_have_started_are_closed_when_one_cannot(tmp_path: Path) -> None:
    class Unreachable(Recorder):
        def start(self, run: TrackedRun) -> None:
            raise ConnectionError("no server")

    before, failing_too, unreachable, after = (
        Recorder(),
        Recorder("close"),
        Unreachable(),
        Recorder(),
    )
    with pytest.raises(ConnectionError, match="no server"):
        train(tmp_path / "r", [before, failing_too, unreachable, after])
    assert [call[0] for call in before.calls] == ["start", "close"]
    for closed in (before, failing_too, unreachable):
        assert closed.calls[-1] == ("close", "failed")
    assert not after.calls


@pytest.mark.parametrize(("number", "status"), [(15, "killed"), (2, "finished")])
def test_it_is_told_of_a_signal(number: int, status: str, tmp_path: Path) -> None:
    tracker = Recorder()
    agent = FakeAgent(on_learn=lambda agent: os.kill(os.getpid(), number))
    with pytest.raises(SystemExit) if number == 15 else nullcontext():
        finetune_llm_reasoning(
            [agent], FakeGym(), trackers=[tracker], checkpoint_path=tmp_path, verbose=False
        )
    assert len(agent.learned) == 1 and tracker.calls[-1] == ("close", status)


def test_its_run_id_is_noted_and_it_is_told_of_a_crash(tmp_path: Path) -> None:
    tracker = Recorder()
    train(tmp_path / "r", [tracker], checkpoint_steps=1)
    state = json.loads((tmp_path / "r" / "iteration_00000002" / "run_state.json").read_text())
    assert state["log"]["trackers"] == {"Recorder 0": "recorded"}

    def crash(agent: FakeAgent) -> None:
        raise ValueError("out of luck")

    with pytest.raises(ValueError, match="out of luck"):
        finetune_llm_reasoning(
            [FakeAgent(on_learn=crash)], FakeGym(), trackers=[tracker], max_steps=2, verbose=False
        )
    assert tracker.calls[-1] == ("close", "failed")


@pytest.mark.parametrize(
    ("method", "number"), [("write", 1), ("write", 3), ("write_completions", 1), ("close", 1)]
)
def test_one_that_fails_is_named_once_and_dropped(
    method: str, number: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failing, other = Recorder(method, number), Recorder()
    with caplog.at_level(logging.INFO, "agilerl"):
        agent = train(tmp_path / "r", [failing, other], completions_interval=1)
    assert len(agent.learned) == 2
    (said,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert said == (
        f"Recorder has failed in {method}() and gets nothing more of this run, which goes on: "
        "RuntimeError: tracker server is gone"
    )
    assert len(failing.of(method)) == number
    if method != "close":
        assert failing.calls[-2][0] == method and failing.calls[-1] == ("close", "failed")
    assert len(failing.of("close")) == 1
    assert other.calls[-1] == ("close", "finished")
    assert len(other.of("write")) == 3
    assert len((tmp_path / "r" / "metrics.csv").read_text().splitlines()) == 4


def test_one_that_waits_is_not_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Waiting(Recorder):
        def _called(self, method: str, *arguments: Any) -> None:
            super()._called(method, *arguments)
            if len(self.calls) in (3, 4):
                raise TrackerWaits("no room")

    tracker = Waiting()
    train(tmp_path / "r", [tracker])
    assert len(tracker.of("write")) == 3 and tracker.of("close")
    assert caplog.text.count("Waiting cannot write now: TrackerWaits('no room')") == 1
    assert "are lost" not in caplog.text


@pytest.mark.parametrize(
    ("trackers", "says"),
    [
        (Recorder(), "trackers is .*it must be a list of trackers"),
        (["wandb"], r"trackers\[0\] is a str, which lacks run_id, start, write, .*MLflowTracker"),
    ],
)
def test_what_is_no_tracker_is_refused(trackers: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=says):
        finetune_llm_reasoning([FakeAgent()], FakeGym(), max_steps=2, trackers=trackers)
    assert not (tmp_path / "runs").exists()


def test_tables_in_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    options = {"tensorboard": True, "completions_interval": 2}
    train(tmp_path / "r", [], **options)
    events = EventAccumulator(str(tmp_path / "r" / "tensorboard")).Reload()
    (shown,) = events.Tensors("completions/agent_0/training/text_summary")
    text = shown.tensor_proto.string_val[0].decode()
    assert shown.step == 2
    assert "| shown as | prompt | completion | answer | reward |" in text
    assert "| <code>best</code> | <code>q2</code> | <code>12</code> | <code>12</code> | 1 |" in text


def test_markdown_keeps_odd_text_in_its_cell() -> None:
    lines = TABLE.markdown().splitlines()
    assert lines == [
        "| shown as | prompt | reward |",
        "| --- | --- | --- |",
        "| <code>best</code> | <code>a&#124;b<br>&lt;x></code> | 1 |",
        "| <code>worst</code> | <code>é</code> |  |",
    ]


@pytest.mark.process
def test_a_wandb_run_of_the_user_is_used_and_not_finished(tmp_path: Path) -> None:
    code = """
import warnings, wandb
from training_fakes import FakeAgent, FakeGym
from agilerl.training.callbacks import Callback
from agilerl.training.train_llm import finetune_llm_reasoning
run = wandb.init(project="mine", dir=".", settings={"silent": True}, config={"lr": 1})
for step in range(7):
    run.log({"own": step})
steps = []
class Own(Callback):
    def on_iteration(self, progress):
        steps.append(run.step)
with warnings.catch_warnings(record=True) as caught:
    finetune_llm_reasoning([FakeAgent(), FakeAgent(1)], FakeGym(), max_steps=4, wb=True,
                           verbose=False, wandb_kwargs={"project": "other"},
                           completions_interval=1, checkpoint_path="r", callbacks=[Own()])
assert steps == [8, 9], steps  # one each for iterations 0 and 1, of both agents and their tables
assert "wandb_kwargs and wandb_api_key have no effect" in str(caught[-1].message), caught
assert wandb.run is run
assert run.config["agilerl"]["environment"] == "digits" and run.config["lr"] == 1
run.log({"own": 7})
print("summary", dict(run.summary))
run.finish()
"""
    result = python(code, WANDB_MODE="offline", HOME=str(tmp_path / "home"))
    assert result.returncode == 0, result.stderr
    assert "'own': 7" in result.stdout and "'agilerl/iteration': 2" in result.stdout
    (data,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    content = data.read_bytes()
    for expected in (b"mine", b"agent_0/reward_mean", b"completions/agent_0/training", b"best/*"):
        assert expected in content, expected
    assert not (tmp_path / "r" / "wandb").exists()


@pytest.mark.process
def test_a_wandb_core_that_dies_is_named_as_what_it_is(tmp_path: Path) -> None:
    code = """
import logging, os, signal, subprocess, sys, time
from training_fakes import FakeAgent, FakeGym
from agilerl.training.train_llm import finetune_llm_reasoning
logging.basicConfig(stream=sys.stdout, level=logging.WARNING, format="%(levelname)s %(message)s")

def kill_core(agent):
    if len(agent.learned) == 2:
        listed = subprocess.run(["ps", "-wweo", "pid,ppid,args"], capture_output=True, text=True)
        rows = [line.split(None, 2) for line in listed.stdout.splitlines()[1:]]
        own = [row for row in rows if row[1] == str(os.getpid())]
        cores = [int(row[0]) for row in own if "wandb-core" in row[2]]
        assert cores, listed.stdout
        for core in cores:
            os.kill(core, signal.SIGKILL)
        time.sleep(1)

agent = FakeAgent(on_learn=kill_core)
finetune_llm_reasoning([agent], FakeGym(rows=20), max_steps=8, wb=True, verbose=False,
                       wandb_kwargs={"settings": {"silent": True}}, checkpoint_path="r")
print("learned", len(agent.learned))

# The next run of the program takes no part in it, and has a wandb-core of its own.
import wandb
ended, finish = [], wandb.Run.finish
def noted(run, exit_code=None):
    ended.append((run.id, exit_code))
    finish(run, exit_code=exit_code)
wandb.Run.finish = noted
class Unreachable:
    run_id = write = write_completions = close = None
    def start(self, run):
        raise OSError("no server")
dead, options = wandb.run.id, {"wb": True, "verbose": False, "max_steps": 2}
try:
    finetune_llm_reasoning([FakeAgent()], FakeGym(), trackers=[Unreachable()], **options,
                           wandb_kwargs={"id": "second"}, checkpoint_path="r2")
except OSError as error:
    print(error)
assert wandb.run is None
def terminate(agent):
    os.kill(os.getpid(), signal.SIGTERM)
try:
    finetune_llm_reasoning([FakeAgent(on_learn=terminate)], FakeGym(), **options,
                           wandb_kwargs={"id": "third"}, checkpoint_path="r3")
except SystemExit as exit:
    print("exit", exit.code)
assert [each for each in ended if each[0] != dead] == [("second", 1), ("third", 143)], ended
"""
    result = python(code, WANDB_MODE="offline", HOME=str(tmp_path / "home"))
    assert result.returncode == 0, result.stderr
    assert "learned 4" in result.stdout
    (said,) = [line for line in result.stdout.splitlines() if line.startswith("ERROR")]
    assert "WandbTracker has failed in write() and gets nothing more of this run" in said
    assert "the process wandb-core, which sends" in said and "has ended" in said
    (folder,) = re.findall("`wandb sync (.*)`", said)
    assert list((tmp_path / folder).glob("run-*.wandb"))  # what `wandb sync` looks for
    assert "no server" in result.stdout and "exit 143" in result.stdout


@pytest.mark.process
def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = str(tmp_path / "mlruns")
    tracker = MLflowTracker("exp", tracking_uri=uri)
    train(tmp_path / "r", [tracker], completions_interval=2)
    client = mlflow.MlflowClient(uri)
    run = client.get_run(tracker.run_id)
    assert run.info.status == "FINISHED" and run.info.run_name.startswith("GSPO-digits-")
    history = client.get_metric_history(tracker.run_id, "agent_0/fitness")
    assert [(each.step, each.value) for each in history] == [
        (0, pytest.approx(1 / 3)),
        (1, pytest.approx(2 / 3)),
        (2, 1.0),
    ]
    file = client.download_artifacts(
        tracker.run_id, "completions/agent_0/training/iteration_00000002.json"
    )
    shown = json.loads(Path(file).read_text())
    assert shown["columns"] == ["shown as", "prompt", "completion", "answer", "reward"]
    assert shown["data"][0] == ["best", "q2", "12", "12", 1.0]
    tracker.write(9, {"agent_0/pass@4": 0.5})
    assert "agent_0/pass_at_4" in client.get_run(tracker.run_id).data.metrics


@pytest.mark.process
@pytest.mark.slow
def test_mlflow_and_trackio_go_on_with_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("trackio")
    code = """
from pathlib import Path
from agilerl.training.trackers import MLflowTracker, TrackioTracker
from resume_helpers import After, make_agents, run_reasoning
def trackers():
    return [MLflowTracker(tracking_uri="mlruns"), TrackioTracker("p")]
run_reasoning(Path("run"), pop=make_agents(1), hook=After(2), trackers=trackers())
run_reasoning(Path("run"), pop=make_agents(1), resume_from="run", trackers=trackers())
"""
    variables = {"TRACKIO_DIR": str(tmp_path / "t"), "HOME": str(tmp_path / "home")}
    result = python(code, MLFLOW_ALLOW_FILE_STORE="true", **variables)
    assert result.returncode == 0, result.stderr
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = mlflow.MlflowClient(str(tmp_path / "mlruns"))
    experiment = client.get_experiment_by_name("agilerl")
    (run,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(run.info.run_id, "agent_0/reward_mean")
    logged = logged_by_trackio(tmp_path / "t" / "p.db", "agent_0/reward_mean")
    # Iteration 2 again, with its evaluation: only what was new.
    assert [each.step for each in history] == [1, 2, 3, 4]
    assert [step for step, _ in logged] == [1, 2, 3, 4]
    fitness = client.get_metric_history(run.info.run_id, "agent_0/fitness")
    assert [each.step for each in fitness] == [0, 2, 4]
    assert run.info.status == "FINISHED" and run.data.params["agent_0/beta"] == "0.001"


@pytest.mark.process
def test_an_mlflow_run_of_the_user_is_used_and_not_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(str(tmp_path / "mlruns"))
    with mlflow.start_run() as mine:
        tracker = MLflowTracker()
        train(tmp_path / "r", [tracker])
        assert tracker.run_id is None
        found = mlflow.get_run(mine.info.run_id)
        assert found.info.status == "RUNNING" and found.data.metrics["agent_0/fitness"] == 1.0


def logged_by_trackio(path: Path, name: str) -> list[tuple[int, Any]]:
    """Steps and values of a metric; all are of one run."""
    rows = sqlite3.connect(path).execute("select run_name, step, metrics from metrics order by id")
    found = [(run, step, json.loads(metrics)) for run, step, metrics in rows]
    assert len({run for run, _, _ in found}) == 1
    return [(step, metrics[name]) for _, step, metrics in found if name in metrics]


@pytest.mark.process
def test_trackio(tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    code = """
from training_fakes import FakeAgent, FakeGym
from agilerl.training.trackers import TrackioTracker
from agilerl.training.train_llm import finetune_llm_reasoning
finetune_llm_reasoning([FakeAgent()], FakeGym(rows=20), trackers=[TrackioTracker("p")],
                       max_steps=4, verbose=False, completions_interval=2)
"""
    result = python(code, TRACKIO_DIR=str(tmp_path / "t"), HOME=str(tmp_path / "home"))
    assert result.returncode == 0, result.stderr
    database = tmp_path / "t" / "p.db"
    assert logged_by_trackio(database, "agent_0/reward_mean") == [(1, 0.5), (2, 0.5)]
    ((step, table),) = logged_by_trackio(database, "completions/agent_0/training")
    assert step == 2 and table["_value"][0]["shown as"] == "best"


@pytest.mark.parametrize(
    ("tracker", "package"), [(MLflowTracker, "mlflow"), (TrackioTracker, "trackio")]
)
def test_without_the_package(tracker: Any, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"{package}: pip install 'agilerl\[{package}\]'"):
        tracker()
