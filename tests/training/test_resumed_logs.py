"""What a resumed run does with the files and trackers of the run that it goes on with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from interpreters import python
from resume_helpers import After, files_up_to, make_agents, rows_of, run_reasoning, state_of

from agilerl.training.collectors.experience import Sample
from agilerl.training.logs.files import CompletionsFile, LineageFile, MetricsCsv
from agilerl.training.logs.resumed_files import take_over_logs
from agilerl.training.trackers.protocol import CompletionTable, TrackedRun
from agilerl.training.trackers.tensorboard import TensorBoardTracker

STATE: dict[str, Any] = {
    "iteration": 2,
    "unevaluated_rows": None,
    "log": {"metrics_rows": 3, "samples": 2},
}


def write_logs(path: Path, metrics: str, completions: str) -> None:
    path.mkdir()
    (path / "metrics.csv").write_text(metrics)
    (path / "completions.jsonl").write_bytes(completions.encode("utf-8"))


def test_rows_and_samples_after_the_checkpoint_and_torn_lines_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, target = tmp_path / "a", tmp_path / "b"
    samples = [json.dumps({"iteration": i, "completion": "ä\u2028"}, ensure_ascii=False) + "\n"
               for i in (1, 2, 3)]  # fmt: skip
    write_logs(source, "iteration,agent,x\n0,0,1.5\n1,0,\n2,0,3\n3,0,4\n4,", "".join(samples))
    with (source / "completions.jsonl").open("ab") as file:
        file.write('{"iteration": 1, "completion": "ä'.encode()[:-1])
    target.mkdir()
    take_over_logs(source, target, STATE)
    assert (target / "metrics.csv").read_text() == "iteration,agent,x\n0,0,1.5\n1,0,\n2,0,3\n"
    assert (target / "completions.jsonl").read_text(encoding="utf-8") == "".join(samples[:2])
    assert not caplog.records
    # Rows whose evaluation is due will be written again: they are not missed, others are.
    due = {**STATE, "unevaluated_rows": [{"iteration": 2}]}
    take_over_logs(source, target, due)
    assert (target / "metrics.csv").read_text() == "iteration,agent,x\n0,0,1.5\n1,0,\n"
    assert not caplog.records
    take_over_logs(source, target, {**due, "log": {"metrics_rows": 4, "samples": 2}})
    assert "metrics.csv lacks 1 lines up to iteration 1" in caplog.text


def test_a_run_that_was_stopped_before_an_evaluation_misses_no_row(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "run"
    run_reasoning(path, hook=After(4), save_elite=None, elite_path=None)  # two agents: iteration 2
    assert len(state_of(path / "iteration_00000002")["unevaluated_rows"]) == 2
    run_reasoning(path, resume_from=path, max_steps=4, save_elite=None, elite_path=None)
    assert "lacks" not in caplog.text
    assert [row["iteration"] for row in rows_of(path)] == ["0", "0", "1", "1", "2", "2"]


def test_logs_that_are_gone_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a").mkdir()
    take_over_logs(tmp_path / "a", tmp_path, STATE)
    assert caplog.text.count("is missing") == 2


def test_tensorboard_goes_on_with_the_same_steps(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    path = tmp_path / "run"
    options = {"tensorboard": True, "tensorboard_log_dir": tmp_path / "events"}
    run_reasoning(path, pop=make_agents(1), hook=After(3), keep_checkpoints=9, **options)
    run_reasoning(path, pop=make_agents(1), resume_from=path / "iteration_00000001", **options)
    (folder,) = (tmp_path / "events").iterdir()
    events = EventAccumulator(str(folder)).Reload()
    scores = [(e.step, e.value) for e in events.Scalars("agent_0/reward_mean")]
    rows = [row for row in rows_of(path) if row["reward_mean"]]
    assert scores == [
        (int(row["iteration"]), pytest.approx(float(row["reward_mean"]))) for row in rows
    ]
    assert [step for step, _ in scores] == [1, 2, 3, 4]


class Shown:
    """A tracker that keeps what it does not have yet."""

    run_id = "one"

    def __init__(self) -> None:
        self.series: list[tuple[int, str]] = []
        self.logged: Mapping[str, int] = {}

    def start(self, run: TrackedRun) -> None:
        self.run, self.logged = run, run.logged

    def write(self, iteration: int, values: Mapping[str, float]) -> None:
        self.series += [(iteration, name) for name in self.run.new_values(iteration, values)]

    def write_completions(self, iteration: int, table: CompletionTable) -> None:
        if self.run.is_new_table(iteration, table):
            self.series.append((iteration, f"completions/{table.name}"))

    def close(self, status: str) -> None:
        self.status = status


def test_a_tracker_is_told_what_the_run_had_shown(tmp_path: Path) -> None:
    path, options = tmp_path / "run", {"completions_interval": 1, "keep_checkpoints": 9}
    first, again, other = Shown(), Shown(), Shown()
    run_reasoning(path, pop=make_agents(1), hook=After(3), trackers=[first], **options)
    crashed = rows_of(path)[-1]["iteration"]
    options |= {"resume_from": path / "iteration_00000001"}
    run_reasoning(path, pop=make_agents(1), trackers=[again, other], **options)
    assert crashed == "3" and first.logged == other.logged == {}
    assert again.logged["agent_0/reward_mean"] == 3 and again.logged["agent_0/fitness"] == 2
    assert len(set(first.series)) == len(first.series)
    assert not set(first.series) & set(again.series)
    assert {*first.series, *again.series} >= {*other.series}
    assert {iteration for iteration, _ in again.series} == {4}
    assert (2, "completions/agent_0/evaluation") in other.series
    config = again.run.config["hyperparameters"]["agent_0"]
    assert (config["lr"], config["loss_type"], config["lora_config"]["r"]) == (1e-2, "grpo", 2)
    assert "actor_network" not in config


def test_hyperparameters_shown_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    path, tracker = tmp_path / "run", Shown()
    run_reasoning(path, pop=make_agents(1), hook=After(1))
    run_reasoning(path, pop=make_agents(1, beta=0.5), resume_from=path, trackers=[tracker])
    assert tracker.run.config["hyperparameters"]["agent_0"]["beta"] == 0.001


def test_all_rows_wait_for_room_and_only_written_ones_count(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    metrics = MetricsCsv(path)
    metrics.write({"iteration": 0, "agent": 0})
    with files_up_to(path.stat().st_size + 3):
        for i in range(1, 400):  # more than a buffer of Python's
            row: dict[str, float] = {"iteration": i, "agent": 0, "wall_seconds": 1 / 3}
            with pytest.raises(OSError, match="too large"):
                metrics.write(row | ({"new": i} if i == 200 else {}))
        assert metrics.rows == len(rows_of(tmp_path)) == 1
    metrics.write({"iteration": 400, "agent": 0})
    assert metrics.rows == 401
    metrics.close()
    rows = rows_of(tmp_path)
    assert [row["iteration"] for row in rows] == [str(i) for i in range(401)]
    assert [i for i, row in enumerate(rows) if row["new"]] == [200]


def test_all_samples_wait_for_room_and_only_written_ones_count(tmp_path: Path) -> None:
    path = tmp_path / "completions.jsonl"
    completions = CompletionsFile(path)
    completions.write(0, 0, [Sample("q", "x" * 1000, "a", 0.0)])
    with files_up_to(path.stat().st_size + 1500):  # for one, and a part of the next
        completions.write(1, 0, [Sample("q", "x" * 1000, "a", 0.0)])
        for i in range(2, 30):
            with pytest.raises(OSError, match="too large"):
                completions.write(i, 0, [Sample("q", "x" * 1000, "a", 0.0)])
        assert completions.lines == len(path.read_text().splitlines()) == 2
    completions.close()
    assert completions.lines == 30
    found = [json.loads(line)["iteration"] for line in path.read_text().splitlines()]
    assert found == list(range(30))


def test_a_lineage_waits_for_room_and_stays_whole_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "lineage.json"
    lineage = LineageFile(path)
    generations = [{"iteration": number, "members": []} for number in range(50)]
    lineage.write(generations[:1])
    with files_up_to(path.stat().st_size + 100):
        with pytest.raises(OSError, match="too large"):
            lineage.write(generations)
        with pytest.raises(OSError, match="too large"):
            lineage.sync()
        assert json.loads(path.read_text()) == {"generations": generations[:1]}
    lineage.sync()
    assert json.loads(path.read_text()) == {"generations": generations}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_tensorboard_goes_on_once_there_is_room_again(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    values = {f"agent_0/m{i}": float(i) for i in range(25)}
    sink = TensorBoardTracker(tmp_path)
    sink.start(TrackedRun("run", tmp_path, {}))
    sink.write(1, values)
    (file,) = tmp_path.iterdir()
    with files_up_to(file.stat().st_size + 100):
        for iteration in (2, 3):
            with pytest.raises(OSError, match="too large"):
                sink.write(iteration, values)
    sink.write(4, values)
    sink.close("finished")
    events = EventAccumulator(str(tmp_path)).Reload()
    assert sorted({e.step for e in events.Scalars("agent_0/m24")}) == [1, 2, 3, 4]


@pytest.mark.process
@pytest.mark.slow
def test_wandb_goes_on_with_the_same_run(tmp_path: Path) -> None:
    code = """
from pathlib import Path
from resume_helpers import After, make_agents, run_reasoning
run = dict(wb=True, wandb_kwargs={"settings": {"silent": True}}, keep_checkpoints=9)
run_reasoning(Path("run"), pop=make_agents(1), hook=After(2), **run)
run_reasoning(Path("run"), pop=make_agents(1), resume_from="run", **run)
"""
    result = python(code, WANDB_MODE="offline", HOME=str(tmp_path / "home"))
    assert result.returncode == 0, result.stderr
    saved = json.loads((tmp_path / "run/iteration_00000002/run_state.json").read_text())
    noted = saved["log"]["trackers"]["wandb"]
    data = list((tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(data) == 2
    assert {file.stem for file in data} == {f"run-{noted}"}
