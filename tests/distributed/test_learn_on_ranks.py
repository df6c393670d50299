"""Two ranks are one process: the same weights, moments and metrics from the same global batch."""

from __future__ import annotations

import copy
import functools
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from agents_and_batches import (
    AGAINST_SAMPLER,
    COSINE,
    CREDIT,
    DECAY,
    LEFT,
    MASKED,
    OPTIONS,
    PROMPTS_OF_RANK,
    Data,
    data,
    make_agent,
    moments,
    weights,
)
from case_settings import each_setting
from cases_learn import mutate, parameters_of_two_groups, step_two_groups, update_with

from agilerl.algorithms import GRPO
from agilerl.llm.batch import make_batch
from agilerl.llm.checkpoint.optimizer_shards import read_shards, write_shard
from agilerl.llm.engine.local import LocalEngine
from agilerl.llm.losses import policy_loss, reduction_weights
from agilerl.llm.policy import scatter_actions
from agilerl.llm.step_results import SkippedSteps

pytestmark = [pytest.mark.slow, pytest.mark.process]

Ranks = list[dict[str, Any]]
TOLERANCE = 1e-6


def assert_same(
    ranks: Ranks, agent: GRPO, metrics: dict[str, float] | None, atol: float = TOLERANCE
) -> None:
    """Both ranks hold the agent's weights and moments, and report its metrics."""
    assert torch.equal(ranks[0]["weights"], ranks[1]["weights"])
    torch.testing.assert_close(ranks[0]["weights"], weights(agent), atol=atol, rtol=0)
    torch.testing.assert_close(ranks[0]["moments"], moments(agent), atol=TOLERANCE, rtol=1e-4)
    if metrics is None:
        return
    for rank in ranks:
        assert rank["metrics"].keys() == metrics.keys()
        for name, value in metrics.items():
            expected = pytest.approx(value, rel=1e-4, abs=1e-6, nan_ok=True)
            assert rank["metrics"][name] == expected, name
    assert str(ranks[0]["metrics"]) == str(ranks[1]["metrics"])


@functools.cache
def alone(per_turn: bool = False, **changes: Any) -> tuple[GRPO, dict[str, float]]:
    """A single process after one ``learn`` of the global batch."""
    agent = make_agent(**(CREDIT if per_turn else {}), **changes)
    return agent, data().learned_by(agent, per_turn=per_turn)


@each_setting("one_step_grpo")
def test_one_step_is_that_of_a_single_process(ranks: Ranks) -> None:
    agent, metrics = alone()
    assert metrics["grad_norm"] > agent.max_grad_norm  # so that clipping is at work
    assert_same(ranks, agent, metrics)


@each_setting("one_step_cispo")
def test_one_step_of_a_mean_over_tokens(ranks: Ranks) -> None:
    assert_same(ranks, *alone(loss_type="cispo", clip_coef=(0.0, 5.0)))


@each_setting("one_step_constant")
def test_one_step_of_a_constant_normaliser(ranks: Ranks) -> None:
    assert_same(ranks, *alone(loss_reduction="constant"))


@each_setting("whitened_turns")
def test_whitening_and_turn_credit_are_over_both_ranks(ranks: Ranks) -> None:
    assert_same(ranks, *alone(per_turn=True))


@each_setting("nothing_to_learn_on_rank_0")
def test_a_rank_without_advantages_does_not_hold_up_the_other(ranks: Ranks) -> None:
    agent, batch = make_agent(beta=0.0), data()
    batch.rewards[0] = 0.0
    assert_same(ranks, agent, batch.learned_by(agent))


@each_setting("no_actions_on_rank_0")
def test_a_rank_without_actions_does_not_hold_up_the_other(ranks: Ranks) -> None:
    agent, batch = make_agent(), data()
    batch.masks[0].zero_()
    assert_same(ranks, agent, batch.learned_by(agent))


