"""Groups without two different rewards, which are kept, left out or replaced; counted by hand."""

from __future__ import annotations

import csv
import logging
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from resume_helpers import (
    TOKENIZER,
    dataset,
    differences,
    everything,
    make_agents,
    reseed,
    rows_of,
    run_reasoning,
    seed_all,
)
from training_fakes import FakeAgent, FakeGym

from agilerl.algorithms import GRPO
from agilerl.llm_envs import ReasoningGym
from agilerl.training.collectors.dynamic_sampling import fill_up
from agilerl.training.collectors.experience import Experience, zero_variance_statistics
from agilerl.training.train_llm import finetune_llm_multiturn, finetune_llm_reasoning


def easy(*rows: int) -> Callable[[str, str], float]:
    """Any completion of these rows is right."""
    return lambda completion, answer: float(completion == answer or int(answer) - 10 in rows)


def train(agent: FakeAgent, env: FakeGym, path: Path, **options: Any) -> list[dict[str, str]]:
    settings: dict[str, Any] = {"checkpoint_path": path, "verbose": False}
    finetune_llm_reasoning([agent], env, **(settings | options))
    with (path / "metrics.csv").open() as file:
        return list(csv.DictReader(file))[1:]  # the first is the evaluation before training


def learned_prompts(agent: FakeAgent, call: int) -> list[int]:
    return [int(ids[0, 0]) - 100 for ids in agent.learned[call]["completion_ids"]]


def test_flat_groups_are_kept_unless_asked_otherwise(tmp_path: Path) -> None:
    agent = FakeAgent()
    (row,) = train(agent, FakeGym(reward=easy(1)), tmp_path, max_steps=2)
    assert agent.learned[0].get("sample_mask") is None
    assert learned_prompts(agent, 0) == [0, 1]
    assert "zero_variance_share" not in row


def test_skipped_groups_are_not_learned_from_and_still_counted(tmp_path: Path) -> None:
    agent = FakeAgent()
    (row,) = train(agent, FakeGym(reward=easy(1)), tmp_path, max_steps=2, zero_variance="skip")
    assert agent.learned[0]["sample_mask"].tolist() == [[True, True], [False, False]]
    assert float(row["zero_variance_share"]) == 0.5
    assert float(row["reward_mean"]) == 0.75, "of all that was drawn"


def test_other_prompts_take_the_places_of_flat_groups(tmp_path: Path) -> None:
    # Batches [0, 1], [2, 3], [4, 5] of which 0, 2 and 3 are flat.
    agent, env = FakeAgent(), FakeGym(rows=6, reward=easy(0, 2, 3))
    (row,) = train(agent, env, tmp_path, max_steps=5, zero_variance="resample")
    assert learned_prompts(agent, 0) == [1, 4]
    assert agent.learned[0]["rewards"].tolist() == [[1, 0], [1, 0]]
    assert len(agent.learned[0]["sampling_logps"]) == 4
    assert (row["steps"], row["resamples"]) == ("6", "2.0")
    assert float(row["zero_variance_share"]) == 0.5
    assert float(row["reward_mean"]) == 0.75
    assert env.seen == [[0, 1], [2, 3], [4, 5], [0, 1]], "5 is not drawn twice, nor left out"
    assert env.num_epochs == 1


def test_after_the_bound_flat_groups_fill_the_batch(tmp_path: Path) -> None:
    agent, env = FakeAgent(), FakeGym(rows=8, reward=easy(*range(7)))
    options: dict[str, Any] = {"zero_variance": "resample", "max_resamples": 2}
    train(agent, env, tmp_path, max_steps=1, **options)
    assert env.seen[:-1] == [[0, 1], [2, 3], [4, 5]]
    assert learned_prompts(agent, 0) == [0, 1]
    train(agent, env, tmp_path / "next", max_steps=1, **options)
    assert learned_prompts(agent, 1) == [6, 7], "one of each kind"


def test_agents_that_share_an_environment_draw_in_turn(tmp_path: Path) -> None:
    agents, env = [FakeAgent(0), FakeAgent(1)], FakeGym(rows=8, reward=easy(0, 5))
    finetune_llm_reasoning(
        agents,
        env,
        max_steps=2,
        zero_variance="resample",
        checkpoint_path=tmp_path,
        verbose=False,
    )
    assert learned_prompts(agents[0], 0) == [1, 2]
    assert learned_prompts(agents[1], 0) == [4, 6]


def parity(completion: str) -> float:
    return float(len(completion) % 2)


def real_gym(reward: Callable[..., float] = parity, batch_size: int = 2) -> ReasoningGym:
    return ReasoningGym(
        dataset("train", 7),
        dataset("test", 3),
        TOKENIZER,
        reward,
        [{"role": "user", "content": "{question}"}],
        data_batch_size_per_gpu=batch_size,
    )


