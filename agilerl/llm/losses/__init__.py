"""From log-probs to the loss: objectives, importance ratios, reductions, entropy.

Functions of tensors only: no agent, no device, no configuration object but the frozen
:class:`~agilerl.llm.config.LossConfig`. docs/losses.md has the formulas.
"""

from agilerl.llm.losses.entropy import quantile_over_ranks, top_entropy_mask
from agilerl.llm.losses.importance import (
    CORRECTION_TABLE,
    CorrectionSpec,
    SamplerCorrection,
    pooled_log_ratio,
    sampler_correction,
)
from agilerl.llm.losses.objectives import (
    LOSS_TABLE,
    LossSpec,
    clip_band,
    k3,
    policy_loss,
    policy_objective,
)
from agilerl.llm.losses.reductions import reduction_counts, reduction_weights
from agilerl.llm.losses.terms import LossFunction, LossTerms, weighted_loss

__all__ = [
    "CORRECTION_TABLE",
    "LOSS_TABLE",
    "CorrectionSpec",
    "LossFunction",
    "LossSpec",
    "LossTerms",
    "SamplerCorrection",
    "clip_band",
    "k3",
    "policy_loss",
    "policy_objective",
    "pooled_log_ratio",
    "quantile_over_ranks",
    "reduction_counts",
    "reduction_weights",
    "sampler_correction",
    "top_entropy_mask",
    "weighted_loss",
]
