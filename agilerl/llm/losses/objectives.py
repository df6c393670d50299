"""The objectives as functions of tensors: surrogates, KL, and what else is part of a loss.

All take ``(B, S)`` log-probs at the sampling temperature and an action mask; masked positions never
contribute, in value or gradient, even where they hold inf or nan.

Sources: GRPO https://arxiv.org/abs/2402.03300, GSPO https://arxiv.org/abs/2507.18071,
CISPO https://arxiv.org/abs/2506.13585, k3 http://joschu.net/blog/kl-approx.html, dual clip
https://arxiv.org/abs/1912.09729. docs/losses.md has all of them as formulas.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from agilerl.llm.batch import TrainBatch
from agilerl.llm.config import LossConfig, LossType, RatioLevel, Reduction
from agilerl.llm.losses.importance import SamplerCorrection, pooled_log_ratio, sampler_correction
from agilerl.llm.losses.terms import LossFunction, LossTerms, weighted_loss

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


def clip_band(
    clip_coef: float | tuple[float, float], name: str = "clip_coef"
) -> tuple[float, float]:
    """Resolve ``clip_coef``: a scalar c is ``[1 - c, 1 + c]``, a tuple is the band ``(lo, hi)``.

    Args:
        clip_coef: The scalar or tuple.
        name: What an error calls it.

    Raises:
        ValueError: Unless ``0 <= lo < hi``, with 1, the ratio of fresh rollouts, within the band.
    """
    low, high = (
        clip_coef if isinstance(clip_coef, tuple | list) else (1.0 - clip_coef, 1.0 + clip_coef)
    )
    if not 0.0 <= low < high:
        raise ValueError(
            f"{name} is {clip_coef}: the ratio band ({low}, {high}) must satisfy 0 <= lo < hi; "
            "pass a scalar in (0, 1] or a tuple such as (0.0, 5.0)"
        )
    if not low <= 1.0 <= high:
        meant = f"; for epsilons {low:g} and {high:g} pass ({1 - low:g}, {1 + high:g})"
        raise ValueError(
            f"{name} is {clip_coef}: the pair is the band of the ratio itself, which must contain "
            f"1{meant if high < 1 else ''}"
        )
    return float(low), float(high)


def k3(logp: torch.Tensor, ref_logp: torch.Tensor) -> torch.Tensor:
    """``exp(ref - logp) - (ref - logp) - 1``: estimates KL(policy || reference), never below 0."""
    delta = ref_logp - logp
    return delta.expm1() - delta  # close to 0, exp(delta) would keep few of its digits


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
    entropy: torch.Tensor | None = None,
    top_entropy_mask: torch.Tensor | None = None,
) -> LossTerms:
    """The loss of one micro-batch; every tensor is ``(B, S)``.

    Args:
        logp: Log-probs under the policy being trained, with gradient.
        advantages: Per-token advantages.
        mask: Trained action positions.
        weights: This micro-batch's rows of
            :func:`~agilerl.llm.losses.reductions.reduction_weights`.
        config: Objective, ratio level, clip band, KL weight, correction and its bounds.
        old_logp: Log-probs when the batch was collected; None: equal to the current ones.
        ref_logp: Log-probs under the reference policy; None leaves the KL out.
        sampling_logp: Log-probs the sampler reported; None leaves the correction out.
        turn_ids: Turn per position.
        entropy: Of the policy being trained, in nats, with gradient; None leaves the bonus out.
        top_entropy_mask: Tokens whose policy term counts; None: all.
    """
    logp = torch.where(mask, logp, 0.0)
    anchor, anchored = _anchor(logp.detach(), mask, config, old_logp, sampling_logp)
    advantages = torch.where(mask, advantages, 0.0)

    kl = None
    if ref_logp is not None:
        kl = torch.where(mask, k3(logp, torch.where(mask, ref_logp, 0.0)), 0.0)
    if config.kl_shaping and kl is not None:
        advantages = advantages + config.beta * _kl_shape(kl.detach(), mask)

    ratio = pooled_log_ratio(logp - anchor, mask, config.ratio_level, turn_ids).exp()
    terms = LOSS_TABLE[config.loss_type].objective(logp, ratio, advantages, config.clip_band)
    sums, maxima = _ratio_metrics(ratio.detach()[mask], config.clip_band)
    if config.dual_clip is not None:
        bound = -config.dual_clip * advantages
        above = (advantages < 0) & (terms > bound)
        terms = torch.where(above, bound, terms)
        sums["dual_clip_fraction"] = above[mask].sum()
    if anchored is not None and sampling_logp is not None:
        terms = torch.where(anchored, terms, 0.0)
        sums["ratio_nonfinite"] = (~anchored)[mask].sum()
        sums["sampler_kl"] = _sampler_kl(sampling_logp, logp.detach(), anchored)
    elif sampling_logp is not None:
        correction = _correction(anchor - sampling_logp, mask, config)
        terms = terms * correction.factors
        measured, maxima["importance_weight_max"] = correction.metrics(mask)
        sums |= measured | {"sampler_kl": _sampler_kl(sampling_logp, anchor, mask)}
    if top_entropy_mask is not None:
        terms = torch.where(top_entropy_mask, terms, 0.0)
        sums["top_entropy_share"] = top_entropy_mask[mask].sum()

    if kl is not None:
        sums["mean_kl"] = kl.detach()[mask].sum()
        if not config.kl_shaping:
            terms = terms + config.beta * kl
    if entropy is not None:
        terms = terms - config.entropy_coef * entropy
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
            entropy=batch.entropy,
            top_entropy_mask=batch.top_entropy_mask,
        )

    return loss


def _anchor(
    logp: torch.Tensor,
    mask: torch.Tensor,
    config: LossConfig,
    old_logp: torch.Tensor | None,
    sampling_logp: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What ratios are against, ``(B, S)``; and, of the sampler's, where they are finite."""
    if config.importance_anchor == "old":
        return logp if old_logp is None else torch.where(mask, old_logp.detach(), 0.0), None
    assert sampling_logp is not None
    finite = mask & sampling_logp.isfinite()
    return torch.where(finite, sampling_logp, logp), finite


def _correction(
    log_weights: torch.Tensor, mask: torch.Tensor, config: LossConfig
) -> SamplerCorrection:
    return sampler_correction(
        log_weights,
        mask,
        config.importance_correction,
        config.importance_floor,
        config.importance_weight_cap,
    )


def _sampler_kl(
    sampling_logp: torch.Tensor, trainer_logp: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """k3 of the sampler's policy to the trainer's, summed; what is not finite counts as 0."""
    kl = k3(sampling_logp[mask], trainer_logp[mask])
    return torch.where(kl.isfinite(), kl, 0.0).sum()


def _ratio_metrics(
    ratio: torch.Tensor, band: tuple[float, float]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    outside = (ratio < band[0]) | (ratio > band[1])
    largest = ratio.max() if ratio.numel() else ratio.new_zeros(())
    return {"clip_fraction": outside.sum(), "ratio_mean": ratio.sum()}, {"ratio_max": largest}


def _kl_shape(kl: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """``mean_row(kl) - kl`` per token, 0 outside ``mask``."""
    row_mean = kl.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    return torch.where(mask, row_mean - kl, 0.0)
