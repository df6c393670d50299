"""From a batch with advantages to optimizer steps on the actor's adapter."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import torch

from agilerl.llm.advantages import Advantages
from agilerl.llm.batch import Batch
from agilerl.llm.config import ForwardConfig, LossConfig, UpdateConfig
from agilerl.llm.engine import Engine
from agilerl.llm.losses import policy_loss, reduction_weights
from agilerl.llm.metrics import UpdateMetrics
from agilerl.llm.policy import Policy, scatter_actions

logger = logging.getLogger(__name__)

MAX_BAD_STEPS = 3


class NonFiniteUpdateError(RuntimeError):
    """Several optimizer steps in a row had a non-finite loss or gradient."""


@dataclass
class Health:
    """What is remembered between updates about steps that had to be skipped."""

    bad_steps: int = 0
    """Skipped in a row, over calls."""
    last_checkpoint: str | None = None


@dataclass(frozen=True)
class Rollouts:
    """All that one update learns from."""

    batch: Batch
    advantages: Advantages
    sampling_logp: torch.Tensor | None = None
    """``(B, S)`` as the sampler reported; None: no correction."""
    trajectory_ids: torch.Tensor | None = None
    """``(B,)`` long: the trajectory of each row; None: one row each."""

    def row_shares(self) -> torch.Tensor | None:
        """``(B,)`` part of its trajectory's trained tokens in each row; None: all of them."""
        if self.trajectory_ids is None:
            return None
        tokens = self.advantages.mask.sum(1).double()
        total = torch.zeros_like(tokens).index_add(0, self.trajectory_ids, tokens)
        return tokens / total[self.trajectory_ids].clamp(min=1)


def run_update(
    policy: Policy,
    engine: Engine,
    rollouts: Rollouts,
    loss: LossConfig,
    forward: ForwardConfig,
    update: UpdateConfig,
    rng: torch.Generator,
    health: Health,
) -> UpdateMetrics:
    """Run the epochs of mini-batches over a batch.

    Args:
        policy: Whose actor is trained.
        engine: Who steps.
        rollouts: The batch and its advantages.
        loss: The objective.
        forward: How log-probs are computed.
        update: Mini-batch and micro-batch sizes, epochs, gradient clipping.
        rng: Orders the mini-batches.
        health: Counts skipped steps over calls.

    Raises:
        NonFiniteUpdateError: After three steps in a row with a non-finite loss or gradient.
    """
    batch = rollouts.batch
    metrics = UpdateMetrics()
    ref_logp = old_logp = None
    if loss.beta != 0.0:
        ref_role = "reference" if "reference" in policy.slots else None
        ref_logp = policy.frozen_logprobs(batch, ref_role, forward)
    mini_batches = [
        rows for _ in range(update.epochs) for rows in _mini_batches(batch, update.batch_size, rng)
    ]
    active = _active_rows(rollouts, has_kl=ref_logp is not None)
    # At the first step the log-probs of the rollout are the current ones.
    later = torch.cat(mini_batches[1:]).unique() if len(mini_batches) > 1 else None
    if later is not None:
        old_logp = policy.frozen_logprobs(batch, "actor", forward, later[active[later]])

    shares = rollouts.row_shares()
    policy.activate("actor")
    for number, rows in enumerate(mini_batches):
        old = old_logp if number > 0 else None
        step = _Step(
            policy, engine, rollouts, active, loss, forward, update, old, ref_logp, shares, metrics
        )
        try:
            bad_rows = step.run(rows)
        except BaseException:
            engine.discard()
            raise
        if bad_rows is not None:
            _watch(bad_rows, metrics, health)
    return metrics


def _active_rows(rollouts: Rollouts, *, has_kl: bool) -> torch.Tensor:
    """``(B,)`` bool: rows with a gradient. Without advantage and KL it is exactly zero."""
    trained = rollouts.advantages.mask
    return (trained if has_kl else trained & (rollouts.advantages.values != 0)).any(1)


