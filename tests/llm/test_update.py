"""From rollouts to optimizer steps, on a real model in float64."""

from __future__ import annotations

import copy
import itertools
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from model_families import without_float32_steps
from rollout_helpers import (
    PLAIN,
    TOLERANCE,
    lora,
    random_batch,
    random_policy,
    randomise,
    randomise_all,
    relative_difference,
)
from update_helpers import (
    FORWARD,
    MANY,
    RecordingEngine,
    Run,
    objective,
    random_values,
)

from agilerl.llm.batch import TrainBatch, make_batch
from agilerl.llm.config import RowLayout, UpdateConfig
from agilerl.llm.logprobs import TokenLogProbs, token_logprobs
from agilerl.llm.losses import (
    LOSS_TABLE,
    LossTerms,
    policy_loss,
    reduction_weights,
    weighted_loss,
)
from agilerl.llm.policy import Policy, scatter_actions
from agilerl.llm.shared_base import SharedBase
from agilerl.llm.step_results import SkippedSteps
from agilerl.llm.update import run_update
from agilerl.testing import tiny_model

REDUCTIONS = ("sequence", "token", "constant", "sum")


@contextmanager
def forwards_counted(policy: Policy) -> Iterator[dict[str, int]]:
    """Rows that go through the model with and without gradients."""
    counts = {"train": 0, "frozen": 0}

    def count(module: torch.nn.Module, args: tuple[torch.Tensor]) -> None:
        counts["train" if torch.is_grad_enabled() else "frozen"] += 1

    hook = policy.base.model.get_input_embeddings().register_forward_pre_hook(count)
    yield counts
    hook.remove()


def reordered(run: Run, order: torch.Tensor, padding: int) -> Run:
    """The same rollouts in another order and with other padding."""
    batch = run.batch
    pad = torch.nn.functional.pad

    def place(tensor: torch.Tensor, value: float) -> torch.Tensor:
        return pad(tensor[order], (0, padding), value=value)

    assert run.values is not None
    assert batch.turn_ids is not None
    moved = make_batch(
        place(batch.token_ids, 7), place(batch.action_mask, False), place(batch.turn_ids, -1)
    )
    sampling = None if run.sampling_logp is None else place(run.sampling_logp, 0.0)
    return replace(
        run, batch=moved, values=place(run.values, 0.0), mask=None, sampling_logp=sampling
    )


# Qwen2 has fewer heads of keys than of queries, and LoRA layers that add in place.
@pytest.mark.parametrize(
    ("shared_policy", "loss_type", "reduction"),
    [
        *itertools.product(["gpt2"], LOSS_TABLE, REDUCTIONS),
        *itertools.product(["qwen2"], LOSS_TABLE, ["token"]),
    ],
    indirect=["shared_policy"],
)
def test_no_layout_of_the_rows_changes_gradients_or_metrics(
    policy: Policy, loss_type: str, reduction: str
) -> None:
    with without_float32_steps():
        check_layouts(policy, loss_type, reduction)


def check_layouts(policy: Policy, loss_type: str, reduction: str) -> None:
    """Two epochs, so that ratio, clipping and KL are at work in the second step."""
    level = "trajectory" if loss_type == "gspo" else "turn"
    loss = objective(
        loss_type, reduction=reduction, ratio_level=level, beta=0.1, importance_weight_cap=1.1
    )
    batch = random_batch(turns=True)
    own = policy.frozen_logprobs(batch, "actor", FORWARD)
    noise = 0.3 * torch.randn(own.shape, generator=torch.Generator().manual_seed(1)).double()
    update = UpdateConfig(MANY, MANY, 2, 1e9)
    run = Run(batch, sampling_logp=own + noise, lr=0.02, forward=PLAIN, update=update)
    metrics, engine = run(policy, loss)
    assert metrics["ratio_max"] > 1.01
    assert metrics["mean_kl"] > 0.01
    assert metrics["importance_weight_capped"] > 0.1

    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(2))
    recomputed = {"recompute_layers": True}
    others: list[tuple[dict[str, Any], int, dict[str, Any]]] = [
        ({"micro_batch_size": 1}, 0, {"layout": "packed"}),
        ({"micro_batch_size": 3, "balance_tokens": True}, 1, {"layout": "packed"} | recomputed),
        ({"micro_batch_tokens": 20}, 3, {"layout": "packed", "tile_rows": 3}),
        ({"micro_batch_size": 3}, 2, {"layout": "shared_prompts"} | recomputed),
        ({"micro_batch_tokens": 40}, 4, {"tile_rows": 3} | recomputed),
    ]
    for sizes, padding, forward in others:
        other = replace(
            reordered(run, order, padding),
            update=replace(run.update, **sizes),
            forward=replace(PLAIN, **forward),
        )
        randomise_all(policy)
        same, found = other(policy, loss)
        assert same == pytest.approx(metrics, rel=1e-9, abs=1e-12)
        for mine, theirs in zip(found.seen, engine.seen, strict=True):
            assert relative_difference(mine, theirs) < TOLERANCE[torch.float64]


