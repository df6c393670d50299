"""The training and the held-out split of an environment, checked against each other."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from agilerl.checks import require
from agilerl.llm.prompts import Conversation
from agilerl.llm_envs.dataset.batches import ShuffledBatches, TrainingBatches
from agilerl.llm_envs.dataset.conversations import ConversationReader
from agilerl.llm_envs.dataset.held_out import HeldOutRows
from agilerl.llm_envs.dataset.prompt_dataset import PromptDataset, PromptReader
from agilerl.llm_envs.dataset.repetition import RepetitionCheck
from agilerl.llm_envs.dataset.rows import Rows, read_rows
from agilerl.llm_envs.dataset.stream import Stream
from agilerl.llm_envs.dataset.streamed_batches import StreamedBatches

_HOLD_OUT = "hold rows out, for example with dataset.train_test_split(test_size=0.1, seed=0)"


def read_training_rows(dataset: Any) -> Rows | Stream:
    """The rows of what the user passed as ``train_dataset``, which may be a stream.

    Raises:
        TypeError: Of no kind that is known.
        ValueError: No rows.
    """
    from datasets import IterableDataset

    name = "train_dataset"
    return (Stream if isinstance(dataset, IterableDataset) else read_rows)(name, dataset)


def read_test_sets(dataset: Any) -> dict[str | None, Rows]:
    """The rows of what the user passed as ``test_dataset``, by the name of their set.

    Raises:
        TypeError: Of no kind that is known; a name that is no text.
        ValueError: No rows; no set; an empty name.
    """
    if dataset is None:
        return {}
    if not isinstance(dataset, Mapping):
        return {None: read_rows("test_dataset", dataset)}
    require(len(dataset) > 0, "test_dataset is an empty dict; pass rows by name, or None")
    for name in dataset:
        require(
            isinstance(name, str),
            f"test_dataset has the name {name!r}; names of test sets must be text",
            TypeError,
        )
        require(name.strip() != "", "test_dataset has a set without a name; give it one")
    return {name: read_rows(_name_of_set(name), rows) for name, rows in dataset.items()}


def _name_of_set(name: str | None) -> str:
    """What messages call a test set."""
    return "test_dataset" if name is None else f"test_dataset[{name!r}]"


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
        self.test = read_test_sets(test_dataset)
        """The test sets by name, a single one by None; none: there is no evaluation."""

    @property
    def column_names(self) -> list[str]:
        """Columns of all splits: a reward that asks for one gets it in evaluation too."""
        columns = [rows.column_names for rows in self.test.values()]
        return [c for c in self.train.column_names if all(c in names for names in columns)]

    def check_answers(self, asked: Collection[str]) -> None:
        """Raise ValueError if a split has no answers although a reward asks for them."""
        splits: dict[str, Rows | Stream] = {"train_dataset": self.train}
        splits |= {_name_of_set(name): rows for name, rows in self.test.items()}
        for name, rows in splits.items():
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
    ) -> tuple[TrainingBatches, HeldOutRows | None]:
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
            repetition.trained_on(train.prompt_keys())
        return ShuffledBatches(train, batch_size, seed, rank, processes), test

    def _held_out_prompts(
        self, reader: PromptReader, max_context_length: int | None
    ) -> tuple[HeldOutRows | None, RepetitionCheck | None]:
        if not self.test:
            return None, None
        test = HeldOutRows(
            {
                name: PromptDataset(_name_of_set(name), rows, reader, max_context_length)
                for name, rows in self.test.items()
            }
        )
        repetition = RepetitionCheck("test_dataset", "train_dataset", _HOLD_OUT)
        repetition.evaluated_on(test.prompt_keys())
        return test, repetition
