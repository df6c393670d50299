"""Importance ratios between policies, and the correction for a sampler that is not the trainer.

Sources: ``"token_truncate"`` https://fengyao.notion.site/off-policy-rl, ``"token_mask"`` (IcePop)
https://arxiv.org/abs/2510.18855, the others
https://yingru.notion.site/When-Speed-Kills-Stability-Demystifying-RL-Collapse-from-the-Training-Inference-Mismatch-271211a558b7808d8b12d403fd15edda
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from agilerl.llm.config import ImportanceCorrection, RatioLevel


def pooled_log_ratio(
    log_ratio: torch.Tensor,
    mask: torch.Tensor,
    level: RatioLevel,
    turn_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """Mean log-ratio over each unit's action tokens, scattered back to its tokens.

    A mean, not a sum: a product over tokens explodes or vanishes with length.

    Args:
        log_ratio: ``(B, S)``, 0 outside ``mask``.
        mask: ``(B, S)`` bool.
        level: ``"token"`` returns ``log_ratio`` as it is.
        turn_ids: ``(B, S)``, needed for ``"turn"``.
    """
    if level == "token":
        return log_ratio
    if level == "trajectory":
        mean = log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
        return torch.where(mask, mean, 0.0)
    if turn_ids is None:
        raise ValueError('importance_sampling_level "turn" needs turn_ids in learn()')
    index = torch.where(mask, turn_ids, 0)
    turns = int(index.max()) + 1 if index.numel() else 1
    zeros = log_ratio.new_zeros(log_ratio.shape[0], turns)
    total = zeros.scatter_add(1, index, log_ratio)
    count = zeros.scatter_add(1, index, mask.to(log_ratio.dtype))
    return torch.where(mask, (total / count.clamp(min=1)).gather(1, index), 0.0)


@dataclass(frozen=True)
class CorrectionSpec:
    """Definition of an ``importance_correction``."""

    weight: Literal["token", "sequence"]
    """What a token's term is multiplied by: its own weight, or the product over its sequence."""
    judged: Literal["weight", "geometric_mean"]
    """What the bounds are of: that weight, or the geometric mean of the sequence's weights."""
    masks: bool
    """Whether what is outside the bounds becomes 0; False: what is above the cap becomes the cap,
    and there is no floor."""


CORRECTION_TABLE: dict[ImportanceCorrection, CorrectionSpec] = {
    "token_truncate": CorrectionSpec("token", "weight", masks=False),
    "token_mask": CorrectionSpec("token", "weight", masks=True),
    "geometric_mask": CorrectionSpec("token", "geometric_mean", masks=True),
    "sequence_truncate": CorrectionSpec("sequence", "weight", masks=False),
    "sequence_mask": CorrectionSpec("sequence", "weight", masks=True),
}


@dataclass(frozen=True)
class SamplerCorrection:
    """Weights of the tokens, by which their policy terms are multiplied; 0 outside the mask."""

    weights: torch.Tensor
    """``(B, S)`` before the bounds; of ``sequence_*`` that of the sequence. May be inf or nan."""
    factors: torch.Tensor
    """``(B, S)`` after them; 0 where a weight is not finite."""

    def metrics(self, mask: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Sums over the tokens of a mask, by the name of the metric; and the largest weight."""
        weights, factors = self.weights[mask], self.factors[mask]
        finite = _finite(weights)
        sums = {
            "importance_weight_mean": finite.sum(),
            "importance_weight_capped": (factors != finite).sum(),
            "importance_weight_nonfinite": (~weights.isfinite()).sum(),
        }
        return sums, finite.max() if finite.numel() else finite.new_zeros(())


def sampler_correction(
    log_weights: torch.Tensor,
    mask: torch.Tensor,
    mode: ImportanceCorrection = "token_truncate",
    floor: float | None = None,
    cap: float | None = None,
) -> SamplerCorrection:
    """Correct for a sampler whose probabilities are not the trainer's.

    Args:
        log_weights: ``(B, S)`` ``old - sampling``, log-probs of the trainer and of the sampler.
        mask: ``(B, S)`` bool.
        mode: With ``w`` the weight of a token: ``"token_truncate"`` ``min(w, cap)``;
            ``"token_mask"`` w within ``[floor, cap]``, else 0; ``"geometric_mask"`` w in sequences
            whose geometric mean of w is within the bounds, else 0: w itself has no bound. With
            ``W`` the product of w over a sequence: ``"sequence_truncate"`` ``min(W, cap)``;
            ``"sequence_mask"`` W within the bounds, else 0. A sequence is a row.
        floor: Lower bound, of the masks; None: 0.
        cap: Upper bound; None: none.
    """
    spec, low, high = CORRECTION_TABLE[mode], floor or 0.0, math.inf if cap is None else cap
    log_weights = torch.where(mask, log_weights, 0.0)
    if spec.weight == "sequence":
        # Where a product would overflow, it is still above the cap.
        product, largest = log_weights.sum(1, keepdim=True), torch.finfo(log_weights.dtype).max
        product = torch.where(product.isfinite(), product.clamp(max=math.log(largest) - 1), product)
        log_weights = product.expand(mask.shape)
    weights = torch.where(mask, log_weights.exp(), 0.0)
    factors = _finite(weights)
    if not spec.masks:
        return SamplerCorrection(weights, factors.clamp(max=high))
    judged = weights
    if spec.judged == "geometric_mean":
        judged = pooled_log_ratio(log_weights, mask, "trajectory").exp()
    within = judged.isfinite() & (low <= judged) & (judged <= high)
    return SamplerCorrection(weights, torch.where(within, factors, 0.0))


def _finite(weights: torch.Tensor) -> torch.Tensor:
    return torch.where(weights.isfinite(), weights, 0.0)
