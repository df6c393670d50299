"""Which optimizer steps the adapters."""

from __future__ import annotations

import torch
from torch.optim.optimizer import ParamsT

from agilerl.llm.config import OptimizerSettings


def build_optimizer(
    parameters: ParamsT, lr: float, settings: OptimizerSettings
) -> torch.optim.Optimizer:
    """An optimizer over parameters, in groups or not.

    Args:
        parameters: What is trained.
        lr: Learning rate, for groups that do not name their own.
        settings: Which one.
    """
    return torch.optim.AdamW(
        parameters, lr=lr, betas=settings.betas, weight_decay=settings.weight_decay
    )
