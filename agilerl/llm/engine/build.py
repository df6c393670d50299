"""Which engine an accelerator asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.optim.optimizer import ParamsT

from agilerl.distributed import ranks_of
from agilerl.llm.config import LRSchedule, OptimizerSettings
from agilerl.llm.engine.accelerator_config import zero_section
from agilerl.llm.engine.all_reduce import AllReduceEngine
from agilerl.llm.engine.local import LocalEngine

if TYPE_CHECKING:
    from accelerate import Accelerator


def build_engine(
    parameters: ParamsT,
    lr: float,
    schedule: LRSchedule | None = None,
    accelerator: Accelerator | None = None,
    settings: OptimizerSettings | None = None,
) -> LocalEngine:
    """An engine over adapters' parameters.

    Args:
        parameters: What is trained, in groups or not.
        lr: Learning rate, for groups that do not name their own.
        schedule: Warm-up and decay of it; None: constant.
        accelerator: None is a single process. With a DeepSpeed plugin of stage 1, 2 or 3, its ZeRO
            optimizer; else gradients are summed over the processes (ZeRO 0 partitions nothing).
        settings: Of the optimizer; with ZeRO 1, 2 or 3 that is AdamW.
    """
    ranks = ranks_of(accelerator)
    section = zero_section(accelerator)
    if section.get("stage", 0) in (1, 2, 3) and torch.distributed.is_initialized():
        from agilerl.llm.engine.zero import ZeroEngine

        return ZeroEngine(parameters, lr, schedule, ranks, section, settings)
    if ranks.world_size == 1:
        return LocalEngine(parameters, lr, schedule, settings)
    return AllReduceEngine(parameters, lr, schedule, ranks, settings)
