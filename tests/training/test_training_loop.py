"""What the loop does, counted by hand on the five rows of the fake environment."""

from __future__ import annotations

import contextlib
import gc
import inspect
import json
import logging
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from resume_helpers import make_agents, run_multiturn, run_reasoning
from training_fakes import FakeAgent, FakeGym

from agilerl.training.callbacks import Callback, RunProgress
from agilerl.training.collectors.experience import (
    Experience,
    accuracy,
    reward_statistics,
    time_statistics,
)
from agilerl.training.train_llm import finetune_llm_reasoning


def train(pop: list[FakeAgent], env: FakeGym | None = None, **options: Any) -> list[FakeAgent]:
    if env is None and "env_fn" not in options:
        env = FakeGym()
    return finetune_llm_reasoning(pop, env, **{"verbose": False, **options})


class Failing(Callback):
    def on_iteration(self, progress: RunProgress) -> None:
        raise ValueError("no plot")


@pytest.mark.parametrize(
    ("run", "callback"),
    [(run_reasoning, None), (run_multiturn, None), (run_reasoning, Failing())],
)
def test_agents_die_as_soon_as_they_are_dropped_after_a_run(
    run: Callable[..., Any], callback: Callback | None, tmp_path: Path
) -> None:
    """A reference cycle would keep them, and their memory, until Python looks for cycles."""

    def train_and_drop() -> weakref.WeakSet[Any]:
        pop = make_agents()
        parts = weakref.WeakSet([*pop, *(agent.policy for agent in pop)])
        with pytest.raises(ValueError, match="no plot") if callback else contextlib.nullcontext():
            run(tmp_path, pop=pop, callbacks=[] if callback is None else [callback])
        return parts

    gc.collect()
    gc.disable()
    try:
        assert not list(train_and_drop())
    finally:
        gc.enable()