def test_rows_without_advantage_count_in_the_mean_although_they_are_not_run(policy: Policy) -> None:
    batch = random_batch()
    values = random_values(batch).clone()
    values[[1, 2, 5]] = 0.0
    loss = objective("cispo")
    with forwards_counted(policy) as counts:
        _, engine = Run(batch, values, update=UpdateConfig(MANY, 1, 1, 1e9))(policy, loss)
    assert counts["frozen"] == 0
    assert engine.backwards == 5

    randomise_all(policy)
    logp = scatter_actions(policy.logprobs(batch, FORWARD).logp, batch.action_mask)
    mask = batch.action_mask
    terms = policy_loss(logp, values, mask, reduction_weights(mask, "token"), loss)
    parameters = policy.parameters()
    grads = torch.autograd.grad(terms.loss, list(parameters.values()))
    assert relative_difference(engine.seen[0], dict(zip(parameters, grads, strict=True))) < 1e-10


def test_filtered_tokens_leave_the_normaliser(policy: Policy) -> None:
    batch = random_batch()
    values = random_values(batch).clone()
    values[3] = 0.0
    filtered = batch.action_mask & (values != 0)
    rest = torch.tensor([0, 1, 2, 4, 5, 6, 7])
    for reduction in REDUCTIONS:
        loss = objective(reduction=reduction, beta=0.1)
        _, engine = Run(batch, values, filtered, lr=0.0)(policy, loss)
        without = Run(batch.select(rest), values[rest], lr=0.0)
        _, expected = without(policy, loss)
        assert relative_difference(engine.seen[0], expected.seen[0]) < 1e-10


