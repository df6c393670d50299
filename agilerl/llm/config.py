"""Frozen records of settings, built from an agent's attributes at call time and passed down.

Nothing derived is cached on the agent, so a mutated ``clip_coef``, ``temperature`` or
``group_size`` takes effect at the next call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

LossType = Literal["grpo", "gspo", "cispo"]
RatioLevel = Literal["token", "turn", "trajectory"]
Granularity = Literal["trajectory", "turn"]
AdvNorm = Literal["mean_std", "mean_only", "batch_std"]
Baseline = Literal["group_mean", "leave_one_out"]
Reduction = Literal["sequence", "token", "constant", "sum", "prompt"]
ImportanceAnchor = Literal["old", "sampler"]
ImportanceCorrection = Literal[
    "token_truncate", "token_mask", "geometric_mask", "sequence_truncate", "sequence_mask"
]
RowLayout = Literal["packed", "shared_prompts", "padded"]
# Fewest tokens first.
ROW_LAYOUTS: tuple[RowLayout, ...] = ("packed", "shared_prompts", "padded")
ScheduleKind = Literal["constant", "linear", "cosine"]
# Called with parameter groups as torch's optimizers take them, and the learning rate.
OptimizerFactory = Callable[[list[dict[str, Any]], float], torch.optim.Optimizer]


@dataclass(frozen=True)
class CosineLRScheduleConfig:
    """Linear warm-up, then a cosine down to zero.

    The schedule advances by one with every call of ``learn``.
    """

    num_epochs: int
    """Length of the schedule, in calls of ``learn``."""
    warmup_proportion: float = 0.0
    """Share of ``num_epochs`` spent warming up, in [0, 1)."""

    def __post_init__(self) -> None:
        if self.num_epochs < 1:
            raise ValueError(
                f"num_epochs is {self.num_epochs}; it must be at least 1 (calls of learn)"
            )
        if not 0.0 <= self.warmup_proportion < 1.0:
            raise ValueError(f"warmup_proportion is {self.warmup_proportion}; it must be in [0, 1)")

    def to_schedule(self) -> LRSchedule:
        """The same with its warm-up in calls of ``learn``."""
        return LRSchedule("cosine", self.num_epochs, int(self.num_epochs * self.warmup_proportion))


@dataclass(frozen=True)
class LRSchedule:
    """How the learning rate changes from one call of ``learn`` to the next.

    With w warm-up calls the first has 1/w of the learning rate, the w-th all of it. After n further
    calls of d, ``"linear"`` has 1 - n/d of it and ``"cosine"`` (1 + cos(πn/d)) / 2, down to zero.
    """

    kind: ScheduleKind
    steps: int | None
    """Calls of ``learn`` until it is zero, warm-up included; None: constant."""
    warmup: int = 0
    """Calls of ``learn`` spent warming up."""


@dataclass(frozen=True)
class OptimizerSettings:
    """Which optimizer, with its settings but for the learning rate."""

    kind: Literal["adamw", "adamw_8bit"] | OptimizerFactory = "adamw"
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)


@dataclass(frozen=True)
class SamplingConfig:
    """How completions are drawn."""

    max_new_tokens: int | None
    """Longest completion, in tokens; None: up to ``max_model_len``."""
    max_model_len: int
    """Longest row (prompt and completion), in tokens."""
    eos_token_ids: tuple[int, ...]
    """Tokens that end a completion; the one sampled belongs to it."""
    pad_token_id: int
    greedy: bool = False
    temperature: float = 1.0
    top_k: int = 0
    """0: off."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    stop_sequences: tuple[str, ...] = ()
    """Texts that end a completion, whose last token is the one that completes the text."""
    chunk_size: int | None = None
    """Prompts generated at a time, each with all of its samples; None: the generator's default. For
    generators that do not schedule rows themselves."""
    left_padding: bool = True
    """False: only prompts of equal length share a batch (for models without position ids). For
    generators that pad."""
    return_logps: bool = False
    """Also return the log-prob of each token under the temperature-scaled distribution, before
    penalties and filters: the sampler's side of what ``learn`` computes."""


