"""The best agent's checkpoint, and what happens to the one an earlier run left there."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from forking import start, wait
from resume_helpers import (
    TOKENIZER,
    checkpoints_in,
    dataset,
    make_agents,
    run_reasoning,
    state_of,
)
from training_fakes import FakeAgent, FakeGym

from agilerl.distributed import Ranks
from agilerl.llm.checkpoint.checkpoint_files import ATTRIBUTES_FILE
from agilerl.llm_envs import ReasoningGym
from agilerl.training.checkpoint.run_checkpoint import complete_checkpoints
from agilerl.training.checkpoint.saver import Elite
from agilerl.training.train_llm import finetune_llm_reasoning


def train(*pop: FakeAgent, elite: str = "run/elite", **options: Any) -> None:
    """Two iterations, evaluated before, after the first and after the second."""
    given = {"max_steps": 4, "evaluation_interval": 1, "checkpoint_path": "run", "verbose": False}
    finetune_llm_reasoning(
        list(pop), FakeGym(), save_elite=True, elite_path=elite, **(given | options)
    )


def saved(path: str) -> tuple[int, int]:
    """Index of the agent in a checkpoint, and how often it had learned."""
    content = json.loads(Path(path, "agent.json").read_text())
    return content["index"], content["learned"]


def test_the_elite_is_the_best_agent_when_it_was_best() -> None:
    # Best of all: agent 4 after one iteration. It gets worse later, and agent 2 only draws level.
    train(FakeAgent(2, skill=[0, 1, 2]), FakeAgent(4, skill=[1, 2, 0]))
    assert saved("run/elite") == (4, 1)


def test_an_agent_that_training_made_worse_is_saved_as_it_came() -> None:
    train(FakeAgent(skill=[2, 1, 0]))
    assert saved("run/elite") == (0, 0)


@pytest.mark.parametrize("elite", ["run/elite", "elsewhere/elite"])
def test_the_same_command_again_keeps_the_earlier_elites(
    elite: str, caplog: pytest.LogCaptureFixture
) -> None:
    for index in (1, 2, 3):
        train(FakeAgent(index, skill=[0, 1, 2]), elite=elite)
    assert saved(elite) == (3, 2)
    assert saved(f"{elite}.earlier_1") == (1, 2)
    assert saved(f"{elite}.earlier_2") == (2, 2)
    assert "elite of an earlier run was moved from" in caplog.text


def test_an_untrained_agent_moves_nothing(caplog: pytest.LogCaptureFixture) -> None:
    train(FakeAgent(1, skill=[0, 1, 2]))
    train(FakeAgent(2, skill=[3, 1, 0]))
    assert saved("run/elite") == (1, 2)
    assert "holds the elite of an earlier run: it stays there" in caplog.text
    assert not list(Path("run").glob("elite.earlier*"))


def test_a_stop_names_the_elite_only_if_it_is_this_runs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    train(FakeAgent(1, skill=[0, 1, 2]))
    stopped = FakeAgent(2, on_learn=lambda agent: os.kill(os.getpid(), signal.SIGINT))
    caplog.set_level("INFO")
    train(stopped)
    assert "Stopped by SIGINT after iteration 1" in caplog.text
    assert "the best agent so far" not in caplog.text


def test_two_runs_at_a_time_cannot_share_an_elite() -> None:
    def learn(agent: FakeAgent) -> None:
        assert Path("run/.elite.lock").exists()
        train(FakeAgent(), checkpoint_path="other")

    with pytest.raises(RuntimeError, match="elite_path='run/elite' belongs to a run that is still"):
        train(FakeAgent(on_learn=learn))
    assert not Path("other").exists()
    # Neither the end nor an exception leaves the lock behind.
    assert not Path("run/.elite.lock").exists()
    train(FakeAgent(1, skill=[0, 1, 2]))
    assert saved("run/elite") == (1, 2)


def test_the_lock_of_a_killed_run_is_taken_over() -> None:
    Path("run").mkdir()
    Path("run/.elite.lock").touch()
    train(FakeAgent(1, skill=[0, 1, 2]))
    assert saved("run/elite") == (1, 2)
    assert not Path("run/.elite.lock").exists()


@pytest.mark.parametrize("place", ["mine", "mine/notes.txt"])
def test_a_place_that_is_taken_is_refused_at_the_start(place: str) -> None:
    Path("mine").mkdir()
    Path("mine/notes.txt").write_text("mine")
    agent = FakeAgent()
    with pytest.raises(ValueError, match=f"elite_path='{place}'"):
        train(agent, elite=place)
    assert not agent.fitness
    assert Path("mine/notes.txt").read_text() == "mine"


def test_an_elite_that_cannot_be_saved_costs_the_elite_only(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    def full_once(agent: FakeAgent) -> None:
        if len(agent.learned) == 1:
            raise OSError(28, "No space left on device")

    # Best of all after one iteration, when the disk is full; then better than at the start.
    train(FakeAgent(skill=[0, 3, 2], on_save=full_once))
    assert saved("run/elite") == (0, 2)
    said = "The best agent so far (0) could NOT be saved"
    assert said in caplog.text
    assert said in capfd.readouterr().out


def test_an_elite_whose_replacement_was_killed_is_kept_too() -> None:
    train(FakeAgent(1, skill=[0, 1, 2]))
    Path("run/elite").rename("run/.elite.previous")  # a kill between the two renames
    train(FakeAgent(2, skill=[0, 1, 2]))
    assert saved("run/elite") == (2, 2)
    assert saved("run/elite.earlier_1") == (1, 2)


def test_a_resumed_run_goes_on_with_its_own_elite_only() -> None:
    with Elite("elite", "first", Ranks()) as elite:
        elite.save(FakeAgent(1), trained=True)
    with Elite("elite", "first_elsewhere", Ranks()) as elite:
        elite.resume("other")
        assert not elite.saved
        elite.resume("first")
        assert elite.saved
    with Elite("elite", "first", Ranks()) as elite:
        elite.resume("first")  # what goes on elsewhere has taken the elite over
        elite.save(FakeAgent(2), trained=True)
    assert (saved("elite"), saved("elite.earlier_1")) == ((2, 0), (1, 0))


@pytest.mark.process
def test_an_elite_of_a_run_that_was_killed_before_its_next_checkpoint_is_its_own() -> None:
    """However often it is killed there; that of an earlier run is moved once."""
    Path("elite").mkdir()
    Path("elite", ATTRIBUTES_FILE).touch()
    began, (agent,) = time.monotonic(), make_agents(1)
    env = ReasoningGym(
        dataset("train", 5),
        dataset("test", 3),
        TOKENIZER,
        lambda completion, answer, question: time.monotonic() - began,  # always better
        [{"role": "user", "content": "{question}"}],
        data_batch_size_per_gpu=2,
    )
    learn = agent.learn

    def go_on(killed: bool) -> None:
        def learn_or_die(*arguments: Any, **options: Any) -> dict[str, float]:
            if killed and len(agent.scores) == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            return learn(*arguments, **options)

        agent.learn = learn_or_die  # type: ignore[method-assign]
        run = Path("run")
        resume_from = run if complete_checkpoints(run) else None
        options = {"checkpoint_steps": 2, "evaluation_interval": 3, "max_steps": 8}
        run_reasoning(
            run, pop=[agent], env=env, elite_path="elite", resume_from=resume_from, **options
        )

    for _ in range(2):
        assert wait(start(lambda: go_on(killed=True))) == -signal.SIGKILL
        assert checkpoints_in(Path("run")) == ["iteration_00000002"]
        assert state_of(Path("run/iteration_00000002"))["best"]["iteration"] == 0
    assert wait(start(lambda: go_on(killed=False))) == 0
    assert sorted(path.name for path in Path().glob("elite*")) == ["elite", "elite.earlier_1"]
    assert not list(Path("elite.earlier_1").glob("actor"))
