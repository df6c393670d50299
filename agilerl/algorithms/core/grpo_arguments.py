"""Constructor arguments specific to GRPO, GSPO and CISPO, and the records built from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agilerl.algorithms.core.argument_rules import check_clip_coef
from agilerl.algorithms.core.arguments import POSITIVE, LLMArguments, argument
from agilerl.checks import COUNT, FLAG, OPTIONAL_COUNT, Number, OneOf, require, warn
from agilerl.llm.config import (
    AdvantageConfig,
    AdvNorm,
    LossConfig,
    LossType,
    RatioLevel,
    Reduction,
    UpdateConfig,
)
from agilerl.llm.engine.accelerator_config import rank_batch_size, rank_micro_batch_size
from agilerl.llm.losses import LOSS_TABLE, clip_band

GRANULARITIES = ("auto", "trajectory", "turn")


class GRPOArguments(LLMArguments):
    """Constructor arguments specific to GRPO, GSPO and CISPO."""

    group_size: int = argument(Number(2, integer=True), 8, mutable=True)
    beta: float = argument(Number(0), 0.001, mutable=True)
    clip_coef: float | tuple[float, float] = argument(check_clip_coef, 0.2, mutable=True)
    max_grad_norm: float = argument(POSITIVE, 0.1, mutable=True)
    update_epochs: int = argument(COUNT, 1, mutable=True)
    use_liger_loss: bool = argument(FLAG, False, supported=False)
    fused_loss_chunk_rows: int | None = argument(OPTIONAL_COUNT, None, supported=False)
    use_kl_advantage_shaping: bool = argument(FLAG, False)
    adv_norm: AdvNorm = argument(OneOf(("mean_std", "mean_only")), "mean_std")
    loss_type: LossType = argument(OneOf(tuple(LOSS_TABLE)), "grpo")
    importance_sampling_level: RatioLevel | None = argument(
        OneOf((None, "token", "turn", "trajectory")), None
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
        OneOf((None, "sequence", "token", "constant", "sum")), None
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
        )

    def update_config(self) -> UpdateConfig:
        """Batch sizes, epochs and clipping, from the attributes as they are now."""
        return UpdateConfig(
            batch_size=rank_batch_size(self.batch_size, self.accelerator),
            micro_batch_size=rank_micro_batch_size(
                self.batch_size, self.micro_batch_size_per_gpu, self.accelerator
            ),
            epochs=self.update_epochs,
            max_grad_norm=self.max_grad_norm,
            reduction=self.loss_reduction or LOSS_TABLE[self.loss_type].default_reduction,
            max_output_tokens=self.max_output_tokens,
            needs_reference=self.beta != 0.0,
            # Without a KL term their gradient is exactly 0.
            skip_zero_advantages=self.beta == 0.0,
        )
