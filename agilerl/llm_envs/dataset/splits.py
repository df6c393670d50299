"""The training and the held-out split of an environment, checked against each other."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from agilerl.checks import require
from agilerl.llm.prompts import Conversation
from agilerl.llm_envs.dataset.batches import ShuffledBatches, TrainingBatches
from agilerl.llm_envs.dataset.conversations import ConversationReader
from agilerl.llm_envs.dataset.prompt_dataset import PromptDataset, PromptReader
from agilerl.llm_envs.dataset.repetition import RepetitionCheck
from agilerl.llm_envs.dataset.rows import Rows, read_rows
from agilerl.llm_envs.dataset.sampler import TrainingBatchSampler
from agilerl.llm_envs.dataset.stream import Stream
from agilerl.llm_envs.dataset.streamed_batches import StreamedBatches


def read_training_rows(dataset: Any) -> Rows | Stream:
    """The rows of what the user passed as ``train_dataset``, which may be a stream.

    Raises:
        TypeError: Of no kind that is known.
        ValueError: No rows.
    """
    from datasets import IterableDataset

    name = "train_dataset"
    return (Stream if isinstance(dataset, IterableDataset) else read_rows)(name, dataset)


def _given_length(max_context_length: int | None) -> int:
    if max_context_length is None:
        raise ValueError(
            "max_context_length is None, but train_dataset is a stream, whose prompts cannot all "
            "be measured before training; pass the most tokens that a prompt may have, less than "
            "max_model_len of the agents: rows with more are dropped as they come"
        )
    return max_context_length


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
        self.train = read_training_rows(train_dataset)
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
        names, rows = self.train.column_names, self.train
        first = rows.head[0] if isinstance(rows, Stream) else rows.take([0])[0]
        first = {name: first.get(name) for name in names}
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
        if isinstance(self.train, Stream):
            length = _given_length(max_context_length)
            test, repetition = self._held_out_prompts(reader, length)
            return StreamedBatches(
                self.train, reader, length, *(batch_size, rank, processes), repetition
            ), test
        train = PromptDataset("train_dataset", self.train, reader, max_context_length)
        test, repetition = self._held_out_prompts(reader, max_context_length)
        if repetition is not None:
            repetition.trained_on(train.prompt_keys)
        sampler = TrainingBatchSampler(len(train), batch_size, seed, rank, processes)
        return ShuffledBatches(train, sampler), test

    def _held_out_prompts(
        self, reader: PromptReader, max_context_length: int | None
    ) -> tuple[PromptDataset | None, RepetitionCheck | None]:
        if self.test is None:
            return None, None
        test = PromptDataset("test_dataset", self.test, reader, max_context_length)
        return test, RepetitionCheck(test.prompt_keys)

    @property
    def _held_out(self) -> Rows | Stream:
        return self.train if self.test is None else self.test
