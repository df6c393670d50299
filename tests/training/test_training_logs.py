"""The run directory and the trackers, with real files, real TensorBoard and real (offline) W&B."""

from __future__ import annotations

import csv
import json
import math
import multiprocessing
import re
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from interpreters import python
from training_fakes import FakeAgent, FakeGym

from agilerl.training.collectors.experience import Sample
from agilerl.training.logs.files import FIRST_COLUMNS, CompletionsFile, MetricsCsv
from agilerl.training.logs.progress_bar import ProgressBar
from agilerl.training.train_llm import finetune_llm_reasoning

API_KEY = "0123456789abcdef0123456789abcdef01234567"


def train(pop: list[FakeAgent], env: FakeGym | None = None, **options: Any) -> None:
    finetune_llm_reasoning(pop, env or FakeGym(), **{"verbose": False, "max_steps": 4, **options})


def read_metrics(path: Path) -> list[dict[str, str]]:
    with (path / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_metrics_of_two_agents(tmp_path: Path) -> None:
    train(
        [FakeAgent(0), FakeAgent(3, right_of_group=2)], evaluation_interval=2, checkpoint_path="r"
    )
    rows = read_metrics(tmp_path / "r")
    assert list(rows[0]) == [*FIRST_COLUMNS, "mean_loss", "mean_kl"]
    assert [(row["iteration"], row["agent"], row["steps"]) for row in rows] == [
        ("0", "0", "0"),
        ("0", "3", "0"),
        ("1", "0", "2"),
        ("1", "3", "2"),
        # The fifth and last row of a pass came alone.
        ("2", "0", "3"),
        ("2", "3", "4"),
    ]
    assert [row["reward_mean"] for row in rows] == ["", "", "0.5", "1.0", "0.5", "1.0"]
    assert [row["accuracy"] for row in rows] == ["", "", "0.5", "1.0", "0.5", "1.0"]
    assert [row["mean_kl"] for row in rows] == ["", "", "0.25", "0.25", "0.5", "0.5"]
    assert [bool(row["fitness"]) for row in rows] == [True, True, False, False, True, True]
    assert float(rows[0]["fitness"]) == float(rows[0]["eval_accuracy"]) == pytest.approx(1 / 3)
    # The time a row gives includes the evaluation whose fitness it shows.
    assert all(float(row["wall_seconds"]) >= float(row["evaluation_seconds"] or 0) for row in rows)
    trained = rows[2]
    seconds = [float(trained[f"{k}_seconds"]) for k in ("generation", "environment", "learning")]
    # Two prompts, groups of two, two generated tokens each.
    assert float(trained["tokens_per_second"]) == pytest.approx(8 / sum(seconds))


def test_max_reward_sets_what_counts_as_accurate(tmp_path: Path) -> None:
    env = FakeGym(reward=lambda completion, answer: 0.7 if completion == answer else 0.1)
    train([FakeAgent()], env, max_reward=0.7, checkpoint_path="r")
    rows = read_metrics(tmp_path / "r")
    assert (rows[1]["accuracy"], float(rows[0]["eval_accuracy"])) == ("0.5", pytest.approx(1 / 3))


def test_the_default_run_directory_names_the_agents_algorithm(tmp_path: Path) -> None:
    env = FakeGym(name="spell/backward: 3")
    train([FakeAgent(algo="CISPO")], env)
    train([FakeAgent(algo="CISPO")], env)
    runs = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert len(runs) == 2
    assert all(name.startswith("CISPO-spell_backward_3-20") for name in runs)
    assert sorted(path.name for path in (tmp_path / "runs" / runs[0]).iterdir()) == [
        "completions.jsonl",
        "config.json",
        "metrics.csv",
    ]


def test_completions_show_the_question_that_was_answered(tmp_path: Path) -> None:
    env = FakeGym(rows=20, batch_size=6)
    train([FakeAgent(0, right_of_group=0), FakeAgent(1)], env, max_steps=6, checkpoint_path="r")
    lines = (tmp_path / "r" / "completions.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert len(records) == 8  # the first completion of four groups, per agent
    assert records[0] == {
        "iteration": 1,
        "agent": 0,
        "question": "q0",
        "completion": "99",
        "answer": "10",
        "reward": 0.0,
    }
    assert (records[4]["question"], records[4]["completion"], records[4]["reward"]) == (
        "q6",
        "16",
        1.0,
    )


def test_completions_survive_odd_text_and_answers(tmp_path: Path) -> None:
    file = CompletionsFile(tmp_path / "c.jsonl")
    file.write(1, 0, [Sample("näh\n{x}", "\ud800 \u2028", {Path("a").name, "a"}, 0.5)])
    file.close()
    raw = (tmp_path / "c.jsonl").read_bytes()
    assert raw.count(b"\n") == 1
    assert "näh".encode() in raw
    record = json.loads(raw)
    assert (record["question"], record["completion"], record["answer"]) == (
        "näh\n{x}",
        "\ud800 \u2028",
        "{'a'}",
    )


def test_new_columns_widen_the_file(tmp_path: Path) -> None:
    metrics = MetricsCsv(tmp_path / "metrics.csv")
    metrics.write({"iteration": 0, "agent": 0, "steps": 0, "fitness": 0.5})
    metrics.write({"iteration": 1, "agent": 0, "steps": 2, "new": 1.5})
    # Readable while the run goes on.
    rows = read_metrics(tmp_path)
    metrics.close()
    assert [(row["iteration"], row["fitness"], row["new"]) for row in rows] == [
        ("0", "0.5", ""),
        ("1", "", "1.5"),
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.csv"]


def write_rows_for_ever(path: Path, acknowledge: Connection) -> None:
    metrics = MetricsCsv(path)
    for i in range(10**9):
        row: dict[str, float] = {"iteration": i, "agent": 0, "steps": 2 * i, "wall_seconds": 0.5}
        if i % 50 == 0 and i < 5000:
            row[f"column_{i}"] = i  # has the file written anew
        metrics.write(row)
        acknowledge.send(i)


@pytest.mark.process
@pytest.mark.parametrize("kill_after", [0, 3, 49, 51, 101, 333, 500])
def test_a_kill_while_writing_keeps_earlier_rows(kill_after: int, tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=write_rows_for_ever, args=(path, sender))
    process.start()
    sender.close()
    while receiver.recv() < kill_after:
        pass
    process.kill()
    process.join()
    last = kill_after
    while receiver.poll():
        try:
            last = receiver.recv()
        except EOFError:
            break
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))[: last + 1]
    assert [row["iteration"] for row in rows] == [str(i) for i in range(last + 1)]
    assert all(row["wall_seconds"] == "0.5" for row in rows)


def test_an_earlier_run_in_the_folder_is_moved_aside(tmp_path: Path) -> None:
    options = {"checkpoint_path": "r", "checkpoint_steps": 1, "tensorboard": True}
    train([FakeAgent(algo="GRPO")], **options)
    before = (tmp_path / "r" / "metrics.csv").read_text()
    (tmp_path / "r" / ".iteration_00000007.0a1b2c3d.tmp").mkdir()
    (tmp_path / "r" / "notes.txt").write_text("mine")
    train([FakeAgent(algo="CISPO")], max_steps=2, **options)
    train([FakeAgent(algo="CISPO")], max_steps=2, **options)
    moved = tmp_path / "r" / "earlier_run_1"
    assert (moved / "metrics.csv").read_text() == before
    assert json.loads((moved / "config.json").read_text())["population"][0]["algo"] == "GRPO"
    assert sorted(path.name for path in moved.iterdir()) == [
        "completions.jsonl",
        "config.json",
        "iteration_00000001",
        "iteration_00000002",
        "metrics.csv",
        "tensorboard",
    ]
    assert sorted(path.name for path in (tmp_path / "r").iterdir()) == [
        "completions.jsonl",
        "config.json",
        "earlier_run_1",
        "earlier_run_2",
        "iteration_00000001",
        "metrics.csv",
        "notes.txt",
        "tensorboard",
    ]
    assert len(read_metrics(tmp_path / "r")) == 2


def test_config_notes_the_facts(tmp_path: Path) -> None:
    facts = {"MODEL": "tiny", "lr": 1e-4, 3: Path("x")}
    train([FakeAgent(2)], init_hp=facts, checkpoint_path=tmp_path / "r")
    config = json.loads((tmp_path / "r" / "config.json").read_text())
    assert config["init_hp"] == {"MODEL": "tiny", "lr": 1e-4, "3": "x"}
    assert config["population"] == [{"index": 2, "algo": "GSPO"}]
    assert config["arguments"]["max_steps"] == 4
    assert config["environment"] == "digits"
    assert config["run"].startswith("GSPO-digits-")


def test_tensorboard_event_files(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # Fitness of 1/3, 3/3 and 0/3, and of 2/3 throughout.
    pop = [FakeAgent(0, skill=[1, 3, 0]), FakeAgent(1, skill=[2])]
    options = {"tensorboard": True, "tensorboard_log_dir": "t", "evaluation_interval": 2}
    train(pop, FakeGym(rows=12), max_steps=7, **options)
    (run,) = (tmp_path / "t").iterdir()
    assert run.name.startswith("GSPO-digits-")
    events = EventAccumulator(str(run)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("agent_0/reward_mean")] == [
        (1, 0.5),
        (2, 0.5),
        (3, 0.5),
        (4, 0.5),
    ]
    assert [e.step for e in events.Scalars("agent_1/fitness")] == [0, 2, 4]
    assert [e.value for e in events.Scalars("agent_1/mean_kl")] == [0.25, 0.5, 0.75, 1.0]
    assert [(e.step, e.value) for e in events.Scalars("best/fitness")] == [
        (0, pytest.approx(2 / 3)),
        (2, 1.0),
        (4, 1.0),
    ]
    assert [e.value for e in events.Scalars("best/agent")] == [1.0, 0.0, 0.0]


@pytest.mark.process
def test_wandb_offline(tmp_path: Path) -> None:
    code = f"""
from training_fakes import FakeAgent, FakeGym
from agilerl.training.train_llm import finetune_llm_reasoning
finetune_llm_reasoning(
    [FakeAgent(0, algo="CISPO"), FakeAgent(1, algo="CISPO")], FakeGym(), max_steps=4,
    init_hp={{"fact": "tiny-model", "path": FakeGym}}, wb=True, verbose=False, checkpoint_path="r",
    wandb_kwargs={{"project": "our-project", "settings": {{"silent": True}}}},
    wandb_api_key="{API_KEY}",
)
"""
    result = python(code, WANDB_MODE="offline", HOME=str(tmp_path / "home"))
    assert result.returncode == 0, result.stderr
    (data,) = (tmp_path / "r" / "wandb").glob("offline-run-*/run-*.wandb")
    content = data.read_bytes()
    for expected in (
        "our-project",
        "CISPO-digits-",
        "tiny-model",
        "agent_0/reward_mean",
        "agent_1/",
        "best/fitness",
        "best/agent",
    ):
        assert expected.encode() in content, expected
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) > 5
    assert not [path for path in written if API_KEY.encode() in path.read_bytes()]


def test_without_the_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # None is how Python itself marks a module that cannot be imported.
    for name in ("wandb", "tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    (agent,) = finetune_llm_reasoning([FakeAgent()], FakeGym(), max_steps=2, verbose=False)
    assert agent.learned
    for argument, name in (("wb", "wandb"), ("tensorboard", "tensorboard")):
        message = rf"{argument}=True needs the package {name}: pip install 'agilerl\[logging\]'"
        with pytest.raises(ImportError, match=message):
            finetune_llm_reasoning([FakeAgent()], FakeGym(), max_steps=2, **{argument: True})
    assert len(list((tmp_path / "runs").iterdir())) == 1


def test_the_progress_bar_says_how_it_goes(capfd: pytest.CaptureFixture[str]) -> None:
    train([FakeAgent()], verbose=True, max_steps=3)
    shown = capfd.readouterr()
    assert "Run directory: runs/GSPO-digits-" in shown.out
    last = shown.err.rstrip().rsplit("\r", 1)[-1]
    assert "100%" in last
    assert "3/3" in last
    for part in ("reward=0.5", "accuracy=0.5", "KL=0.5", "tokens/s=", "fitness=0.333"):
        assert part in last


@pytest.mark.parametrize(("others", "shown"), [([0.5], True), ([], False)])
def test_the_kl_of_agents_that_compute_none_is_not_shown(
    others: list[float], shown: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    bar = ProgressBar(total=1, enabled=True)
    bar.update(1, [{"mean_kl": kl, "reward_mean": 0.75} for kl in [math.nan, *others]])
    bar.close()
    last = capfd.readouterr().err.rstrip().rsplit("\r", 1)[-1]
    assert "reward=0.75" in last and ("KL=0.5" in last) == ("KL" in last) == shown


def test_time_left_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    bar = ProgressBar(total=100, enabled=True)
    time.sleep(0.2)
    bar.update(10, [{"reward_mean": 0.25}])
    bar.close()
    # Not 00:00: nine times what the first ten took.
    assert re.search(r"10/100 \[\d\d:\d\d<(?!00:00)\d\d:\d\d", capfd.readouterr().err)


def test_verbose_false_is_silent(capfd: pytest.CaptureFixture[str]) -> None:
    train([FakeAgent()])
    assert capfd.readouterr() == ("", "")


def test_passes_over_shared_data_are_divided_among_agents(
    capfd: pytest.CaptureFixture[str],
) -> None:
    train([FakeAgent(0), FakeAgent(1)], FakeGym(rows=8), max_steps=None, num_epochs=1, verbose=True)
    shown = capfd.readouterr().err
    assert "4/4" in shown and "prompts/s" in shown


def test_training_in_a_thread_works(tmp_path: Path) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    agent = FakeAgent()
    thread = threading.Thread(target=train, args=([agent],))
    thread.start()
    thread.join()
    assert len(agent.learned) == 2
    assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