@dataclass(frozen=True)
class AdvantageConfig:
    """How rewards become advantages."""

    group_size: int
    norm: AdvNorm = "mean_std"
    granularity: Granularity = "trajectory"
    whiten: bool = False
    clip_range: float | None = None
    filter_zero: bool = False
    filter_eps: float = 0.0
    baseline: Baseline = "group_mean"


@dataclass(frozen=True)
class BatchConfig:
    """What ``learn`` reads of its arguments."""

    advantages: AdvantageConfig
    reads_sampling_logps: bool = True
    """Whether the sampler's log-probs are used where they are given."""
    needs_sampling_logps: bool = False
    """Whether they must be given of every trajectory that is trained."""
    needs_group_ids: bool = False
    """Whether the loss reads which rows are of one group."""
    masks_truncated: bool = False
    """Whether trajectories that were cut off are masked out of the loss."""


@dataclass(frozen=True)
class LossConfig:
    """The objective and its settings."""

    loss_type: LossType
    ratio_level: RatioLevel
    clip_band: tuple[float, float]
    """Absolute bounds ``(lo, hi)`` of the importance ratio."""
    beta: float = 0.0
    """Weight of the KL penalty towards the reference policy."""
    kl_shaping: bool = False
    """Move the KL from the loss into the advantages."""
    importance_weight_cap: float | None = None
    """Upper bound of the sampler correction; None: unbounded."""
    importance_floor: float | None = None
    """Lower bound of its masks; None: 0."""
    importance_correction: ImportanceCorrection = "token_truncate"
    """What the bounds do; see :func:`agilerl.llm.losses.sampler_correction`."""
    importance_anchor: ImportanceAnchor = "old"
    """Whose log-probs ratios are against: the policy's when the batch was collected, or the
    sampler's, which leaves nothing to correct."""
    dual_clip: float | None = None
    """Where advantages are negative, a term is at most this times their magnitude; None: off."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""


@dataclass(frozen=True)
class UpdateConfig:
    """How a batch of rollouts becomes optimizer steps."""

    batch_size: int
    """Trajectories of this rank per optimizer step."""
    micro_batch_size: int
    """Rows of this rank per forward and backward; with ``balance_tokens`` about as many."""
    epochs: int
    max_grad_norm: float
    reduction: Reduction = "sequence"
    max_output_tokens: int | None = None
    """The constant of the ``"constant"`` reduction."""
    needs_reference: bool = False
    """Whether the loss reads the log-probs of the reference policy."""
    skip_zero_advantages: bool = False
    """Whether rows whose advantages are all 0 have no gradient, and are not run."""
    role: str = "actor"
    """The adapter that is trained."""
    needs_old: bool = True
    """Whether the loss reads the log-probs of the policy before the update."""
    needs_entropy: bool = False
    """Whether the loss reads entropies, with their gradient."""
    top_entropy_quantile: float | None = None
    """Share of the tokens of a mini-batch whose policy terms are left out, those with least entropy
    before the update; None: all count."""
    micro_batch_tokens: int | None = None
    """Most tokens of this rank per forward and backward, in place of ``micro_batch_size``."""
    balance_tokens: bool = False
    """Cut packed rows into micro-batches of about equal numbers of tokens, not of rows, and deal
    those of each optimizer step to the ranks so that all have about as many."""
    micro_batch_size_is_auto: bool = False
    """Whether ``micro_batch_size`` was chosen by the free memory, for messages."""


@dataclass(frozen=True)
class ForwardConfig:
    """How log-probs are computed; no setting here changes their value beyond rounding."""

    temperature: float
    recompute_layers: bool = False
    """Gradient checkpointing: keep only each layer's input and recompute the rest in backward."""
    layout: RowLayout = "packed"
    """How rows are laid out where the model allows it; see
    :mod:`agilerl.llm.forward.hidden_states`."""
    offload_activations: bool = False
    """Keep what backward needs in host memory."""
    use_position_ids: bool = True
    fp32_logits: bool = True
    tile_rows: int | None = None
    """Rows per logit tile; None: auto."""
    fused_layers: bool = False
    """Run an update with Liger's layers, where they may be."""
