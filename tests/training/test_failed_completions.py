"""Completions that failed: left out of learning and of every figure, counted, and shown."""

from __future__ import annotations

import csv
import json
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from forking import on_two_ranks
from test_training_with_reasoning_gym import TOKENIZER, WritingAgent, rows

from agilerl.algorithms.core.evaluation import scores_of_all_ranks
from agilerl.distributed import Ranks
from agilerl.llm_envs import (
    ReasoningGym,
    RewardError,
    SyncMultiTurnVecEnv,
    TokenObservationWrapper,
)
from agilerl.llm_envs.dataset import TrainingBatchSampler
from agilerl.training.collectors.dynamic_sampling import DynamicSampling
from agilerl.training.collectors.experience import (
    Experience,
    Sample,
    check_failures,
    gather_statistics,
    samples_to_show,
)
from agilerl.training.collectors.multiturn_collector import MultiTurnCollector
from agilerl.training.collectors.reasoning_collector import ReasoningCollector
from agilerl.training.logs.progress_bar import ProgressBar
from agilerl.training.train_llm import finetune_llm_reasoning
from agilerl.typing import ActionResult, Evaluation


class MaskedAgent(WritingAgent):
    """Writes ``yes`` and ``no``; takes a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: list[torch.Tensor | None] = []

    def learn(self, *args: Any, sample_mask: Any = None, **options: Any) -> dict[str, float]:
        self.masks.append(sample_mask)
        return super().learn(*args, **options)


def length(completion: str) -> float:
    return float(len(completion))


def judged(completion: str, answer: str) -> float:
    """Fails on what is not the answer of a question that names the completion that breaks it."""
    if answer == f"not {completion}":
        raise ConnectionError("judge is down")
    return 1.0


def trained(
    folder: Path, answers: list[str], **options: Any
) -> tuple[list[dict[str, str]], list[dict[str, Any]], MaskedAgent]:
    """Rows, samples and agent of one iteration; each question is answered yes and no."""
    agent = MaskedAgent()
    env = ReasoningGym(
        rows("train", answers),
        rows("test", ["yes"]),
        TOKENIZER,
        {"length": length, "judged": judged},
        [{"role": "user", "content": "{question}"}],
        data_batch_size_per_gpu=len(answers),
        **options,
    )
    options = {"max_steps": len(answers), "checkpoint_path": folder, "verbose": False}
    finetune_llm_reasoning([agent], env, **options)
    with (folder / "metrics.csv").open(newline="") as file:
        written = list(csv.DictReader(file))
    lines = (folder / "completions.jsonl").read_text().splitlines()
    return written, [json.loads(line) for line in lines], agent


def test_figures_are_of_what_is_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Five "yes" (4 points) and four "no" (3 points) are left of six each."""
    answers = ["", "not yes", "", "not no", "not no", ""]
    with caplog.at_level(logging.WARNING, "agilerl"):
        (before, row), samples, agent = trained(tmp_path, answers, on_failure="drop")
    assert before["failed_completions"] == ""
    assert float(row["failed_completions"]) == 3.0
    assert float(row["reward_mean"]) == pytest.approx((5 * 4 + 4 * 3) / 9)
    assert float(row["reward_std"]) == pytest.approx((5 * 4 / 81) ** 0.5)
    assert float(row["accuracy"]) == 1.0
    assert float(row["rewards/length/mean"]) == pytest.approx((5 * 3 + 4 * 2) / 9)
    assert float(row["rewards/judged/mean"]) == 1.0
    assert agent.scores == [pytest.approx((5 * 4 + 4 * 3) / 9)]
    (mask,) = agent.masks
    assert mask is not None
    assert sorted(mask.tolist()) == [[False, True], *[[True, False]] * 2, *[[True, True]] * 3]
    (failed,) = [sample for sample in samples if "failure" in sample] or [None]
    assert failed is not None
    assert failed["failure"] == "reward_fn 'judged' failed with ConnectionError: judge is down"
    assert failed["reward"] is None
    assert failed["rewards"]["judged"] is None
    assert len(samples) == 4
    (warning,) = caplog.records
    assert (
        "3 of 12 completions failed and are left out. The first: reward_fn 'judged'"
        in warning.message
    )


def test_nothing_fails(tmp_path: Path) -> None:
    (_, row), samples, agent = trained(tmp_path, ["", ""], on_failure="drop")
    assert float(row["failed_completions"]) == 0.0
    assert agent.masks == [None]
    assert not any("failure" in sample for sample in samples)


