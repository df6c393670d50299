"""Updates with what is off by default, on a real model in float64."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from rollout_helpers import gradients, random_batch, randomise_all, relative_difference
from update_helpers import FORWARD, MANY, Objective, Run, objective, random_values

from agilerl.llm.config import UpdateConfig
from agilerl.llm.losses import policy_loss, reduction_weights
from agilerl.llm.policy import Policy, scatter_actions


@contextmanager
def forwards_counted(policy: Policy) -> Iterator[dict[str, int]]:
    counts = {"train": 0, "frozen": 0}

    def count(module: torch.nn.Module, args: tuple[torch.Tensor]) -> None:
        counts["train" if torch.is_grad_enabled() else "frozen"] += 1

    hook = policy.base.model.get_input_embeddings().register_forward_pre_hook(count)
    yield counts
    hook.remove()


def sampled(policy: Policy, batch: Any) -> torch.Tensor:
    """Log-probs of a sampler that differs from the trainer."""
    own = policy.frozen_logprobs(batch, "actor", FORWARD)
    rng = torch.Generator().manual_seed(1)
    return own + 0.3 * torch.randn(own.shape, generator=rng, dtype=torch.float64)


OPTIONS: dict[str, dict[str, Any]] = {
    "prompt": {"reduction": "prompt"},
    "sampler": {"importance_anchor": "sampler"},
    "token_mask": {"importance_correction": "token_mask", "importance_floor": 0.8},
    "geometric": {"importance_correction": "geometric_mask", "importance_floor": 0.95},
    "product": {"importance_correction": "sequence_truncate"},
    "dual clip": {"dual_clip": 1.01, "clip_band": (0.99, 1.005)},
    "entropy": {"entropy_coef": 0.05},
    "top entropy": {"top_entropy_quantile": 0.6},
    "several": {
        "top_entropy_quantile": 0.4,
        "entropy_coef": 0.05,
        "reduction": "prompt",
        "importance_anchor": "sampler",
        "beta": 0.1,
    },
}


@pytest.mark.parametrize("name", OPTIONS)
def test_gradient_depends_on_neither_micro_batches_nor_row_order(policy: Policy, name: str) -> None:
    """Two epochs; each option makes a difference."""
    batch = random_batch((9, 5, 6), (6, 1, 4, 3))
    gen = sampled(policy, batch)
    run = Run(batch, sampling_logp=gen, lr=0.02, update=UpdateConfig(MANY, MANY, 2, 1e9))
    plain = objective(importance_weight_cap=1.2)
    loss = replace(plain, **OPTIONS[name])
    randomise_all(policy)
    _, without = run(policy, plain)
    randomise_all(policy)
    metrics, engine = run(policy, loss)
    assert relative_difference(engine.seen[-1], without.seen[-1]) > 1e-4
    assert metrics["ratio_max"] > 1.0

    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(2))
    shuffled = batch.select(order)
    for micro, layout in ((1, "packed"), (5, "padded")):
        other = Run(
            shuffled,
            random_values(batch)[order],
            sampling_logp=gen[order],
            lr=0.02,
            update=UpdateConfig(MANY, micro, 2, 1e9),
            forward=replace(FORWARD, layout=layout),
        )
        randomise_all(policy)
        _, found = other(policy, loss)
        for mine, theirs in zip(found.seen, engine.seen, strict=True):
            assert relative_difference(mine, theirs) < 1e-9


def passes(policy: Policy, loss: Objective, batch_size: int = 4, epochs: int = 1) -> dict[str, int]:
    """Forwards of an update of eight rows."""
    batch = random_batch()
    run = Run(
        batch,
        sampling_logp=sampled(policy, batch),
        update=UpdateConfig(batch_size, MANY, epochs, 1e9),
        forward=replace(FORWARD, layout="padded"),
    )
    with forwards_counted(policy) as counts:
        run(policy, loss)
    return counts


@pytest.mark.parametrize(("batch_size", "epochs"), [(4, 1), (2, 1), (4, 3), (MANY, 2)])
def test_against_the_sampler_no_old_log_probs_are_computed(
    policy: Policy, batch_size: int, epochs: int
) -> None:
    steps = epochs * max(8 // batch_size, 1)
    mini_batches = steps // epochs
    old = passes(policy, objective("cispo"), batch_size, epochs)
    assert old == {"train": steps, "frozen": mini_batches - 1}
    loss = objective("cispo", importance_anchor="sampler")
    assert passes(policy, loss, batch_size, epochs) == {"train": steps, "frozen": 0}


def test_what_each_option_runs(policy: Policy) -> None:
    """Two mini-batches, two epochs; the second needs a pass for its old log-probs as it is."""
    for changes, frozen in (
        ({}, 1),
        ({"dual_clip": 3.0}, 1),
        ({"entropy_coef": 0.1}, 1),
        ({"reduction": "prompt"}, 1),
        ({"importance_correction": "geometric_mask"}, 1),
        ({"top_entropy_quantile": 0.8}, 2),
        ({"top_entropy_quantile": 0.8, "importance_anchor": "sampler"}, 2),
    ):
        counts = passes(policy, objective(**changes), epochs=2)
        assert counts == {"train": 4, "frozen": frozen}, changes


def test_the_entropy_bonus_against_a_plain_implementation(policy: Policy) -> None:
    batch = random_batch()
    values, mask = random_values(batch), batch.action_mask
    loss = objective("cispo", entropy_coef=0.3, beta=0.0)
    _, engine = Run(batch, values, lr=0.0, update=UpdateConfig(MANY, 3, 1, 1e9))(policy, loss)

    policy.set_role("actor")
    inside = torch.arange(batch.token_ids.shape[1]) < batch.lengths[:, None]
    logits = policy.base.model(batch.token_ids, attention_mask=inside.long()).logits[:, :-1]
    log_p = (logits / FORWARD.temperature).log_softmax(-1)
    logp = log_p.gather(2, batch.token_ids[:, 1:, None]).squeeze(2)
    entropy = -(log_p.exp() * log_p).sum(2)
    expected = ((-values * logp - 0.3 * entropy) * mask).sum() / mask.sum()
    assert relative_difference(engine.seen[0], gradients(policy, expected)) < 1e-9


def test_rows_without_advantage_are_run_for_their_entropy(policy: Policy) -> None:
    batch = random_batch()
    nothing = torch.zeros(batch.action_mask.shape, dtype=torch.float64)
    metrics, _ = Run(batch, nothing)(policy, objective(entropy_coef=0.3))
    assert metrics["grad_norm"] > 0
    before = metrics["entropy"]
    Run(batch, nothing, lr=1.0)(policy, objective(entropy_coef=0.3))
    assert Run(batch, nothing)(policy, objective(entropy_coef=0.3))[0]["entropy"] > before
    assert Run(batch, nothing)(policy, objective())[0]["grad_norm"] == 0.0


@pytest.mark.parametrize("batch_size", [MANY, 4])
@pytest.mark.parametrize("beta", [0.0, 1e-12])
def test_only_tokens_with_most_entropy_are_trained(
    policy: Policy, batch_size: int, beta: float
) -> None:
    """Those of each mini-batch, judged before the update: the same tokens in every epoch.

    Rows without an advantage count in the quantile, run for a KL penalty or not.
    """
    batch = random_batch()
    values, mask = random_values(batch).clone(), batch.action_mask
    idle = torch.tensor([False, True, False, True, False, False, True, False])
    values[idle] = 0.0
    loss = objective("cispo", top_entropy_quantile=0.7, clip_band=(0.0, 100.0), beta=beta)
    run = Run(batch, values, lr=0.0, update=UpdateConfig(batch_size, 3, 2, 1e9))
    metrics, engine = run(policy, loss)
    made = policy.logprobs(batch, FORWARD)
    entropy, logp = (scatter_actions(part, mask) for part in (made.entropy, made.logp))
    parts = [torch.arange(8)] if batch_size == MANY else [torch.arange(4), torch.arange(4, 8)]
    expected = []
    kept = 0
    for rows in parts:
        threshold = torch.quantile(entropy[rows][mask[rows]], 0.7)
        chosen = mask[rows] & (entropy[rows] >= threshold)
        kept += int(chosen[~idle[rows] | (beta > 0)].sum())
        terms = policy_loss(
            logp[rows],
            values[rows],
            mask[rows],
            reduction_weights(mask[rows], "token"),
            objective("cispo", clip_band=(0.0, 100.0)),
            top_entropy_mask=chosen,
        )
        parameters = list(policy.parameters().values())
        grads = torch.autograd.grad(terms.loss, parameters, retain_graph=True)
        expected.append(dict(zip(policy.parameters(), grads, strict=True)))
    run_tokens = mask[~idle | (beta > 0)].sum()
    assert metrics["top_entropy_share"] == pytest.approx(kept / int(run_tokens))
    for epoch in range(2):
        seen = engine.seen[epoch * len(parts) : (epoch + 1) * len(parts)]
        matched = [min(relative_difference(mine, theirs) for mine in seen) for theirs in expected]
        assert max(matched) < 1e-6


def test_a_ratio_against_the_sampler_is_off_one_from_the_start(policy: Policy) -> None:
    batch = random_batch()
    own = policy.frozen_logprobs(batch, "actor", FORWARD)
    loss = objective(importance_anchor="sampler")
    same, _ = Run(batch, sampling_logp=own, lr=0.0)(policy, loss)
    assert same["ratio_mean"] == pytest.approx(1.0) and same["sampler_kl"] < 1e-12
    other, _ = Run(batch, sampling_logp=own - 0.5, lr=0.0)(policy, loss)
    assert other["ratio_mean"] == pytest.approx(torch.tensor(0.5).exp().item())
    assert other["clip_fraction"] == 1.0
    assert not any(name.startswith("importance_weight") for name in other)


@pytest.mark.parametrize(
    ("changes", "there"),
    [
        ({}, set()),
        ({"entropy_coef": 0.1}, {"entropy"}),
        ({"top_entropy_quantile": 0.5}, {"top_entropy_mask"}),
        ({"reduction": "prompt"}, {"group_ids", "sequence_weights"}),
    ],
)
def test_what_is_off_has_no_tensor(
    policy: Policy, changes: dict[str, Any], there: set[str]
) -> None:
    optional = {"entropy", "top_entropy_mask", "group_ids", "sequence_weights"}
    loss, seen = objective(**changes), set()

    class Noting(Objective):
        def __call__(self, logp: torch.Tensor, batch: Any, weights: torch.Tensor) -> Any:
            seen.update(name for name in optional if getattr(batch, name) is not None)
            return super().__call__(logp, batch, weights)

    Run(update=UpdateConfig(4, 3, 2, 1e9))(policy, Noting(**vars(loss)))
    assert seen == there
