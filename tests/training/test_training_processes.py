"""What two processes settle before and during a run, so that neither waits for the other for ever.

Real ranks, forked; the agents are fakes. With real ones: ``tests/distributed``.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from forking import on_two_ranks
from resume_helpers import dataset
from training_fakes import FakeAgent, FakeGym

from agilerl.algorithms.core.llm_algorithm import LLMAlgorithm
from agilerl.distributed import Ranks
from agilerl.llm.step_results import NonFiniteUpdateError
from agilerl.llm_envs import ReasoningGym
from agilerl.llm_envs.dataset import TrainingBatchSampler
from agilerl.llm_envs.vector.vector_env import SyncMultiTurnVecEnv
from agilerl.testing import byte_tokenizer
from agilerl.training import rank_consistency
from agilerl.training.bounds import Bounds
from agilerl.training.checkpoint.saver import Elite
from agilerl.training.collectors.multiturn_collector import MultiTurnCollector
from agilerl.training.collectors.reasoning_collector import ReasoningCollector
from agilerl.training.evaluation import evaluated, evaluation_statistics
from agilerl.training.options import TrainingOptions
from agilerl.training.population import Population
from agilerl.training.protocols import Collector
from agilerl.training.run import run_training
from agilerl.typing import Act, Evaluation

pytestmark = pytest.mark.process

Learn = Callable[[FakeAgent], None]


class AgentOfRank(FakeAgent):
    """Rank 0 writes its checkpoints."""

    ranks = Ranks()

    def save_checkpoint(self, path: str | Path, *arguments: Any, **options: Any) -> None:
        self.ranks.on_rank_zero(lambda: super(AgentOfRank, self).save_checkpoint(path))


def train(ranks: Ranks, on_learn: Learn = lambda agent: None, size: int = 1, **options: Any) -> int:
    """Iterations of the first agent."""
    pop = [AgentOfRank(index, on_learn=on_learn) for index in range(size)]
    for agent in pop:
        agent.ranks = ranks
        agent.engine = SimpleNamespace(sharded=options.get("max_steps") == 5)
    given = TrainingOptions(**({"max_steps": 4, "verbose": False} | options))
    population = Population(pop, [ReasoningCollector(FakeGym(rows=99)) for _ in pop])
    run_training(population, given, "d", ranks)
    return len(pop[0].learned)


def refused(results: list[Any], kind: type[Exception]) -> str:
    """The text of the error that both processes raised."""
    assert [result[0] for result in results] == [kind, kind], results
    assert results[0][1] == results[1][1]
    return str(results[0][1])


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("resume_from", ("run", None)),
        ("allow_appended_rows", (True, False)),
        ("max_steps", (4, 6)),
        ("evaluation_interval", (10, 5)),
        ("checkpoint_path", ("run", "other")),
    ],
)
def test_options_that_differ_are_refused_on_all(
    name: str, values: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    results = on_two_ranks(
        tmp_path / "ranks",
        lambda ranks: train(ranks, **({"checkpoint_path": "run"} | {name: values[ranks.rank]})),
    )
    said = refused(results, ValueError)
    assert f"{name} is {values[0]!r} on process 0 but {values[1]!r} on process 1" in said
    assert "let process 0 decide and tell the others" in said
    assert not (tmp_path / "run").exists()


def test_populations_that_differ_are_refused_on_all(tmp_path: Path) -> None:
    results = on_two_ranks(
        tmp_path, lambda ranks: train(ranks, size=1 + ranks.rank, checkpoint_path=tmp_path / "run")
    )
    said = refused(results, ValueError)
    assert "pop is ['GSPO 0'] on process 0 but ['GSPO 0', 'GSPO 1'] on process 1" in said


def refused_data(folder: Path, make: Callable[[Ranks], Collector]) -> str:
    """What both processes say of the environments that ``make`` gives them."""

    def action(ranks: Ranks) -> None:
        options = TrainingOptions(max_steps=4, verbose=False, checkpoint_path=folder / "run")
        run_training(Population([FakeAgent(3)], [make(ranks)]), options, "d", ranks)

    said = refused(on_two_ranks(folder / "ranks", action), ValueError)
    assert not (folder / "run").exists()
    return said


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"shuffled": 2}, "questions_and_answers of the environment of agent 3 is '"),
        ({"rows": 7}, "rows of the environment of agent 3 is 6 on process 0 but 7 on process 1"),
        ({"seed": 1}, "seed of the environment of agent 3 is 0 on process 0 but 1 on process 1"),
        ({"batch": 3}, "data_batch_size_per_gpu of the environment of agent 3 is 2 on process 0"),
    ],
)
def test_rows_that_differ_are_refused_on_all(
    other: dict[str, int], says: str, tmp_path: Path
) -> None:
    def make(ranks: Ranks) -> Collector:
        same = {"rows": 6, "shuffled": 1, "seed": 0, "batch": 2}
        given = same | (other if ranks.rank else {})
        env = ReasoningGym(
            dataset("q", given["rows"]).shuffle(seed=given["shuffled"]),
            dataset("t", 2),
            byte_tokenizer(),
            lambda completion, answer, question: 0.0,
            [{"role": "user", "content": "{question}"}],
            data_batch_size_per_gpu=given["batch"],
            accelerator=SimpleNamespace(process_index=ranks.rank, num_processes=2),
            seed=given["seed"],
        )
        return ReasoningCollector(env)

    said = refused_data(tmp_path, make)
    assert says in said
    assert "dataset.shuffle(seed=42)" in said


@pytest.mark.parametrize(
    "name", ["groups_per_iteration", "train_seeds", "seed", "max_turns", "evaluation_episodes"]
)
def test_multi_turn_environments_that_differ_are_refused_on_all(name: str, tmp_path: Path) -> None:
    same = {"groups_per_iteration": 4, "train_seeds": 9, "seed": 0}
    same |= {"max_turns": 3, "evaluation_episodes": 5}

    def make(ranks: Ranks) -> Collector:
        given = same | {name: same[name] + 2 * ranks.rank}
        groups = given["groups_per_iteration"] // 2
        env = SyncMultiTurnVecEnv(
            dict,  # nothing is played
            batch_size=groups,
            max_turns=given["max_turns"],
            evaluation_episodes=given["evaluation_episodes"],
        )
        order = TrainingBatchSampler(given["train_seeds"], groups, given["seed"], ranks.rank, 2)
        return MultiTurnCollector(env, order)

    said = refused_data(tmp_path, make)
    values = f"{same[name]} on process 0 but {same[name] + 2} on process 1"
    assert f"{name} of the environment of agent 3 is {values}" in said


def test_environments_that_divide_their_data_themselves_are_let_be(tmp_path: Path) -> None:
    """Without ``fingerprint()`` a process may hold its part only, and its position in that."""

    class Part(FakeGym):
        def __init__(self, rank: int) -> None:
            super().__init__(rows=90 + rank)
            self.rank = rank

        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "rank": self.rank}

    def action(ranks: Ranks) -> int:
        options = TrainingOptions(max_steps=4, verbose=False, checkpoint_path=tmp_path / "run")
        agent, collector = AgentOfRank(), ReasoningCollector(Part(ranks.rank))
        run_training(Population([agent], [collector]), options, "d", ranks)
        return len(agent.learned)

    assert on_two_ranks(tmp_path, action) == [1, 1]


def test_logs_that_cannot_be_opened_end_all_processes(tmp_path: Path) -> None:
    events = tmp_path / "events"
    events.write_text("a file where the folder of the events should be")
    results = on_two_ranks(
        tmp_path / "ranks",
        lambda ranks: train(
            ranks,
            checkpoint_path=tmp_path / "run",
            tensorboard=True,
            tensorboard_log_dir=events / "of_today",
        ),
    )
    assert [kind for kind, *_ in results] == [results[0][0]] * 2
    assert issubclass(results[0][0], OSError)
    assert str(events) in results[1][1]


def in_a_folder_of_its_own(folder: Path, action: Callable[[Ranks], Any]) -> Callable[[Ranks], Any]:
    """As on two machines: a relative path is another place on each."""

    def run(ranks: Ranks) -> Any:
        own = folder / f"machine_{ranks.rank}"
        own.mkdir()
        os.chdir(own)
        return action(ranks)

    return run


def test_sharded_agents_need_storage_that_all_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_consistency, "FILE_WAIT_SECONDS", 0.2)
    action = in_a_folder_of_its_own(
        tmp_path, lambda ranks: train(ranks, max_steps=5, checkpoint_path="run")
    )
    said = refused(on_two_ranks(tmp_path / "ranks", action), ValueError)
    assert "checkpoint_path='run': what process 0 writes to 'run' is not seen by process 1" in said
    assert "storage that all processes see" in said


def test_others_are_told_that_resuming_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_consistency, "FILE_WAIT_SECONDS", 0.2)

    def action(ranks: Ranks) -> tuple[int, list[str]]:
        said: list[str] = []
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger().addHandler(handler)
        return train(ranks, checkpoint_path="run"), said

    first, second = on_two_ranks(tmp_path / "ranks", in_a_folder_of_its_own(tmp_path, action))
    assert (first[0], second[0]) == (1, 1)  # max_steps counts the prompts of both
    (warning,) = first[1]
    assert "is not seen by process 1" in warning and "to resume from them" in warning
    assert second[1] == []
    assert not list((tmp_path / "machine_0" / "run").glob(".seen*"))


def test_sharded_agents_on_shared_storage(tmp_path: Path) -> None:
    results = on_two_ranks(
        tmp_path, lambda ranks: train(ranks, max_steps=5, checkpoint_path=tmp_path / "run")
    )
    assert results == [2, 2]
    assert not list((tmp_path / "run").glob(".seen*"))


def test_whether_an_elite_is_this_runs_is_decided_once(tmp_path: Path) -> None:
    """Not every machine may see it."""

    def action(ranks: Ranks) -> bool:
        if ranks.rank == 0:
            FakeAgent().save_checkpoint("elite")
            Path("elite/run.txt").write_text("run")
        with Elite("elite", "run", ranks) as elite:
            elite.resume("run")
            return elite.saved

    results = on_two_ranks(tmp_path / "ranks", in_a_folder_of_its_own(tmp_path, action))
    assert results == [True, True]


@pytest.mark.parametrize(
    ("signals", "code"),
    [
        ((signal.SIGINT, signal.SIGTERM), 143),
        ((None, signal.SIGTERM), 143),
        ((None, signal.SIGINT), 2),
    ],
)
def test_the_strongest_signal_counts_on_all(
    signals: tuple[signal.Signals | None, ...], code: int, tmp_path: Path
) -> None:
    """Both exit with 143 after SIGTERM to one; after Ctrl-C both return, after two iterations."""

    def action(ranks: Ranks) -> Any:
        def learn(agent: FakeAgent) -> None:
            number = signals[ranks.rank]
            if len(agent.learned) == 1 and number is not None:
                os.kill(os.getpid(), number)
                time.sleep(0.01)

        return train(ranks, learn, max_steps=90, checkpoint_path=tmp_path / "run")

    results = on_two_ranks(tmp_path, action)
    if code == 143:
        assert [(kind, code) for kind, _, code in results] == [(SystemExit, 143)] * 2
    else:
        assert results == [2, 2]
    assert (tmp_path / "run" / "iteration_00000002" / "run_state.json").is_file()


@pytest.mark.parametrize(("seconds", "reached"), [((90.0, 0.0), True), ((0.0, 90.0), False)])
def test_the_clock_of_rank_zero_ends_the_run(
    seconds: tuple[float, float], reached: bool, tmp_path: Path
) -> None:
    def action(ranks: Ranks) -> bool:
        options = TrainingOptions(max_wall_seconds=60)
        bounds = Bounds(Population([], []), options, ranks)
        bounds.wall_seconds = seconds[ranks.rank]
        return bounds.reached()

    assert on_two_ranks(tmp_path, action) == [reached] * 2


class ManyBatches(FakeGym):
    """Asks for answers ``batches`` times in an evaluation, each taking a while."""

    batches = 0
    asked = 0

    def evaluate(self, act: Act, loop: int = 1) -> Evaluation:
        for _ in range(self.batches):
            act([])
            self.asked += 1
            time.sleep(0.01)
        return Evaluation(torch.ones(self.batches))


@pytest.mark.parametrize(
    ("batches", "told"), [((3000, 3000), 1), ((3000, 3000), 0), ((2, 3000), 1)]
)
def test_a_signal_to_one_process_stops_the_evaluation_of_all(
    batches: tuple[int, int], told: int, tmp_path: Path
) -> None:
    """Also of one that has no more answers to give, and waits for the other's."""

    def action(ranks: Ranks) -> Any:
        agent, env = AgentOfRank(), ManyBatches(rows=99)
        agent.ranks, env.batches = ranks, batches[ranks.rank]
        agent.accelerator = SimpleNamespace(device=torch.device("cpu"))

        def answer(prompts: Any, training: bool) -> Any:
            if ranks.rank == told and env.asked == 5:
                os.kill(os.getpid(), signal.SIGTERM)

        agent.get_action = answer
        agent.test = lambda env: LLMAlgorithm.test(agent, env)
        options = TrainingOptions(checkpoint_path=tmp_path / "run", verbose=False)
        population = Population([agent], [ReasoningCollector(env)])
        with pytest.raises(SystemExit) as stopped:
            run_training(population, options, "d", ranks)
        return stopped.value.code, env.asked, agent.fitness, agent.steps

    results = on_two_ranks(tmp_path, action)
    assert [(code, *entries) for code, _, *entries in results] == [(143, [], [])] * 2
    assert results[told][1] == 6
    other = results[1 - told][1]
    assert other == 2 if batches[1 - told] == 2 else 0 < other < 1000
    assert (tmp_path / "run" / "iteration_00000000" / "run_state.json").is_file()


