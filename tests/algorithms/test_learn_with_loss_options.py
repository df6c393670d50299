"""Agents with options of the loss: what ``learn`` takes, measures, saves and refuses."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from agent_helpers import (
    FLAT,
    fixed_rollouts,
    make_agent,
    prompts,
    randomise,
    small_model,
    train,
    trained,
    weights,
)

from agilerl.algorithms import CISPO, GRPO, GSPO

OPTIONS: dict[str, Any] = {
    "importance_correction": "geometric_mask",
    "importance_floor": 0.5,
    "dual_clip": 4.0,
    "advantage_baseline": "leave_one_out",
    "adv_norm": "batch_std",
    "entropy_coef": 0.02,
    "top_entropy_quantile": 0.3,
    "loss_reduction": "prompt",
}


def logps(shift: float = 0.0) -> list[torch.Tensor]:
    """A sampler's log-probs for the fixed rollouts."""
    rng = torch.Generator().manual_seed(5)
    return [torch.rand(int(m.sum()), generator=rng) - 6.0 - shift for m in fixed_rollouts()[1]]


@pytest.mark.parametrize("cls", [GRPO, GSPO, CISPO])
def test_a_ratio_against_the_sampler(cls: type[GRPO]) -> None:
    """From rollout to update, with the generator that is the trainer's own model."""
    agent = randomise(make_agent(cls, importance_anchor="sampler", beta=0.0, batch_size=2, lr=1e-6))
    result = agent.get_action(prompts("hello", "there"))
    assert result.sampling_logps is not None
    metrics = agent.learn((*result, torch.rand(2, 4)), sampling_logps=result.sampling_logps)
    assert metrics["grad_norm"] > 0 and metrics["ratio_nonfinite"] == 0.0
    assert 0 <= metrics["sampler_kl"] < 1e-3
    assert not [name for name in metrics if name.startswith("importance_weight")]
    assert agent.get_action(prompts("hello"), training=False).sampling_logps is None
    assert make_agent(cls).get_action(prompts("hello")).sampling_logps is None


def test_the_sampler_decides_where_the_ratio_starts() -> None:
    settings = {"importance_anchor": "sampler", "update_epochs": 1, "batch_size": 8}
    low, high = (
        trained(extra={"sampling_logps": logps(shift)}, **settings)[1]["ratio_mean"]
        for shift in (0.0, 1.0)
    )
    assert high == pytest.approx(math.e * low)


def test_every_completion_that_counts_needs_the_samplers_log_probs() -> None:
    agent = randomise(make_agent(importance_anchor="sampler"))
    before = weights(agent)
    some = [*logps()[:5], None, *logps()[6:]]
    with pytest.raises(ValueError, match=r"sampling_logps is None for row 5.*importance_anchor"):
        train(agent, sampling_logps=some)
    with pytest.raises(ValueError, match=r"sampling_logps is None for row 0.*importance_anchor"):
        train(agent)
    assert torch.equal(before, weights(agent))
    kept = torch.tensor([False] + [True] * 4 + [False] + [True] * 2)
    with pytest.raises(ValueError, match=r"sampling_logps is None for row 6.*importance_anchor"):
        train(agent, sampling_logps=[*logps()[:6], None, logps()[7]], sample_mask=kept)
    assert train(agent, sampling_logps=some, sample_mask=kept)["grad_norm"] > 0


@pytest.mark.parametrize("mode", ["token_mask", "geometric_mask", "sequence_truncate"])
def test_corrections_are_applied_and_measured(mode: str) -> None:
    settings: dict[str, Any] = {"beta": 0.0, "max_grad_norm": 1e9, "update_epochs": 1}
    settings["vllm_importance_sampling_cap"] = 1.05
    extra = {"sampling_logps": logps(0.4)}
    changed, metrics = trained(importance_correction=mode, extra=extra, **settings)
    plain, _ = trained(extra=extra, **settings)
    assert not torch.allclose(changed, plain, atol=1e-6)
    assert 0.0 < metrics["importance_weight_capped"] <= 1.0
    without = trained(importance_correction=mode, **settings)
    assert torch.equal(without[0], trained(**settings)[0]), "nothing to correct"


