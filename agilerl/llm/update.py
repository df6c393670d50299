"""From a batch with advantages to optimizer steps on an adapter."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
from dataclasses import replace

import torch

from agilerl.checks import inform_once, warn_once
from agilerl.llm.batch import TrainBatch
from agilerl.llm.config import ForwardConfig, Reduction, RowLayout, UpdateConfig
from agilerl.llm.engine import Engine
from agilerl.llm.forward.activation_offload import activations_on_host, may_offload
from agilerl.llm.forward.liger import liger_layers
from agilerl.llm.frozen_passes import with_frozen_passes
from agilerl.llm.losses import LossFunction, reduction_weights
from agilerl.llm.metrics import UpdateMetrics
from agilerl.llm.plan import MiniBatch, plan_mini_batches
from agilerl.llm.policy import Policy, scatter_actions
from agilerl.llm.step_results import SkippedSteps, StepResult

logger = logging.getLogger(__name__)


def run_update(
    policy: Policy,
    engine: Engine,
    batch: TrainBatch,
    loss_function: LossFunction,
    forward: ForwardConfig,
    update: UpdateConfig,
    rng: torch.Generator,
    skipped_steps: SkippedSteps,
) -> UpdateMetrics:
    """Run the epochs of mini-batches over a batch.

    With several ranks each brings its own rows, and all of them step together: what a mean divides
    by, whether a step is taken, and the metrics returned are those of all ranks.

    Args:
        policy: Whose adapter is trained.
        engine: Accumulates gradients and steps.
        batch: The rows with their ``advantages`` and ``loss_mask``; the log-probs of the reference
            and of the policy before the update are added here, where they are needed.
        loss_function: The objective.
        forward: How log-probs are computed.
        update: Sizes, epochs, gradient clipping.
        rng: Orders the prompts.
        skipped_steps: Counted over calls.

    Raises:
        NonFiniteUpdateError: After three steps in a row with a non-finite loss or gradient.
    """
    # What is not trained does not go through the head.
    weights = _sequence_weights(batch, update.reduction)
    batch = replace(batch, sequence_weights=weights, action_mask=batch.loss_mask)
    layout, padded_by = policy.row_layout(forward), policy.padding_reason(forward)
    several = engine.ranks.world_size > 1
    if update.balance_tokens and (reason := _packing_obstacle(layout, padded_by, update, several)):
        warn_once(logger, "use_sequence_packing has no effect: %s", reason)
    elif padded_by is not None:
        inform_once(logger, "rows are padded, and prompts run once per completion: %s", padded_by)
    batch, plan = plan_mini_batches(
        batch,
        _active_rows(batch, update),
        update,
        engine.ranks,
        rng,
        lockstep=engine.lockstep,
        layout=layout,
    )
    kernels = liger_layers(policy.base) if forward.fused_layers else contextlib.nullcontext()
    with kernels:
        batch = with_frozen_passes(policy, engine.ranks, batch, plan, forward, update)
        updater = _Updater(policy, engine, batch, loss_function, forward, update)
        with policy.as_role(update.role):
            for step, mini_batch in enumerate(plan * update.epochs):
                try:
                    result = updater.step(mini_batch, first=step == 0)
                except BaseException:
                    engine.discard()
                    raise
                updater.metrics.add_step(result.outcome, result.loss, result.grad_norm)
                skipped_steps.count(result, engine.ranks.rank)
    updater.metrics.reduce(engine.ranks)
    return updater.metrics


def _packing_obstacle(
    layout: RowLayout, padded_by: str | None, update: UpdateConfig, several: bool
) -> str | None:
    """Why neither micro-batches nor several ranks get about equal numbers of tokens, or None."""
    if layout != "packed":
        return _why_not_packed(layout, padded_by)
    if several:
        return None
    if update.micro_batch_tokens is not None:
        return "micro_batch_tokens decides how many tokens a micro-batch has"
    if update.micro_batch_size >= update.batch_size:
        if update.micro_batch_size_is_auto:
            return (
                f"micro_batch_size_per_gpu='auto' chose {update.micro_batch_size}, which is all "
                "sequences of an optimizer step; a number below batch_size would cut them"
            )
        return (
            "all sequences of an optimizer step are one micro-batch; set micro_batch_size_per_gpu "
            "below batch_size"
        )
    return None


def _why_not_packed(layout: RowLayout, padded_by: str | None) -> str:
    if padded_by is not None:
        return f"rows are padded, because {padded_by}"
    found = "rows are padded"
    if layout == "shared_prompts":
        found = "rows of a prompt share it, with copies of its keys and values"
    return (
        f'{found}. Packing takes attn_implementation="sdpa", and on a GPU float16 or bfloat16 and '
        "no sliding window; what a model lacks is logged at level INFO when it is probed, at the "
        "first update of the first agent on it"
    )


def _sequence_weights(batch: TrainBatch, reduction: Reduction) -> torch.Tensor | None:
    """``(B,)`` share of its trajectory's (group's) tokens in each row; None: 1 each."""
    unit = batch.group_ids if reduction == "prompt" else batch.trajectory_ids
    if unit is None:
        return None
    tokens = batch.counted.sum(1).double()
    total = torch.zeros_like(tokens).index_add(0, unit, tokens)
    return tokens / total[unit].clamp(min=1)


def _loss_scale(weights: torch.Tensor, dtype: torch.dtype) -> float:
    """A power of two by which losses are multiplied in backward, against underflow.

    A token's gradient is proportional to its weight, 1 / (B·S) or so, and float16 has no numbers
    below 6e-8. Scaled, the mean weight is in [1, 2). Gradients are unscaled before they are summed
    over ranks, so each rank chooses by its own rows.

    Args:
        weights: ``(n, S)`` of the tokens of a mini-batch; 0 for those that are not trained.
        dtype: The base's.
    """
    trained = weights[weights > 0]
    if dtype != torch.float16 or not len(trained):
        return 1.0
    return float(2.0 ** -math.floor(math.log2(trained.mean())))


def _active_rows(batch: TrainBatch, update: UpdateConfig) -> torch.Tensor:
    """``(B,)`` bool: rows with a gradient."""
    assert batch.advantages is not None
    trained = batch.loss_mask
    return (trained & (batch.advantages != 0) if update.skip_zero_advantages else trained).any(1)


class _Updater:
    """Takes the optimizer steps of one update."""

    def __init__(
        self,
        policy: Policy,
        engine: Engine,
        batch: TrainBatch,
        loss_function: LossFunction,
        forward: ForwardConfig,
        update: UpdateConfig,
    ) -> None:
        self.policy, self.engine, self.batch = policy, engine, batch
        self.loss_function, self.forward, self.update = loss_function, forward, update
        self.metrics = UpdateMetrics()
        self._offloads = forward.offload_activations and may_offload(policy.device)

    def step(self, mini_batch: MiniBatch, *, first: bool) -> StepResult:
        """Take one step; every decision is made by all ranks together.

        Args:
            mini_batch: What is trained.
            first: Whether the weights are those before the update.
        """
        if not mini_batch.has_gradient:
            return StepResult("no_gradient")
        ranks, rows = self.engine.ranks, mini_batch.rows
        row_losses = self._backward(mini_batch, first)
        bad = ~row_losses.isfinite()
        totals = torch.stack([bad.sum().double(), row_losses.sum().double()])
        bad_rows, loss = ranks.sum(totals).tolist()
        if bad_rows:
            self.engine.discard()
            return StepResult("skipped", bad_rows=self._as_given(rows[bad]))
        norm = self.engine.step(self.update.max_grad_norm)
        if not math.isfinite(norm):
            return StepResult("skipped", bad_rows=self._as_given(rows))
        return StepResult("taken", loss, norm)

    def _as_given(self, rows: torch.Tensor) -> tuple[list[int], ...]:
        """All ranks' rows, by the rank whose batch they were given in and their places there."""
        batch, ranks = self.batch, self.engine.ranks
        given = batch.row_as_given[rows].tolist()
        origins = [ranks.rank] * len(given)
        if batch.origin_rank is not None:
            origins = batch.origin_rank[rows].tolist()
        own = list(zip(origins, given, strict=True))
        by_rank: tuple[list[int], ...] = tuple([] for _ in range(ranks.world_size))
        for rank, row in itertools.chain.from_iterable(ranks.gather(own)):
            by_rank[rank].append(row)
        return by_rank

    def _backward(self, mini_batch: MiniBatch, first: bool) -> torch.Tensor:
        """Accumulate the gradient of this rank's rows; ``(n,)``, what each adds to the loss."""
        batch, rows = self.batch, mini_batch.rows
        weights = reduction_weights(
            batch.loss_mask[rows],
            self.update.reduction,
            self.update.max_output_tokens,
            None if batch.sequence_weights is None else batch.sequence_weights[rows],
            mini_batch.counts,
        )
        self.engine.loss_scale = _loss_scale(weights, self.policy.base.model.dtype)
        sizes = [len(part) for part in mini_batch.micro_batches]
        row_losses = [
            self._micro_batch(part, part_weights, first)
            for part, part_weights in zip(
                mini_batch.micro_batches, weights.split(sizes), strict=True
            )
        ]
        for _ in range(mini_batch.dummy_micro_batches):
            self._dummy_micro_batch()
        return torch.cat([weights.new_zeros(0), *row_losses])

    def _dummy_micro_batch(self) -> None:
        """Run forward and backward with weight zero: all ranks must run equally many (ZeRO 3)."""
        batch = self.batch.select(self.batch.shortest_row)
        self.engine.backward(self.policy.logprobs(batch, self.forward).logp.sum() * 0.0)

    def _micro_batch(self, rows: torch.Tensor, weights: torch.Tensor, first: bool) -> torch.Tensor:
        """Forward and backward of some rows; returns each one's contribution to the loss."""
        batch, needs_entropy = self.batch.select(rows), self.update.needs_entropy
        with self._offloading():
            logprobs = self.policy.logprobs(batch, self.forward, entropy_gradient=needs_entropy)
        logp = scatter_actions(logprobs.logp, batch.action_mask)
        if self.update.needs_old:
            if first:
                batch = replace(batch, old_logp=logp.detach())
                self._keep_old_logp(rows, logp.detach())
            batch = replace(batch, sampling_logp=_sampling_logp(batch))
        if needs_entropy:
            entropy = scatter_actions(logprobs.entropy, batch.action_mask)
            batch = replace(batch, entropy=entropy)
        terms = self.loss_function(logp, batch, weights[:, : logp.shape[1]])
        self.engine.backward(terms.loss)
        if terms.per_row.isfinite().all():  # a skipped step must not turn every mean into nan
            self.metrics.add(terms, logprobs.entropy.detach())
        return terms.per_row

    def _offloading(self) -> contextlib.AbstractContextManager[object]:
        if not self._offloads:
            return contextlib.nullcontext()
        return activations_on_host(self.policy.model, self.policy.device)

    def _keep_old_logp(self, rows: torch.Tensor, logp: torch.Tensor) -> None:
        """Store the log-probs before the update for later epochs."""
        if self.update.epochs == 1:
            return
        if self.batch.old_logp is None:
            nothing_yet = logp.new_zeros(self.batch.action_mask.shape)
            self.batch = replace(self.batch, old_logp=nothing_yet)
        assert self.batch.old_logp is not None
        # What ran no row before the update, because all are in the first step, has no dtype yet.
        old_logp = self.batch.old_logp.to(logp.dtype)
        old_logp[rows, : logp.shape[1]] = logp
        self.batch = replace(self.batch, old_logp=old_logp)


def _sampling_logp(batch: TrainBatch) -> torch.Tensor | None:
    """``(B, S)``; the trainer's own for rows without any, which gives them a weight of 1."""
    if batch.sampling_logp is None:
        return None
    assert batch.has_sampling_logp is not None and batch.old_logp is not None
    return torch.where(batch.has_sampling_logp[:, None], batch.sampling_logp, batch.old_logp)
