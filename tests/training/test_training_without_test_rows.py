"""Training without held-out data: no evaluations, and nothing that would need their fitness."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from resume_helpers import (
    TOKENIZER,
    After,
    dataset,
    differences,
    everything,
    make_agents,
    reseed,
    seed_all,
)

from agilerl.hpo import Mutations, TournamentSelection
from agilerl.llm_envs import ReasoningGym
from agilerl.training.checkpoint.run_checkpoint import best_checkpoint, complete_checkpoints
from agilerl.training.train_llm import finetune_llm_reasoning


def gym(hook: Any = None) -> ReasoningGym:
    def reward(completion: str) -> float:
        if hook is not None:
            hook()
        return len(set(completion)) / 8

    return ReasoningGym(
        dataset("train", 5),
        None,
        TOKENIZER,
        reward,
        [{"role": "user", "content": "{question}"}],
        data_batch_size_per_gpu=2,
        reward_workers=1,
    )


def train(path: Path, pop: list[Any], env: ReasoningGym | None = None, **options: Any) -> None:
    settings = {
        "max_steps": 6,
        "evaluation_interval": 1,
        "checkpoint_steps": 1,
        "checkpoint_path": path,
        "verbose": False,
    }
    finetune_llm_reasoning(pop, gym() if env is None else env, **(settings | options))


def test_agents_train_and_are_not_evaluated(tmp_path: Path) -> None:
    pop = make_agents(2)
    train(tmp_path, pop)
    with (tmp_path / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["steps"] for row in rows if row["agent"] == "0"] == ["2", "3", "5", "7"]
    assert {"fitness", "eval_accuracy", "evaluation_seconds"}.isdisjoint(rows[0])
    assert all(agent.fitness == [] and len(agent.scores) == 4 for agent in pop)
    assert complete_checkpoints(tmp_path) and best_checkpoint(tmp_path) is None


def test_such_a_run_resumes_exactly(tmp_path: Path) -> None:
    (whole,) = agents = make_agents(1)
    seed_all()
    train(tmp_path / "whole", agents)
    expected = everything(tmp_path / "whole", [whole])
    seed_all()
    # In the second iteration, of three.
    train(tmp_path / "parts", make_agents(1), gym(After(8)))
    assert len(complete_checkpoints(tmp_path / "parts")) == 2
    resumed = make_agents(1)
    reseed()
    train(tmp_path / "parts", resumed, resume_from=tmp_path / "parts")
    assert not differences(everything(tmp_path / "parts", resumed), expected)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        (
            "tournament",
            {
                "tournament": TournamentSelection(2, elitism=True, population_size=2),
                "mutation": Mutations(1, 0, 0, 0, 0, 0),
                "evo_steps": 1,
            },
        ),
        ("save_elite", {"save_elite": True, "elite_path": "elite"}),
    ],
)
def test_what_needs_a_fitness_is_refused(tmp_path: Path, name: str, options: Any) -> None:
    pop = make_agents(2)
    with pytest.raises(ValueError, match=rf"{name} chooses agents .*test_dataset=None"):
        train(tmp_path / "run", pop, **options)
    assert not (tmp_path / "run").exists()


def test_agents_cannot_be_tested() -> None:
    (agent,) = make_agents(1)
    with pytest.raises(ValueError, match="test_dataset is None, so there is nothing to evaluate"):
        agent.test(gym())
    assert agent.fitness == []
