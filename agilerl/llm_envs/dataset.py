"""The rows of a dataset as prompts, and the order in which training takes them."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from agilerl.checks import require, shorten
from agilerl.llm.prompts import PromptEncoder, has_chat_template
from agilerl.typing import ReasoningPrompts

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

_COLUMNS = ("question", "answer")


@dataclass(frozen=True)
class PromptBatch:
    """Dataset rows handed out together: one question, answer and prompt each."""

    questions: list[str]
    answers: list[Any]
    prompts: list[ReasoningPrompts]
    columns: dict[str, list[Any]] = field(default_factory=dict)
    """Further columns, by name."""


class PromptDataset:
    """The rows of one split whose prompts fit into the context.

    Args:
        name: What messages call the split: ``train_dataset`` or ``test_dataset``.
        dataset: Has passed :func:`check_dataset`; ``question`` holds strings, ``answer`` anything.
        encoder: Makes the prompts.
        max_context_length: Tokens a prompt may have, template included; None keeps every row.
        columns: Further columns that batches shall have.

    Raises:
        TypeError: A question that is not a string.
        ValueError: No row whose prompt fits.
    """

    def __init__(
        self,
        name: str,
        dataset: Dataset,
        encoder: PromptEncoder,
        max_context_length: int | None,
        columns: Sequence[str] = (),
    ) -> None:
        self._encoder = encoder
        self._lengths: list[int] | None = None
        self.questions, self.answers = _read_columns(name, dataset)
        # Read when needed: columns may be large.
        self._columns = dataset.select_columns(list(columns)) if columns else None
        if max_context_length is not None:
            self._drop_long_prompts(name, max_context_length)

    def __len__(self) -> int:
        return len(self.questions)

    def batch(self, rows: Sequence[int]) -> PromptBatch:
        """The given rows with their prompts."""
        questions = [self.questions[row] for row in rows]
        answers = [self.answers[row] for row in rows]
        columns = {} if self._columns is None else dict(self._columns[list(rows)])
        return PromptBatch(questions, answers, self._encoder.encode(questions), columns)

    def lengths(self) -> list[int]:
        """Tokens of each row's prompt, template included; counted at the first call."""
        if self._lengths is None:
            texts = [self._encoder.render(question) for question in self.questions]
            self._lengths = [len(ids) for ids in self._encoder.tokenize(texts)]
        return self._lengths

    def fingerprint(self) -> str:
        """A digest of questions, answers, further columns and what makes prompts of them.

        The templates are used instead of rendered prompts, as some templates print the date.
        """
        tokenizer = self._encoder.tokenizer
        chat_template = tokenizer.chat_template if has_chat_template(tokenizer) else None
        templates = (self._encoder.conversation_template, chat_template)
        columns = () if self._columns is None else self._columns
        return fingerprint([templates, *zip(self.questions, self.answers, strict=True), *columns])

    def _drop_long_prompts(self, name: str, max_context_length: int) -> None:
        lengths = self.lengths()
        kept = [row for row, length in enumerate(lengths) if length <= max_context_length]
        require(
            bool(kept),
            f"{name}: none of the {len(lengths)} prompts fits into max_context_length="
            f"{max_context_length} tokens (template included), the shortest has {min(lengths)}; "
            "raise max_context_length or shorten conversation_template",
        )
        if len(kept) < len(lengths):
            logger.warning(
                "%s: dropped %d of %d rows, their prompts (template included) are longer than "
                "max_context_length=%d tokens.",
                *(name, len(lengths) - len(kept), len(lengths), max_context_length),
            )
        self.questions = [self.questions[row] for row in kept]
        self.answers = [self.answers[row] for row in kept]
        self._lengths = [lengths[row] for row in kept]
        if self._columns is not None:
            self._columns = self._columns.select(kept)