def test_one_prompt_is_a_mean_over_tokens() -> None:
    ids, mask = fixed_rollouts()
    found = []
    for reduction in ("token", "prompt"):
        agent = randomise(make_agent(loss_reduction=reduction, max_grad_norm=1e9))
        agent.learn((ids[:4], mask[:4], FLAT[:4]))
        found.append(weights(agent))
    torch.testing.assert_close(*found)


def test_prompts_count_alike_however_long_their_completions_are() -> None:
    """Groups, not texts: the same prompt twice is two."""
    ids, mask = fixed_rollouts()
    settings: dict[str, Any] = {
        "beta": 0.0, "batch_size": 8, "update_epochs": 1, "max_grad_norm": 1e9, "lr": 1e-3,
    }  # fmt: skip

    def gradient(rows: slice, reduction: str, same_prompt: bool) -> torch.Tensor:
        agent = randomise(make_agent(loss_reduction=reduction, **settings))
        tokens = ids.clone()
        if same_prompt:
            tokens[:, :5] = tokens[0, :5]
        agent.engine.step = lambda max_grad_norm: 1.0  # type: ignore[method-assign]
        agent.learn((tokens[rows], mask[rows], FLAT[rows]))
        return torch.cat([p.grad.flatten() for p in agent.policy.parameters().values()])

    for same_prompt in (False, True):
        both = gradient(slice(0, 8), "prompt", same_prompt)
        each = [gradient(rows, "token", same_prompt) for rows in (slice(0, 4), slice(4, 8))]
        torch.testing.assert_close(both, (each[0] + each[1]) / 2, rtol=1e-3, atol=1e-6)


def test_they_are_saved_loaded_and_cloned(tmp_path: Path) -> None:
    agent = randomise(make_agent(**OPTIONS, lr=1e-3))
    train(agent)
    agent.save_checkpoint(tmp_path / "saved")
    loaded = GRPO.load(tmp_path / "saved", actor_network=small_model())
    twin = agent.clone()
    for other in (loaded, twin):
        assert {name: getattr(other, name) for name in OPTIONS} == OPTIONS
        assert other.loss_config() == agent.loss_config()
        assert other.update_config() == agent.update_config()
        assert other.advantage_config() == agent.advantage_config()


@pytest.mark.parametrize("cls", [GRPO, GSPO])
def test_all_together_learn(cls: type[GRPO]) -> None:
    extra = {"sampling_logps": logps()}
    moved, metrics = trained(cls, extra=extra, **OPTIONS, lr=1e-3)
    assert all(math.isfinite(value) for value in metrics.values())
    assert {"dual_clip_fraction", "top_entropy_share"} < metrics.keys()
    assert metrics["top_entropy_share"] == pytest.approx(23 / 33)  # 11 of 16, 12 of 17
    assert not torch.equal(moved, weights(randomise(make_agent(cls))))


def test_a_wide_cap_of_a_geometric_mean_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    def warned(**changes: Any) -> bool:
        caplog.clear()
        with caplog.at_level(logging.WARNING, "agilerl"):
            make_agent(**changes).clone()
        return "upper bound of the geometric mean" in caplog.text

    assert warned(importance_correction="geometric_mask", vllm_importance_sampling_cap=1.75)
    assert not warned(importance_correction="geometric_mask", vllm_importance_sampling_cap=1.01)
    assert not warned(importance_correction="token_mask", vllm_importance_sampling_cap=1.75)


def test_equal_rewards_still_teach_entropy() -> None:
    rewards = torch.ones(2, 4)
    plain, _ = trained(beta=0.0, rewards=rewards, lr=1e-3)
    bonus, metrics = trained(beta=0.0, entropy_coef=0.1, rewards=rewards, lr=1e-3)
    assert metrics["grad_norm"] > 0.0
    assert not torch.equal(bonus, plain)
