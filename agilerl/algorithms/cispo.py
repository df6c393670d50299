"""CISPO: a clamped, detached importance weight times the log-prob."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agilerl.algorithms.core.pin_argument import pin_argument
from agilerl.algorithms.grpo import GRPO


class CISPO(GRPO):
    """Clipped Importance Sampling Policy Optimization, https://arxiv.org/abs/2506.13585.

    :class:`~agilerl.algorithms.grpo.GRPO` with ``loss_type`` pinned to ``"cispo"``; takes all its
    other arguments. Recommended: ``clip_coef=(0.0, 5.0)``, a cap without a lower bound.
    """

    if not TYPE_CHECKING:
        __init__ = pin_argument(GRPO.__init__, loss_type="cispo")
