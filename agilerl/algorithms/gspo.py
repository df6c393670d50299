"""GSPO: GRPO with one importance ratio per trajectory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agilerl.algorithms.core.pin_argument import pin_argument
from agilerl.algorithms.grpo import GRPO


class GSPO(GRPO):
    """Group Sequence Policy Optimization, https://arxiv.org/abs/2507.18071.

    :class:`~agilerl.algorithms.grpo.GRPO` with ``loss_type`` pinned to ``"gspo"``; takes all its
    other arguments. The paper clips to about ``(1 - 3e-4, 1 + 4e-4)``.
    """

    if not TYPE_CHECKING:
        __init__ = pin_argument(GRPO.__init__, loss_type="gspo")
