"""The plan of an update: which rows go into which optimizer step and which micro-batch.

``mini_batches.py`` makes it; ``rank_balancing.py`` evens out what the ranks run in each step, and
``micro_batches.py`` cuts a rank's part.
"""

from agilerl.llm.plan.micro_batches import (
    split_by_tokens,
    split_evenly_by_tokens,
    split_into_micro_batches,
)
from agilerl.llm.plan.mini_batches import MiniBatch, plan_mini_batches

__all__ = [
    "MiniBatch",
    "plan_mini_batches",
    "split_by_tokens",
    "split_evenly_by_tokens",
    "split_into_micro_batches",
]
