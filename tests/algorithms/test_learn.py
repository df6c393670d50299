"""Learning: what it returns, which rewards it takes, the sampler's correction, the reference."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from agent_helpers import (
    LENGTHS,
    REWARDS,
    fixed_rollouts,
    make_agent,
    prompts,
    randomise,
    train,
    trained,
    weights,
)

from agilerl import checks
from agilerl.algorithms import CISPO, GRPO, GSPO
from agilerl.distributed import Ranks
from agilerl.llm.batch import make_batch
from agilerl.llm.config import UpdateConfig
from agilerl.llm.plan import plan_mini_batches

KEYS = {
    "mean_loss", "mean_kl", "clip_fraction", "entropy", "grad_norm", "ratio_mean", "ratio_max",
    "advantage_mean", "advantage_std", "completion_length", "zero_variance_groups", "skipped_steps",
    "lr",
}  # fmt: skip
CORRECTION = {
    "importance_weight_mean", "importance_weight_max", "importance_weight_capped",
    "importance_weight_nonfinite", "sampler_kl",
}  # fmt: skip


@pytest.mark.parametrize("cls", [GRPO, GSPO, CISPO])
def test_metrics(cls: type[GRPO]) -> None:
    metrics = trained(cls)[1]
    assert metrics.keys() == KEYS
    assert all(isinstance(value, float) and math.isfinite(value) for value in metrics.values())
    assert metrics["completion_length"] == sum(LENGTHS) / 8
    assert metrics["zero_variance_groups"] == 0.0
    assert metrics["mean_kl"] > 0.0 < metrics["grad_norm"]


def test_first_ratio_is_one_and_equal_rewards_teach_nothing() -> None:
    agent = randomise(make_agent(update_epochs=1, batch_size=8, beta=0.0))
    before = weights(agent)
    metrics = train(agent, torch.full((2, 4), 1.3))
    assert metrics["zero_variance_groups"] == 2.0 and metrics["mean_loss"] == 0.0
    assert torch.equal(weights(agent), before)
    metrics = train(agent)
    assert metrics["ratio_mean"] == metrics["ratio_max"] == 1.0
    assert math.isnan(metrics["mean_kl"]), "no reference pass with beta 0"


@pytest.mark.parametrize(
    "rewards",
    [
        REWARDS.flatten(),
        REWARDS.flatten()[:, None],
        REWARDS.tolist(),
        REWARDS.flatten().tolist(),
        list(REWARDS),
        REWARDS.numpy(),
        torch.stack([REWARDS.flatten(), torch.zeros(8)], dim=1),
    ],
    ids=["(B,)", "(B,1)", "nested list", "flat list", "list of tensors", "array", "(B,U)"],
)
def test_shapes_of_rewards(rewards: Any) -> None:
    assert torch.equal(trained(rewards=rewards)[0], trained()[0])


@pytest.mark.parametrize(
    ("rewards", "says"),
    [
        (torch.rand(4, 2), r"\(4, 2\) for 8 completions in groups of 4"),
        (torch.rand(7), r"\(7,\) for 8"),
        (torch.rand(2, 2, 2), r"\(2, 2, 2\) for 8"),
        (torch.tensor(1.0), r"\(\) for 8"),
        ([[1.0, 2.0], [1.0]], "not an array of numbers"),
        ([None] * 8, "not an array of numbers"),
        ("rewards", "not an array of numbers"),
        (torch.tensor([1.0] * 5 + [math.nan] + [0.0] * 2), "completion 5 is nan.*finite"),
        (torch.tensor([1.0] * 5 + [math.inf] + [0.0] * 2), "completion 5 is inf.*finite"),
    ],
)
def test_bad_rewards(rewards: Any, says: str) -> None:
    agent = make_agent()
    before = weights(agent)
    with pytest.raises(ValueError, match=says):
        train(agent, rewards)
    assert torch.equal(weights(agent), before)


def test_incomplete_groups() -> None:
    ids, mask = fixed_rollouts()
    with pytest.raises(ValueError, match="6 sequences are not whole groups of group_size 4"):
        make_agent().learn((ids[:6], mask[:6], torch.rand(6)))


def test_shapes_that_disagree() -> None:
    ids, mask = fixed_rollouts()
    with pytest.raises(ValueError, match="action_masks"):
        make_agent().learn((ids, mask[:, 1:], REWARDS))


@pytest.mark.parametrize(("shift", "capped"), [(-1.0, 1.0), (0.5, 0.0)])
def test_correction_for_the_sampler(shift: float, capped: float) -> None:
    ids, mask = fixed_rollouts()
    agent = randomise(make_agent(beta=0.0, batch_size=8, update_epochs=1))
    logps = own_logprobs(agent)
    metrics = agent.learn((ids, mask, REWARDS), sampling_logps=[row + shift for row in logps])
    assert metrics.keys() == KEYS | CORRECTION
    assert metrics["importance_weight_mean"] == pytest.approx(math.exp(-shift), rel=1e-4)
    assert metrics["importance_weight_max"] == pytest.approx(math.exp(-shift), rel=1e-4)
    assert metrics["importance_weight_capped"] == capped
    assert metrics["sampler_kl"] == pytest.approx(math.exp(-shift) + shift - 1, rel=1e-3)


def own_logprobs(agent: GRPO) -> list[torch.Tensor]:
    """Per row, the trainer's own log-probs of the generated tokens, by the plain formula."""
    ids, mask = fixed_rollouts()
    with agent.select_adapter("actor"), torch.no_grad():
        logits = agent.actor(input_ids=ids).logits[:, :-1] / agent.temperature
    logp = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return [row[m] for row, m in zip(logp, mask, strict=True)]