def drawing_run(path: Path, **options: Any) -> list[GRPO]:
    """Two agents on one environment, whose rewards are 0 and 1: some groups are flat."""
    env = real_gym()
    settings = {"zero_variance": "resample", "max_steps": 20, "keep_checkpoints": 99} | options
    return run_reasoning(path, env=env, pop=make_agents(optimizer=torch.optim.Adagrad), **settings)


def test_a_resumed_run_draws_what_the_uninterrupted_one_draws(tmp_path: Path) -> None:
    whole, other = tmp_path / "whole", tmp_path / "other"
    seed_all()
    expected = everything(whole, drawing_run(whole))
    drawn = {row["resamples"] for row in rows_of(whole) if row["resamples"]}
    assert len(drawn) > 1, "iterations differ in how much they draw"
    reseed()
    start, elite = whole / "iteration_00000001", other / "elite"
    resumed = everything(other, drawing_run(other, resume_from=start, elite_path=elite))
    assert set(differences(resumed, expected)) <= {"elite"}


def one_agent_run(path: Path, env: ReasoningGym, **options: Any) -> list[dict[str, str]]:
    """Rows of its iterations, of one optimizer step each."""
    seed_all()
    sizes = {"batch_size": 12, "update_epochs": 1, "beta": 0.0}
    run_reasoning(path, env=env, pop=make_agents(1, **sizes), **options)
    return [row for row in rows_of(path) if row["reward_mean"]]


@pytest.mark.parametrize("zero_variance", ["skip", "resample"])
def test_where_no_group_of_a_real_agent_varies(
    zero_variance: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"zero_variance": zero_variance, "max_resamples": 1, "max_steps": 8}
    with caplog.at_level(logging.WARNING, "agilerl"):
        rows = one_agent_run(tmp_path, real_gym(lambda completion: 1.0), **options)
    steps = [0, *(int(row["steps"]) for row in rows)]
    assert len(rows) > 2
    for row, before, now in zip(rows, steps[:-1], steps[1:], strict=True):
        assert float(row["zero_variance_share"]) == 1.0
        assert float(row["zero_variance_groups"]) == now - before
        assert float(row["completion_length"]) > 1
        assert float(row["grad_norm"]) == 0.0
    assert sum("update skipped" in record.message for record in caplog.records) <= 1


def test_a_real_agent_learns_from_the_groups_that_are_left_alone(tmp_path: Path) -> None:
    def reward(completion: str, question: str) -> float:
        return 1.0 if question in ("train0?", "train1?", "train2?") else len(completion) / 8

    rows = {}
    for zero_variance in ("keep", "skip"):
        options: dict[str, Any] = {"zero_variance": zero_variance, "max_steps": 4}
        (rows[zero_variance],) = one_agent_run(
            tmp_path / zero_variance, real_gym(reward, 4), **options
        )
    flat = float(rows["keep"]["zero_variance_groups"])
    assert flat in (1.0, 2.0, 3.0)
    for name in ("zero_variance_groups", "completion_length", "reward_mean", "entropy"):
        assert float(rows["skip"][name]) == pytest.approx(float(rows["keep"][name])), name
    found, kept = (float(rows[name]["grad_norm"]) for name in ("skip", "keep"))
    assert found == pytest.approx(kept * 4 / (4 - flat), rel=1e-4)


def experience(rewards: list[list[float]], **changes: Any) -> Experience:
    count = len(rewards)
    settings: dict[str, Any] = {
        "experiences": ([torch.zeros(2, 3)] * count, [torch.zeros(2, 2)] * count, None),
        "rewards": torch.tensor(rewards),
        "steps": count,
        "generated_tokens": 4 * count,
        "generation_seconds": 1.0,
        "environment_seconds": 0.5,
        "learn_arguments": {"sampling_logps": None},
    }
    settings |= changes
    ids, masks, _ = settings["experiences"]
    settings["experiences"] = (ids, masks, settings["rewards"])
    return Experience(**settings)


def test_a_single_scored_answer_is_no_group_without_variance() -> None:
    """Of four groups one is flat, one has variance, one a single answer, and one none."""
    kept = torch.tensor([[True, True], [True, True], [True, False], [False, False]])
    rewards = torch.tensor([[1.0, 1.0], [0.0, 1.0], [1.0, 0.0], [0.0, 0.0]])
    drawn = experience(rewards.tolist(), sample_mask=kept)
    found = zero_variance_statistics(drawn)
    assert found == {"zero_variance_groups": 1.0, "zero_variance_share": 0.5}
    nothing = zero_variance_statistics(replace(drawn, sample_mask=torch.zeros_like(kept)))
    assert nothing["zero_variance_groups"] == 0.0 and math.isnan(nothing["zero_variance_share"])


