"""Checkpoints, and what is left behind by signals, crashes and kills."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from forking import TIME_LIMIT, start, wait
from interpreters import started, wait_for
from training_fakes import FakeAgent, FakeGym

from agilerl.distributed import Ranks
from agilerl.training.checkpoint.run_directory import RunDirectory
from agilerl.training.interrupts import GracefulStop
from agilerl.training.train_llm import finetune_llm_reasoning


def train(pop: list[FakeAgent], env: FakeGym | None = None, **options: Any) -> list[FakeAgent]:
    return finetune_llm_reasoning(pop, env or FakeGym(), **{"verbose": False, **options})


def train_until_stopped(
    pop: list[FakeAgent], env: FakeGym, **options: Any
) -> list[FakeAgent] | int | str | None:
    """What a run returns that a signal stops, or the code that it exits with."""
    try:
        return train(pop, env, max_steps=90, **options)
    except SystemExit as stop:
        return stop.code


def children(path: Path) -> list[str]:
    return sorted(child.name for child in path.iterdir() if child.is_dir())


def send(number: signal.Signals, in_iteration: int) -> Any:
    def on_learn(agent: FakeAgent) -> None:
        if len(agent.learned) + 1 == in_iteration:
            os.kill(os.getpid(), number)

    return on_learn


def test_a_checkpoint_holds_the_population_and_the_runs_state(tmp_path: Path) -> None:
    pop = [FakeAgent(0, skill=[1, 0]), FakeAgent(5, skill=[0, 2, 1])]
    train(
        pop,
        FakeGym(rows=8),
        max_steps=6,
        evaluation_interval=1,
        checkpoint_steps=2,
        checkpoint_path="c",
    )
    assert children(tmp_path / "c") == ["iteration_00000002", "iteration_00000003"]
    child = tmp_path / "c" / "iteration_00000002"
    assert sorted(path.name for path in child.iterdir()) == [
        "SHA256SUMS",
        "agent_0",
        "agent_5",
        "run_state.json",
    ]
    saved = json.loads((child / "agent_5" / "agent.json").read_text())
    assert saved == {"index": 5, "learned": 2, "optimizer": True}
    state = json.loads((child / "run_state.json").read_text())
    assert state["iteration"] == 2
    assert state["best"] == {
        "agent_index": 5,
        "fitness": pytest.approx(2 / 3),
        "iteration": 1,
    }
    # Four batches of two are consumed, the first of the second pass is pending.
    assert [env["position"] for env in state["environments"]] == [{"epoch": 1, "position": 2}]
    second = state["agents"][1]
    assert (second["index"], second["folder"], second["environment"]) == (5, "agent_5", 0)
    assert (second["steps"], second["steps_of_run"]) == (4, 4)
    assert second["fitness_history"] == pytest.approx([0, 2 / 3, 1 / 3])
    assert second["step_history"] == [0, 2, 4]
    assert second["score_history"] == [0.5, 0.5]


def test_environments_of_their_own_are_saved_one_by_one(tmp_path: Path) -> None:
    finetune_llm_reasoning(
        [FakeAgent(0), FakeAgent(1)],
        env_fn=FakeGym,
        max_steps=2,
        checkpoint_steps=1,
        checkpoint_path="c",
        verbose=False,
    )
    state = json.loads((tmp_path / "c" / "iteration_00000001" / "run_state.json").read_text())
    assert [agent["environment"] for agent in state["agents"]] == [0, 1]
    assert [env["position"] for env in state["environments"]] == [{"epoch": 0, "position": 4}] * 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_iteration_and_saves(
    number: signal.Signals, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: Any
) -> None:
    handlers = [signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)]
    pop = [FakeAgent(0, on_learn=send(number, in_iteration=2)), FakeAgent(1)]
    with caplog.at_level(logging.INFO):
        stopped = train_until_stopped(
            pop, FakeGym(rows=99), save_elite=True, elite_path="e", checkpoint_path="c"
        )
    # Ctrl-C ends the run, SIGTERM the program.
    assert stopped == (pop if number == signal.SIGINT else 143)
    assert [len(agent.learned) for agent in pop] == [2, 2]
    assert [agent.steps for agent in pop] == [[0]] * 2
    assert [len(agent.fitness) for agent in pop] == [1, 1]
    assert children(tmp_path / "c") == ["iteration_00000002"]
    assert len((tmp_path / "c" / "metrics.csv").read_text().splitlines()) == 1 + 3 * 2
    shown = capfd.readouterr()
    expected = (
        f"Stopped by {number.name} after iteration 2. Saved to c/iteration_00000002; "
        "the best agent so far is in e"
    )
    assert expected in shown.out
    assert expected in caplog.messages
    assert "finishing this iteration" in shown.err
    again = "Press Ctrl-C again to stop" if number == signal.SIGINT else "Press Ctrl-C to stop"
    assert again in shown.err
    assert [signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)] == handlers


def test_the_exit_code_can_be_chosen() -> None:
    agent = FakeAgent(on_learn=send(signal.SIGTERM, in_iteration=1))
    assert train_until_stopped([agent], FakeGym(), exit_code_on_sigterm=0) == 0


def test_a_stop_on_a_checkpointed_iteration_writes_it_once(tmp_path: Path) -> None:
    saves: list[int] = []
    agent = FakeAgent(
        on_learn=send(signal.SIGTERM, in_iteration=2),
        on_save=lambda agent: saves.append(len(agent.learned)),
    )
    train_until_stopped([agent], FakeGym(rows=99), checkpoint_steps=2, checkpoint_path="c")
    assert saves == [2]
    assert children(tmp_path / "c") == ["iteration_00000002"]


def test_a_stop_during_the_first_evaluation(tmp_path: Path) -> None:
    agent = FakeAgent()
    env = FakeGym()
    env.reward = lambda completion, answer: os.kill(os.getpid(), signal.SIGTERM) or 0.0
    assert train_until_stopped([agent], env, checkpoint_path="c") == 143
    assert not agent.learned
    assert children(tmp_path / "c") == ["iteration_00000000"]


def test_a_second_ctrl_c_raises_at_once(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)

    def twice(agent: FakeAgent) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        raise AssertionError("still learning")

    with pytest.raises(KeyboardInterrupt):
        train([FakeAgent(on_learn=twice)], max_steps=90, checkpoint_path="c")
    assert signal.getsignal(signal.SIGINT) is before
    assert children(tmp_path / "c") == []


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_after_a_second_signal_the_program_ends(first: signal.Signals) -> None:
    with GracefulStop() as stop:
        os.kill(os.getpid(), first)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)
        assert stop.requested == "SIGTERM"


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with GracefulStop() as stop:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
            assert stop.requested is None
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.process
def test_a_forked_child_can_be_terminated() -> None:
    """As those of a ``multiprocessing.Pool`` in a reward function are."""
    context = multiprocessing.get_context("fork")
    ready = context.Event()

    def work() -> None:
        ready.set()
        time.sleep(TIME_LIMIT)

    with GracefulStop() as stop:
        child = context.Process(target=work)
        child.start()
        assert ready.wait(TIME_LIMIT)
        child.terminate()
        child.join(TIME_LIMIT)
        assert child.exitcode == -signal.SIGTERM
        os.kill(os.getpid(), signal.SIGTERM)  # here it is still only asked for
        time.sleep(0.01)
        assert stop.requested == "SIGTERM"


WAITING_RUN = """
import pathlib, time
from training_fakes import FakeAgent, FakeGym
from agilerl.training.checkpoint.run_directory import RunDirectory
from agilerl.training.train_llm import finetune_llm_reasoning
def learn(agent):
    print("learning", len(agent.learned), flush=True)
    while len(agent.learned) == 1 and not pathlib.Path("go").exists():
        time.sleep(0.02)
