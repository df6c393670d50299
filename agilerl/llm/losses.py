"""The objectives as functions of tensors: importance ratios, surrogates, KL and reductions.

All take ``(B, S)`` log-probs at the sampling temperature and an action mask; masked positions never
contribute, in value or gradient, even where they hold inf or nan.

Sources: GRPO https://arxiv.org/abs/2402.03300, GSPO https://arxiv.org/abs/2507.18071,
CISPO https://arxiv.org/abs/2506.13585, k3 http://joschu.net/blog/kl-approx.html,
``"constant"`` reduction (Dr. GRPO) https://arxiv.org/abs/2503.20783.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from agilerl.llm.batch import TrainBatch
from agilerl.llm.config import LossConfig, LossType, RatioLevel, Reduction

Objective = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, tuple[float, float]], torch.Tensor]


def clipped_surrogate(
    logp: torch.Tensor, ratio: torch.Tensor, advantages: torch.Tensor, band: tuple[float, float]
) -> torch.Tensor:
    """``-min(r A, clamp(r) A)`` per token: GRPO and, with a trajectory ratio, GSPO."""
    return -torch.minimum(ratio * advantages, ratio.clamp(*band) * advantages)


def cispo_objective(
    logp: torch.Tensor, ratio: torch.Tensor, advantages: torch.Tensor, band: tuple[float, float]
) -> torch.Tensor:
    """``-sg(clamp(r)) A logp`` per token: CISPO (sg: stop-gradient). No token is dropped."""
    return -ratio.clamp(*band).detach() * advantages * logp


@dataclass(frozen=True)
class LossSpec:
    """Definition of a ``loss_type``."""

    objective: Objective
    forced_level: RatioLevel | None
    """The only level at which ratios are pooled; None: ``importance_sampling_level`` decides."""
    default_reduction: Reduction
    """Used where ``loss_reduction`` is None."""


LOSS_TABLE: dict[LossType, LossSpec] = {
    "grpo": LossSpec(clipped_surrogate, None, "sequence"),
    "gspo": LossSpec(clipped_surrogate, "trajectory", "sequence"),
    "cispo": LossSpec(cispo_objective, None, "token"),
}


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
being trained, with gradient; the rows; the ``(B, S)`` weight of every token in the mini-batch."""


def clip_band(
    clip_coef: float | tuple[float, float], name: str = "clip_coef"
) -> tuple[float, float]:
    """Resolve ``clip_coef``: a scalar c is ``[1 - c, 1 + c]``, a tuple is the band ``(lo, hi)``.

    Args:
        clip_coef: The scalar or tuple.
        name: What an error calls it.

    Raises:
        ValueError: Unless ``0 <= lo < hi``.
    """
    low, high = (
        clip_coef if isinstance(clip_coef, tuple | list) else (1.0 - clip_coef, 1.0 + clip_coef)
    )
    if not 0.0 <= low < high:
        raise ValueError(
            f"{name} is {clip_coef}: the ratio band ({low}, {high}) must satisfy 0 <= lo < hi; "
            "pass a scalar in (0, 1] or a tuple such as (0.0, 5.0)"
        )
    return float(low), float(high)


def k3(logp: torch.Tensor, ref_logp: torch.Tensor) -> torch.Tensor:
    """``exp(ref - logp) - (ref - logp) - 1``: estimates KL(policy || reference), never below 0."""
    delta = ref_logp - logp
    return delta.expm1() - delta  # close to 0, exp(delta) would keep few of its digits


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


