"""Constructor arguments specific to GRPO, GSPO and CISPO, and the records built from them."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from agilerl.algorithms.core.argument_rules import check_clip_coef
from agilerl.algorithms.core.arguments import POSITIVE, LLMArguments, argument
from agilerl.algorithms.core.registry import HyperparameterConfig
from agilerl.checks import COUNT, FLAG, Number, OneOf, require, warn, warn_once
from agilerl.llm.config import (
    AdvantageConfig,
    AdvNorm,
    Baseline,
    BatchConfig,
    ImportanceAnchor,
    ImportanceCorrection,
    LossConfig,
    LossType,
    RatioLevel,
    Reduction,
    UpdateConfig,
)
from agilerl.llm.engine.accelerator_config import rank_batch_size
from agilerl.llm.losses import CORRECTION_TABLE, LOSS_TABLE, clip_band

logger = logging.getLogger(__name__)

GRANULARITIES = ("auto", "trajectory", "turn")
WIDEST_GEOMETRIC_CAP = 1.1
"""A geometric mean over a sequence of some length is never above it, however far off tokens are."""

# What TRL calls a loss is here an objective and a reduction.
TRL_LOSSES = {
    "dapo": "Nearest to TRL's 'dapo' is loss_type='grpo' with loss_reduction='token'",
    "bnpo": "Nearest to TRL's 'bnpo' is loss_type='grpo' with loss_reduction='token'",
    "dr_grpo": "Nearest to TRL's 'dr_grpo' is loss_type='grpo' with loss_reduction='constant' (and "
    "adv_norm='mean_only' for its scale_rewards='none')",
}
TRL_LEVELS = {"sequence": "TRL's 'sequence' is 'trajectory' here"}


class GRPOArguments(LLMArguments):
    """Constructor arguments specific to GRPO, GSPO and CISPO."""

    group_size: int = argument(Number(2, integer=True), 8, mutable=True)
    beta: float = argument(Number(0), 0.001, mutable=True)
    clip_coef: float | tuple[float, float] = argument(check_clip_coef, 0.2, mutable=True)
    max_grad_norm: float = argument(POSITIVE, 0.1, mutable=True)
    update_epochs: int = argument(COUNT, 1, mutable=True)
    use_kl_advantage_shaping: bool = argument(FLAG, False)
    adv_norm: AdvNorm = argument(OneOf(("mean_std", "mean_only", "batch_std")), "mean_std")
    loss_type: LossType = argument(OneOf(tuple(LOSS_TABLE), TRL_LOSSES), "grpo")
    importance_sampling_level: RatioLevel | None = argument(
        OneOf((None, "token", "turn", "trajectory"), TRL_LEVELS), None
    )
    advantage_granularity: str = argument(OneOf(GRANULARITIES), "auto")
    action_granularity: str | None = argument(OneOf((None, *GRANULARITIES)), None)
    whiten_advantages: bool = argument(FLAG, False)
    adv_clip_range: float | None = argument(
        Number(0, open_low=True, optional=True), None, mutable=True
    )
    filter_zero_adv: bool = argument(FLAG, False)
    adv_filter_eps: float = argument(Number(0), 0.0)
    vllm_importance_sampling_correction: bool = argument(FLAG, True)
    vllm_importance_sampling_cap: float = argument(
        Number(0, open_low=True, finite=False), 2.0, mutable=True
    )
    loss_reduction: Reduction | None = argument(
        OneOf((None, "sequence", "token", "constant", "sum", "prompt")), None
    )
    importance_anchor: ImportanceAnchor = argument(OneOf(("old", "sampler")), "old")
    importance_correction: ImportanceCorrection = argument(
        OneOf(tuple(CORRECTION_TABLE)), "token_truncate"
    )
    importance_floor: float | None = argument(Number(0, optional=True), None)
    dual_clip: float | None = argument(Number(1, open_low=True, optional=True), None)
    advantage_baseline: Baseline = argument(OneOf(("group_mean", "leave_one_out")), "group_mean")
    entropy_coef: float = argument(Number(0), 0.0, mutable=True)
    top_entropy_quantile: float | None = argument(
        Number(0, 1, open_low=True, open_high=True, optional=True), None
    )
    mask_truncated_completions: bool = argument(FLAG, False)

    @classmethod
    def check_together(cls, arguments: Mapping[str, Any]) -> None:
        """Refuse values that contradict each other, and say which have no effect."""
        super().check_together(arguments)
        require(
            arguments["loss_reduction"] != "constant" or arguments["max_output_tokens"] is not None,
            "loss_reduction is 'constant', which divides by max_output_tokens, but that is None; "
            "it must be set",
        )
        _check_importance(arguments)
        require(
            arguments["dual_clip"] is None or arguments["loss_type"] != "cispo",
            f"dual_clip is {arguments['dual_clip']}, but loss_type is 'cispo', whose weights "
            "clip_coef bounds already; leave dual_clip at None",
        )
        _warn_of_narrow_cispo(arguments)
        _warn_of_no_effect(arguments)
        level = arguments["importance_sampling_level"]
        pooled = arguments["loss_type"] == "gspo" and level in ("token", "turn")
        if pooled and not arguments["clone"]:  # a clone would only repeat it
            warn(
                f"importance_sampling_level={level!r} has no effect with loss_type 'gspo', which "
                "pools the ratio over the trajectory"
            )

    def advantage_config(self) -> AdvantageConfig:
        """How rewards become advantages, from the attributes as they are now."""
        granularity = self.advantage_granularity
        if granularity == "auto":
            granularity = "turn" if self.loss_config().ratio_level == "turn" else "trajectory"
        return AdvantageConfig(
            group_size=self.group_size,
            norm=self.adv_norm,
            granularity="turn" if granularity == "turn" else "trajectory",
            whiten=self.whiten_advantages,
            clip_range=self.adv_clip_range,
            filter_zero=self.filter_zero_adv,
            filter_eps=self.adv_filter_eps,
            baseline=self.advantage_baseline,
        )

    def batch_config(self) -> BatchConfig:
        """What ``learn`` reads of its arguments, from the attributes as they are now."""
        against_sampler = self.importance_anchor == "sampler"
        return BatchConfig(
            advantages=self.advantage_config(),
            reads_sampling_logps=self.vllm_importance_sampling_correction or against_sampler,
            needs_sampling_logps=against_sampler,
            needs_group_ids=self.update_config().reduction == "prompt",
            masks_truncated=self.mask_truncated_completions,
        )

    def loss_config(self) -> LossConfig:
        """The objective, from the attributes as they are now."""
        row = LOSS_TABLE[self.loss_type]
        return LossConfig(
            loss_type=self.loss_type,
            ratio_level=row.forced_level or self.importance_sampling_level or "token",
            clip_band=clip_band(self.clip_coef),
            beta=self.beta,
            kl_shaping=self.use_kl_advantage_shaping,
            importance_weight_cap=self.vllm_importance_sampling_cap,
            importance_floor=self.importance_floor,
            importance_correction=self.importance_correction,
            importance_anchor=self.importance_anchor,
            dual_clip=self.dual_clip,
            entropy_coef=self.entropy_coef,
        )

    def update_config(self) -> UpdateConfig:
        """Batch sizes, epochs and clipping, from the attributes as they are now."""
        return UpdateConfig(
            batch_size=rank_batch_size(self.batch_size, self.accelerator),
            micro_batch_size=self.rank_micro_batch_size(),
            epochs=self.update_epochs,
            max_grad_norm=self.max_grad_norm,
            reduction=self.loss_reduction or LOSS_TABLE[self.loss_type].default_reduction,
            max_output_tokens=self.max_output_tokens,
            needs_reference=self.beta != 0.0,
            # Without a KL term and an entropy bonus their gradient is exactly 0.
            skip_zero_advantages=self.beta == 0.0 and self.entropy_coef == 0.0,
            needs_old=self.importance_anchor == "old",
            needs_entropy=self.entropy_coef != 0.0,
            top_entropy_quantile=self.top_entropy_quantile,
            micro_batch_tokens=self.micro_batch_tokens,
            balance_tokens=self.use_sequence_packing,
            micro_batch_size_is_auto=self.micro_batch_size_per_gpu == "auto",
        )


def _warn_of_no_effect(arguments: Mapping[str, Any]) -> None:
    """Say once which options another setting switches off."""
    if arguments["clone"]:
        return
    eps, cap = arguments["adv_filter_eps"], arguments["vllm_importance_sampling_cap"]
    if eps > 0 and not arguments["filter_zero_adv"]:
        warn_once(
            logger,
            "adv_filter_eps=%g has no effect without filter_zero_adv; set that to True",
            eps,
        )
    default = GRPOArguments.argument_table()["vllm_importance_sampling_cap"].default
    if cap != default and arguments["importance_anchor"] == "sampler":
        warn_once(
            logger,
            "vllm_importance_sampling_cap=%g has no effect with importance_anchor='sampler', which "
            "leaves nothing to correct; clip_coef bounds the ratio",
            cap,
        )
    if arguments["use_kl_advantage_shaping"] and arguments["beta"] == 0:
        warn_once(
            logger,
            "use_kl_advantage_shaping has no effect with beta=0; set beta above 0, or leave it out",
        )


def _warn_of_narrow_cispo(arguments: Mapping[str, Any]) -> None:
    """Say what a scalar ``clip_coef``, PPO's convention, means for CISPO."""
    clip = arguments["clip_coef"]
    scalar = arguments["loss_type"] == "cispo" and not isinstance(clip, tuple | list)
    if scalar and not arguments["clone"]:
        warn_once(
            logger,
            "clip_coef is %g, so that CISPO's weights are kept in [%g, %g]: next to no token gets "
            "another weight than 1. Usual is a cap without a lower bound: clip_coef=(0.0, 5.0).",
            clip,
            *clip_band(clip),
        )