class TrainingBatchSampler:
    """Batches of dataset rows, reshuffled every epoch: a pure function of seed, epoch and offset.

    torch's samplers are iterated; this one stays at a batch until :meth:`advance`, so that its
    state names the first batch that is not trained on yet.

    With several processes a batch has ``batch_size`` rows for each, assigned round-robin; every row
    occurs once in an epoch. The last batch of an epoch may be short, but has a row for every
    process: fewer remaining rows than processes are added to the batch before.

    Args:
        rows: Rows of the training split.
        batch_size: Rows per batch and process.
        seed: 0 or more.
        rank: This process.
        num_replicas: Number of processes.

    Raises:
        ValueError: Fewer rows than processes.
    """

    def __init__(
        self, rows: int, batch_size: int, seed: int, rank: int = 0, num_replicas: int = 1
    ) -> None:
        require(
            rows >= num_replicas,
            f"train_dataset has {rows} rows for {num_replicas} processes; every process needs at "
            "least one, so add rows or use fewer processes",
        )
        self.rows = rows
        self.batch_size = batch_size
        self.seed = seed
        self.rank = rank
        self.num_replicas = num_replicas
        self.epoch = 0
        """Completed passes."""
        self.offset = 0
        """Rows of all processes that are done in this epoch."""

    def current(self) -> list[int]:
        """The rows of the present batch that are this process's share."""
        permutation = _permutation(self.rows, self.seed, self.epoch)
        return permutation[self.offset + self.rank : self._end() : self.num_replicas].tolist()

    def upcoming(self, count: int) -> list[list[int]]:
        """This process's share of the present batch and those after it, ``count`` in all."""
        position, batches = (self.epoch, self.offset), []
        for _ in range(count):
            batches.append(self.current())
            self.advance()
        self.epoch, self.offset = position
        return batches

    def advance(self) -> None:
        """Go to the next batch."""
        self.offset = self._end()
        if self.offset >= self.rows:
            self.set_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Go to the first batch of an epoch."""
        self.epoch, self.offset = epoch, 0

    def state_dict(self) -> dict[str, int]:
        """The position and what it depends on, JSON-compatible; the same in every process."""
        return {
            "seed": self.seed, "epoch": self.epoch, "offset": self.offset, "rows": self.rows
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Take the seed and the position of ``state``.

        Raises:
            ValueError: Not a state of this class, or of another number of rows.
        """
        expected = sorted(self.state_dict())
        require(
            sorted(state) == expected,
            f"state has the keys {sorted(state)}, expected {expected}; pass what state_dict() "
            "returned",
        )
        require(
            state["rows"] == self.rows,
            f"state was saved with rows={state['rows']}, this environment has {self.rows}, so the "
            "same position has other rows here; resume with the same train_dataset and "
            "max_context_length",
        )
        self.seed, self.epoch, self.offset = state["seed"], state["epoch"], state["offset"]

    def _end(self) -> int:
        """Where the present batch of all processes ends."""
        end = self.offset + self.batch_size * self.num_replicas
        return end if self.rows - end >= self.num_replicas else self.rows


@lru_cache(maxsize=2)
def _permutation(rows: int, seed: int, epoch: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.random.default_rng((seed, epoch)).permutation(rows)


def fingerprint(rows: Iterable[Any]) -> str:
    """Digest of rows in their order, 16 hexadecimal digits; the same in every process.

    Values that are neither JSON nor arrays, such as images, count by their class only.
    """
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, default=_as_json, skipkeys=True).encode())
    return digest.hexdigest()[:16]


def _as_json(value: Any) -> Any:
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        return value.tolist()
    return type(value).__name__  # its repr may contain a memory address


def check_dataset(name: str, dataset: Any) -> None:
    """Check that a split can be used.

    Args:
        name: What messages call it: ``train_dataset`` or ``test_dataset``.
        dataset: What the user passed.

    Raises:
        TypeError: Not a ``datasets.Dataset``.
        ValueError: A missing column, or no rows.
    """
    from datasets import Dataset

    require(
        isinstance(dataset, Dataset),
        f"{name} is of type {type(dataset).__name__}; it must be a datasets.Dataset: build one "
        "with Dataset.from_list([...]), or pass one split of a DatasetDict, such as "
        "splits['train']",
        TypeError,
    )
    columns = dataset.column_names
    require(len(dataset) > 0, f"{name} has no rows; pass at least one question with its answer")
    missing = [repr(column) for column in _COLUMNS if column not in columns]
    require(
        not missing,
        f"{name} has no column {' and no column '.join(missing)}, only {columns}; rename yours "
        "with dataset.rename_column(old, new)",
    )


def _read_columns(name: str, dataset: Dataset) -> tuple[list[str], list[Any]]:
    """The question and the answer column as lists."""
    questions, answers = (list(dataset[column]) for column in _COLUMNS)
    for row, question in enumerate(questions):
        if not isinstance(question, str):
            raise TypeError(
                f"{name} row {row}: question must be a string, got {shorten(question)}; turn "
                "conversations into text, or drop rows without a question"
            )
    return questions, answers
