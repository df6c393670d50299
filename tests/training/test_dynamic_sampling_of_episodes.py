"""Groups of episodes without variance, which are kept, left out or replaced; counted by hand.

An environment pays by seed and episode, whatever is answered, so that it is known which groups
vary.
"""

from __future__ import annotations

import csv
import json
import logging
import random
import re
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from resume_helpers import (
    TOKENIZER,
    After,
    Dice,
    Hook,
    checkpoints_in,
    differences,
    everything,
    nothing,
    reseed,
    rows_of,
    run_multiturn,
    seed_all,
)

from agilerl.algorithms import GRPO
from agilerl.llm.config import CosineLRScheduleConfig
from agilerl.llm_envs import EVALUATION_SEED_START, TokenObservationWrapper
from agilerl.llm_envs.dataset import TrainingBatchSampler
from agilerl.testing import guess_the_number_env, load_bundled_model, tiny_model
from agilerl.training.train_llm import finetune_llm_multiturn

Pay = Callable[[int, int], list[float]]
SEEDS = 6
BATCHES = TrainingBatchSampler(SEEDS, 2, seed=42).upcoming(3)
ORDER = [seed for batch in BATCHES for seed in batch]


class Paid:
    """Pays the n-th episode of a training seed what ``pay`` says, turn by turn; [] fails at once.

    Of an episode that the rewards do not last for the next step fails.
    """

    pay: ClassVar[Pay]
    resets: ClassVar[list[int]] = []
    training_turns: ClassVar[int] = 2

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        assert seed is not None
        number = self.resets.count(seed)
        self.resets.append(seed)
        held_out = seed >= EVALUATION_SEED_START
        self.rewards = [0.0] if held_out else type(self).pay(seed, number)
        self.turn, self.turns = 0, 1 if held_out else self.training_turns
        if not self.rewards:
            raise OSError("no game")
        return f"game {seed}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.turn += 1
        return "go on", self.rewards[self.turn - 1], self.turn == self.turns, False, {}


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Paid.resets = []
    monkeypatch.chdir(tmp_path)


def make_agent(**arguments: Any) -> GRPO:
    settings: dict[str, Any] = {
        "actor_network": tiny_model(hidden_size=32, layers=1),
        "pad_token_id": TOKENIZER.pad_token_id,
        "pad_token": TOKENIZER.pad_token,
        "batch_size": 4,
        "group_size": 2,
        "max_output_tokens": 4,
        "max_model_len": 160,
        "lr": 1e-3,
        "gradient_checkpointing": False,
    }
    return GRPO(**(settings | arguments))


def train(agent: GRPO, pay: Pay, **options: Any) -> tuple[list[dict[str, str]], list[Any]]:
    """Rows of ``metrics.csv`` but for that of the evaluation before training; what learn got."""
    Paid.pay = staticmethod(pay)
    learned: list[Any] = []
    learn = agent.learn

    def watched(experiences: Any, **given: Any) -> dict[str, float]:
        learned.append(deepcopy((experiences, given)))
        return learn(experiences, **given)

    agent.learn = watched  # type: ignore[method-assign, assignment]
    settings: dict[str, Any] = {
        "max_turns": 2,
        "env_factory": lambda: TokenObservationWrapper(Paid(), TOKENIZER, max_turns=2),
        "max_steps": 1,
        "evaluation_interval": 100,
        "evaluation_episodes": 1,
        "groups_per_iteration": 2,
        "train_seeds": SEEDS,
        "checkpoint_path": "run",
        "verbose": False,
        "max_workers": 1,
    }
    finetune_llm_multiturn([agent], **(settings | options))
    with Path("run/metrics.csv").open() as file:
        return list(csv.DictReader(file))[1:], learned


def seed_of(ids: torch.Tensor) -> int:
    """The seed that the first prompt of an episode's rows shows."""
    (found,) = re.findall(r"game (\d+)", TOKENIZER.decode(ids[0]))
    return int(found)