def _warn_of_wide_geometric_mask(arguments: Mapping[str, Any]) -> None:
    """Say what the cap, 2 by default, means for a geometric mean."""
    mode, cap = arguments["importance_correction"], arguments["vllm_importance_sampling_cap"]
    judged = CORRECTION_TABLE[mode].judged
    if judged == "weight" or cap <= WIDEST_GEOMETRIC_CAP or arguments["clone"]:
        return
    warn_once(
        logger,
        "importance_correction is %r, for which vllm_importance_sampling_cap=%g is the upper bound "
        "of the geometric mean of a sequence's weights, not of the weights: those are unbounded, "
        "and such a mean hardly ever exceeds %g, so that next to nothing is masked. Usual are caps "
        "of 1.001 to 1.01, with importance_floor=0.99 to 0.999.",
        mode,
        cap,
        WIDEST_GEOMETRIC_CAP,
    )


def _check_importance(arguments: Mapping[str, Any]) -> None:
    """Refuse what contradicts itself in the correction for the sampler."""
    mode, floor = arguments["importance_correction"], arguments["importance_floor"]
    given = (
        f"importance_correction is {mode!r}" if floor is None else f"importance_floor is {floor}"
    )
    plain = mode == "token_truncate" and floor is None
    require(
        plain or arguments["importance_anchor"] == "old",
        f"{given}, but importance_anchor is 'sampler', which leaves nothing to correct; leave "
        "importance_correction and importance_floor at their defaults",
    )
    require(
        plain or arguments["vllm_importance_sampling_correction"],
        f"{given}, but vllm_importance_sampling_correction is False; set it to True",
    )
    _warn_of_wide_geometric_mask(arguments)
    if floor is None:
        return
    masks = [repr(name) for name, spec in CORRECTION_TABLE.items() if spec.masks]
    require(
        CORRECTION_TABLE[mode].masks,
        f"importance_floor is {floor}, but importance_correction is {mode!r}, which has no lower "
        f"bound; it must be one of {', '.join(masks)}",
    )
    name = "vllm_importance_sampling_cap"
    limit = dict((arguments["hp_config"] or HyperparameterConfig()).items()).get(name)
    for what, cap in (
        (name, arguments[name]),
        (f"the limit of {name} in hp_config", math.inf if limit is None else limit.min),
    ):
        require(
            floor < cap, f"importance_floor is {floor}; it must be below {what}, which is {cap}"
        )