@dataclass(frozen=True)
class _Step:
    """One optimizer step over a mini-batch."""

    policy: Policy
    engine: Engine
    rollouts: Rollouts
    active: torch.Tensor
    loss: LossConfig
    forward: ForwardConfig
    update: UpdateConfig
    old_logp: torch.Tensor | None
    ref_logp: torch.Tensor | None
    row_shares: torch.Tensor | None
    metrics: UpdateMetrics

    def run(self, rows: torch.Tensor) -> list[int] | None:
        """Take the step.

        Returns:
            The rows at fault if it was skipped because loss or gradient is not finite, else none;
            None if there was nothing to learn from.
        """
        mask = self.rollouts.advantages.mask[rows]
        shares = None if self.row_shares is None else self.row_shares[rows]
        weights = reduction_weights(mask, self.loss.reduction, self.loss.max_output_tokens, shares)
        chosen = self.active[rows].nonzero().squeeze(1)
        if chosen.numel() == 0:
            self.metrics.losses.append(0.0)
            return None
        per_row = torch.cat(
            [
                self._micro_batch(rows[part], weights[part])
                for part in chosen.split(self.update.micro_batch_size)
            ]
        )
        bad = ~per_row.isfinite()
        if bad.any():
            self.engine.discard()
            return rows[chosen][bad].tolist()
        norm = self.engine.step(self.update.max_grad_norm)
        if not math.isfinite(norm):
            return rows[chosen].tolist()
        self.metrics.losses.append(float(per_row.sum()))
        self.metrics.grad_norms.append(norm)
        return []

    def _micro_batch(self, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Forward and backward of some rows; returns each one's contribution to the loss."""
        batch = self.rollouts.batch.select(rows)
        width = batch.action_mask.shape[1]

        def mine(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor[rows, :width]

        mask = self.rollouts.advantages.mask[rows, :width]
        logprobs = self.policy.logprobs(batch, self.forward)
        terms = policy_loss(
            scatter_actions(logprobs.logp, batch.action_mask),
            self.rollouts.advantages.values[rows, :width],
            mask,
            weights[:, :width],
            self.loss,
            old_logp=mine(self.old_logp),
            ref_logp=mine(self.ref_logp),
            sampling_logp=mine(self.rollouts.sampling_logp),
            turn_ids=batch.turn_ids,
        )
        self.engine.backward(terms.loss)
        if terms.per_row.isfinite().all():  # a skipped step must not turn every mean into nan
            trained = mask[batch.action_mask]
            cap = self.loss.importance_weight_cap
            self.metrics.add(terms, logprobs.entropy[trained], mask, self.loss.clip_band, cap)
        return terms.per_row


def _mini_batches(batch: Batch, size: int, rng: torch.Generator) -> list[torch.Tensor]:
    """Row indices of each optimizer step: prompts in random order, each one's rows side by side."""
    if len(batch) <= size:
        return [torch.arange(len(batch), device=batch.token_ids.device)]
    prompts = int(batch.prompt_index.max()) + 1
    rank = torch.randperm(prompts, generator=rng).to(batch.prompt_index.device)
    return list(torch.argsort(rank[batch.prompt_index], stable=True).split(size))


def _watch(bad_rows: list[int], metrics: UpdateMetrics, health: Health) -> None:
    """Count a skipped step; raise when they keep coming."""
    if not bad_rows:
        health.bad_steps = 0
        return
    health.bad_steps += 1
    metrics.skipped_steps += 1
    listed = f"rows {bad_rows[:16]}{' ...' if len(bad_rows) > 16 else ''} of the batch"
    logger.warning("optimizer step skipped: the loss or its gradient is not finite (%s)", listed)
    if health.bad_steps >= MAX_BAD_STEPS:
        saved = health.last_checkpoint or "none was written yet"
        raise NonFiniteUpdateError(
            f"{health.bad_steps} optimizer steps in a row had a non-finite loss or gradient, last "
            f"on {listed}. Weights are those before the first; last good checkpoint: {saved}. "
            "Lower lr or max_grad_norm, or check the rewards."
        )
