"""Engines: who runs backward, clips, steps the optimizer and keeps its state.

``local.py`` is a single process. With several, every rank accumulates the gradients of its own
rows: ``all_reduce.py`` sums them, ``zero.py`` has DeepSpeed sum them and partition the optimizer.
``build.py`` chooses one by the accelerator, whose configuration only ``accelerator_config.py``
reads. ``partitioned_base.py`` partitions the frozen base (ZeRO stage 3).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from agilerl.distributed import Ranks


class Engine(Protocol):
    """What :func:`agilerl.llm.update.run_update` needs of an engine."""

    ranks: Ranks
    """The processes that step together."""
    lockstep: bool
    """Whether every rank must run the same number of forwards and backwards."""
    loss_scale: float
    """What :meth:`backward` multiplies losses with until the next step, which divides the gradients
    by it before they are summed over ranks: a power of two, 1 unless it is set."""

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate the gradient of a micro-batch's loss.

        The loss is this rank's part of a sum over ranks.
        """
        ...

    def step(self, max_grad_norm: float) -> float:
        """Sum over ranks, clip, step, clear; all ranks together.

        Returns:
            The norm of the sum before clipping, the same on every rank; if it is not finite,
            nothing was stepped.
        """
        ...

    def discard(self) -> None:
        """Clear accumulated gradients and the loss scale without a step."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Optimizer and schedule, in a form that every engine loads; all ranks together."""
        ...

    def load_state_dict(self, state: Mapping[str, Any], *, keep_lr: bool = False) -> None:
        """Restore what :meth:`state_dict` of any engine gave; ``keep_lr``: except the rate."""
        ...
