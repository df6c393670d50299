"""Engines: who runs backward, clips, steps the optimizer and keeps its state."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class Engine(Protocol):
    """What :func:`agilerl.llm.update.run_update` needs of an engine."""

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate the gradient of a micro-batch's loss."""
        ...

    def step(self, max_grad_norm: float) -> float:
        """Clip, step, clear.

        Returns:
            The norm before clipping; if it is not finite, nothing was stepped.
        """
        ...

    def discard(self) -> None:
        """Clear accumulated gradients without a step."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Optimizer and schedule."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave."""
        ...
