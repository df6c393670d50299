"""Rewards to advantages."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from agilerl import checks
from agilerl.llm.advantages import (
    compute_advantages,
    credited_turns,
    group_relative,
    group_relative_per_turn,
    has_baseline,
    varying_groups,
    zero_variance_groups,
)
from agilerl.llm.config import AdvantageConfig

DTYPES = (torch.float32, torch.float64)


def actions(*lengths: int) -> torch.Tensor:
    """An action mask with the given numbers of actions per row."""
    return torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]


@pytest.mark.parametrize("reward", [0.1, 0.3, 1.3, 0.0, -0.7, 1e-6, 1e6])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("groups", [1, 3, 16])
def test_equal_rewards_give_exactly_zero(reward: float, dtype: torch.dtype, groups: int) -> None:
    rewards = torch.full((8 * groups,), reward, dtype=dtype)
    for norm in ("mean_std", "mean_only"):
        assert (group_relative(rewards, 8, norm) == 0).all()
    made, _trained = compute_advantages(rewards, actions(*[3] * len(rewards)), AdvantageConfig(8))
    assert (made == 0).all()
    assert zero_variance_groups(rewards, 8) == groups


@settings(max_examples=30, deadline=None)
@given(
    pieces=st.lists(st.sampled_from([0.1, 0.2, 0.3, 0.7, 1.3]), min_size=2, max_size=6),
    seed=st.integers(0, 2**31 - 1),
)
def test_returns_that_differ_by_the_order_of_summation_are_equal(
    pieces: list[float], seed: int
) -> None:
    rng = torch.Generator().manual_seed(seed)
    terms = torch.tensor(pieces)
    returns = []
    for _ in range(8):
        total = torch.zeros(())
        for term in terms[torch.randperm(len(terms), generator=rng)]:
            total = total + term
        returns.append(total)
    assert (group_relative(torch.stack(returns), 8) == 0).all()


@settings(max_examples=30, deadline=None)
@given(
    turns=st.lists(st.sampled_from([0.1, -0.7, 1e4, 0.3]), min_size=2, max_size=5),
    seed=st.integers(0, 2**31 - 1),
)
def test_turns_in_another_order_give_equal_returns(turns: list[float], seed: int) -> None:
    """Sums that are small beside what they are sums of, too: 1e4 - 1e4 + 0.1."""
    rng, cancelling = torch.Generator().manual_seed(seed), torch.tensor([*turns, -sum(turns)])
    rewards = torch.stack([cancelling[torch.randperm(len(cancelling), generator=rng)]] * 4)
    rewards[1], rewards[2] = cancelling, cancelling.flip(0)
    assert (group_relative(rewards, 4) == 0).all()
    assert zero_variance_groups(rewards, 4) == 1
    config = AdvantageConfig(4)
    assert (compute_advantages(rewards, actions(2, 2, 2, 2), config)[0] == 0).all()


class LargestTensor(TorchDispatchMode):
    """Notes how many elements the largest result of an operation has."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.elements = max(self.elements, result.untyped_storage().nbytes() // result.itemsize)
        return result


def test_turns_take_no_memory_per_token_and_turn() -> None:
    rows, tokens, turns = 8, 64, 50
    turn_ids = torch.randint(turns, (rows, tokens))
    config = AdvantageConfig(4, granularity="turn")
    with LargestTensor() as largest:
        compute_advantages(torch.rand(rows, turns), turn_ids >= 0, config, turn_ids)
    assert largest.elements < 4 * rows * tokens


@settings(max_examples=30, deadline=None)
@given(
    rewards=st.lists(st.floats(-10, 10, width=32), min_size=4, max_size=4),
    groups=st.integers(1, 3),
)
def test_a_group_is_centred_and_scaled_on_itself_alone(rewards: list[float], groups: int) -> None:
    values = torch.tensor(rewards, dtype=torch.float64)
    others = torch.linspace(-1, 1, 4 * groups, dtype=torch.float64)
    alone = group_relative(values, 4)
    assert torch.equal(group_relative(torch.cat([others, values]), 4)[-4:], alone)
    spread = max(rewards) - min(rewards)
    if spread > 1e-3:
        expected = (values - values.mean()) / (values.std() + 1e-8)
        torch.testing.assert_close(alone, expected)
        torch.testing.assert_close(group_relative(values, 4, "mean_only"), values - values.mean())
    assert alone.mean().item() == pytest.approx(0.0, abs=1e-9)