def test_tokens_that_are_filtered_do_not_go_through_the_head(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, loss = random_batch(), objective("cispo", beta=0.1)
    values = random_values(batch)
    first = batch.action_mask & (batch.action_mask.cumsum(1) == 1)
    filtered = batch.action_mask & ~first
    ran: list[int] = []

    def counted(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> TokenLogProbs:
        ran.append(len(hidden))
        return token_logprobs(hidden, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr("agilerl.llm.policy.token_logprobs", counted)
        metrics, engine = Run(batch, values, filtered, update=UpdateConfig(MANY, 3, 1, 1e9))(
            policy, loss
        )
    assert sum(ran) == 2 * filtered.sum()  # under the reference and in training

    randomise_all(policy)
    found = policy.logprobs(batch, FORWARD)
    logp = scatter_actions(found.logp, batch.action_mask)
    reference = policy.frozen_logprobs(batch, "reference", FORWARD)
    weights = reduction_weights(filtered, "token")
    terms = policy_loss(logp, values, filtered, weights, loss, ref_logp=reference)
    parameters = policy.parameters()
    grads = torch.autograd.grad(terms.loss, list(parameters.values()))
    assert relative_difference(engine.seen[0], dict(zip(parameters, grads, strict=True))) < 1e-10
    entropy = found.entropy[filtered[batch.action_mask]].mean().item()
    assert metrics["entropy"] == pytest.approx(entropy, rel=1e-9)


@pytest.mark.parametrize(("micro", "backwards"), [(1, 8), (3, 4), (4, 2), (MANY, 2)])
def test_one_optimizer_step_per_mini_batch_whatever_the_micro_batch(
    policy: Policy, micro: int, backwards: int
) -> None:
    _, engine = Run(update=UpdateConfig(4, micro, 3, 1e9))(policy, objective("cispo"))
    assert len(engine.seen) == 3 * 2  # epochs × mini-batches of 4 of the 8 rows
    assert engine.backwards == 3 * backwards


def test_mini_batches_cover_every_row_once_and_keep_prompts_together(policy: Policy) -> None:
    batch = random_batch((4, 5, 6), (3, 2))
    values = torch.ones(len(batch), 1, dtype=torch.float64).expand(batch.action_mask.shape)
    run = Run(batch, values, update=UpdateConfig(2, 2, 1, 1e9), lr=0.0)
    seen: list[tuple[int, ...]] = []
    hook = policy.base.model.get_input_embeddings().register_forward_pre_hook(
        lambda module, args: seen.append(tuple(args[0].shape)) if torch.is_grad_enabled() else None
    )
    run(policy, objective())
    hook.remove()
    prompts = [width for rows, width in seen if rows == 1]
    # One prompt per step, run once, with three and two tokens but for the last of each.
    assert sorted(prompts) == [7, 8, 9]


@pytest.mark.parametrize(
    ("batch_size", "epochs", "beta", "frozen"),
    [
        (8, 1, 0.0, 0),
        (MANY, 1, 0.0, 0),
        (8, 2, 0.0, 0),
        (4, 1, 0.0, 1),
        (8, 1, 0.1, 1),
        (4, 1, 0.1, 3),
    ],
)
def test_frozen_passes_are_run_exactly_where_they_are_needed(
    policy: Policy, batch_size: int, epochs: int, beta: float, frozen: int
) -> None:
    config = replace(FORWARD, layout="padded")
    with forwards_counted(policy) as counts:
        metrics, _ = Run(forward=config, update=UpdateConfig(batch_size, MANY, epochs, 1e9))(
            policy, objective(beta=beta)
        )
    assert counts["frozen"] == frozen
    assert math.isnan(metrics["mean_kl"]) == (beta == 0.0)


@pytest.mark.parametrize("packing", [True, False])
def test_a_setting_that_has_rows_padded_is_named_once(
    policy: Policy,
    packing: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agilerl.checks._warned", set())
    run = Run(
        forward=replace(FORWARD, use_position_ids=False),
        update=UpdateConfig(8, 2, 1, 1e9, balance_tokens=packing),
    )
    with caplog.at_level(logging.INFO):
        run(policy, objective())
        run(policy, objective())
    (record,) = [r for r in caplog.records if "calc_position_embeddings is False" in r.getMessage()]
    assert ("use_sequence_packing has no effect" in record.getMessage()) == packing
    assert record.levelno == (logging.WARNING if packing else logging.INFO)


@pytest.mark.parametrize(
    ("layout", "sizes", "says"),
    [
        ("padded", {"micro_batch_size": 2}, "rows are padded. Packing takes"),
        ("shared_prompts", {"micro_batch_size": 2}, "prompt share it, with copies of its keys"),
        ("packed", {"micro_batch_size": 2, "micro_batch_tokens": 30}, "micro_batch_tokens decides"),
        ("packed", {"micro_batch_size": MANY}, "are one micro-batch; set micro_batch_size_per_gpu"),
        (
            "packed",
            {"micro_batch_size": 8, "micro_batch_size_is_auto": True},
            "micro_batch_size_per_gpu='auto' chose 8",
        ),
        ("packed", {"micro_batch_size": 2}, None),
    ],
)
def test_sequence_packing_says_why_it_has_no_effect(
    policy: Policy,
    layout: RowLayout,
    sizes: dict[str, Any],
    says: str | None,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agilerl.checks._warned", set())
    update = replace(UpdateConfig(8, MANY, 1, 1e9, balance_tokens=True), **sizes)
    Run(forward=replace(FORWARD, layout=layout), update=update)(policy, objective())
    lines = [r.getMessage() for r in caplog.records if "use_sequence_packing" in r.getMessage()]
    assert len(lines) == (says is not None)
    assert says is None or says in lines[0]


def test_the_reference_is_its_adapter_or_the_bare_base() -> None:
    batch = random_batch()
    for separate in (True, False):
        policy = random_policy(tiny_model().double(), separate_reference=separate)
        actor = policy.frozen_logprobs(batch, "actor", FORWARD)
        reference = policy.frozen_logprobs(batch, "reference" if separate else None, FORWARD)
        delta = (reference - actor)[batch.action_mask]
        metrics, _ = Run(batch)(policy, objective(beta=0.1))
        expected = (delta.exp() - delta - 1).mean().item()
        assert metrics["mean_kl"] == pytest.approx(expected, rel=1e-6)


def test_a_reference_that_adds_nothing_is_run_as_the_bare_base(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a new adapter does: the same numbers to the last bit, without its branches."""
    roles = dict.fromkeys(("actor", "reference"), lora())
    policy = Policy(SharedBase.of(tiny_model()), roles, seed=1)
    run, activate = Run(random_batch()), policy.base.activate
    for trained in (False, True):
        if trained:
            randomise_all(policy)
        expected = policy.frozen_logprobs(run.batch, "reference", FORWARD)
        bare = policy.frozen_logprobs(run.batch, None, FORWARD)
        assert torch.equal(expected, bare) != trained
        seen: list[str | None] = []

        def recorded(slot: str | None, trainable: bool, seen: list[str | None] = seen) -> None:
            seen.append(slot)
            activate(slot, trainable)

        monkeypatch.setattr(policy.base, "activate", recorded)
        run(policy, objective(beta=0.1))
        assert (policy.slots["reference"] in seen) == trained
        assert (None in seen) != trained


def test_a_policy_that_equals_its_reference_has_no_kl_and_no_kl_gradient(policy: Policy) -> None:
    policy.copy_role("actor", "reference")
    with_kl, engine = Run(lr=0.0)(policy, objective(beta=0.5))
    _, without = Run(lr=0.0)(policy, objective())
    assert with_kl["mean_kl"] == pytest.approx(0.0, abs=1e-12)
    assert relative_difference(engine.seen[0], without.seen[0]) < 1e-6


@pytest.mark.parametrize("epochs", [1, 2])
def test_lora_dropout_does_not_move_the_first_ratio(epochs: int) -> None:
    policy = random_policy(tiny_model(), lora(lora_dropout=0.5))
    update = UpdateConfig(MANY, MANY, epochs, 1e9)
    metrics, _ = Run(update=update, lr=0.0)(policy, objective())
    assert metrics["ratio_mean"] == 1.0
    assert metrics["ratio_max"] == 1.0
    assert metrics["clip_fraction"] == 0.0


def test_importance_weights_of_a_sampler_that_is_the_trainer_are_one(policy: Policy) -> None:
    batch = random_batch()
    own = policy.frozen_logprobs(batch, "actor", FORWARD)
    config = objective("cispo", importance_weight_cap=2.0)
    metrics, engine = Run(batch, sampling_logp=own, lr=0.0)(policy, config)
    assert metrics["importance_weight_mean"] == pytest.approx(1.0, abs=1e-9)
    assert metrics["importance_weight_max"] == pytest.approx(1.0, abs=1e-9)
    assert metrics["importance_weight_capped"] == 0.0
    _, plain = Run(batch, lr=0.0)(policy, config)
    assert relative_difference(engine.seen[0], plain.seen[0]) < 1e-9


def test_importance_weights_are_measured_before_the_cap(policy: Policy) -> None:
    batch = random_batch((5,), (1, 1, 1, 1))
    own = policy.frozen_logprobs(batch, "actor", FORWARD)
    at = batch.action_mask.long().argmax(1)
    off = torch.tensor([0.0, math.log(4.0), -math.inf, math.log(0.5)], dtype=torch.float64)
    own[torch.arange(4), at] -= off
    own[2, at[2]] = -math.inf  # a weight of infinity
    metrics, _ = Run(batch, sampling_logp=own)(policy, objective(importance_weight_cap=2.0))
    assert metrics["importance_weight_max"] == pytest.approx(4.0)
    assert metrics["importance_weight_mean"] == pytest.approx((1.0 + 4.0 + 0.0 + 0.5) / 4)
    assert metrics["importance_weight_capped"] == 0.25
    assert metrics["importance_weight_nonfinite"] == 0.25


def test_clip_fraction_entropy_and_norm_are_those_of_the_tokens_trained(policy: Policy) -> None:
    batch = random_batch()
    entropy = policy.logprobs(batch, FORWARD).entropy
    rows = torch.arange(8)[:, None].expand(batch.action_mask.shape)[batch.action_mask]
    values = random_values(batch).clone()
    values[:4] = 0.0
    metrics, engine = Run(batch, values)(policy, objective())
    assert metrics["entropy"] == pytest.approx(entropy[rows >= 4].mean().item(), rel=1e-6)
    norm = torch.stack([g.norm() for g in engine.seen[0].values()]).norm().item()
    assert metrics["grad_norm"] == pytest.approx(norm)
    assert metrics["ratio_mean"] == 1.0


def test_the_update_raises_the_probability_of_what_was_rewarded(policy: Policy) -> None:
    batch = random_batch()
    values = torch.ones(8, 1, dtype=torch.float64).expand(batch.action_mask.shape).clone()
    values[1::2] = -1.0
    before = policy.frozen_logprobs(batch, "actor", FORWARD)
    for loss_type in LOSS_TABLE:
        Run(batch, values, lr=0.05)(policy, objective(loss_type))
    change = (policy.frozen_logprobs(batch, "actor", FORWARD) - before).sum(1)
    assert change[::2].mean() > 0 > change[1::2].mean()


@pytest.mark.parametrize("loss_type", ["grpo", "cispo"])
def test_the_gradient_on_a_float16_base_is_that_on_a_float32_one(loss_type: str) -> None:
    """Also with weights that are small in float16, as those of long batches are."""
    model = tiny_model(dtype=torch.float16)
    found = []
    for base in (model, copy.deepcopy(model).float()):
        roles = dict.fromkeys(("actor", "reference"), lora())
        policy = Policy(SharedBase.of(base), roles, seed=0)
        for number, role in enumerate(policy.roles):
            randomise(policy.parameters(role), seed=number, dtype=torch.float32)
        long = objective(loss_type, reduction="constant", max_output_tokens=131_072)
        metrics, engine = Run()(policy, long)
        assert metrics["skipped_steps"] == 0 and engine.loss_scale == 1.0
        found.append(engine.seen[0])
    assert relative_difference(*found) < 0.02


def test_an_objective_of_ones_own(policy: Policy) -> None:
    """REINFORCE with a penalty on what the policy has become sure of: no ratio, no reference."""

    def loss(logp: torch.Tensor, batch: TrainBatch, weights: torch.Tensor) -> LossTerms:
        assert batch.advantages is not None
        terms = -batch.advantages * logp + 0.1 * logp.exp()
        sums = {"probability": logp.detach().exp()[batch.loss_mask].sum()}
        return weighted_loss(terms, batch.loss_mask, weights, sums)

    batch = random_batch()
    batch = replace(batch, advantages=random_values(batch))
    before = policy.frozen_logprobs(batch, "actor", FORWARD)
    update = UpdateConfig(4, 3, epochs=2, max_grad_norm=1e9, reduction="token")
    engine = RecordingEngine(policy, lr=0.05)
    rng, counter = torch.Generator().manual_seed(0), SkippedSteps()
    metrics = run_update(policy, engine, batch, loss, FORWARD, update, rng, counter).result()
    assert 0.0 < metrics["probability"] < 1.0
    assert len(engine.seen) == 4
    after = policy.frozen_logprobs(batch, "actor", FORWARD)
    assert ((after - before) * batch.advantages * batch.action_mask).sum() > 0
