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
from agilerl.llm.plan import MiniBatch, plan_mini_batches
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

    With several ranks each brings its own rows, and all of them step together: what a mean divides
    by, whether a step is taken, and the metrics returned are those of all ranks.

    Args:
        policy: Whose actor is trained.
        engine: Who steps.
        rollouts: The batch and its advantages.
        loss: The objective.
        forward: How log-probs are computed.
        update: Mini-batch and micro-batch sizes (in rows of this rank), epochs, gradient clipping.
        rng: Orders the prompts.
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
    active = _active_rows(rollouts, has_kl=ref_logp is not None)
    shares = rollouts.row_shares()
    mini_batches = plan_mini_batches(
        batch,
        rollouts.advantages.mask,
        active,
        shares,
        rollouts.trajectory_ids,
        update,
        engine,
        rng,
    )
    if len(mini_batches) > 1:
        # At the first step the log-probs of the rollout are the current ones.
        later = torch.cat([mini.active for mini in mini_batches[1:]]).unique()
        old_logp = policy.frozen_logprobs(batch, "actor", forward, later)

    with policy.as_role("actor"):
        for number, mini in enumerate(mini_batches):
            old = old_logp if number > 0 else None
            step = _Step(
                policy, engine, rollouts, loss, forward, update, old, ref_logp, shares, metrics
            )
            try:
                rows_at_fault = step.run(mini)
            except BaseException:
                engine.discard()
                raise
            if rows_at_fault is not None:
                _watch(rows_at_fault, engine.ranks.rank, metrics, health)
    metrics.reduce(engine.ranks)
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
    loss: LossConfig
    forward: ForwardConfig
    update: UpdateConfig
    old_logp: torch.Tensor | None
    ref_logp: torch.Tensor | None
    row_shares: torch.Tensor | None
    metrics: UpdateMetrics

    def run(self, mini: MiniBatch) -> list[list[int]] | None:
        """Take the step; every decision is made by all ranks together.

        Returns:
            Each rank's rows at fault if the step was skipped because loss or gradient is not
            finite, else none; None if no rank has anything to learn from.
        """
        if not mini.has_gradient:
            self.metrics.losses.append(0.0)
            return None
        per_row = self._backward(mini)
        bad = ~per_row.isfinite()
        verdict = torch.stack([bad.sum().double(), per_row.sum().double()])
        bad_rows, loss = self.engine.ranks.sum(verdict).tolist()
        if bad_rows:
            self.engine.discard()
            return self.engine.ranks.gather(mini.active[bad].tolist())
        norm = self.engine.step(self.update.max_grad_norm)
        if not math.isfinite(norm):
            return self.engine.ranks.gather(mini.active.tolist())
        self.metrics.losses.append(loss)
        self.metrics.grad_norms.append(norm)
        return []

    def _backward(self, mini: MiniBatch) -> torch.Tensor:
        """Accumulate the gradient of this rank's rows; ``(a,)``, what each adds to the loss."""
        weights = reduction_weights(
            self.rollouts.advantages.mask[mini.active],
            self.loss.reduction,
            self.loss.max_output_tokens,
            None if self.row_shares is None else self.row_shares[mini.active],
            mini.counts,
        )
        size = self.update.micro_batch_size
        parts = [
            self._micro_batch(mini.active[start : start + size], weights[start : start + size])
            for start in range(0, len(mini.active), size)
        ]
        for _ in range(mini.weightless):
            self._weightless()
        return torch.cat(parts) if parts else weights.new_zeros(0)

    def _weightless(self) -> None:
        """A forward and backward that add nothing, for ranks that must run equally many."""
        batch = self.rollouts.batch.select(torch.zeros(1, dtype=torch.long))
        self.engine.backward(self.policy.logprobs(batch, self.forward).logp.sum() * 0.0)

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


def _watch(
    rows_at_fault: list[list[int]], rank: int, metrics: UpdateMetrics, health: Health
) -> None:
    """Count a skipped step; raise when they keep coming."""
    if not rows_at_fault:
        health.bad_steps = 0
        return
    health.bad_steps += 1
    metrics.skipped_steps += 1
    listed = _listed(rows_at_fault)
    if rank == 0:
        logger.warning(
            "optimizer step skipped: the loss or its gradient is not finite (%s)", listed
        )
    if health.bad_steps >= MAX_BAD_STEPS:
        saved = health.last_checkpoint or "none was written yet"
        raise NonFiniteUpdateError(
            f"{health.bad_steps} optimizer steps in a row had a non-finite loss or gradient, last "
            f"on {listed}. Weights are those before the first; last good checkpoint: {saved}. "
            "Lower lr or max_grad_norm, or check the rewards."
        )


def _listed(rows_at_fault: list[list[int]]) -> str:
    """Rows by rank, as a message names them."""
    several = len(rows_at_fault) > 1
    return ", ".join(
        f"rows {rows[:16]}{' ...' if len(rows) > 16 else ''} of "
        + (f"rank {rank}'s batch" if several else "the batch")
        for rank, rows in enumerate(rows_at_fault)
        if rows
    )
