"""The rows of a split as prompts."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agilerl.checks import require
from agilerl.llm.prompts import PromptEncoder, has_chat_template
from agilerl.llm_envs.dataset.conversations import ConversationReader
from agilerl.llm_envs.dataset.fingerprint import fingerprint
from agilerl.llm_envs.dataset.repetition import prompt_key
from agilerl.llm_envs.dataset.rows import Rows
from agilerl.typing import ReasoningPrompts

logger = logging.getLogger(__name__)

_ROWS_AT_A_TIME = 1000


@dataclass(frozen=True)
class PromptBatch:
    """Dataset rows handed out together: one question, answer and prompt each."""

    questions: list[Any]
    """The column ``question``, or the last message of the user."""
    answers: list[Any]
    prompts: list[ReasoningPrompts]
    columns: dict[str, list[Any]] = field(default_factory=dict)
    """Further columns, by name."""


def join_batches(batches: Sequence[PromptBatch]) -> PromptBatch:
    """The rows of at least one batch, one after the other."""
    return PromptBatch(
        questions=[question for batch in batches for question in batch.questions],
        answers=[answer for batch in batches for answer in batch.answers],
        prompts=[prompt for batch in batches for prompt in batch.prompts],
        columns={
            column: [value for batch in batches for value in batch.columns[column]]
            for column in batches[0].columns
        },
    )


class PromptReader:
    """From rows to prompts, of either split.

    Args:
        conversations: From rows to messages.
        encoder: From messages to prompts.
        columns: Further columns that batches shall have.
    """

    def __init__(
        self, conversations: ConversationReader, encoder: PromptEncoder, columns: Sequence[str] = ()
    ) -> None:
        self.conversations, self.encoder, self.columns = conversations, encoder, list(columns)

    def missing(self, column_names: Sequence[str]) -> list[str]:
        """Columns that a split lacks, of those that prompts are made of."""
        return [c for c in self.conversations.columns if c not in column_names]

    def needed(self, column_names: Sequence[str]) -> list[str]:
        """The columns of a split that are read."""
        asked = dict.fromkeys([*self.columns, *self.conversations.columns, "answer"])
        return [column for column in asked if column in column_names]

    def render(self, row: Mapping[str, Any], where: str) -> str:
        """The prompt of a row as text.

        Raises:
            TypeError: A row that is no prompt, named by ``where``.
            ValueError: The same.
        """
        conversation = self.conversations.read(row, where)
        try:
            return self.encoder.render(conversation)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error

    def batch(self, rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> PromptBatch:
        """Rows with their prompts.

        Args:
            rows: Values by column.
            names: What messages call each.

        Raises:
            TypeError: A row that is no prompt.
            ValueError: The same.
        """
        read = self.conversations
        conversations = [read.read(*each) for each in zip(rows, names, strict=True)]
        return PromptBatch(
            questions=[read.question(*each) for each in zip(rows, conversations, strict=True)],
            answers=[row.get("answer") for row in rows],
            prompts=self.encoder.encode(conversations),
            columns={column: [row[column] for row in rows] for column in self.columns},
        )

    def templates(self) -> tuple[Any, ...]:
        """What makes prompts of rows, for fingerprints.

        Not rendered prompts, as some templates print the date.
        """
        tokenizer, arguments = self.encoder.tokenizer, self.encoder.chat_template_kwargs
        chat_template = tokenizer.chat_template if has_chat_template(tokenizer) else None
        templates = (self.conversations.template, chat_template)
        return (*templates, arguments) if arguments else templates


class PromptDataset:
    """The rows of one split whose prompts fit into the context.

    Args:
        name: What messages call the split: ``train_dataset`` or ``test_dataset``.
        rows: The rows.
        reader: Makes prompts of them.
        max_context_length: Tokens a prompt may have, template included; None keeps every row.

    Raises:
        TypeError: A row that is no prompt.
        ValueError: The same; a column that the prompts need is missing; no row whose prompt fits.
    """

    def __init__(
        self, name: str, rows: Rows, reader: PromptReader, max_context_length: int | None
    ) -> None:
        missing = reader.missing(rows.column_names)
        require(
            not missing,
            f"{name} has no column {' and no column '.join(map(repr, missing))}, of which prompts "
            f"are made, only {rows.column_names}; give both splits the same columns",
        )
        self.name, self._reader = name, reader
        self._rows = rows.select_columns(reader.needed(rows.column_names))
        self._kept: Sequence[int] = range(len(rows))
        self._lengths: list[int] | None = None
        # A chat template that refuses the roles fails here, not in training.
        reader.render(self._rows.take([0])[0], self._where(0))
        self._keys: array[int] | None = None
        # Either way every row is read, so that one that is no prompt fails here.
        if max_context_length is None:
            self.prompt_keys()
        else:
            self._drop_long_prompts(max_context_length)

    def __len__(self) -> int:
        return len(self._kept)

    def batch(self, rows: Sequence[int]) -> PromptBatch:
        """The given rows, of those that fit, with their prompts."""
        numbers = [self._kept[row] for row in rows]
        return self._reader.batch(self._rows.take(numbers), [self._where(n) for n in numbers])

    def lengths(self) -> list[int]:
        """Tokens of each row's prompt, template included; counted at the first call."""
        if self._lengths is None:
            self._lengths = []
            texts: list[str] = []
            for row, where in self._each():
                texts.append(self._reader.render(row, where))
                if len(texts) == _ROWS_AT_A_TIME:
                    self._lengths += self._counted(texts)
                    texts = []
            self._lengths += self._counted(texts)
        return self._lengths

    def prompt_keys(self) -> array[int]:
        """A number for every row that fits: equal where prompts are equal."""
        if self._keys is None:
            read = self._reader.conversations.read
            self._keys = array("q", (prompt_key(read(row, where)) for row, where in self._each()))
        return self._keys

    def fingerprint(self, rows: int | None = None) -> str:
        """A digest of questions, answers, further columns and what makes prompts of them.

        Args:
            rows: Only the first ``rows`` of those that fit; None: all.
        """
        columns = [c for c in self._rows.column_names if c not in ("question", "answer")]

        def parts() -> Iterator[Any]:
            yield self._reader.templates()
            for row, _ in self._each(rows):
                yield row.get("question"), row.get("answer")
            for row, _ in self._each(rows) if columns else ():
                yield {column: row[column] for column in columns}

        return fingerprint(parts())

    def _counted(self, texts: Sequence[str]) -> list[int]:
        return [len(ids) for ids in self._reader.encoder.tokenize(texts)]

    def _each(self, count: int | None = None) -> Iterator[tuple[dict[str, Any], str]]:
        """The rows that fit, each with its name; only the first ``count``, unless it is None."""
        kept = self._kept[:count]
        for start in range(0, len(kept), _ROWS_AT_A_TIME):
            numbers = kept[start : start + _ROWS_AT_A_TIME]
            for number, row in zip(numbers, self._rows.take(numbers), strict=True):
                yield row, self._where(number)

    def _where(self, number: int) -> str:
        return f"{self.name} row {number}"

    def _drop_long_prompts(self, max_context_length: int) -> None:
        lengths = self.lengths()
        kept = [row for row, length in enumerate(lengths) if length <= max_context_length]
        require(
            bool(kept),
            f"{self.name}: none of the {len(lengths)} prompts fits into max_context_length="
            f"{max_context_length} tokens (template included), the shortest has {min(lengths)}; "
            "raise max_context_length or shorten conversation_template",
        )
        if len(kept) < len(lengths):
            logger.warning(
                "%s: dropped %d of %d rows, their prompts (template included) are longer than "
                "max_context_length=%d tokens.",
                *(self.name, len(lengths) - len(kept), len(lengths), max_context_length),
            )
        self._kept = kept
        self._lengths = [lengths[row] for row in kept]