def test_a_group_of_one_has_no_advantage() -> None:
    for norm in ("mean_std", "mean_only"):
        assert group_relative(torch.tensor([1.0, -3.0, 7.0]), 1, norm).tolist() == [0.0, 0.0, 0.0]


def test_values_are_spread_over_the_actions_and_zero_elsewhere() -> None:
    made, trained = compute_advantages(
        torch.tensor([1.0, 0.0]),
        torch.tensor([[False, True, True], [False, True, False]]),
        AdvantageConfig(2, norm="mean_only"),
    )
    assert made.tolist() == [[0.0, 0.5, 0.5], [0.0, -0.5, 0.0]]
    assert trained.tolist() == [[False, True, True], [False, True, False]]


def test_advantages_per_turn_on_a_worked_example() -> None:
    """Three rows; the third stops after its first turn and nobody but the first plays a third."""
    rewards = torch.tensor([[1.0, 0.0, 4.0], [0.0, 2.0, 0.0], [2.0, 0.0, 0.0]])
    played = torch.tensor([[True, True, True], [True, True, False], [True, False, False]])
    made = group_relative_per_turn(rewards, played, 3, "mean_only")
    # Turn 0: mean 1. Turn 1: mean 1 of two players. Turn 2: one player, who takes the trajectory's
    # advantage: returns 5, 2, 2 with mean 3.
    assert made.tolist() == [[0.0, -1.0, 2.0], [-1.0, 1.0, 0.0], [1.0, 0.0, 0.0]]

    scaled = group_relative_per_turn(rewards, played, 3)
    assert scaled[:, 0].tolist() == pytest.approx([0.0, -1.0, 1.0])
    assert scaled[:2, 1].tolist() == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)])
    assert scaled[0, 2].item() == pytest.approx(2 / math.sqrt(3))


def test_turn_advantages_land_on_the_tokens_of_their_turns() -> None:
    turn_ids = torch.tensor([[0, -1, 1, 1, 2], [0, 0, 1, -1, -1], [0, -1, -1, -1, -1]])
    rewards = torch.tensor([[1.0, 0.0, 4.0], [0.0, 2.0, 0.0], [2.0, 0.0, 0.0]])
    config = AdvantageConfig(3, norm="mean_only", granularity="turn")
    made, _trained = compute_advantages(rewards, turn_ids >= 0, config, turn_ids)
    assert made.tolist() == [
        [0.0, 0.0, -1.0, -1.0, 2.0],
        [-1.0, -1.0, 1.0, 0.0, 0.0],
        [1.0, 0.0, 0.0, 0.0, 0.0],
    ]


def test_rows_of_one_trajectory_share_its_advantage() -> None:
    """Trajectory 1 gave two rows: its turn 0 in one, its turn 1 in the other."""
    rewards = torch.tensor([[1.0, 0.0], [0.0, 5.0]])
    trajectory_ids = torch.tensor([0, 1, 1])
    turn_ids = torch.tensor([[0, 1, 1], [0, 0, -1], [-1, -1, 1]])
    config = AdvantageConfig(2, norm="mean_only")
    made, _trained = compute_advantages(rewards, turn_ids >= 0, config, turn_ids, trajectory_ids)
    # Returns 1 and 5.
    assert made.tolist() == [[-2.0, -2.0, -2.0], [2.0, 2.0, 0.0], [0.0, 0.0, 2.0]]

    by_turn = replace(config, granularity="turn")
    made, _trained = compute_advantages(rewards, turn_ids >= 0, by_turn, turn_ids, trajectory_ids)
    assert made.tolist() == [[0.5, -2.5, -2.5], [-0.5, -0.5, 0.0], [0.0, 0.0, 2.5]]


def test_one_turn_is_the_trajectory() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.5, 0.25])
    mask = actions(3, 1, 2, 4)
    by_turn, _ = compute_advantages(
        torch.stack([rewards, torch.zeros(4)], dim=1),
        mask,
        AdvantageConfig(4, granularity="turn"),
        torch.where(mask, 0, -1),
    )
    assert torch.equal(by_turn, compute_advantages(rewards, mask, AdvantageConfig(4))[0])


