"""Trajectories that ``sample_mask`` leaves out: ``learn`` is that of a batch without their rows."""

from __future__ import annotations

import logging
import math
import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from agent_helpers import fixed_rollouts, make_agent, randomise, weights

from agilerl import checks
from agilerl.algorithms import CISPO, GRPO, GSPO
from agilerl.llm.step_results import NonFiniteUpdateError

LEFT = torch.tensor([[True, False, True, False], [False, False, True, True]])


@dataclass
class Rollouts:
    """Two groups of four trajectories; the third of the first group has two rows."""

    ids: torch.Tensor
    turns: torch.Tensor
    trajectory_ids: torch.Tensor
    rewards: torch.Tensor

    def learned_by(self, agent: GRPO, **extra: Any) -> tuple[torch.Tensor, dict[str, float]]:
        rows = {"turn_ids": self.turns, "trajectory_ids": self.trajectory_ids}
        randomise(agent)
        metrics = agent.learn((self.ids, self.turns >= 0, self.rewards), **rows, **extra)
        return weights(agent), metrics

    def of(self, kept: torch.Tensor) -> Rollouts:
        """Those of some trajectories."""
        rows = kept[self.trajectory_ids]
        ids = (kept.cumsum(0) - 1)[self.trajectory_ids[rows]]
        return Rollouts(self.ids[rows], self.turns[rows], ids, self.rewards[kept])


def rollouts(garbage: int | None = None) -> Rollouts:
    """With ``garbage``, other tokens, lengths and rewards where ``LEFT`` is False."""
    ids, mask = fixed_rollouts()
    trajectory_ids = torch.tensor([0, 1, 2, 2, 3, 4, 5, 6, 7])
    ids, mask = ids[trajectory_ids], mask[trajectory_ids].clone()
    mask[2, 6:], mask[3, :6] = False, False
    rewards = torch.rand(8, 2, generator=torch.Generator().manual_seed(3))
    if garbage is not None:
        rng = torch.Generator().manual_seed(garbage)
        out = ~LEFT.flatten()
        rows = out[trajectory_ids]
        ids[rows] = torch.randint(97, 123, ids.shape, generator=rng)[rows]
        mask[rows] = torch.arange(10) > int(torch.randint(2, 9, (), generator=rng))
        rewards[out] = torch.tensor([math.nan, math.inf])
    turns = torch.where(mask, (torch.arange(10) > 5).long(), -1)
    return Rollouts(ids, turns, trajectory_ids, rewards)


def settings(**changes: Any) -> dict[str, Any]:
    sizes = {"batch_size": 3, "micro_batch_size_per_gpu": 2, "update_epochs": 2}
    return sizes | {"max_grad_norm": 1e6, "lr": 1e-3} | changes


@pytest.mark.parametrize("cls", [GRPO, GSPO, CISPO])
@pytest.mark.parametrize(
    "changes",
    [
        {"beta": 0.1},
        {"beta": 0.0, "adv_norm": "mean_only", "loss_reduction": "token"},
        {"beta": 0.0, "advantage_granularity": "turn", "whiten_advantages": True},
        {"beta": 0.1, "whiten_advantages": True, "adv_clip_range": 0.7, "loss_reduction": "sum"},
        {"beta": 0.1, "filter_zero_adv": True, "adv_filter_eps": 0.6, "loss_reduction": "token"},
        {"beta": 0.1, "use_kl_advantage_shaping": True, "loss_reduction": "constant"},
        {"beta": 0.1, "micro_batch_size_per_gpu": 8, "batch_size": 16},
        {"beta": 0.0, "loss_reduction": "prompt", "adv_norm": "batch_std"},
        {"beta": 0.1, "advantage_baseline": "leave_one_out", "adv_norm": "mean_only"},
        {
            "beta": 0.0,
            "advantage_baseline": "leave_one_out",
            "adv_norm": "batch_std",
            "advantage_granularity": "turn",
            "loss_reduction": "prompt",
            "entropy_coef": 0.01,
            "top_entropy_quantile": 0.5,
        },
    ],
    ids=lambda changes: "-".join(map(str, changes.values())),
)
def test_it_is_that_of_a_batch_without_them(cls: type[GRPO], changes: dict[str, Any]) -> None:
    """Two are left of each group of four: the same as groups of two."""
    masked = make_agent(cls, **settings(**changes))
    left, metrics = rollouts(garbage=1).learned_by(masked, sample_mask=LEFT)
    alone = make_agent(cls, group_size=2, **settings(**changes))
    expected, expected_metrics = rollouts().of(LEFT.flatten()).learned_by(alone)
    assert torch.equal(left, expected)
    assert str(metrics) == str(expected_metrics)
    assert not torch.equal(left, weights(randomise(make_agent(cls))))


@pytest.mark.parametrize("per_turn", [False, True])
def test_groups_of_which_different_numbers_are_left(per_turn: bool) -> None:
    """What they were does not matter, and each advantage is by hand."""
    kept = torch.tensor([True, True, True, False, False, True, False, False])
    changes = {"beta": 0.1, "whiten_advantages": True}
    changes["advantage_granularity"] = "turn" if per_turn else "trajectory"
    data = rollouts()
    garbage = rollouts()
    garbage.ids[~kept[garbage.trajectory_ids]] += 1
    garbage.rewards[~kept] = math.nan
    learned = [
        each.learned_by(make_agent(**settings(**changes)), sample_mask=kept)
        for each in (data, garbage)
    ]
    assert torch.equal(learned[0][0], learned[1][0])
    assert str(learned[0][1]) == str(learned[1][1])
    everything = data.learned_by(make_agent(**settings(**changes)))[0]
    assert not torch.allclose(learned[0][0], everything)


