"""Steps that must not be taken: skipped, counted and, when they keep coming, an error."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

import pytest
import torch
from rollout_helpers import (
    random_batch,
    random_policy,
)
from update_helpers import (
    MANY,
    Run,
    objective,
    random_values,
    weights,
)

from agilerl.llm.config import UpdateConfig
from agilerl.llm.policy import Policy
from agilerl.llm.step_results import NonFiniteUpdateError, SkippedSteps
from agilerl.testing import tiny_model


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_loss_that_is_not_finite_skips_its_step_only(
    policy: Policy, bad: float, caplog: pytest.LogCaptureFixture
) -> None:
    before = weights(policy)
    run = Run(update=UpdateConfig(MANY, 3, 1, 1e9), lr=0.1)
    assert run.values is not None
    broken = run.values.clone()
    broken[2] = bad
    with caplog.at_level(logging.WARNING, logger="agilerl.llm.step_results"):
        metrics, engine = replace(run, values=broken)(policy, objective())
    assert all(torch.equal(value, before[name]) for name, value in weights(policy).items())
    assert metrics["skipped_steps"] == 1.0
    assert engine.seen == []
    assert "rows [2]" in caplog.text
    assert all(p.grad is None for p in policy.parameters().values())


def test_a_gradient_that_is_not_finite_skips_its_step_too(policy: Policy) -> None:
    before = weights(policy)
    run = Run(lr=0.1)
    values = torch.full(run.batch.action_mask.shape, 1e308, dtype=torch.float64)
    values[4] = 0.0
    with pytest.raises(NonFiniteUpdateError, match=r"rows \[0, 1, 2, 3, 5, 6, 7\]"):
        loss = objective("cispo", reduction="token", clip_band=(0.0, 5.0))
        replace(run, values=values, update=UpdateConfig(MANY, MANY, 3, 1e9))(policy, loss)
    assert all(torch.equal(value, before[name]) for name, value in weights(policy).items())


def test_a_skipped_step_leaves_the_metrics_of_the_others_alone() -> None:
    model = tiny_model(tie_word_embeddings=False)
    broken = random_policy(model, separate_reference=False)
    batch = random_batch((9, 5), (3, 3))
    row = batch.token_ids[2]
    lonely = next(i for i in row.tolist() if (batch.token_ids[:2] != i).all())
    model.get_input_embeddings().weight.data[lonely] = math.nan
    values = random_values(batch).float()
    run = Run(batch, values, update=UpdateConfig(2, 2, 1, 1e9), lr=0.0)
    metrics, engine = run(broken, objective())
    assert metrics["skipped_steps"] == 1.0
    assert len(engine.seen) == 1
    names = ("mean_loss", "entropy", "ratio_mean", "ratio_max", "clip_fraction", "grad_norm")
    assert all(math.isfinite(metrics[name]) for name in names)


def test_three_bad_steps_in_a_row_raise_with_rows_and_checkpoint(policy: Policy) -> None:
    run = Run()
    assert run.values is not None
    broken = run.values.clone()
    broken[[1, 6]] = math.nan
    skipped = SkippedSteps(last_checkpoint="runs/7/best")
    bad = replace(run, values=broken, skipped=skipped)
    for _ in range(2):
        metrics, _ = bad(policy, objective())
        assert metrics["skipped_steps"] == 1.0
    with pytest.raises(NonFiniteUpdateError, match=r"rows \[1, 6\] .*checkpoint: runs/7/best"):
        bad(policy, objective())
    with pytest.raises(NonFiniteUpdateError, match="none was written yet"):
        replace(bad, skipped=SkippedSteps(), update=UpdateConfig(MANY, MANY, 3, 1e9))(
            policy, objective()
        )


def test_a_good_step_in_between_resets_the_count_and_an_empty_one_does_not(policy: Policy) -> None:
    run = Run()
    assert run.values is not None
    broken = run.values.clone()
    broken[0] = math.nan
    skipped = SkippedSteps()
    bad = replace(run, values=broken, skipped=skipped)
    good = replace(run, skipped=skipped)
    empty = replace(run, values=torch.zeros_like(broken), skipped=skipped)
    for step, count in ((bad, 1), (bad, 2), (good, 0), (bad, 1), (empty, 1), (bad, 2)):
        step(policy, objective())
        assert skipped.in_a_row == count


def test_an_error_in_a_micro_batch_leaves_no_gradient_behind(policy: Policy) -> None:
    run = Run(random_batch(), update=UpdateConfig(MANY, 2, 1, 1e9))  # no turn ids
    with pytest.raises(ValueError, match="turn_ids"):
        run(policy, objective(ratio_level="turn"))
    assert all(p.grad is None for p in policy.parameters().values())


def test_nothing_to_learn_is_no_step(policy: Policy) -> None:
    before = weights(policy)
    run = Run()
    assert run.values is not None
    metrics, engine = replace(run, values=torch.zeros_like(run.values))(policy, objective())
    assert engine.seen == []
    assert metrics["mean_loss"] == 0.0
    assert metrics["grad_norm"] == 0.0
    assert all(torch.equal(value, before[name]) for name, value in weights(policy).items())