@each_setting("nothing_to_learn_anywhere")
def test_nothing_to_learn_anywhere_is_no_step(ranks: Ranks) -> None:
    for rank in ranks:
        assert torch.equal(rank["weights"], rank["before"])
        assert rank["metrics"]["mean_loss"] == rank["metrics"]["grad_norm"] == 0.0


@each_setting("some_left_out")
def test_what_ranks_leave_out_is_left_out_of_the_whole_batch(ranks: Ranks) -> None:
    plain, credit = make_agent(), make_agent(**CREDIT)
    metrics = data().learned_by(plain, sample_mask=LEFT)
    # AdamW's first step divides a gradient by itself, which makes much of the rounding of small
    # ones; the moments are compared as closely as elsewhere.
    assert_same([rank["plain"] for rank in ranks], plain, metrics, atol=1e-5)
    metrics = data().learned_by(credit, per_turn=True, sample_mask=LEFT)
    assert_same([rank["credit"] for rank in ranks], credit, metrics, atol=1e-5)
    masked, whole = make_agent(**MASKED), data()
    for prompts in PROMPTS_OF_RANK:
        whole.rewards[prompts[0]] = 0.0
    metrics = whole.learned_by(masked, truncated=~LEFT)
    assert_same([rank["masked"] for rank in ranks], masked, metrics, atol=1e-5)


@each_setting("options_of_the_loss")
def test_options_of_the_loss_are_over_all_ranks(ranks: Ranks) -> None:
    logps = data().sampling_logps()
    for name, settings in (("together", OPTIONS), ("against", AGAINST_SAMPLER)):
        agent = make_agent(**settings)
        per_turn = name == "together"
        metrics = data().learned_by(agent, per_turn=per_turn, sampling_logps=logps)
        assert_same([rank[name] for rank in ranks], agent, metrics, atol=1e-5)
    for rank in ranks:
        assert "sampling_logps is None for row 0" in rank["refusal"]


@each_setting("all_left_out_on_rank_0")
def test_a_rank_that_leaves_out_everything_does_not_hold_up_the_other(ranks: Ranks) -> None:
    agent = make_agent()
    metrics = data().of([1, 2]).learned_by(agent)
    assert_same(ranks, agent, metrics)
    for rank in ranks:
        assert rank["idle"]
        assert rank["idle_metrics"]["grad_norm"] == 0.0
        assert math.isnan(rank["idle_metrics"]["completion_length"])


def joint_steps(rng_state: torch.Tensor) -> list[list[int]]:
    """Rows of the global batch in each of four steps, two epochs over the same two mini-batches.

    Each rank takes half of its rows: rank 0 of one prompt's four, rank 1 of two prompts' eight.
    """
    rng = torch.Generator()
    rng.set_state(rng_state)
    first, second = (p * 4 for p in torch.randperm(2, generator=rng).argsort().tolist())
    epoch = [
        [0, 1, *range(4 + first, 8 + first)],
        [2, 3, *range(4 + second, 8 + second)],
    ]
    return epoch * 2


def train_by_hand(agent: GRPO, batch: Data, steps: list[list[int]]) -> None:
    """GRPO with KL in plain torch: AdamW steps on given rows, old log-probs from the start."""
    rows = make_batch(batch.ids, batch.masks)
    rewards = batch.rewards.sum(-1)
    values = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-8)
    values = values.flatten()[:, None].expand(rows.action_mask.shape)
    reference, old = (
        agent.policy.frozen_logprobs(rows, role, agent.forward_config())
        for role in ("reference", "actor")
    )
    parameters = list(agent.policy.parameters().values())
    optimizer = torch.optim.AdamW(parameters, lr=agent.lr, weight_decay=0.0)
    agent.policy.set_role("actor")
    for step in map(torch.tensor, steps):
        part = rows.select(step)
        width = part.action_mask.shape[1]
        logp = agent.policy.logprobs(part, agent.forward_config()).logp
        terms = policy_loss(
            scatter_actions(logp, part.action_mask),
            values[step, :width],
            part.action_mask,
            reduction_weights(part.action_mask, "sequence"),
            agent.loss_config(),
            old_logp=old[step, :width],
            ref_logp=reference[step, :width],
        )
        terms.loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, agent.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()


