"""The agents: GRPO, and the thin GSPO and CISPO that pin its ``loss_type``."""

from agilerl.algorithms.cispo import CISPO
from agilerl.algorithms.grpo import GRPO
from agilerl.algorithms.gspo import GSPO

__all__ = ["CISPO", "GRPO", "GSPO"]