def flat(*seeds: int) -> Pay:
    """Every episode of these seeds gets 1 in its first turn; of others only each second one."""
    return lambda seed, number: [float(seed in seeds or number % 2), 0.0, 0.0]


def test_skipped_groups_are_not_learned_from_and_still_counted() -> None:
    (row,), ((experiences, given),) = train(make_agent(), flat(ORDER[1]), zero_variance="skip")
    assert [seed_of(ids) for ids in experiences[0]] == [ORDER[0]] * 2 + [ORDER[1]] * 2
    assert given["sample_mask"].tolist() == [[True, True], [False, False]]
    assert float(row["zero_variance_share"]) == 0.5
    assert float(row["reward_mean"]) == 0.75, "of all that were played"
    assert row["steps"] == "8"
    assert "resamples" not in row


def test_other_seeds_take_the_places_of_flat_groups() -> None:
    # Batches [0, 1], [2, 3], [4, 5] of the order, of which 0, 2 and 3 are flat.
    agent = make_agent(importance_anchor="sampler")
    rows, learned = train(agent, flat(*(ORDER[n] for n in (0, 2, 3))), zero_variance="resample")
    (row,), ((experiences, given),) = rows, learned
    chosen = [ORDER[1], ORDER[4]]
    assert [seed_of(ids) for ids in experiences[0]] == [chosen[0]] * 2 + [chosen[1]] * 2
    assert experiences[2].tolist() == [[0.0, 0.0], [1.0, 0.0]] * 2
    counts = [int(mask.sum()) for mask in experiences[1]]
    assert [len(logps) for logps in given["sampling_logps"]] == counts
    assert [sorted(set(turns.flatten().tolist())) for turns in given["turn_ids"]] == [
        [-1, 0, 1]
    ] * 4
    assert given["truncated"].tolist() == [False] * 4
    assert set(given) == {"turn_ids", "sampling_logps", "truncated"}
    assert (row["steps"], row["resamples"]) == ("24", "2.0")
    assert float(row["zero_variance_share"]) == 0.5
    assert float(row["reward_mean"]) == 0.75
    assert float(row["turns_mean"]) == 2.0
    trained = [seed for seed in Paid.resets if seed < EVALUATION_SEED_START]
    assert trained == [seed for seed in ORDER for _ in range(2)]


def test_after_the_bound_flat_groups_fill_the_batch_and_the_next_one_goes_on() -> None:
    batches = TrainingBatchSampler(8, 2, seed=42).upcoming(4)
    order = [seed for batch in batches for seed in batch]
    options: dict[str, Any] = {"max_resamples": 1, "train_seeds": 8, "max_steps": 32}
    _, learned = train(make_agent(), flat(*order[:7]), zero_variance="resample", **options)
    seeds = [[seed_of(ids) for ids in experiences[0][::2]] for experiences, _ in learned]
    assert seeds == [order[:2], [order[4], order[7]]]


@pytest.mark.parametrize(
    ("credit", "moved", "resamples"),
    [("trajectory", "return", "0.0"), ("turn", "turn", "0.0"), ("turn", "return", "3.0"),
     ("trajectory", "turn", "3.0")],
)  # fmt: skip
def test_the_credit_assignment_says_which_groups_vary(
    credit: str, moved: str, resamples: str
) -> None:
    """Equal returns of differing turns; differing returns of turns that are equal where played."""

    def pay(seed: int, number: int) -> list[float]:
        if moved == "turn":
            return [[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]][number % 3]
        return [[1.0], [1.0, 1.0], [1.0, 1.0]][number % 3]

    class Shorter(Paid):
        def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
            began = super().reset(seed)
            self.turns = len(self.rewards)
            return began

    agent = make_agent(advantage_granularity=credit, group_size=3, batch_size=6)
    (row,), ((experiences, given),) = train(
        agent,
        pay,
        zero_variance="resample",
        env_factory=lambda: TokenObservationWrapper(Shorter(), TOKENIZER, max_turns=2),
    )
    assert row["resamples"] == resamples
    varies = resamples == "0.0"
    assert float(row["zero_variance_share"]) == (0.0 if varies else 1.0)
    assert float(row["zero_variance_groups"]) == (0.0 if varies else 8.0), "of all that was drawn"
    # What learn itself finds of those that it is given.
    metrics = agent.learn(experiences, **given)
    assert metrics["zero_variance_groups"] == (0.0 if varies else 2.0)
    assert (float(row["grad_norm"]) > 0) == varies
    assert (float(row["advantage_std"]) > 0) == varies


