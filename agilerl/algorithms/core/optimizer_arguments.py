"""Constructor arguments of every algorithm that concern its optimizer and learning rate."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping
from numbers import Real
from typing import Any

from agilerl.algorithms.core.arguments import LLMArguments, argument
from agilerl.checks import OPTIONAL_COUNT, InstanceOf, Number, OneOf, require, warn_once
from agilerl.distributed import ranks_of
from agilerl.llm.config import (
    CosineLRScheduleConfig,
    LRSchedule,
    OptimizerSettings,
    ScheduleKind,
)
from agilerl.llm.engine.accelerator_config import zero_section
from agilerl.llm.engine.optimizers import check_optimizer

logger = logging.getLogger(__name__)

LOWEST_USUAL_LR = 1e-6
"""Below it LoRA adapters hardly move."""


def check_betas(name: str, value: Any) -> None:
    """Refuse what is not two numbers in [0, 1)."""
    remedy = "it must be two numbers in [0, 1), such as (0.9, 0.999)"
    fits = isinstance(value, tuple | list) and all(isinstance(beta, Real) for beta in value)
    require(fits, f"{name} is {value!r}; {remedy}", TypeError)
    within = len(value) == 2 and all(0 <= beta < 1 for beta in value)
    require(within, f"{name} is {value!r}; {remedy}")


class OptimizerArguments(LLMArguments):
    """Arguments of the optimizer and the learning rate's schedule."""

    cosine_lr_schedule_config: CosineLRScheduleConfig | None = argument(
        InstanceOf(CosineLRScheduleConfig, "a CosineLRScheduleConfig"), None
    )
    optimizer: Any = argument(check_optimizer, "adamw", resumed=False)
    weight_decay: float = argument(Number(0), 0.0, mutable=True)
    adam_betas: tuple[float, float] = argument(check_betas, (0.9, 0.999))
    lr_schedule: ScheduleKind | None = argument(OneOf((None, "constant", "linear", "cosine")), None)
    lr_schedule_steps: int | None = argument(OPTIONAL_COUNT, None)
    warmup_steps: float = argument(Number(0), 0)

    @classmethod
    def check_together(cls, arguments: Mapping[str, Any]) -> None:
        """Refuse values that contradict each other."""
        super().check_together(arguments)
        _check_schedule(arguments)
        _check_optimizer_fits(arguments)
        rank = ranks_of(arguments["accelerator"]).rank
        if arguments["lr"] < LOWEST_USUAL_LR and rank == 0 and not arguments["clone"]:
            warn_once(
                logger,
                "lr is below 1e-6, as its default of 5e-7 is. That suits full finetuning; a LoRA "
                "adapter hardly moves in a hundred steps. Pass lr=1e-5 to 1e-4.",
            )

    def optimizer_settings(self) -> OptimizerSettings:
        """Which optimizer, and its settings, from the attributes as they are now."""
        first, second = self.adam_betas
        # The attribute `optimizer` is torch's.
        kind = vars(self)["optimizer"]
        return OptimizerSettings(kind, weight_decay=self.weight_decay, betas=(first, second))

    def schedule(self) -> LRSchedule | None:
        """The learning rate's schedule; None: constant, without warm-up."""
        if self.cosine_lr_schedule_config is not None:
            return self.cosine_lr_schedule_config.to_schedule()
        if self.lr_schedule is None or (self.lr_schedule == "constant" and not self.warmup_steps):
            return None
        warmup = _warmup_calls(self.warmup_steps, self.lr_schedule_steps)
        return LRSchedule(self.lr_schedule, self.lr_schedule_steps, warmup)


def _check_optimizer_fits(arguments: Mapping[str, Any]) -> None:
    """Refuse an optimizer that is not installed, and settings that it does not have."""
    chosen = arguments["optimizer"]
    stage = zero_section(arguments["accelerator"]).get("stage", 0)
    require(
        chosen == "adamw" or stage == 0,
        f"optimizer is {chosen!r}, but accelerator asks for ZeRO stage {stage}, which partitions "
        "AdamW only; use optimizer='adamw', or an accelerator without DeepSpeed",
    )
    require(
        chosen != "adamw_8bit" or importlib.util.find_spec("bitsandbytes") is not None,
        "optimizer is 'adamw_8bit', which needs bitsandbytes: pip install 'agilerl[quantization]'",
        ImportError,
    )
    if callable(chosen):
        searched = "weight_decay" in (arguments["hp_config"] or ())
        for name in ("weight_decay", "adam_betas"):
            default = OptimizerArguments.argument_table()[name].default
            require(
                arguments[name] == default and not (name == "weight_decay" and searched),
                f"{name} is {arguments[name]}{', and in hp_config' if searched else ''}, but "
                f"optimizer is a function; have it set {name}",
            )


def _check_schedule(arguments: Mapping[str, Any]) -> None:
    kind, steps = arguments["lr_schedule"], arguments["lr_schedule_steps"]
    warmup = arguments["warmup_steps"]
    require(
        kind is None or arguments["cosine_lr_schedule_config"] is None,
        f"lr_schedule is {kind!r}, but cosine_lr_schedule_config is given too; pass one of them",
    )
    for name, default in (("lr_schedule_steps", None), ("warmup_steps", 0)):
        require(
            kind is not None or arguments[name] == default,
            f"{name} is {arguments[name]}, but lr_schedule is None; pass lr_schedule='constant', "
            "'linear' or 'cosine' with it",
        )
    require(
        kind in (None, "constant") or steps is not None,
        f"lr_schedule is {kind!r}, but lr_schedule_steps is None; pass the number of calls of "
        "learn (iterations of a training function) after which the learning rate is zero",
    )
    require(
        not 0 < warmup < 1 or steps is not None,
        f"warmup_steps is {warmup}, a share of lr_schedule_steps, but that is None; pass it, or a "
        "whole number of calls of learn",
    )
    require(
        warmup < 1 or float(warmup).is_integer(),
        f"warmup_steps is {warmup}; it must be a whole number of calls of learn, or a share of "
        "lr_schedule_steps below 1",
    )
    require(
        steps is None or warmup < steps,
        f"warmup_steps is {warmup}; it must be below lr_schedule_steps, which is {steps}",
    )


def _warmup_calls(warmup: float, steps: int | None) -> int:
    """Calls of ``learn``, of a number of them or a share of all."""
    return int(warmup * steps) if warmup < 1 and steps is not None else int(warmup)