def test_an_evaluation_is_of_all_processes(tmp_path: Path) -> None:
    """Answers are in the order of ranks, as the rewards of ``agent.test`` are."""

    def action(ranks: Ranks) -> Any:
        own = [
            Evaluation(torch.ones(2), rows=[0, 0], sets=["a"] * 2, final_answers=["x", "x"]),
            Evaluation(torch.zeros(2), rows=[1, 1], sets=["b"] * 2, final_answers=["y", None]),
        ][ranks.rank]
        answers = evaluated(np.array([1.0, 1.0, 0.0, 0.0]), own, ranks)
        return answers.rows, evaluation_statistics(answers, 1.0, 2)

    results = on_two_ranks(tmp_path, action)
    assert results[0] == results[1]
    rows, columns = results[0]
    assert rows == [0, 0, 1, 1]
    assert (columns["fitness/a"], columns["fitness/b"]) == (1.0, 0.0)
    assert (columns["avg@2"], columns["maj@2"]) == (0.5, 0.5)


def test_a_failure_on_one_process_is_noted_as_its_own(tmp_path: Path) -> None:
    def action(ranks: Ranks) -> int:
        def learn(agent: FakeAgent) -> None:
            if len(agent.learned) == 1 and ranks.rank == 1:
                raise ZeroDivisionError("only here")

        return train(ranks, learn, max_steps=90, checkpoint_path=tmp_path / "run")

    survivor, failed = on_two_ranks(tmp_path, action)
    assert failed[0] is ZeroDivisionError
    assert "Process 1 of 2 ended with this error in iteration 2" in failed[1]
    assert survivor[0] is not ZeroDivisionError
    assert "Process 0 of 2 ended with this error in iteration" in survivor[1]
    assert "the launcher names it" in survivor[1]


def test_an_error_that_all_have_is_saved_from(tmp_path: Path) -> None:
    def learn(agent: FakeAgent) -> None:
        if len(agent.learned) == 1:
            raise NonFiniteUpdateError("not finite")

    results = on_two_ranks(
        tmp_path, lambda ranks: train(ranks, learn, max_steps=90, checkpoint_path=tmp_path / "run")
    )
    where = tmp_path / "run" / "crashed_in_iteration_00000002"
    assert f"The agents were saved to {where}" in refused(results, NonFiniteUpdateError)
    assert (where / "agent_0" / "agent.json").is_file()