def test_what_belongs_to_a_group_goes_with_it() -> None:
    first = experience(
        [[1.0, 1.0], [0.0, 1.0]],
        learn_arguments={
            "sampling_logps": None,
            "truncated": torch.tensor([[True, False], [False, True]]),
        },
    )
    second = experience(
        [[0.0, 1.0], [3.0, 2.0], [0.0, 5.0]],
        sample_mask=torch.tensor([[True, False], [True, True], [True, True]]),
        learn_arguments={
            "sampling_logps": [torch.tensor([float(n)]) for n in range(6)],
            "truncated": torch.tensor([[False, False], [True, True], [False, False]]),
        },
    )
    filled = fill_up([first, second])
    assert filled.experiences[2].tolist() == [[0.0, 1.0], [3.0, 2.0]]
    logps = filled.learn_arguments["sampling_logps"]
    assert [None if row is None else row.item() for row in logps] == [None, None, 2.0, 3.0]
    assert filled.learn_arguments["truncated"].tolist() == [[False, True], [True, True]]
    assert "sample_mask" not in filled.learn_arguments
    assert (filled.steps, filled.generated_tokens, filled.generation_seconds) == (5, 20, 2.0)
    assert len(filled.kept_rewards) == 9


def test_what_belongs_to_an_episode_goes_with_it() -> None:
    """Two seeds, two episodes each; in the second batch two windows slid."""

    def rows(count: int, token: int) -> torch.Tensor:
        return torch.full((count, 3), token)

    def batch(returns: list[list[float]], counts: list[int], first: int) -> Experience:
        turns = torch.tensor(returns).reshape(-1, 1) * torch.tensor([0.0, 1.0])
        blocks = [rows(count, first + n) for n, count in enumerate(counts)]
        given = {
            "turn_ids": [block[:, 1:] for block in blocks],
            "sampling_logps": [block[0] for block in blocks for _ in block],
            "truncated": torch.tensor([n == 0 for n in range(len(counts))]),
        }
        if max(counts) > 1:
            given["trajectory_ids"] = torch.arange(4).repeat_interleave(torch.tensor(counts))
        made = experience(returns, learn_arguments=given)
        return replace(made, experiences=(blocks, [block[:, 1:] > 0 for block in blocks], turns))

    drawn = [batch([[1, 1], [0, 1]], [1] * 4, 10), batch([[5, 2], [7, 7]], [3, 1, 1, 2], 20)]
    filled = fill_up(drawn)
    ids, masks, rewards = filled.experiences
    assert [(len(block), int(block[0, 0])) for block in ids] == [(1, 12), (1, 13), (3, 20), (1, 21)]
    assert [tuple(mask.shape) for mask in masks] == [(1, 2), (1, 2), (3, 2), (1, 2)]
    assert rewards.tolist() == [[0, 0], [0, 1], [0, 5], [0, 2]]
    given = filled.learn_arguments
    assert [tuple(turns.shape) for turns in given["turn_ids"]] == [(1, 2), (1, 2), (3, 2), (1, 2)]
    assert [int(row[0]) for row in given["sampling_logps"]] == [12, 13, 20, 20, 20, 21]
    assert given["trajectory_ids"].tolist() == [0, 1, 2, 2, 2, 3]
    assert given["truncated"].tolist() == [False, False, True, False]
    assert "sample_mask" not in given
    alone = fill_up(drawn[:1]).learn_arguments
    assert "trajectory_ids" not in alone


def test_an_empty_further_batch_is_refused(tmp_path: Path) -> None:
    class Emptied(FakeGym):
        def _draw(self) -> None:
            super()._draw()
            if len(self.seen) == 2:
                self.pending = []

    with pytest.raises(ValueError, match="Emptied handed out an empty training batch"):
        train(FakeAgent(), Emptied(reward=easy(0)), tmp_path, max_steps=2, zero_variance="resample")


def no_environment() -> Any:
    raise AssertionError("an environment was made")


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"zero_variance": "drop"}, ValueError, "zero_variance is 'drop'.*'resample'"),
        ({"max_resamples": 0}, ValueError, "max_resamples is 0"),
        ({"max_resamples": 1.5}, TypeError, "max_resamples is 1.5"),
    ],
)
def test_bad_values(given: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        finetune_llm_reasoning([FakeAgent()], FakeGym(), max_steps=1, **given)
    with pytest.raises(error, match=says):
        finetune_llm_multiturn([FakeAgent()], 1, no_environment, **given)


def test_a_bound_without_resampling_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="max_resamples has no effect with zero_variance='skip'"):
        finetune_llm_reasoning(
            [FakeAgent()], FakeGym(), zero_variance="skip", max_resamples=2, verbose=False
        )