@each_setting("mini_batches")
def test_mini_batches_and_epochs_step_on_the_rows_of_both_ranks(ranks: Ranks) -> None:
    agent = make_agent(batch_size=8, update_epochs=2, lr=1e-2)
    train_by_hand(agent, data(), joint_steps(ranks[1]["rng_state"]))
    assert torch.equal(ranks[0]["weights"], ranks[1]["weights"])
    # Four steps at a high rate: rounding has room to grow.
    torch.testing.assert_close(ranks[0]["weights"], weights(agent), atol=1e-5, rtol=0)
    assert str(ranks[0]["metrics"]) == str(ranks[1]["metrics"])
    assert ranks[0]["metrics"]["ratio_max"] > 1.001


@each_setting("uneven_ranks")
def test_rows_that_are_dealt_to_the_ranks_anew_make_the_same_steps(ranks: Ranks) -> None:
    for name in ("all", "advantages", "quantile"):
        (plain, balanced), (other_plain, other_balanced) = (rank[name] for rank in ranks)
        assert torch.equal(balanced["weights"], other_balanced["weights"])
        # Some of it is rounded to float32 in float64 models too.
        atol = 1e-7 if plain["weights"].dtype == torch.float64 else 1e-5
        torch.testing.assert_close(balanced["weights"], plain["weights"], atol=atol, rtol=0)
        torch.testing.assert_close(balanced["moments"], plain["moments"], atol=1e-7, rtol=1e-4)
        for metric, value in plain["metrics"].items():
            expected = pytest.approx(value, rel=1e-5, abs=1e-6, nan_ok=True)
            assert balanced["metrics"][metric] == expected, metric
        assert balanced["metrics"]["ratio_max"] != 1.0
        # Ranks wait for the one with most tokens at each step.
        waits = [
            torch.maximum(first["tokens"], second["tokens"]).sum()
            for first, second in ((plain, other_plain), (balanced, other_balanced))
        ]
        assert waits[1] < 0.9 * waits[0], name


@each_setting("uneven_ranks")
def test_a_row_that_another_rank_trained_is_named_as_it_was_given(ranks: Ranks) -> None:
    # The second prompt of rank 1, with rows 4 to 7, joins the one of rank 0.
    assert ranks[0]["tokens"] > ranks[1]["tokens"]
    assert all("rows [5] of rank 1's batch" in rank["error"] for rank in ranks)


@functools.cache
def ten_steps_alone() -> tuple[GRPO, list[tuple[float, float]]]:
    agent = make_agent(cosine_lr_schedule_config=COSINE)
    history = []
    for step in range(10):
        mutate(agent, step)
        metrics = data(step).learned_by(agent)
        history.append((metrics["grad_norm"], agent.optimizer.param_groups[0]["lr"]))
    return agent, history


@each_setting("ten_steps")
def test_ten_steps_with_schedule_and_mutations_reach_the_same_weights(ranks: Ranks) -> None:
    agent, history = ten_steps_alone()
    torch.testing.assert_close(ranks[0]["weights"], weights(agent), atol=1e-5, rtol=0)
    assert torch.equal(ranks[0]["weights"], ranks[1]["weights"])
    for (norm, lr), (expected_norm, expected_lr) in zip(ranks[0]["history"], history, strict=True):
        assert norm == pytest.approx(expected_norm, rel=1e-3)
        assert lr == expected_lr
    assert len({lr for _, lr in history}) > 6


