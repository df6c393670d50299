"""The engine of several processes without DeepSpeed: the local one and a sum of the gradients."""

from __future__ import annotations

import torch
from torch.optim.optimizer import ParamsT

from agilerl.distributed import Ranks
from agilerl.llm.config import LRSchedule, OptimizerSettings
from agilerl.llm.engine.local import LocalEngine


class AllReduceEngine(LocalEngine):
    """Data parallel training: one flat all-reduce of the adapters' gradients per optimizer step.

    Only LoRA gradients exist, and they are small. Nothing is communicated before the step, so ranks
    may run different numbers of micro-batches, and forward as often as they like per backward.

    Args:
        parameters: What is trained, in groups or not; overwritten with the values of rank 0.
        lr: Learning rate, for groups that do not name their own.
        schedule: Warm-up and decay of it; None: constant.
        ranks: The processes that step together.
        settings: Of the optimizer.
    """

    def __init__(
        self,
        parameters: ParamsT,
        lr: float,
        schedule: LRSchedule | None,
        ranks: Ranks,
        settings: OptimizerSettings | None = None,
    ) -> None:
        super().__init__(parameters, lr, schedule, settings)
        self.ranks = ranks
        ranks.broadcast(self.parameters)

    def _reduce_gradients(self) -> None:
        """Sum the gradients over ranks."""
        gradients = [p.grad for p in self.parameters]
        flat = [
            p.new_zeros(p.numel()) if grad is None else grad.flatten()
            for p, grad in zip(self.parameters, gradients, strict=True)
        ]
        # What no rank has used keeps no gradient: AdamW leaves it alone, as in a single process.
        used = flat[0].new_tensor([grad is not None for grad in gradients])
        summed = self.ranks.sum(torch.cat([*flat, used]))
        *parts, used = summed.split([*(p.numel() for p in self.parameters), len(gradients)])
        for parameter, part, users in zip(self.parameters, parts, used.tolist(), strict=True):
            parameter.grad = part.view_as(parameter).to(parameter.dtype) if users else None