def importance_weights(
    old_logp: torch.Tensor, sampling_logp: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """``exp(old - sampling)`` per token, ``(B, S)``: the sampler correction before its cap."""
    return torch.where(mask, (old_logp - sampling_logp).exp(), 0.0)


def reduction_counts(
    mask: torch.Tensor, sequence_weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Trained tokens and sequences of a mini-batch, ``(2,)`` float64: what its means divide by.

    Args:
        mask: ``(B, S)`` bool.
        sequence_weights: As in :func:`reduction_weights`.
    """
    return torch.stack([mask.sum().double(), _row_weights(mask, sequence_weights).sum()])


def _row_weights(mask: torch.Tensor, sequence_weights: torch.Tensor | None) -> torch.Tensor:
    """``(B,)`` float64: by how much each row counts as a sequence."""
    return mask.any(1).double() if sequence_weights is None else sequence_weights.double()


def reduction_weights(
    mask: torch.Tensor,
    reduction: Reduction,
    max_output_tokens: int | None = None,
    sequence_weights: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Weight of every token in the loss of a mini-batch, so that ``loss = sum(weights * terms)``.

    Computed once over the whole mini-batch and then sliced, so that a gradient depends neither on
    the micro-batch size nor on padding.

    Args:
        mask: ``(B, S)`` bool over the mini-batch.
        reduction: ``"sequence"`` mean over sequences of token means; ``"token"`` mean over tokens;
            ``"constant"`` sum / (sequences × ``max_output_tokens``); ``"sum"``.
        max_output_tokens: Tokens; needed for ``"constant"``.
        sequence_weights: ``(B,)`` by which a row counts as a sequence: its share of the trained
            tokens of a trajectory that gave several rows. None: 1.
        counts: ``(2,)`` :func:`reduction_counts` of the whole mini-batch, where these rows are only
            a rank's part of it; None: they are all of it.

    Returns:
        ``(B, S)`` float64, 0 outside ``mask``.
    """
    weights = mask.to(torch.float64)
    all_tokens, sequences = reduction_counts(mask, sequence_weights) if counts is None else counts
    sequences = torch.where(sequences > 0, sequences, 1.0)
    if reduction == "sequence":
        shares = _row_weights(mask, sequence_weights)[:, None]
        return weights * shares / weights.sum(1, keepdim=True).clamp(min=1) / sequences
    if reduction == "token":
        return weights / all_tokens.clamp(min=1)
    if reduction == "constant":
        if max_output_tokens is None:
            raise ValueError('loss_reduction "constant" needs max_output_tokens')
        return weights / (sequences * max_output_tokens)
    return weights


def policy_loss(  # noqa: PLR0913 - the optional inputs are keyword-only
    logp: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    weights: torch.Tensor,
    config: LossConfig,
    *,
    old_logp: torch.Tensor | None = None,
    ref_logp: torch.Tensor | None = None,
    sampling_logp: torch.Tensor | None = None,
    turn_ids: torch.Tensor | None = None,
) -> LossTerms:
    """The loss of one micro-batch; every tensor is ``(B, S)``.

    Args:
        logp: Log-probs under the policy being trained, with gradient.
        advantages: Per-token advantages.
        mask: Trained action positions.
        weights: This micro-batch's rows of :func:`reduction_weights`.
        config: Objective, ratio level, clip band, KL weight, correction cap.
        old_logp: Log-probs when the batch was collected; None: equal to the current ones.
        ref_logp: Log-probs under the reference policy; None leaves the KL out.
        sampling_logp: Log-probs the sampler reported; None leaves the correction out.
        turn_ids: Turn per position.
    """
    logp = torch.where(mask, logp, 0.0)
    old = logp.detach() if old_logp is None else torch.where(mask, old_logp, 0.0)
    advantages = torch.where(mask, advantages, 0.0)
    row = LOSS_TABLE[config.loss_type]

    kl = None
    if ref_logp is not None:
        kl = torch.where(mask, k3(logp, torch.where(mask, ref_logp, 0.0)), 0.0)
    if config.kl_shaping and kl is not None:
        advantages = advantages + config.beta * _kl_shape(kl.detach(), mask)

    ratio = pooled_log_ratio(logp - old, mask, config.ratio_level, turn_ids).exp()
    terms = row.objective(logp, ratio, advantages, config.clip_band)

    importance_weight = None
    if sampling_logp is not None:
        importance_weight = importance_weights(old.detach(), sampling_logp, mask)
        terms = terms * _capped(importance_weight, config.importance_weight_cap)
    if kl is not None and not config.kl_shaping:
        terms = terms + config.beta * kl

    with torch.no_grad():
        sums, maxima = _ratio_metrics(ratio[mask], config.clip_band)
        if kl is not None:
            sums["mean_kl"] = kl[mask].sum()
        if sampling_logp is not None and importance_weight is not None:
            _add_correction_metrics(
                sums, maxima, importance_weight[mask], config.importance_weight_cap
            )
            sampler_kl = k3(sampling_logp[mask], old[mask])
            sums["sampler_kl"] = torch.where(sampler_kl.isfinite(), sampler_kl, 0.0).sum()
    return weighted_loss(terms, mask, weights, sums, maxima)


def policy_objective(config: LossConfig) -> LossFunction:
    """:func:`policy_loss` as :func:`agilerl.llm.update.run_update` takes it."""

    def loss(logp: torch.Tensor, batch: TrainBatch, weights: torch.Tensor) -> LossTerms:
        assert batch.advantages is not None
        return policy_loss(
            logp,
            batch.advantages,
            batch.loss_mask,
            weights,
            config,
            old_logp=batch.old_logp,
            ref_logp=batch.ref_logp,
            sampling_logp=batch.sampling_logp,
            turn_ids=batch.turn_ids,
        )

    return loss


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


def _ratio_metrics(
    ratio: torch.Tensor, band: tuple[float, float]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    outside = (ratio < band[0]) | (ratio > band[1])
    largest = ratio.max() if ratio.numel() else ratio.new_zeros(())
    return {"clip_fraction": outside.sum(), "ratio_mean": ratio.sum()}, {"ratio_max": largest}


def _add_correction_metrics(
    sums: dict[str, torch.Tensor],
    maxima: dict[str, torch.Tensor],
    importance_weight: torch.Tensor,
    cap: float | None,
) -> None:
    """Add what is measured of ``(N,)`` weights before the cap."""
    finite = torch.where(importance_weight.isfinite(), importance_weight, 0.0)
    sums["importance_weight_mean"] = finite.sum()
    sums["importance_weight_capped"] = (finite > (math.inf if cap is None else cap)).sum()
    sums["importance_weight_nonfinite"] = (~importance_weight.isfinite()).sum()
    maxima["importance_weight_max"] = finite.max() if finite.numel() else finite.new_zeros(())


def _capped(importance_weight: torch.Tensor, cap: float | None) -> torch.Tensor:
    finite = torch.where(importance_weight.isfinite(), importance_weight, 0.0)
    return finite if cap is None else finite.clamp(max=cap)


def _kl_shape(kl: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """``mean_row(kl) - kl`` per token, 0 outside ``mask``."""
    row_mean = kl.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    return torch.where(mask, row_mean - kl, 0.0)