def test_signature_is_the_contract() -> None:
    parameters = inspect.signature(finetune_llm_reasoning).parameters
    assert {name: p.default for name, p in parameters.items() if name != "pop"} == {
        "env": None,
        "env_fn": None,
        "init_hp": None,
        "save_elite": None,
        "elite_path": None,
        "wb": False,
        "tensorboard": False,
        "tensorboard_log_dir": None,
        "evo_steps": None,
        "checkpoint_steps": None,
        "checkpoint_path": None,
        "tournament": None,
        "mutation": None,
        "wandb_api_key": None,
        "wandb_kwargs": None,
        "evaluation_interval": 10,
        "max_reward": None,
        "verbose": True,
        "accelerator": None,
        "max_steps": None,
        "num_epochs": None,
        "resume_from": None,
        "keep_checkpoints": 2,
        "max_wall_seconds": None,
        "exit_code_on_sigterm": 143,
        "evaluation_rows": None,
        "evaluation_samples": None,
        "callbacks": None,
        "zero_variance": "keep",
        "max_resamples": 3,
        "allow_appended_rows": False,
        "completions_interval": None,
        "completions_shown": 4,
        "trackers": None,
    }
    assert list(parameters)[:4] == ["pop", "env", "env_fn", "init_hp"]
    positional = [n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional[-4:] == ["accelerator", "max_steps", "num_epochs", "resume_from"]


def test_history_of_one_agent() -> None:
    # Batches of 2, 2, 1 prompts. Evaluations: before, after iteration 2, at the end (iteration 3).
    agent = FakeAgent(skill=[0, 3, 1])
    pop = [agent]
    assert train(pop, max_steps=5, evaluation_interval=2) is pop
    assert agent.fitness == pytest.approx([0, 1, 1 / 3])
    assert agent.steps == [0, 4, 5]
    assert agent.scores == [0.5, 0.5, 0.5]
    assert [entry["rewards"].tolist() for entry in agent.learned] == [
        [[1, 0], [1, 0]],
        [[1, 0], [1, 0]],
        [[1, 0]],
    ]
    assert all(entry["sampling_logps"] is not None for entry in agent.learned)


def test_no_second_evaluation_at_the_end() -> None:
    agent = FakeAgent()
    train([agent], max_steps=4, evaluation_interval=1)
    assert (len(agent.fitness), agent.steps) == (3, [0, 2, 4])


@pytest.mark.parametrize(("max_steps", "iterations"), [(1, 1), (2, 1), (3, 2), (4, 2), (6, 4)])
def test_max_steps_ends_with_the_batch_that_reaches_it(max_steps: int, iterations: int) -> None:
    agent = FakeAgent()
    train([agent], max_steps=max_steps)
    assert len(agent.learned) == iterations


def test_steps_go_on_in_a_second_call() -> None:
    agent, env = FakeAgent(), FakeGym(rows=4)
    train([agent], env, max_steps=2)
    train([agent], env, max_steps=2)
    assert len(agent.learned) == 2
    assert agent.steps == [0, 2, 2, 4]


def test_a_second_call_goes_on_with_the_batch_that_waited() -> None:
    agent, env = FakeAgent(), FakeGym(rows=6)
    train([agent], env, num_epochs=1)
    train([agent], env, num_epochs=1)
    assert env.seen == [[0, 1], [2, 3], [4, 5]] * 2 + [[0, 1]]
    assert len(agent.learned) == 6


@pytest.mark.parametrize(("epochs", "iterations"), [(1, 3), (2, 6)])
def test_num_epochs_counts_passes_of_this_call(epochs: int, iterations: int) -> None:
    agent, env = FakeAgent(), FakeGym()
    env.num_epochs = 7
    train([agent], env, num_epochs=epochs)
    assert len(agent.learned) == iterations
    assert agent.trackers[0] == 7
    assert len(agent.trackers) == iterations


def test_a_pass_that_begins_in_the_middle_of_the_data_is_whole() -> None:
    agent, env = FakeAgent(), FakeGym(rows=6)
    train([agent], env, max_steps=2)
    train([agent], env, num_epochs=1)
    assert env.seen[1:-1] == [[2, 3], [4, 5], [0, 1]]
    assert len(agent.learned) == 4


def test_agents_make_the_passes_of_a_shared_environment_together() -> None:
    pop, env = [FakeAgent(0), FakeAgent(1)], FakeGym(rows=8)
    train(pop, env, num_epochs=1)
    assert [len(agent.learned) for agent in pop] == [2, 2]


def test_without_bounds_a_run_is_one_pass() -> None:
    agent = FakeAgent()
    train([agent])
    assert len(agent.learned) == 3
    arguments = json.loads(next(Path("runs").glob("*/config.json")).read_text())["arguments"]
    assert arguments["num_epochs"] == 1


def test_time_alone_bounds_a_run() -> None:
    agent = FakeAgent(on_learn=lambda agent: time.sleep(0.02))
    started = time.monotonic()
    train([agent], max_wall_seconds=0.5)
    assert len(agent.learned) > 3  # more than one pass
    assert 0.5 <= time.monotonic() - started < 60


@pytest.mark.parametrize("interval", [1, 2, 100])
def test_steps_and_fitness_grow_together(interval: int) -> None:
    agent = FakeAgent()
    train([agent], max_steps=4, evaluation_interval=interval)
    train([agent], num_epochs=2, evaluation_interval=interval)
    assert len(agent.steps) == len(agent.fitness)
    assert agent.steps[-1] == agent.total_steps


def test_whichever_bound_comes_first() -> None:
    agent = FakeAgent()
    train([agent], num_epochs=100, max_steps=4)
    assert len(agent.learned) == 2


def test_a_shared_environment_deals_its_batches_in_turn() -> None:
    pop, env = [FakeAgent(0), FakeAgent(1)], FakeGym(rows=6)
    train(pop, env, max_steps=4)
    # Two iterations of two agents, and the batch that was pending at the end.
    assert env.seen == [[0, 1], [2, 3], [4, 5], [0, 1], [2, 3]]
    assert [len(agent.learned) for agent in pop] == [2, 2]


def test_env_fn_makes_one_environment_per_agent() -> None:
    made: list[FakeGym] = []

    def env_fn() -> FakeGym:
        made.append(FakeGym(rows=6))
        return made[-1]

    train([FakeAgent(0), FakeAgent(1)], env_fn=env_fn, max_steps=4)
    assert [env.seen for env in made] == [[[0, 1], [2, 3], [4, 5]]] * 2


def test_raw_completions_are_accepted() -> None:
    agent = FakeAgent()
    train([agent], FakeGym(return_raw_completions=True), max_steps=4)
    assert agent.scores == [0.5, 0.5]


def test_a_window_without_reward_variance_is_said_loudly(caplog: pytest.LogCaptureFixture) -> None:
    stuck, fine = FakeAgent(0, right_of_group=0), FakeAgent(1)
    with caplog.at_level(logging.WARNING):
        train([stuck, fine], FakeGym(rows=100), max_steps=2 * 19)
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == 1
    assert "GSPO agent 0 learns nothing" in warned[0]
    assert "(1 to 10)" in warned[0]


def test_a_solved_task_is_said_to_be_solved(caplog: pytest.LogCaptureFixture) -> None:
    agent = FakeAgent(right_of_group=2)
    agent.right_of_group = agent.group_size
    train([agent], FakeGym(rows=100), max_steps=20)
    (warned,) = (record.getMessage() for record in caplog.records)
    assert "at least the reward 1, so the task is solved" in warned
    assert "easier" not in warned


def test_a_learning_rate_of_zero_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pop = make_agents(1, cosine_lr_schedule_config=None, lr_schedule="linear", lr_schedule_steps=2)
    with caplog.at_level(logging.WARNING):
        run_reasoning(tmp_path, pop=pop)
    warned = [each for each in caplog.messages if "learning rate is 0" in each]
    assert len(warned) == 1
    assert "GRPO agent 0 learns nothing since iteration 3" in warned[0]


def test_an_evaluation_before_a_run_leaves_as_many_steps_as_fitnesses() -> None:
    agent, env = FakeAgent(), FakeGym()
    agent.test(env)
    train([agent], env, max_steps=4, evaluation_interval=1)
    assert agent.steps == [0, 0, 2, 4]
    assert len(agent.fitness) == 4


def test_one_varied_group_restarts_the_window(caplog: pytest.LogCaptureFixture) -> None:
    def learn_once(agent: FakeAgent) -> None:
        agent.right_of_group = 1 if len(agent.learned) == 8 else 2

    agent = FakeAgent(right_of_group=2, on_learn=learn_once)
    with caplog.at_level(logging.WARNING):
        train([agent], FakeGym(rows=100), max_steps=2 * 19)
    assert not caplog.records


def test_reward_statistics_by_hand() -> None:
    rewards = torch.tensor([[1.0, 0.0], [3.0, 0.0]])
    assert reward_statistics(rewards, 1.0) == pytest.approx(
        {"reward_mean": 1.0, "reward_std": 1.5**0.5, "accuracy": 0.5}
    )
    assert reward_statistics(torch.tensor([[2.0]]), 1.0)["reward_std"] == 0
    assert reward_statistics(torch.zeros(0), 1.0) == {}


@pytest.mark.parametrize("threshold", [0.1, 0.3, 1.1, 1.3])
def test_accuracy_counts_rewards_that_equal_the_threshold(threshold: float) -> None:
    assert accuracy(torch.tensor([[threshold, threshold - 0.01]]), threshold) == 0.5


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [([[1.0, 1.0], [0.0, 0.0]], False), ([[1.0, 1.0], [0.0, 0.1]], True), ([[1.0], [0.0]], False)],
)
def test_variance_is_looked_for_inside_groups(rewards: list[list[float]], expected: bool) -> None:
    assert bool(collected(torch.tensor(rewards)).varies.any()) is expected


def collected(rewards: torch.Tensor, mask: torch.Tensor | None = None) -> Experience:
    return Experience(([], [], None), rewards, 1, 60, 2.0, 1.0, sample_mask=mask)


@pytest.mark.parametrize(
    ("kept", "expected"),
    [([[1, 1, 0], [1, 0, 0]], False), ([[1, 0, 1], [0, 0, 0]], True), ([[0] * 3] * 2, False)],
)
def test_what_is_left_out_is_no_variance(kept: list[list[int]], expected: bool) -> None:
    rewards = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    assert bool(collected(rewards, torch.tensor(kept).bool()).varies.any()) is expected


def test_time_statistics_by_hand() -> None:
    assert time_statistics(collected(torch.zeros(1, 1)), 3.0) == {
        "tokens_per_second": 10.0,
        "generation_seconds": 2.0,
        "environment_seconds": 1.0,
        "learning_seconds": 3.0,
    }


def test_returns_that_differ_by_rounding_alone_are_no_variance() -> None:
    turns = torch.tensor([[0.1, 0.1, 0.7], [0.1, 0.7, 0.1]])
    assert not collected(turns.sum(1)[None]).varies.any()
