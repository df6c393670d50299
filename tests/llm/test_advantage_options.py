"""Baselines and scales of advantages that are off by default."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agilerl.llm.advantages import compute_advantages, group_relative, group_relative_per_turn
from agilerl.llm.config import AdvantageConfig

LOO = {"baseline": "leave_one_out"}


def test_leave_one_out_on_a_worked_example() -> None:
    rewards = torch.tensor([3.0, 1.0, 1.0, 1.0, 0.0, 2.0, 4.0, 9.0], dtype=torch.float64)
    made = group_relative(rewards, 4, "mean_only", **LOO)
    assert made.tolist() == pytest.approx(
        [2, -2 / 3, -2 / 3, -2 / 3, -5, 2 - 13 / 3, 4 - 11 / 3, 7]
    )
    # Divided by the unbiased std of the others: of (2, 4, 9), (0, 4, 9), (0, 2, 9), (0, 2, 4).
    # The others of the first 3 are all 1, so the std of its group stands in: 1.
    stds = [1.0, *[statistics.stdev([3, 1, 1])] * 3]
    stds += [statistics.stdev(others) for others in ([2, 4, 9], [0, 4, 9], [0, 2, 9], [0, 2, 4])]
    scaled = group_relative(rewards, 4, "mean_std", **LOO)
    assert scaled.tolist() == pytest.approx((made / torch.tensor(stds)).tolist(), abs=1e-6)


def test_leave_one_out_of_pairs() -> None:
    """The only other has no std: that of the group, sqrt(1/2) of the difference."""
    rewards = torch.tensor([1.0, 0.0])
    assert group_relative(rewards, 2, "mean_only", **LOO).tolist() == [1.0, -1.0]
    root = math.sqrt(2)
    assert group_relative(rewards, 2, **LOO).tolist() == pytest.approx([root, -root])


@settings(max_examples=60, deadline=None)
@given(
    rewards=st.lists(st.floats(-10, 10, width=32), min_size=8, max_size=8),
    kept=st.lists(st.booleans(), min_size=8, max_size=8),
    norm=st.sampled_from(["mean_std", "mean_only", "batch_std"]),
    baseline=st.sampled_from(["group_mean", "leave_one_out"]),
)
def test_against_a_loop(rewards: list[float], kept: list[bool], norm: str, baseline: str) -> None:
    values = torch.tensor(rewards, dtype=torch.float64)
    counts = torch.tensor(kept)
    made = group_relative(values, 4, norm, counts, baseline=baseline)
    everyone = values[counts]
    for i in range(8):
        group = [j for j in range(i - i % 4, i - i % 4 + 4) if kept[j]]
        spread = float(values[group].max() - values[group].min()) if group else 0.0
        if not kept[i] or len(group) < 2 or spread == 0:
            assert made[i] == 0
            continue
        if spread < 1e-3:
            continue  # up to rounding
        peers = [j for j in group if baseline == "group_mean" or j != i]
        expected = float(values[i] - values[peers].mean())
        if norm == "batch_std":
            expected /= float(everyone.std()) + 1e-8
        if norm == "mean_std":
            own = values[peers]
            if float(own.max() - own.min()) < 1e-3:
                own = values[group]
                if peers != group and len(peers) > 1 and float(values[peers].std()) > 0:
                    continue  # close to equal, not equal
            expected /= float(own.std()) + 1e-8
        assert float(made[i]) == pytest.approx(expected, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("reward", [0.1, 0.3, 1.3, 0.0, -0.7, 1e6])
@pytest.mark.parametrize("norm", ["mean_std", "mean_only", "batch_std"])
@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out"])
def test_equal_groups_have_no_advantage(reward: float, norm: str, baseline: str) -> None:
    rewards = torch.full((24,), reward)
    assert (group_relative(rewards, 8, norm, baseline=baseline) == 0).all()
    rewards[8] += 1.0  # the others' groups stay without
    made = group_relative(rewards, 8, norm, baseline=baseline)
    assert (made[:8] == 0).all() and (made[16:] == 0).all() and (made[8:16] != 0).all()


def test_the_std_of_the_batch_is_of_all_returns_that_count() -> None:
    """Groups of easy and hard questions: the close one is not blown up."""
    rewards = torch.tensor([10.0, 10.1, 0.0, 6.0], dtype=torch.float64)
    made = group_relative(rewards, 2, "batch_std")
    std = statistics.stdev(rewards.tolist())
    assert made.tolist() == pytest.approx([-0.05 / std, 0.05 / std, -3 / std, 3 / std])
    kept = torch.tensor([True, True, True, False])
    std = statistics.stdev([10.0, 10.1, 0.0])
    made = group_relative(rewards, 2, "batch_std", kept)
    assert made.tolist() == pytest.approx([-0.05 / std, 0.05 / std, 0.0, 0.0])


def test_turns_are_compared_with_and_scaled_by_those_who_played_them() -> None:
    rewards = torch.tensor(
        [[1.0, 0.0, 4.0], [0.0, 2.0, 0.0], [2.0, 0.0, 0.0], [5.0, 1.0, 0.0], [3.0, 4.0, 0.0]] * 2,
        dtype=torch.float64,
    )[:9]
    played = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0]] * 3) > 0
    rewards = rewards * played
    made = group_relative_per_turn(rewards, played, 3, "mean_only", **LOO)
    # Group 0, turn 0: rewards 1, 0, 2. Turn 1: 0 and 2. Turn 2: one player, so the trajectory's.
    assert made[:3, 0].tolist() == [0.0, -1.5, 1.5]
    assert made[:2, 1].tolist() == [-2.0, 2.0]
    assert made[0, 2].item() == 5.0 - (2.0 + 2.0) / 2
    scaled = group_relative_per_turn(rewards, played, 3, "batch_std")
    for turn in range(2):
        values = rewards[:, turn][played[:, turn]]
        group = rewards[:3, turn][played[:3, turn]]
        expected = (group - group.mean()) / (values.std() + 1e-8)
        torch.testing.assert_close(scaled[:3, turn][played[:3, turn]], expected)
    returns = rewards.sum(1)
    expected = (returns[0] - returns[:3].mean()) / (returns.std() + 1e-8)
    assert scaled[0, 2].item() == pytest.approx(expected.item())
    left = torch.tensor([True, True, False] + [True] * 6)
    without = group_relative_per_turn(rewards, played, 3, "batch_std", left)
    values = rewards[:, 0][played[:, 0] & left]
    assert without[:2, 0].tolist() == pytest.approx(
        [0.5 / values.std().item(), -0.5 / values.std().item()]
    )


def test_the_config_reaches_both_granularities() -> None:
    rewards = torch.tensor([[1.0, 0.0], [0.0, 3.0]])
    turns = torch.tensor([[0, 1], [0, 1]])
    config = AdvantageConfig(2, norm="mean_only", baseline="leave_one_out")
    made, _ = compute_advantages(rewards, turns >= 0, config, turns)
    assert made.tolist() == [[-2.0, -2.0], [2.0, 2.0]]
    by_turn = replace(config, granularity="turn")
    made, _ = compute_advantages(rewards, turns >= 0, by_turn, turns)
    assert made.tolist() == [[1.0, -3.0], [-1.0, 3.0]]
    scaled = replace(by_turn, norm="batch_std")
    made, _ = compute_advantages(rewards, turns >= 0, scaled, turns)
    assert made[0].tolist() == pytest.approx([1 / math.sqrt(0.5), -3 / math.sqrt(4.5)])
