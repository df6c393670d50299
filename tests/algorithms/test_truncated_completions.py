"""``mask_truncated_completions``: what was cut off adds nothing to the loss, but counts in it."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from agent_helpers import TOKENIZER, make_agent, prompts, randomise, weights
from hypothesis import given, settings
from hypothesis import strategies as st
from test_sample_mask import Rollouts, rollouts
from test_sample_mask import settings as agent_settings

from agilerl.algorithms import CISPO, GRPO, GSPO
from agilerl.typing import ActionResult


def masking(cls: type[GRPO] = GRPO, **changes: Any) -> GRPO:
    return make_agent(cls, **agent_settings(mask_truncated_completions=True, **changes))


def with_mean_rewards(data: Rollouts, cut: torch.Tensor) -> Rollouts:
    """The rewards of those that are cut off are the mean of the others of their group."""
    returns, groups = data.rewards.sum(1).double().view(2, 4), cut.view(2, 4)
    left = torch.where(groups, 0.0, returns).sum(1) / (~groups).sum(1).clamp(min=1)
    data.rewards = torch.where(groups, left[:, None], returns).flatten()
    return data


@settings(max_examples=8, deadline=None)
@given(
    cut=st.lists(st.booleans(), min_size=8, max_size=8).filter(
        lambda cut: min(cut[:4].count(False), cut[4:].count(False)) > 0
    ),
    cls=st.sampled_from([GRPO, GSPO, CISPO]),
    reduction=st.sampled_from(["sequence", "token", "sum", "constant", "prompt"]),
)
def test_it_leaves_the_numerator_only(cut: list[bool], cls: type[GRPO], reduction: str) -> None:
    """Masked is as an advantage of 0: one that counts in what the loss is divided by."""
    changes = {"adv_norm": "mean_only", "beta": 0.0, "loss_reduction": reduction}
    truncated = torch.tensor(cut)
    data = with_mean_rewards(rollouts(), truncated)
    found, metrics = data.learned_by(masking(cls, **changes), truncated=truncated)
    expected, expected_metrics = data.learned_by(make_agent(cls, **agent_settings(**changes)))
    assert torch.allclose(found, expected, atol=1e-6)
    assert metrics["mean_loss"] == pytest.approx(expected_metrics["mean_loss"], abs=1e-6)
    assert metrics["grad_norm"] == pytest.approx(expected_metrics["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_its_reward_counts_and_its_tokens_do_not(beta: float) -> None:
    cut = torch.tensor([[False, True, False, False], [True, False, False, False]])
    plain = rollouts().learned_by(masking(beta=beta), truncated=cut)[0]
    other_tokens, other_rewards = rollouts(), rollouts()
    rows = cut.flatten()[other_tokens.trajectory_ids]
    other_tokens.ids[:, 1:][(other_tokens.turns >= 0) & rows[:, None]] = 98
    other_rewards.rewards[cut.flatten()] += 2.0
    assert torch.equal(other_tokens.learned_by(masking(beta=beta), truncated=cut)[0], plain)
    moved = other_rewards.learned_by(masking(beta=beta), truncated=cut)[0]
    assert (moved - plain).abs().max() > 1e-4
    unmasked = make_agent(**agent_settings(beta=beta))
    assert not torch.allclose(plain, rollouts().learned_by(unmasked)[0])


def test_whitening_is_over_what_is_trained() -> None:
    agent = masking(whiten_advantages=True, beta=0.0)
    cut = torch.tensor([False, True, False, True, False, False, False, True])
    metrics = rollouts().learned_by(agent, truncated=cut)[1]
    assert metrics["advantage_mean"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["advantage_std"] == pytest.approx(1.0, abs=1e-6)


def test_lengths_are_those_of_all_that_was_generated() -> None:
    data, cut = rollouts(), torch.arange(8) == 1
    metrics = data.learned_by(masking(), truncated=cut)[1]
    plain = data.learned_by(make_agent(**agent_settings()))[1]
    assert metrics["completion_length"] == plain["completion_length"]
    assert metrics["zero_variance_groups"] == plain["zero_variance_groups"] == 0


def test_all_cut_off_is_a_skipped_update(caplog: pytest.LogCaptureFixture) -> None:
    agent = masking(beta=0.1)
    before = weights(randomise(agent))
    with caplog.at_level(logging.WARNING, "agilerl"):
        after, metrics = rollouts().learned_by(agent, truncated=[True] * 8)
    assert torch.equal(before, after)
    assert "update skipped: mask_truncated_completions leaves out every" in caplog.text
    assert metrics["mean_loss"] == metrics["grad_norm"] == 0.0
    assert not math.isnan(metrics["completion_length"])


def test_without_the_option_it_is_not_read() -> None:
    plain = rollouts().learned_by(make_agent(**agent_settings()))
    told = rollouts().learned_by(make_agent(**agent_settings()), truncated=[True] * 8)
    assert torch.equal(plain[0], told[0]) and str(plain[1]) == str(told[1])


def test_an_action_says_what_was_cut_off() -> None:
    agent = masking(max_output_tokens=2)
    action = agent.get_action(prompts("a", "bc"))
    assert action.truncated is not None and action.finish_reasons is not None
    assert tuple(action.truncated.shape) == (2, 4) and bool(action.truncated.any())
    for reasons, ids, cut in zip(
        action.finish_reasons, action.completion_ids, action.truncated, strict=True
    ):
        assert [reason == "length" for reason in reasons] == cut.tolist()
        assert not (ids[cut, -1] == TOKENIZER.eos_token_id).any()
    agent.learn((*action, torch.rand(2, 4)), truncated=action.truncated)
    assert ActionResult(*action).truncated is None


@pytest.mark.parametrize(
    ("truncated", "error", "says"),
    [
        (None, ValueError, r"truncated is None, but mask_truncated.*truncated=action.truncated"),
        (torch.zeros(8), TypeError, r"truncated has the type torch.float32.*truncated.bool\(\)"),
        ([False] * 7, ValueError, r"truncated has shape \(7,\) for 8 completions"),
    ],
)
def test_bad_values(truncated: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        rollouts().learned_by(masking(), truncated=truncated)
    with pytest.raises(TypeError, match="mask_truncated_completions is 1"):
        make_agent(mask_truncated_completions=1)