def test_rewards_per_turn_are_summed_at_trajectory_granularity() -> None:
    rewards = torch.tensor([[1.0, 2.0], [0.0, 1.0]])
    made, _trained = compute_advantages(
        rewards, actions(2, 2), AdvantageConfig(2, norm="mean_only")
    )
    assert made[:, 0].tolist() == [1.0, -1.0]


def test_filter_then_whiten_then_clip() -> None:
    """One group with advantages 3, 1, 0 (filtered) and -4; lengths 1, 2, 1, 1."""
    rewards = torch.tensor([3.0, 1.0, 0.0, -4.0], dtype=torch.float64)
    mask = actions(1, 2, 1, 1)
    plain = AdvantageConfig(4, norm="mean_only")
    assert compute_advantages(rewards, mask, plain)[0][:, 0].tolist() == [3.0, 1.0, 0.0, -4.0]

    config = AdvantageConfig(4, norm="mean_only", filter_zero=True, whiten=True, clip_range=1.2)
    made, trained = compute_advantages(rewards, mask, config)
    tokens = torch.tensor([3.0, 1.0, 1.0, -4.0], dtype=torch.float64)
    white = (tokens - tokens.mean()) / tokens.std()
    assert trained.tolist() == [[True, False], [True, True], [False, False], [True, False]]
    assert white[3] < -1.2
    assert made[trained].tolist() == pytest.approx([*white[:3].tolist(), -1.2])
    assert (made[~trained] == 0).all()


def test_filter_eps_removes_small_advantages() -> None:
    rewards = torch.tensor([1.0, 0.1, -0.1, -1.0])
    config = AdvantageConfig(4, norm="mean_only", filter_zero=True, filter_eps=0.2)
    _made, trained = compute_advantages(rewards, actions(1, 1, 1, 1), config)
    assert trained.squeeze(1).tolist() == [True, False, False, True]


def test_filter_can_remove_everything() -> None:
    config = AdvantageConfig(2, filter_zero=True, whiten=True)
    made, trained = compute_advantages(torch.tensor([0.3, 0.3]), actions(2, 2), config)
    assert not trained.any()
    assert (made == 0).all()


def test_incomplete_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="group_size 4"):
        compute_advantages(torch.zeros(6), actions(*[1] * 6), AdvantageConfig(4))


def test_turn_granularity_without_turns_falls_back_to_the_trajectory(
    caplog: pytest.LogCaptureFixture,
) -> None:
    turn, trajectory = AdvantageConfig(2, granularity="turn"), AdvantageConfig(2)
    rewards, mask = torch.tensor([[1.0, 0.0], [0.0, 3.0]]), actions(2, 2)
    checks._warned.clear()
    for _ in range(2):
        made, _trained = compute_advantages(rewards, mask, turn)
    assert torch.equal(made, compute_advantages(rewards.sum(1), mask, trajectory)[0])
    assert caplog.text.count("advantages are per trajectory") == 1


def test_every_turn_needs_its_reward() -> None:
    config = AdvantageConfig(2, granularity="turn")
    rewards, mask = torch.zeros(2, 2), actions(2, 2)
    with pytest.raises(ValueError, match="turn_ids go up to 2"):
        compute_advantages(rewards, mask, config, torch.tensor([[0, 2], [0, 1]]))


@settings(max_examples=40, deadline=None)
@given(kept=st.lists(st.booleans(), min_size=8, max_size=8), norm=st.sampled_from(["std", "only"]))
def test_those_that_do_not_count_are_in_no_mean_and_no_std(kept: list[bool], norm: str) -> None:
    rng = torch.Generator().manual_seed(1)
    turns = torch.tensor([[0, 1], [0, 1], [0, -1], [0, 1]] * 2)
    rewards = torch.rand(8, 2, generator=rng, dtype=torch.float64) * (turns >= 0)
    counts = torch.tensor(kept)
    rewards[~counts] = 1e9
    for granularity in ("trajectory", "turn"):
        config = AdvantageConfig(4, f"mean_{norm}", granularity)
        made, trained = compute_advantages(rewards, turns >= 0, config, turns, kept=counts)
        assert torch.equal(trained, (turns >= 0) & counts[:, None])
        for row in range(8):
            group = [r for r in range(row - row % 4, row - row % 4 + 4) if kept[r]]
            for turn in range(2):
                played = [r for r in group if turns[r, turn] >= 0]
                values = rewards[group].sum(1)
                own = rewards[row].sum()
                if granularity == "turn" and len(played) > 1:
                    values, own = rewards[played, turn], rewards[row, turn]
                expected = 0.0
                if kept[row] and turns[row, turn] >= 0 and len(group) > 1:
                    std = float(values.std()) + 1e-8 if norm == "std" else 1.0
                    expected = float(own - values.mean()) / std
                assert float(made[row, turn]) == pytest.approx(expected, abs=1e-9)