def test_failures_with_a_reward_are_counted_and_stay(tmp_path: Path) -> None:
    (_, row), samples, agent = trained(tmp_path, ["not yes", ""], on_failure=-9.0)
    assert float(row["failed_completions"]) == 1.0
    assert float(row["rewards/judged/mean"]) == -1.5
    assert agent.masks == [None]
    (failed,) = [sample for sample in samples if "failure" in sample]
    assert failed["reward"] == -6.0


@pytest.mark.parametrize("on_failure", ["raise", "drop", 0.0])
def test_a_run_whose_rewards_fail_does_not_end_well(tmp_path: Path, on_failure: Any) -> None:
    with pytest.raises(RewardError, match="judge is down"):
        trained(tmp_path, ["not yes", "not no"], on_failure=on_failure, max_failure_share=0.4)


def test_an_iteration_in_which_all_failed(tmp_path: Path) -> None:
    class Breaking(ReasoningGym):
        pass

    def fails_in_training(question: str) -> float:
        if question.startswith("train"):
            raise ConnectionError("judge is down")
        return 1.0

    agent = MaskedAgent()
    template = [{"role": "user", "content": "{question}"}]
    data = rows("train", ["", ""]), rows("test", ["yes"]), TOKENIZER
    env = Breaking(*data, fails_in_training, template, on_failure="drop", max_failure_share=1.0)
    options = {"max_steps": 2, "checkpoint_path": tmp_path, "verbose": False}
    finetune_llm_reasoning([agent], env, checkpoint_steps=1, **options)
    with (tmp_path / "metrics.csv").open(newline="") as file:
        row = list(csv.DictReader(file))[-1]
    assert (row["failed_completions"], row["reward_mean"], row["accuracy"]) == ("4.0", "", "")
    assert agent.scores == []
    assert agent.fitness == [1.0, 1.0]
    state = next(tmp_path.glob("iteration_*/run_state.json")).read_text()
    assert json.loads(state, parse_constant=pytest.fail)["iteration"] == 1


def collected(rewards: list[list[float]], kept: list[list[bool]], turns: float) -> Experience:
    mask = torch.tensor(kept)
    return Experience(
        *(([], [], None), torch.tensor(rewards), 1, 1, 1.0, 1.0),
        metrics={"turns_mean": turns},
        sample_mask=mask,
        failed_completions=int((~mask).sum()),
    )


@pytest.mark.process
def test_ranks_are_weighed_by_what_is_left(tmp_path: Path) -> None:
    """Once with nothing left on rank 0."""

    def action(ranks: Ranks) -> list[Any]:
        found = []
        for first in ([[True, False]], [[False, False]]):
            own = [
                collected([[1.0, 9.0]], first, 3.0 if any(first[0]) else float("nan")),
                collected([[2.0, 3.0], [4.0, 9.0]], [[True, True], [True, False]], 1.0),
            ][ranks.rank]
            all_ranks = gather_statistics(own, ranks)
            rewards = all_ranks.kept_rewards.tolist()
            found.append((rewards, all_ranks.metrics, all_ranks.failed_completions))
        return found

    first, second = on_two_ranks(tmp_path / "ranks", action)
    assert first == second
    assert first[0] == ([1.0, 2.0, 3.0, 4.0], {"turns_mean": 1.5}, 2)
    assert first[1] == ([2.0, 3.0, 4.0], {"turns_mean": 1.0}, 3)


def test_one_that_failed_is_shown_if_there_is_one() -> None:
    assert samples_to_show([None] * 6, 2) == [0, 2, 4]
    assert samples_to_show([None] * 20, 2) == [0, 2, 4, 6]
    assert samples_to_show([None, None, None, "x", None, "y"], 2) == [0, 2, 3]
    assert samples_to_show(["x", None, None, "y"], 2) == [0, 2]
    assert Sample("q", "c", "a", 1.0).failure is None


