"""What a loss function returns, for one micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from agilerl.llm.batch import TrainBatch


@dataclass(frozen=True)
class LossTerms:
    """The loss of one micro-batch and its metrics; all but ``loss`` are detached."""

    loss: torch.Tensor
    """Scalar: the weighted sum, ready for backward."""
    per_row: torch.Tensor
    """``(B,)`` contribution of each row to ``loss``."""
    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    """Sums over the trained tokens, by the name of the metric that is their mean."""
    maxima: dict[str, torch.Tensor] = field(default_factory=dict)
    """Largest values among the trained tokens, by the name of the metric."""


LossFunction: TypeAlias = Callable[[torch.Tensor, TrainBatch, torch.Tensor], LossTerms]
"""``(logp, batch, weights)`` of one micro-batch to its loss: ``(B, S)`` log-probs under the policy
being trained, with gradient, 0 at positions that are not trained; the rows; the ``(B, S)`` weight
of every token in the mini-batch."""


def weighted_loss(
    terms: torch.Tensor,
    mask: torch.Tensor,
    weights: torch.Tensor,
    sums: dict[str, torch.Tensor] | None = None,
    maxima: dict[str, torch.Tensor] | None = None,
) -> LossTerms:
    """Sum ``(B, S)`` terms by their :func:`reduction_weights`."""
    per_row = (torch.where(mask, terms, 0.0) * weights.to(terms.dtype)).sum(1)
    return LossTerms(per_row.sum(), per_row.detach(), sums or {}, maxima or {})