def test_what_scales_with_the_correction_and_what_switches_it_off() -> None:
    settings: dict[str, Any] = {"max_grad_norm": 1e6, "beta": 0.0}
    logps = [row - 1.0 for row in own_logprobs(randomise(make_agent()))]
    plain = trained(**settings)[1]
    corrected = trained(extra={"sampling_logps": logps}, **settings)[1]
    higher = trained(extra={"sampling_logps": logps}, vllm_importance_sampling_cap=2.5, **settings)[
        1
    ]
    off = trained(
        extra={"sampling_logps": logps}, vllm_importance_sampling_correction=False, **settings
    )[1]
    assert off == plain
    assert plain["grad_norm"] < corrected["grad_norm"] < higher["grad_norm"]
    assert trained(extra={"sampling_logps": [None] * 8}, **settings)[1] == plain
    half = [*logps[:4], *[None] * 4]
    metrics = trained(extra={"sampling_logps": half}, **settings)[1]
    assert 1.0 < metrics["importance_weight_mean"] < math.e


@pytest.mark.parametrize(
    ("logps", "says"),
    [
        ([None, torch.zeros(3)], "2 entries for 8 completions"),
        ([torch.zeros(6)] * 8, r"sampling_logps\[1\] has 6 entries.*3 generated"),
    ],
)
def test_bad_sampler_logprobs(logps: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        train(make_agent(), sampling_logps=logps)


def test_lists_as_get_action_gives_them() -> None:
    agent = make_agent()
    result = agent.get_action(prompts("hello", "hi"))
    assert agent.learn((*result, torch.rand(2, 4))).keys() == KEYS


def test_the_reference_moves_once_per_tracker_advance() -> None:
    agent = randomise(make_agent())
    assert not torch.equal(weights(agent), weights(agent, "reference"))
    before = weights(agent, "reference")
    agent.set_reference_policy(0)
    assert torch.equal(weights(agent, "reference"), before)
    agent.set_reference_policy(1)
    assert torch.equal(weights(agent, "reference"), weights(agent))
    train(agent)
    for tracker in (1, 0):
        agent.set_reference_policy(tracker)
        assert not torch.equal(weights(agent, "reference"), weights(agent))
    agent.set_reference_policy(5)
    assert torch.equal(weights(agent, "reference"), weights(agent))


def test_without_a_reference_adapter_it_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    checks._warned.clear()
    agent = randomise(make_agent(use_separate_reference_adapter=False))
    before = weights(agent)
    for tracker in (1, 2, 3):
        agent.set_reference_policy(tracker)
    assert caplog.text.count("the reference policy stays the base model") == 1
    assert agent.policy.roles == ["actor"] and torch.equal(weights(agent), before)


def test_groups_without_variance_over_several_mini_batches_change_nothing() -> None:
    agent = make_agent(beta=0.0, batch_size=4, update_epochs=2)
    before = weights(agent)
    ids, masks = fixed_rollouts()
    metrics = agent.learn((ids, masks, torch.ones(len(ids))))
    assert torch.equal(weights(agent), before)
    assert metrics["mean_loss"] == 0.0
    assert metrics["grad_norm"] == 0.0


@pytest.mark.parametrize("reduction", ["sequence", "token", "constant"])
@pytest.mark.parametrize("granularity", ["trajectory", "turn"])
def test_an_episode_in_several_rows_moves_the_weights_like_one_row(
    reduction: str, granularity: str
) -> None:
    """The second row of episode 1 trains its turn 1 in the same context as the whole row does."""
    ids = torch.tensor([[5, 6, 7, 8, 9, 10], [5, 6, 11, 8, 12, 13]])
    turns = torch.tensor([[-1, 0, 0, -1, 1], [-1, 0, -1, 1, 1]])
    rewards = torch.tensor([[1.0, 0.0], [0.0, 3.0]])
    split_ids = torch.stack([ids[0], ids[1], ids[1]])
    split_turns = torch.tensor([[-1, 0, 0, -1, 1], [-1, 0, -1, -1, -1], [-1, -1, -1, 1, 1]])

    def trained(ids: torch.Tensor, turns: torch.Tensor, **extra: Any) -> torch.Tensor:
        agent = make_agent(
            group_size=2,
            batch_size=8,
            update_epochs=1,
            advantage_granularity=granularity,
            loss_reduction=reduction,
            beta=0.0,
            max_grad_norm=1e9,
        )
        randomise(agent)
        agent.learn((ids, turns >= 0, rewards), turn_ids=turns, **extra)
        return torch.cat([p.flatten() for p in agent.policy.parameters().values()]).detach()

    whole = trained(ids, turns)
    split = trained(split_ids, split_turns, trajectory_ids=[0, 1, 1])
    assert (whole - split).abs().max() < 1e-5


def test_batch_size_counts_trajectories_not_their_rows() -> None:
    """Four episodes of three rows each are one optimizer step of four, or two of two."""
    ids = torch.arange(3, 15)[:, None] + torch.arange(5)
    mask = torch.ones(12, 4, dtype=torch.bool)
    trajectory_ids = torch.arange(12) // 3
    rewards = torch.tensor([1.0, 0.0, 0.5, 0.0])

    def counts(batch_size: int) -> list[int]:
        agent = make_agent(batch_size=batch_size, update_epochs=1)
        sums: list[int] = []
        step = agent.engine.step

        def counting(max_grad_norm: float) -> float:
            sums.append(1)
            return step(max_grad_norm)

        agent.engine.step = counting  # type: ignore[method-assign]
        agent.learn((ids, mask, rewards), trajectory_ids=trajectory_ids)
        return sums

    assert len(counts(4)) == 1
    assert len(counts(2)) == 2


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_a_trajectory_is_in_one_mini_batch_with_all_its_rows(size: int) -> None:
    trajectory_ids = torch.tensor([0, 1, 1, 2, 2, 2, 3, 4, 5, 5])
    prompts = torch.tensor([10, 10, 14, 11, 15, 16, 11, 12, 12, 17])
    ids = torch.stack([prompts, torch.arange(10)], dim=1)
    batch = replace(make_batch(ids, torch.ones(10, 1) > 0), trajectory_ids=trajectory_ids)
    rng, everything = torch.Generator().manual_seed(0), torch.ones(10, dtype=torch.bool)
    update = UpdateConfig(batch_size=size, micro_batch_size=2, epochs=1, max_grad_norm=1.0)
    _, plan = plan_mini_batches(batch, everything, update, Ranks(), rng)
    parts = [mini_batch.rows for mini_batch in plan]
    assert sorted(torch.cat(parts).tolist()) == list(range(10))
    owners = [set(trajectory_ids[part].tolist()) for part in parts]
    assert sum(map(len, owners)) == 6
    assert all(len(owner) <= size for owner in owners)
    assert max(map(len, owners)) - min(map(len, owners)) <= 1
    assert len(parts) == -(-6 // size)


@pytest.mark.parametrize("ids", [[0, 1], [0, 2, 2], [1, 1, 2], [0.0, 1.0, 1.0], [[0, 1, 1]]])
def test_bad_trajectory_ids(ids: Any) -> None:
    agent = make_agent(group_size=2)
    rows = torch.tensor([[5, 6, 7]] * 3)
    with pytest.raises(ValueError, match="trajectory_ids is"):
        agent.learn((rows, rows[:, 1:] > 6, [1.0, 0.0]), trajectory_ids=ids)
