"""What is computed of a batch without gradients before it is trained, where it is needed."""

from __future__ import annotations

from dataclasses import replace

import torch

from agilerl.distributed import Ranks
from agilerl.llm.adapters import adds_nothing
from agilerl.llm.batch import TrainBatch
from agilerl.llm.config import ForwardConfig, UpdateConfig
from agilerl.llm.losses import top_entropy_mask
from agilerl.llm.plan import MiniBatch
from agilerl.llm.policy import Policy


def with_frozen_passes(
    policy: Policy,
    ranks: Ranks,
    batch: TrainBatch,
    plan: list[MiniBatch],
    forward: ForwardConfig,
    update: UpdateConfig,
) -> TrainBatch:
    """The batch with what the loss reads of the reference and of the policy before the update.

    Args:
        policy: Whose adapters are run.
        ranks: The processes that train together.
        batch: The rows.
        plan: The optimizer steps of an epoch, whose micro-batches every pass runs.
        forward: How log-probs are computed.
        update: Which of them are needed.

    Returns:
        The batch with ``ref_logp``, ``old_logp`` and ``top_entropy_mask``, where they are.
    """
    every = [rows for mini in plan for rows in mini.micro_batches]
    if update.needs_reference:
        reference: str | None = "reference"
        if reference not in policy.slots or adds_nothing(policy.parameters(reference)):
            reference = None
        batch = replace(batch, ref_logp=policy.frozen_logprobs(batch, reference, forward, every))
    # The first mini-batch is trained before anything has changed: its forward gives them.
    later = [rows for mini in plan[1:] for rows in mini.micro_batches]
    if update.top_entropy_quantile is not None:
        entropy = torch.zeros(batch.action_mask.shape, device=batch.device)
        # All tokens count in the quantile, also of rows that have no advantage.
        every += [rows for mini in plan for rows in mini.without_gradient]
        logp = policy.frozen_logprobs(batch, update.role, forward, every, entropy_out=entropy)
        mask = torch.zeros_like(batch.loss_mask)
        for rows in (mini.trained_rows for mini in plan):
            chosen = entropy[rows], batch.loss_mask[rows]
            mask[rows] = top_entropy_mask(*chosen, update.top_entropy_quantile, ranks)
        batch = replace(batch, top_entropy_mask=mask, old_logp=logp if update.needs_old else None)
    elif update.needs_old and len(plan) > 1:
        batch = replace(batch, old_logp=policy.frozen_logprobs(batch, update.role, forward, later))
    return batch