@each_setting("non_finite")
def test_steps_that_are_not_finite_are_skipped_by_both_and_leave_nothing_behind(
    ranks: Ranks,
) -> None:
    for rank in ranks:
        assert rank["skipped"] == [(1.0, True), (1.0, True)]
        assert rank["bad_steps"] == 0
        assert "rows [5] of rank 1's batch" in rank["error"]
    assert torch.equal(ranks[0]["weights"], ranks[1]["weights"])
    assert str(ranks[0]["metrics"]) == str(ranks[1]["metrics"])
    # The good step in between is that of a process which never had a bad one.
    agent = make_agent(beta=0.0, loss_type="cispo", clip_coef=(0.0, 5.0), loss_reduction="sum")
    batch = data()
    metrics = update_with(agent, batch.rewards.sum(-1).flatten() - 1.0, batch, SkippedSteps())
    moment = moments(agent)
    torch.testing.assert_close(ranks[0]["weights"], weights(agent), atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(ranks[0]["moments"], moment, atol=TOLERANCE, rtol=1e-4)
    assert metrics["grad_norm"] == pytest.approx(ranks[0]["metrics"]["grad_norm"], rel=1e-4)


@functools.cache
def third_step_alone() -> GRPO:
    agent = make_agent(cosine_lr_schedule_config=COSINE)
    for _ in range(3):
        data().learned_by(agent)
    return agent


@each_setting("state")
def test_a_state_goes_on_in_clones_wrapped_again_and_in_one_process(ranks: Ranks) -> None:
    expected = third_step_alone()
    for rank in ranks:
        assert rank["plain"] and rank["values_kept"]
        assert "wrap_models" in rank["refusal"]
        for values, moment in rank["third"].values():
            torch.testing.assert_close(values, weights(expected), atol=TOLERANCE, rtol=0)
            torch.testing.assert_close(moment, moments(expected), atol=TOLERANCE, rtol=1e-4)

    for rank in ranks:  # every rank has the whole state
        agent = make_agent(cosine_lr_schedule_config=COSINE)
        parameters = list(agent.policy.parameters().values())
        parts = rank["start"].split([p.numel() for p in parameters])
        with torch.no_grad():
            for parameter, part in zip(parameters, parts, strict=True):
                parameter.copy_(part.view_as(parameter))
        agent.engine.load_state_dict(copy.deepcopy(rank["saved"]))
        data().learned_by(agent)
        torch.testing.assert_close(weights(agent), weights(expected), atol=TOLERANCE, rtol=0)


@each_setting("state_of_one_process")
def test_the_state_of_a_single_process_goes_on_on_ranks(ranks: Ranks) -> None:
    assert_same(ranks, third_step_alone(), None)
    if ranks[0]["engine"] == "ZeroEngine":
        assert "number or shape" in ranks[0]["refusal"]


@each_setting("other_schedule")
def test_a_loaded_state_leaves_the_learning_rate_alone(ranks: Ranks) -> None:
    for rank in ranks:
        before, after = rank["rates"]
        assert before == after == pytest.approx(1e-3 / 3)


@each_setting("two_groups")
def test_parameter_groups_step_apart_and_together(ranks: Ranks, tmp_path: Path) -> None:
    """As in a single process, where AdamW leaves alone what has no gradient."""
    parameters = parameters_of_two_groups()
    groups = [{"params": parameters[:1], "lr": 0.1}, {"params": parameters[1:], "lr": 0.02}]
    alone = LocalEngine(groups, 0.1, settings=DECAY)
    for number in range(5):
        step_two_groups(alone, number, [0, 1])
    expected = alone.state_dict()["optimizer"]
    for rank in ranks:
        for value, parameter in zip(rank["values"], parameters, strict=True):
            torch.testing.assert_close(value, parameter.detach())
        found = rank["saved"]["optimizer"]["state"]
        assert [found[n]["step"] for n in range(3)] == [5.0, 2.0, 2.0]
        for name in ("exp_avg", "exp_avg_sq"):
            for n in range(3):
                torch.testing.assert_close(found[n][name], expected["state"][n][name])
        if rank["shards"]:
            read = []
            for shards in (rank["shards"][0], rank["shards"][-1]):
                for number, shard in enumerate(shards):
                    write_shard(tmp_path, number, shard)
                read.append(read_shards(tmp_path, len(shards), 3))
            assert [read[0][n]["step"] for n in range(3)] == [1.0, 0.0, 0.0]
            for n, moments in read[1].items():
                assert all(torch.equal(moments[name], found[n][name]) for name in moments)


@each_setting("another_optimizer")
def test_another_optimizer_steps_alike_and_is_refused_with_zero(ranks: Ranks) -> None:
    if "refusals" in ranks[0]:
        says = "optimizer is {}, but accelerator asks for ZeRO stage 2.*optimizer='adamw'"
        for rank in ranks:
            for name, refusal in zip((".*SGD.*", "'adamw_8bit'"), rank["refusals"], strict=True):
                assert re.search(says.format(name), refusal)
        return
    agent, _ = alone(optimizer=torch.optim.SGD)
    for rank in ranks:
        torch.testing.assert_close(rank["weights"], weights(agent), atol=TOLERANCE, rtol=0)


@each_setting("fresh_optimizer")
def test_a_fresh_optimizer_steps_as_at_first(ranks: Ranks) -> None:
    agent, metrics = alone()
    assert ranks[0]["empty"] == {}
    assert_same(ranks, agent, metrics)


@each_setting("agreement")
def test_ranks_agree_on_weights_and_fitness_and_differ_in_samples(ranks: Ranks) -> None:
    first, second = ranks
    assert torch.equal(first["weights"], second["weights"])
    assert not (
        first["sampled"].shape == second["sampled"].shape
        and torch.equal(first["sampled"], second["sampled"])
    )
    assert sorted(first["scores"]) == [float(ord(q)) for q in "abcdefg"]
    assert np.array_equal(first["scores"], second["scores"])
    assert first["fitness"] == second["fitness"]
    assert first["fitness"][0] == np.mean([ord(q) for q in "abcdefg"])
    assert first["of_one_row"] == second["of_one_row"] == [float(ord("d"))]
    for rank in (first, second):
        assert "batch_size is 15" in rank["indivisible"]
        assert "batch_size is 7" in rank["indivisible"]


@each_setting("in_lockstep")
def test_in_lockstep_every_rank_runs_as_many_micro_batches(ranks: Ranks) -> None:
    assert [rank["backwards"] for rank in ranks] == [3, 3]  # four rows and eight, three at a time
    agent, metrics = alone()
    assert_same(ranks, agent, metrics)
    assert math.isfinite(metrics["mean_loss"])


@each_setting("one_step_grpo")
def test_every_setting_has_its_engine(ranks: Ranks, request: pytest.FixtureRequest) -> None:
    partitioned = any(f"[zero{stage}" in request.node.name for stage in (1, 2, 3))
    expected = "ZeroEngine" if partitioned else "AllReduceEngine"
    assert [rank["engine"] for rank in ranks] == [expected] * 2


@each_setting("other_base")
def test_a_base_that_differs_between_ranks_is_refused(ranks: Ranks) -> None:
    assert all("actor_network has other weights" in rank["error"] for rank in ranks)


@each_setting("deepspeed_settings")
def test_a_deepspeed_configuration_counts_where_the_agent_has_no_argument(ranks: Ranks) -> None:
    for rank in ranks:
        assert rank["update"].micro_batch_size == 2
        (message,) = rank["warnings"]
        assert "max_grad_norm decides" in message and "optimizer" in message
        assert "accelerator asks for parameters to be offloaded to 'nvme'" in rank["nvme"]


@each_setting("errors")
def test_what_fails_on_one_rank_fails_on_all(ranks: Ranks) -> None:
    # A class that cannot be sent arrives as a RuntimeError that quotes it; its own rank has it.
    assert ranks[0]["raised"] == ["OSError('disk full')", "RuntimeError(\"_Unsendable('odd')\")"]
    assert ranks[1]["raised"] == ["OSError('disk full')", "_Unsendable('odd')"]
    for number, rank in enumerate(ranks):
        assert (rank["first"], rank["together"]) == ("done", number)
