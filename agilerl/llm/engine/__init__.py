"""Engines: who runs backward, clips, steps the optimizer and keeps its state.

``local.py`` is a single process. With several, every rank accumulates the gradients of its own
rows: ``all_reduce.py`` sums them, ``zero.py`` has DeepSpeed sum them and partition the optimizer.
``partition.py`` partitions the frozen base (ZeRO stage 3).
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from agilerl.distributed import Ranks


class Engine(Protocol):
    """What :func:`agilerl.llm.update.run_update` needs of an engine."""

    ranks: Ranks
    """The processes that step together."""
    lockstep: bool
    """Whether every rank must run the same number of forwards and backwards."""

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
        """Clear accumulated gradients without a step."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Optimizer and schedule, in a form that every engine loads; all ranks together."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` of any engine gave."""
        ...