(agent,) = finetune_llm_reasoning(
    [FakeAgent(on_learn=learn)], FakeGym(), max_steps=10**6, checkpoint_path="c"
)
print("returned", len(agent.learned), agent.total_steps > 0, flush=True)
"""


@pytest.mark.process
def test_sigterm_to_a_real_process(tmp_path: Path) -> None:
    with started(WAITING_RUN) as process:
        wait_for("learning 1", process)
        process.send_signal(signal.SIGTERM)
        wait_for("SIGTERM: finishing this iteration", process, "stderr")
        (tmp_path / "go").touch()
        out, err = process.communicate(timeout=120)
    assert process.returncode == 143, err
    assert "Stopped by SIGTERM after iteration 2. Saved to c/iteration_00000002" in out
    assert "returned" not in out  # a script with another stage would go on with that
    saved = json.loads((tmp_path / "c/iteration_00000002/agent_0/agent.json").read_text())
    assert saved["learned"] == 2
    assert (tmp_path / "c/iteration_00000002/run_state.json").is_file()


@pytest.mark.process
def test_a_living_run_keeps_its_directory_and_a_killed_one_gives_it_up(tmp_path: Path) -> None:
    refused = pytest.raises(
        RuntimeError, match=r"checkpoint_path='c' .*choose another checkpoint_path"
    )
    with started(WAITING_RUN) as process:
        wait_for("learning 1", process)
        before = sorted(entry.name for entry in (tmp_path / "c").iterdir())
        with refused:
            train([FakeAgent()], max_steps=2, checkpoint_path="c")
        assert sorted(entry.name for entry in (tmp_path / "c").iterdir()) == before
        train([FakeAgent()], max_steps=2, checkpoint_path="other")
    train([FakeAgent()], max_steps=2, checkpoint_path="c")
    assert children(tmp_path / "c") == ["earlier_run_1"]


def test_a_run_inside_a_run_is_refused_its_directory() -> None:
    def learn(agent: FakeAgent) -> None:
        train([FakeAgent()], max_steps=2, checkpoint_path="c")

    with pytest.raises(RuntimeError, match="a run that is still going on"):
        train([FakeAgent(on_learn=learn)], max_steps=2, checkpoint_path="c")
    # Neither the end nor an exception leaves the lock behind.
    train([FakeAgent()], max_steps=2, checkpoint_path="c")
    train([FakeAgent()], max_steps=2, checkpoint_path="c")


@pytest.mark.process
def test_a_forked_child_does_not_keep_the_directory() -> None:
    with RunDirectory("run", "c", None, Ranks()):
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
    try:
        RunDirectory("run", "c", None, Ranks()).close()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.process
def test_a_kill_while_saving_leaves_no_half_checkpoint(tmp_path: Path) -> None:
    saving = tmp_path / "saving"

    def save(agent: FakeAgent) -> None:
        if len(agent.learned) == 2:
            saving.touch()
            time.sleep(60)

    options = {"max_steps": 9, "checkpoint_steps": 1, "checkpoint_path": "c"}
    child = start(lambda: train([FakeAgent(on_save=save)], **options))
    end = time.monotonic() + TIME_LIMIT
    while not saving.exists() and time.monotonic() < end:
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    assert wait(child) == -signal.SIGKILL
    leftover, *complete = children(tmp_path / "c")
    assert re.fullmatch(r"\.iteration_00000002\.[0-9a-f]{8}\.tmp", leftover)
    assert complete == ["iteration_00000001"]
    assert (tmp_path / "c/iteration_00000001/agent_0/agent.json").is_file()


def fail(agent: FakeAgent) -> None:
    if len(agent.learned) == 1:
        raise RuntimeError("loss is not finite")


def test_a_crash_saves_what_was_trained(tmp_path: Path, caplog: Any) -> None:
    handlers = [signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)]
    pop = [FakeAgent(0), FakeAgent(1, on_learn=fail)]
    with pytest.raises(RuntimeError, match="loss is not finite") as caught:
        train(pop, max_steps=90, checkpoint_path="c")
    where = "c/crashed_in_iteration_00000002"
    assert caught.value.__notes__ == [
        f"Iteration 2 failed. The agents were saved to {where}",
    ]
    assert where in caplog.text
    assert children(tmp_path / "c") == ["crashed_in_iteration_00000002"]
    saved = json.loads((tmp_path / where / "agent_0" / "agent.json").read_text())
    assert saved["learned"] == 2
    # Agent 0 had finished iteration 2: its row is there, agent 1's is not.
    rows = (tmp_path / "c" / "metrics.csv").read_text().splitlines()[1:]
    assert [row.split(",")[:2] for row in rows] == [
        ["0", "0"],
        ["0", "1"],
        ["1", "0"],
        ["1", "1"],
        ["2", "0"],
    ]
    assert [signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)] == handlers


def test_a_crash_of_the_environment_saves_too(tmp_path: Path) -> None:
    calls: list[str] = []

    def reward(completion: str, answer: str) -> float:
        calls.append(completion)
        if len(calls) > 3 + 4:  # the first evaluation and the first batch
            raise ZeroDivisionError("reward_fn")
        return 0.0

    with pytest.raises(ZeroDivisionError) as caught:
        train([FakeAgent()], FakeGym(reward=reward), max_steps=90, checkpoint_path="c")
    assert "crashed_in_iteration_00000002" in caught.value.__notes__[0]
    assert children(tmp_path / "c") == ["crashed_in_iteration_00000002"]


def test_a_crash_before_training_has_nothing_to_save(tmp_path: Path) -> None:
    def reward(completion: str, answer: str) -> float:
        raise ZeroDivisionError("reward_fn")

    with pytest.raises(ZeroDivisionError) as caught:
        train([FakeAgent()], FakeGym(reward=reward), max_steps=90, checkpoint_path="c")
    assert caught.value.__notes__ == ["Nothing was trained yet. Logs are in c"]
    assert children(tmp_path / "c") == []


def test_a_failing_save_does_not_hide_the_crash(tmp_path: Path, caplog: Any) -> None:
    def cannot(agent: FakeAgent) -> None:
        raise OSError("disk full")

    with pytest.raises(RuntimeError, match="loss is not finite") as caught:
        train([FakeAgent(on_learn=fail, on_save=cannot)], max_steps=90, checkpoint_path="c")
    assert "could not be saved (OSError('disk full')). Logs are in c" in caught.value.__notes__[0]
    assert "disk full" in caplog.text
    assert children(tmp_path / "c") == []


def test_a_stop_whose_save_fails_says_so_once() -> None:
    def cannot(agent: FakeAgent) -> None:
        raise OSError("disk full")

    agent = FakeAgent(on_learn=send(signal.SIGINT, in_iteration=2), on_save=cannot)
    with pytest.raises(OSError, match="disk full") as caught:
        train([agent], FakeGym(rows=99), max_steps=90, checkpoint_path="c")
    assert caught.value.__notes__ == [
        "Stopped by SIGINT after iteration 2, which could not be saved. The newest checkpoint: None"
    ]
