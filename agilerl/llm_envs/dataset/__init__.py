"""From datasets to prompts: rows, conversations, the order of training."""

from __future__ import annotations

from agilerl.llm_envs.dataset.batches import ShuffledBatches, TrainingBatches
from agilerl.llm_envs.dataset.fingerprint import fingerprint
from agilerl.llm_envs.dataset.held_out import HeldOutRows
from agilerl.llm_envs.dataset.prompt_dataset import PromptBatch, PromptDataset, PromptReader
from agilerl.llm_envs.dataset.sampler import TrainingBatchSampler, with_appended_rows
from agilerl.llm_envs.dataset.splits import Splits

__all__ = [
    "HeldOutRows",
    "PromptBatch",
    "PromptDataset",
    "PromptReader",
    "ShuffledBatches",
    "Splits",
    "TrainingBatchSampler",
    "TrainingBatches",
    "fingerprint",
    "with_appended_rows",
]