def test_one_left_of_a_group_teaches_nothing() -> None:
    agent = make_agent(**settings(beta=0.0, whiten_advantages=True))
    kept = torch.tensor([[True, False, False, False], [False, False, True, False]])
    before = weights(randomise(agent))
    after, metrics = rollouts().learned_by(agent, sample_mask=kept)
    assert torch.equal(before, after)
    assert metrics["zero_variance_groups"] == metrics["grad_norm"] == 0.0


def test_rows_that_are_left_out_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = make_agent(**settings(beta=0.1))
    run, forward = [], agent.policy.logprobs

    def recorded(batch: Any, *args: Any, **options: Any) -> Any:
        run.append(len(batch))
        return forward(batch, *args, **options)

    monkeypatch.setattr(agent.policy, "logprobs", recorded)
    rollouts().learned_by(agent, sample_mask=LEFT)
    # Trajectory 2 has two rows. The reference, the old log-probs of the second mini-batch, two
    # epochs.
    rows = int(LEFT.sum()) + 1
    assert 3 * rows < sum(run) < 4 * rows


def test_rows_are_named_as_they_were_given(caplog: pytest.LogCaptureFixture) -> None:
    agent = make_agent(**settings(beta=0.1))
    data = rollouts()
    for parameter in agent.policy.parameters().values():
        parameter.data.fill_(math.inf)
    inputs = {"turn_ids": data.turns, "trajectory_ids": data.trajectory_ids, "sample_mask": LEFT}
    with caplog.at_level(logging.WARNING, "agilerl"), pytest.raises(NonFiniteUpdateError):
        agent.learn((data.ids, data.turns >= 0, data.rewards), **inputs)
    named = {
        int(row) for rows in re.findall(r"rows \[([^]]+)\]", caplog.text) for row in rows.split(",")
    }
    # Those of the trajectories 0, 2, 6 and 7.
    assert named == {0, 2, 3, 7, 8}


def test_all_left_out_is_a_skipped_update(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "_warned", set())
    agent = make_agent(**settings(beta=0.1))
    before = weights(randomise(agent))
    with caplog.at_level(logging.WARNING, "agilerl"):
        data = rollouts()
        data.turns[:] = -1  # as where every reset failed
        after, metrics = data.learned_by(agent, sample_mask=[False] * 8)
    assert torch.equal(before, after)
    assert "sample_mask leaves out every trajectory" in caplog.text
    assert metrics["mean_loss"] == metrics["grad_norm"] == metrics["skipped_steps"] == 0.0
    assert math.isnan(metrics["completion_length"])
    caplog.clear()
    moved, _ = rollouts().learned_by(agent, sample_mask=LEFT)
    assert not torch.equal(before, moved)
    assert not caplog.records


def test_a_mask_that_leaves_out_nothing() -> None:
    plain = rollouts().learned_by(make_agent(**settings()))
    masked = rollouts().learned_by(make_agent(**settings()), sample_mask=LEFT.numpy() | True)
    assert torch.equal(plain[0], masked[0])
    assert str(plain[1]) == str(masked[1])


def test_a_reward_that_counts_must_be_finite() -> None:
    data = rollouts(garbage=1)
    with pytest.raises(ValueError, match=r"completion 1 is nan.*finite.*sample_mask"):
        data.learned_by(make_agent())
    with pytest.raises(ValueError, match="completion 4 is nan"):
        data.learned_by(make_agent(), sample_mask=LEFT.flatten() | (torch.arange(8) == 4))


def test_the_correction_for_the_sampler_is_over_what_is_left() -> None:
    data = rollouts()
    logps: list[torch.Tensor | None] = [-torch.ones(int(n)) for n in (data.turns >= 0).sum(1)]
    agent = make_agent(**settings(beta=0.0))
    found = data.learned_by(agent, sample_mask=LEFT, sampling_logps=logps)
    rows = LEFT.flatten()[data.trajectory_ids]
    alone = make_agent(group_size=2, **settings(beta=0.0))
    left = [row for row, kept in zip(logps, rows.tolist(), strict=True) if kept]
    expected = data.of(LEFT.flatten()).learned_by(alone, sampling_logps=left)
    assert torch.equal(found[0], expected[0])
    assert str(found[1]) == str(expected[1])


@pytest.mark.parametrize(
    ("mask", "error", "says"),
    [
        (torch.ones(2, 4), TypeError, r"type torch.float32; pass True or False"),
        ([1] * 8, TypeError, r"type torch.int64"),
        ([True] * 9, ValueError, r"shape \(9,\) for 8 completions in groups of 4"),
        (torch.ones(4, 2) > 0, ValueError, r"shape \(4, 2\)"),
        ([[True], [True, False]], TypeError, "no array"),
        ("all", TypeError, "sample_mask is 'all'"),
    ],
)
def test_bad_masks(mask: Any, error: type[Exception], says: str) -> None:
    agent = make_agent()
    before = weights(randomise(agent))
    with pytest.raises(error, match=says):
        rollouts().learned_by(agent, sample_mask=mask)
    assert torch.equal(before, weights(agent))