@pytest.mark.parametrize("credit", ["trajectory", "turn"])
def test_no_warning_where_turns_teach_though_returns_are_equal(
    credit: str, caplog: pytest.LogCaptureFixture
) -> None:
    agent = make_agent(advantage_granularity=credit)
    with caplog.at_level(logging.WARNING, "agilerl"):
        train(agent, lambda _, number: [number % 2, 1 - number % 2], max_steps=80)
    warned = [record for record in caplog.records if "learns nothing" in record.getMessage()]
    assert bool(warned) == (credit == "trajectory")


def test_episodes_whose_windows_slid_keep_their_rows() -> None:
    """The third turn does not fit beside the first; of the batches one group each varies."""

    class Longer(Paid):
        training_turns = 3

    def env() -> TokenObservationWrapper:
        return TokenObservationWrapper(Longer(), TOKENIZER, max_turns=3, enable_sliding_window=True)

    agent = make_agent(max_model_len=75, importance_anchor="sampler")
    _, ((experiences, given),) = train(
        agent,
        flat(ORDER[0], ORDER[3]),
        zero_variance="resample",
        env_factory=env,
        max_turns=3,
    )
    ids, masks, _ = experiences
    assert [seed_of(block) for block in ids] == [ORDER[1]] * 2 + [ORDER[2]] * 2
    assert [len(block) for block in ids] == [2] * 4, "every window slid"
    assert given["trajectory_ids"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [turns.max(1).values.tolist() for turns in given["turn_ids"]] == [[1, 2]] * 4
    actions = [int(of_row.sum()) for mask in masks for of_row in mask]
    assert [len(logps) for logps in given["sampling_logps"]] == actions


def test_failed_episodes_are_counted_over_all_draws() -> None:
    """Of three episodes one fails: of the first seed at once, of the third in its second turn."""

    def pay(seed: int, number: int) -> list[float]:
        if number == 1:
            return {ORDER[0]: [], ORDER[2]: [0.5]}.get(seed, [1.0, 1.0])
        return [float(number), 0.0] if seed in ORDER[:1] + ORDER[2:4] else [1.0, 1.0]

    agent = make_agent(group_size=3, batch_size=6)
    (row,), ((experiences, given),) = train(agent, pay, zero_variance="resample")
    # 0 and 2 vary by what is left of them, 1 is flat.
    assert [seed_of(ids) for ids in experiences[0][3:]] == [ORDER[2]] * 3
    assert experiences[0][1].shape == (1, 2), "no row of the one that failed at once"
    assert given["sample_mask"].tolist() == [[True, False, True]] * 2
    assert row["failed_completions"] == "2.0"
    assert row["resamples"] == "1.0"
    assert float(row["zero_variance_share"]) == 0.25
    # 11 with two turns each, of which one failed in its second, and none of the first that failed.
    assert row["steps"] == "22"


def test_a_batch_without_any_episode_is_followed_by_another_one() -> None:
    def pay(seed: int, number: int) -> list[float]:
        return [] if seed in ORDER[:2] else [float(number % 2), 0.0]

    options: dict[str, Any] = {"zero_variance": "resample", "max_failure_share": 1.0}
    (row,), ((experiences, given),) = train(make_agent(), pay, **options)
    assert [seed_of(ids) for ids in experiences[0]] == [ORDER[2]] * 2 + [ORDER[3]] * 2
    assert "sample_mask" not in given
    assert (row["failed_completions"], row["steps"], row["resamples"]) == ("4.0", "8", "1.0")
    assert float(row["reward_mean"]) == 0.5


def drawing_run(path: Path, hook: Hook = nothing, **options: Any) -> list[GRPO]:
    """Two agents, batches of two seeds of five; returns are 0 to 3: some groups are flat."""

    class Coarse(Dice):
        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            text, reward, *over = super().step(action)
            return text, float(reward > 0.6), *over

    settings: dict[str, Any] = {
        "env_factory": lambda: TokenObservationWrapper(Coarse(hook), TOKENIZER, max_turns=3),
        "zero_variance": "resample",
        "max_resamples": 2,
        "groups_per_iteration": 2,
        "train_seeds": 5,
        "max_steps": 120,
        "keep_checkpoints": 99,
    }
    return run_multiturn(path, **(settings | options))


def test_a_resumed_run_draws_what_the_uninterrupted_one_draws(tmp_path: Path) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    seed_all()
    expected = everything(whole, drawing_run(whole))
    rows = [row for row in rows_of(whole) if row["resamples"]]
    assert len({row["resamples"] for row in rows}) > 1, "iterations differ in how much they draw"
    for iteration in (1, 2):
        reseed()
        start, other = whole / f"iteration_{iteration:08d}", tmp_path / f"from_{iteration}"
        resumed = everything(
            other, drawing_run(other, resume_from=start, elite_path=other / "elite")
        )
        assert set(differences(resumed, expected)) <= {"elite"}
    # A Ctrl-C while a further batch is played: after two evaluations of two episodes and the first
    # batch of two groups of three, of both agents.
    assert rows[0]["resamples"] != "0.0"
    seed_all()
    drawing_run(stopped, After(4 + 12 + 1))
    assert checkpoints_in(stopped) == ["iteration_00000001"]
    reseed()
    assert (
        differences(everything(stopped, drawing_run(stopped, resume_from=stopped)), expected) == []
    )


def guess_the_number(path: Path, **options: Any) -> list[GRPO]:
    """The bundled model, on GEM's game, which draws from the global random numbers."""
    model, tokenizer = load_bundled_model("guess_the_number")
    agent = make_agent(
        actor_network=model,
        pad_token_id=tokenizer.pad_token_id,
        pad_token=tokenizer.pad_token,
        max_output_tokens=12,
        max_model_len=512,
        advantage_granularity="turn",
        cosine_lr_schedule_config=CosineLRScheduleConfig(num_epochs=8),
    )
    settings: dict[str, Any] = {
        "max_turns": 3,
        "env_factory": lambda: TokenObservationWrapper(
            guess_the_number_env(), tokenizer, max_turns=3, apply_chat_template=True
        ),
        "max_steps": 60,
        "evaluation_interval": 2,
        "evaluation_episodes": 2,
        "groups_per_iteration": 2,
        "train_seeds": 7,
        "zero_variance": "resample",
        "checkpoint_steps": 1,
        "keep_checkpoints": 99,
        "checkpoint_path": path,
        "verbose": False,
        "max_workers": 1,
    }
    return finetune_llm_multiturn([agent], **(settings | options))


def test_a_game_with_the_bundled_model_whole_and_resumed(tmp_path: Path) -> None:
    whole, other = tmp_path / "whole", tmp_path / "other"
    seed_all()
    expected = everything(whole, guess_the_number(whole))
    rows = [row for row in rows_of(whole) if row["resamples"]]
    assert len(rows) > 1
    assert any(float(row["resamples"]) > 0 for row in rows)
    assert all(float(row["grad_norm"]) > 0 for row in rows)
    games = [json.loads(line) for line in (whole / "completions.jsonl").read_text().splitlines()]
    assert all(game["completion"] for game in games)
    random.seed(0)
    reseed()
    resumed = guess_the_number(other, resume_from=whole / "iteration_00000001")
    assert differences(everything(other, resumed), expected) == []
