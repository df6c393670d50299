"""The columns of ``metrics.csv``, the first ones in order, and what a tracker is asked for."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from resume_helpers import TOKENIZER, Dice, dataset, make_agents, nothing
from test_columns_of_learn import ALWAYS

from agilerl.llm_envs import ReasoningGym, TokenObservationWrapper
from agilerl.training.logs.files import FIRST_COLUMNS
from agilerl.training.trackers import Tracker
from agilerl.training.train_llm import finetune_llm_multiturn, finetune_llm_reasoning

COLUMNS = (
    "iteration", "agent", "steps", "wall_seconds", "reward_mean", "reward_std", "accuracy",
    "failed_completions", "truncated_share", "fitness", "eval_accuracy", "tokens_per_second",
    "generation_seconds", "environment_seconds", "learning_seconds", "evaluation_seconds",
)  # fmt: skip
SAMPLED = {"avg@2", "pass@2"}
RESAMPLED = {"zero_variance_share", "resamples"}
OPTIONS: dict[str, Any] = {
    "max_steps": 2, "verbose": False, "evaluation_samples": 2, "zero_variance": "resample",
}  # fmt: skip


def header(path: Path) -> list[str]:
    with (path / "metrics.csv").open(newline="") as file:
        return next(csv.reader(file))


def test_first_columns() -> None:
    assert FIRST_COLUMNS == COLUMNS


def test_all_columns_of_a_run_of_one_turn(tmp_path: Path) -> None:
    env = ReasoningGym(
        dataset("train", 2),
        {"easy": dataset("e", 1), "hard": dataset("h", 1)},
        TOKENIZER,
        {"long": lambda completion: float(len(completion)), "odd": lambda completion: 1.0},
        [{"role": "user", "content": "{question}"}],
        data_batch_size_per_gpu=2,
        extract_answer=lambda completion: completion[:1],
    )
    finetune_llm_reasoning(make_agents(1), env, checkpoint_path=tmp_path, **OPTIONS)
    found = header(tmp_path)
    assert tuple(found[: len(COLUMNS)]) == COLUMNS
    rewards = {f"rewards/{name}/{what}" for name in ("long", "odd") for what in ("mean", "std")}
    evaluated = SAMPLED | {"maj@2"}
    sets = {
        f"{name}/{test_set}"
        for name in {"fitness", "eval_accuracy"} | evaluated
        for test_set in ("easy", "hard")
    }
    assert {*found} == {*COLUMNS} | ALWAYS | RESAMPLED | evaluated | rewards | sets


def test_all_columns_of_a_run_of_several_turns(tmp_path: Path) -> None:
    def env_factory() -> TokenObservationWrapper:
        return TokenObservationWrapper(Dice(nothing), TOKENIZER, max_turns=3)

    options = {"groups_per_iteration": 1, "evaluation_episodes": 1, "max_workers": 1, **OPTIONS}
    finetune_llm_multiturn(make_agents(1), 3, env_factory, checkpoint_path=tmp_path, **options)
    assert {*header(tmp_path)} == {*COLUMNS} | ALWAYS | RESAMPLED | SAMPLED | {"turns_mean"}


def test_trackers() -> None:
    members = {name for name in vars(Tracker) if not name.startswith("_")}
    assert members == {"run_id", "start", "write", "write_completions", "close"}
