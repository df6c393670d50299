"""The training and the held-out split of an environment, checked against each other."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

import numpy as np

from agilerl.checks import require, warn_once
from agilerl.llm.prompts import Conversation
from agilerl.llm_envs.dataset.batches import ShuffledBatches, TrainingBatches
from agilerl.llm_envs.dataset.conversations import ConversationReader
from agilerl.llm_envs.dataset.prompt_dataset import PromptDataset, PromptReader
from agilerl.llm_envs.dataset.rows import Rows, read_rows
from agilerl.llm_envs.dataset.sampler import TrainingBatchSampler

logger = logging.getLogger(__name__)

# With fewer, as in a toy, repetitions are no sign of a mistake.
_LEAST_TEST_PROMPTS = 8
_LARGE_SHARE = 0.1


class Splits:
    """The rows that the user gave.

    Args:
        train_dataset: What the user passed.
        test_dataset: What the user passed; None: there are no held-out rows.

    Raises:
        TypeError: Of no kind that is known.
        ValueError: No rows.
    """

    def __init__(self, train_dataset: Any, test_dataset: Any) -> None:
        self.train = read_rows("train_dataset", train_dataset)
        self.test = None if test_dataset is None else read_rows("test_dataset", test_dataset)

    @property
    def column_names(self) -> list[str]:
        """Columns of both splits: a reward that asks for one gets it in evaluation too."""
        return [c for c in self.train.column_names if c in self._held_out.column_names]

    def check_answers(self, asked: Collection[str]) -> None:
        """Raise ValueError if a split has no answers although a reward asks for them."""
        for name, rows in {"train_dataset": self.train, "test_dataset": self._held_out}.items():
            require(
                "answer" not in asked or "answer" in rows.column_names,
                f"{name} has no column 'answer', only {rows.column_names}, and a reward asks for "
                "it; rename yours with dataset.rename_column(old, new), or have reward_fn name the "
                "columns that it needs",
            )

    def conversations(self, conversation_template: Conversation | None) -> ConversationReader:
        """The reader of both splits' conversations.

        Raises:
            Exception: What it raises.
        """
        names, first = self.train.column_names, self.train.take([0])[0]
        return ConversationReader(conversation_template, "train_dataset", names, first)

    def prompts(
        self,
        reader: PromptReader,
        max_context_length: int | None,
        batch_size: int,
        seed: int,
        rank: int,
        processes: int,
    ) -> tuple[TrainingBatches, PromptDataset | None]:
        """Training batches and, if there are any, the held-out rows.

        Args:
            reader: Makes prompts of rows.
            max_context_length: Tokens a prompt may have; None keeps every row.
            batch_size: Rows per training batch and process.
            seed: Of the training order.
            rank: This process.
            processes: Their number.

        Raises:
            TypeError: A row that is no prompt.
            ValueError: The same; no row that fits; fewer rows than processes.
        """
        train = PromptDataset("train_dataset", self.train, reader, max_context_length)
        test = None
        if self.test is not None:
            test = PromptDataset("test_dataset", self.test, reader, max_context_length)
            warn_of_repeated_prompts(train, test)
        sampler = TrainingBatchSampler(len(train), batch_size, seed, rank, processes)
        return ShuffledBatches(train, sampler), test

    @property
    def _held_out(self) -> Rows:
        return self.train if self.test is None else self.test


def warn_of_repeated_prompts(train: PromptDataset, test: PromptDataset) -> None:
    """Warn once if a large share of the test prompts are training prompts as well."""
    held_out = np.unique(test.prompt_keys)
    share = float(np.isin(held_out, train.prompt_keys).mean())
    if len(held_out) >= _LEAST_TEST_PROMPTS and share >= _LARGE_SHARE:
        warn_once(
            logger,
            "%.0f%% of the prompts of test_dataset are in train_dataset too, so its fitness does "
            "not show how an agent does on new ones; hold rows out, for example with "
            "dataset.train_test_split(test_size=0.1, seed=0).",
            100 * share,
        )