@pytest.mark.parametrize(("failed", "shown"), [([2.0, 1.0], True), ([0.0, 0.0], False)])
def test_the_bar_shows_failures(
    failed: list[float], shown: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    bar = ProgressBar(total=1, enabled=True)
    bar.update(1, [{"failed_completions": number} for number in failed])
    bar.close()
    last = capfd.readouterr().err.rstrip().rsplit("\r", 1)[-1]
    assert ("failed=3" in last) == ("failed" in last) == shown


class ScoresByItself(ReasoningGym):
    """Its ``step`` says nothing of failures."""

    def step(self, completion_ids: Any, action: Any = None) -> Any:
        self.last_completions = [["x"] * len(ids) for ids in completion_ids]
        return self.reset(), torch.ones(len(completion_ids), 2)


def test_an_environment_that_scores_by_itself_has_samples() -> None:
    data = rows("train", ["", ""]), None
    template = [{"role": "user", "content": "{question}"}]
    env = ScoresByItself(*data, TOKENIZER, length, template, data_batch_size_per_gpu=2)
    experience = ReasoningCollector(env).collect(MaskedAgent())
    assert [sample.completion for sample in experience.few_samples] == ["x", "x"]
    assert len(experience.samples) == 4
    assert experience.failed_completions == 0
    assert experience.kept.tolist() == [[True, True]] * 2


class Told:
    """Over after one turn, or fails in it."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def reset(self, seed: int | None = None) -> Any:
        return f"game {seed}", {}

    def step(self, action: str) -> Any:
        if self.fails:
            raise ConnectionError("the game server is gone")
        return "", 1.0, True, False, {}


def write_once(prompts: Any) -> ActionResult:
    ids = torch.tensor([TOKENIZER.encode("a")])
    return ActionResult([torch.cat([p["input_ids"], ids], dim=1) for p in prompts], [])


def single_turn(ranks: Ranks, share: float) -> tuple[Experience, Evaluation]:
    def reward(completion: str) -> float:
        if ranks.rank == 0:
            raise ConnectionError("judge is down")
        return 1.0

    env = ReasoningGym(
        *(rows("train", [""] * 4), rows("test", [""] * 4), TOKENIZER, reward),
        [{"role": "user", "content": "{question}"}],
        data_batch_size_per_gpu=2,
        accelerator=SimpleNamespace(process_index=ranks.rank, num_processes=2),
        on_failure="drop",
        max_failure_share=share,
    )
    return ReasoningCollector(env).collect(MaskedAgent()), env.evaluate(write_once)


def several_turns(
    ranks: Ranks, share: float, sampling: DynamicSampling | None = None
) -> tuple[Experience, Evaluation]:
    env = SyncMultiTurnVecEnv(
        *(lambda: TokenObservationWrapper(Told(ranks.rank == 0), TOKENIZER, 1), 2, 2),
        evaluation_episodes=8,
        process_index=ranks.rank,
        num_processes=2,
        max_failure_share=share,
    )
    order = TrainingBatchSampler(8, 2, 0, ranks.rank, 2)
    (rollout,) = MultiTurnCollector(env, order, sampling, ranks).begin([MaskedAgent()])
    further = True
    while further:
        while rollout.prompts:
            rollout.answer(write_once(rollout.prompts), 0.0)
        further = rollout.draw_again()
    experience, evaluation = rollout.finish(), env.evaluate(write_once)
    env.close()
    return experience, evaluation


def further_seeds(ranks: Ranks, share: float) -> tuple[Experience, Evaluation]:
    return several_turns(ranks, share, DynamicSampling("resample", 1))


@pytest.mark.process
@pytest.mark.parametrize(
    ("play", "failed"),
    [(single_turn, "4 of 8"), (several_turns, "4 of 8"), (further_seeds, "8 of 16")],
)
def test_ranks_refuse_too_many_failures_together(
    tmp_path: Path, play: Callable[[Ranks, float], tuple[Experience, Evaluation]], failed: str
) -> None:
    """All of rank 0's fail, and none of rank 1's: that is half of them."""

    def said(check: Callable[[], object]) -> str:
        try:
            check()
        except RuntimeError as error:
            return str(error)
        return ""

    def action(ranks: Ranks) -> list[str]:
        answers = []
        for share in (0.4, 0.6):
            experience, evaluation = play(ranks, share)
            experience = gather_statistics(experience, ranks)
            answers.append(said(partial(check_failures, experience)))
            answers.append(said(partial(scores_of_all_ranks, evaluation, ranks)))
        return answers

    first, second = on_two_ranks(tmp_path / "ranks", action)
    assert first == second
    assert first[0].startswith(f"{failed} completions of all processes have failed, more than max_")
    assert "ConnectionError" in first[0]
    assert "answers failed, more than the" in first[1]
    assert first[2:] == ["", ""]
