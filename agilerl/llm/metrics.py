"""The numbers that ``learn`` returns, accumulated over micro-batches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from agilerl.distributed import Ranks, mean_and_std
from agilerl.llm.losses import LossTerms

# What may be measured; in the same order on every rank.
SUMS = (
    "clip_fraction",
    "entropy",
    "ratio_mean",
    "mean_kl",
    "importance_weight_mean",
    "importance_weight_capped",
    "importance_weight_nonfinite",
)
MAXIMA = ("ratio_max", "importance_weight_max")


@dataclass
class UpdateMetrics:
    """Sums over the trained tokens of every micro-batch, turned into means at the end.

    Losses, norms and skipped steps are of all ranks from the start, the others of this one until
    :meth:`reduce`.
    """

    sums: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)
    tokens: int = 0
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    skipped_steps: int = 0

    def add(
        self,
        terms: LossTerms,
        entropy: torch.Tensor,
        mask: torch.Tensor,
        clip_band: tuple[float, float],
        cap: float | None,
    ) -> None:
        """Take in one micro-batch; ``entropy`` is ``(N,)``, the masks and terms ``(B, S)``."""
        ratio = terms.ratio[mask]
        self.tokens += ratio.numel()
        outside = (ratio < clip_band[0]) | (ratio > clip_band[1])
        self._sum(clip_fraction=outside.sum(), entropy=entropy.sum(), ratio_mean=ratio.sum())
        self._max(ratio_max=ratio.max() if ratio.numel() else ratio.new_zeros(()))
        if terms.kl is not None:
            self._sum(mean_kl=terms.kl[mask].sum())
        if terms.importance_weight is not None:
            weight = terms.importance_weight[mask]
            finite = torch.where(weight.isfinite(), weight, 0.0)
            self._sum(
                importance_weight_mean=finite.sum(),
                importance_weight_capped=(finite > (math.inf if cap is None else cap)).sum(),
                importance_weight_nonfinite=(~weight.isfinite()).sum(),
            )
            self._max(importance_weight_max=finite.max())

    def reduce(self, ranks: Ranks) -> None:
        """Make this the metrics of all ranks; each must call it."""
        if ranks.world_size == 1:
            return
        # A rank that ran nothing has not measured what others have.
        values = [self.sums.get(name, 0.0) for name in SUMS]
        present = [float(name in self.sums) for name in SUMS]
        *totals, tokens = ranks.sum(
            torch.tensor([*values, *present, self.tokens]).double()
        ).tolist()
        found = zip(SUMS, totals[: len(SUMS)], totals[len(SUMS) :], strict=True)
        self.sums = {name: total for name, total, measured in found if measured}
        self.tokens = int(tokens)
        own = [self.maxima.get(name, -math.inf) for name in MAXIMA]
        highest = ranks.max(torch.tensor(own, dtype=torch.float64)).tolist()
        self.maxima = {n: v for n, v in zip(MAXIMA, highest, strict=True) if v > -math.inf}

    def result(self) -> dict[str, float]:
        """Means per token, maxima, and the mean loss and gradient norm of the optimizer steps.

        nan where nothing was measured.
        """
        means = {name: value / max(self.tokens, 1) for name, value in self.sums.items()}
        return {
            "mean_loss": _mean(self.losses),
            "mean_kl": math.nan,
            "clip_fraction": 0.0,
            "entropy": math.nan,
            "ratio_mean": 1.0,
            "ratio_max": 1.0,
            "grad_norm": _mean(self.grad_norms),
            "skipped_steps": float(self.skipped_steps),
            **means,
            **self.maxima,
        }

    def _sum(self, **values: torch.Tensor) -> None:
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(value)

    def _max(self, **values: torch.Tensor) -> None:
        for name, value in values.items():
            self.maxima[name] = max(self.maxima.get(name, -math.inf), float(value))


def batch_metrics(
    advantages: torch.Tensor,
    mask: torch.Tensor,
    action_mask: torch.Tensor,
    zero_variance_groups: int,
    ranks: Ranks,
) -> Mapping[str, float]:
    """Facts of all ranks' batches that no forward is needed for; lengths in generated tokens."""
    count, mean, std = mean_and_std(advantages[mask], ranks)
    facts = torch.tensor([float(action_mask.sum()), len(action_mask), zero_variance_groups])
    tokens, rows, equal_groups = ranks.sum(facts.double()).tolist()
    return {
        "advantage_mean": mean,
        "advantage_std": std if count > 1 else 0.0,
        "completion_length": tokens / rows,
        "zero_variance_groups": equal_groups,
    }


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