def test_groups_with_fewer_than_two_left_are_not_counted_or_whitened() -> None:
    kept = torch.tensor([True, False, False, False, True, True, True, False])
    rewards = torch.tensor([1.0, 9.0, 9.0, 9.0, 0.0, 1.0, 5.0, 9.0])
    assert has_baseline(kept, 4).tolist() == [False] * 4 + [True] * 3 + [False]
    config = AdvantageConfig(4, whiten=True)
    made, trained = compute_advantages(rewards, actions(*[2] * 8), config, kept=kept)
    assert trained.any(1).tolist() == kept.tolist()
    assert (made[:4] == 0).all()
    alone = made[4:7]
    assert float(alone.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(alone.std()) == pytest.approx(1.0, abs=1e-6)
    assert zero_variance_groups(rewards, 4, kept) == 0
    pairs = torch.tensor([1.0, 1.0, 9.0, 9.0] * 2)
    assert zero_variance_groups(pairs, 4, torch.tensor([True, False, True, False] * 2)) == 0
    assert zero_variance_groups(pairs, 4, torch.tensor([True] * 2 + [False] * 3 + [True] * 3)) == 1


@settings(max_examples=60, deadline=None)
@given(
    rewards=st.lists(st.sampled_from([0.0, 1.0, 0.1]), min_size=18, max_size=18),
    lengths=st.lists(st.integers(0, 3), min_size=6, max_size=6),
    kept=st.lists(st.booleans(), min_size=6, max_size=6),
    credit=st.sampled_from(["trajectory", "turn"]),
    norm=st.sampled_from(["mean_std", "mean_only", "batch_std"]),
    baseline=st.sampled_from(["group_mean", "leave_one_out"]),
)
def test_groups_vary_where_an_advantage_is_not_zero(
    rewards: list[float],
    lengths: list[int],
    kept: list[bool],
    credit: Any,
    norm: Any,
    baseline: Any,
) -> None:
    """Two groups of three episodes of up to three turns, a token each."""
    earned, counts = torch.tensor(rewards).view(6, 3), torch.tensor(kept)
    played = torch.arange(3) < torch.tensor(lengths)[:, None]
    turn_ids = torch.where(played, torch.arange(3), -1)
    config = AdvantageConfig(3, norm, credit, baseline=baseline)
    made, _ = compute_advantages(earned * played, played, config, turn_ids, kept=counts)
    turns = credited_turns(earned, played, config, turn_ids)
    assert (turns is None) == (credit == "trajectory")
    found = varying_groups(earned * played, 3, counts, turns)
    # One that failed before its first turn has a return, but no action that it is credited to.
    silent = (~played.any(1) & counts).view(2, 3).any(1)
    expected = (made != 0).view(2, -1).any(1)
    assert found[~silent].tolist() == expected[~silent].tolist()
    compared = has_baseline(counts, 3).view(2, 3).any(1)
    flat = zero_variance_groups(earned * played, 3, counts, turns)
    assert flat == int((~found & compared).sum())


def test_turns_vary_by_their_own_rewards() -> None:
    """Equal returns of differing turns; differing returns of equal turns."""
    rewards = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    played = torch.tensor([[1, 1], [1, 1], [1, 1], [1, 1], [1, 0], [1, 1]]).bool()
    pairs = rewards[[0, 1, 4, 5]], played[[0, 1, 4, 5]]
    assert varying_groups(pairs[0], 2).tolist() == [False, True]
    # The turn that one of them alone has played takes the advantage of its trajectory.
    assert varying_groups(pairs[0], 2, None, pairs[1]).tolist() == [True, True]
    threes = rewards[[0, 1, 2, 4, 3, 5]], played[[0, 1, 2, 4, 3, 5]]
    assert varying_groups(threes[0], 3).tolist() == [False, True]
    assert varying_groups(threes[0], 3, None, threes[1]).tolist() == [True, False]
    assert zero_variance_groups(threes[0], 3, None, threes[1]) == 1
