"""From the row of a dataset to the conversation that the model continues."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from agilerl.checks import require, shorten, warn_once
from agilerl.llm.prompts import (
    EXAMPLE_TEMPLATE,
    Conversation,
    as_text,
    check_template,
    fill_template,
    placeholders,
)

logger = logging.getLogger(__name__)

CONVERSATION_COLUMNS = ("prompt", "messages")
"""Columns that may hold whole conversations."""
_SYSTEM_ROLES = ("system", "developer")
_LISTS = (list, tuple, np.ndarray)  # pandas gives what it reads from Parquet as arrays


class ConversationReader:
    """Reads conversations, and what the question is, off the rows of a dataset.

    A row either fills the template, or holds a conversation in the column ``prompt`` or
    ``messages``; the template, if there is one, then only stands in front. It does so where no
    placeholder in it names a column, or all of its messages are the system's.

    Args:
        conversation_template: Messages with placeholders of columns, such as ``{question}``; may be
            None where rows hold conversations.
        name: What messages call the split that the row is of.
        column_names: Columns of the split.
        first: A row of it, which shows what the columns hold.

    Raises:
        TypeError: A template that is not a list of messages.
        ValueError: A template that shows no column; none, and no conversation in the rows; rows
            with two of them.
    """

    def __init__(
        self,
        conversation_template: Conversation | None,
        name: str,
        column_names: Sequence[str],
        first: Mapping[str, Any],
    ) -> None:
        if conversation_template is not None:
            check_template(conversation_template)
        self.template = [dict(message) for message in conversation_template or ()]
        own = [c for c in CONVERSATION_COLUMNS if c in column_names and is_conversation(first[c])]
        # TRL's name for it; where there is a column question too, it is another one.
        question = "prompt" if "prompt" in column_names and "prompt" not in own else None
        question = "question" if "question" in column_names else question
        # The answer is never filled in: the model would see it.
        self._column_of = {column: column for column in column_names if column != "answer"}
        if question is not None:
            self._column_of["question"] = question
        names = placeholders(self.template)
        self.shown = [place for place in names if place in self._column_of]
        """Placeholders that are filled."""
        in_front = all(message["role"] in _SYSTEM_ROLES for message in self.template)
        self._own = own[0] if own and (in_front or not self.shown) else None
        if "question" in names:
            require(
                question is not None,
                f"{name} has no column 'question', only {list(column_names)}; rename yours with "
                "dataset.rename_column(old, new), or name it in conversation_template: {old}",
            )
        if self._own is None:
            self._check_shown(conversation_template, name, column_names)
        require(
            self._own is None or len(own) < 2,
            f"{name} has conversations in the columns {own}; remove one with "
            "dataset.remove_columns(name)",
        )
        _warn_of_unfilled(names, self._column_of, column_names)
        self._question = question if question in (*self._shown_columns(), "question") else None

    @property
    def columns(self) -> list[str]:
        """The columns that are read."""
        read = [self._question, *self._shown_columns(), self._own]
        return list(dict.fromkeys(column for column in read if column is not None))

    def read(self, row: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
        """The conversation of a row.

        Args:
            row: Its values by column.
            where: Names the row in messages, such as ``train_dataset row 3``.

        Raises:
            TypeError: A value that is no text; a conversation that is not a list of messages.
            ValueError: None in a column that is shown; a conversation with the answer in it.
        """
        values = {
            place: _shown_value(row[self._column_of[place]], self._column_of[place], where)
            for place in self.shown
        }
        try:
            filled = fill_template(self.template, values)
        except TypeError as error:
            raise TypeError(f"{where}: {error}; leave its column out of the template") from error
        if self._own is None:
            return filled
        own = read_conversation(row[self._own], f"{where}: {self._own}")
        require(
            not (_has_system(filled) and _has_system(own)),
            f"{where}: {self._own} has a system message, and conversation_template another one; "
            "leave out one of them",
        )
        return filled + own

    def question(self, row: Mapping[str, Any], conversation: Conversation) -> Any:
        """The value of the question's column; without one, the last message of the user."""
        if self._question is not None and row[self._question] is not None:
            return row[self._question]
        of_user = [message["content"] for message in conversation if message["role"] == "user"]
        return of_user[-1] if of_user else conversation[-1]["content"]

    def _shown_columns(self) -> list[str]:
        return [self._column_of[place] for place in self.shown]

    def _check_shown(
        self, template: Conversation | None, name: str, column_names: Sequence[str]
    ) -> None:
        columns = [c for c in column_names if c != "answer"]
        shown = "question" if "question" in columns or not columns else columns[0]
        remedy = f"pass for example {EXAMPLE_TEMPLATE.replace('question', shown)}"
        require(
            template is not None,
            f"conversation_template is None, but {name} has no conversations: no column 'prompt' "
            "or 'messages' with lists of messages {'role': ..., 'content': ...}, only "
            f"{list(column_names)}; {remedy}",
        )
        require(
            bool(self.shown),
            "conversation_template has no {question}, nor another column of "
            f"{name} in any content, so every prompt would be the same, got {self.template!r}; "
            f"there are {list(column_names)}: {remedy}",
        )


def is_conversation(value: Any) -> bool:
    """Whether a value of a column is meant to be a list of messages."""
    listed = isinstance(value, _LISTS) and len(value) > 0
    return listed and isinstance(value[0], Mapping) and "role" in value[0]


def read_conversation(value: Any, where: str) -> list[dict[str, Any]]:
    """The messages of a row, their contents as text.

    Keys beside role and content that are not None are kept for the chat template.

    Args:
        value: What the column holds.
        where: Names row and column in messages.

    Raises:
        TypeError: Not a list of messages.
        ValueError: No messages; a last one of the assistant; a content that is no text.
    """
    require(
        isinstance(value, _LISTS),
        f"{where} is {shorten(value)}; it must be a list of messages "
        '{"role": "user", "content": "..."}, as in the first row',
        TypeError,
    )
    require(len(value) > 0, f"{where} has no messages; drop the row")
    messages = [_message(each, f"{where}[{number}]") for number, each in enumerate(value)]
    require(
        messages[-1]["role"] != "assistant",
        f"{where} ends with a message of the assistant, {shorten(messages[-1]['content'])}, which "
        "usually holds the answer: end conversations with the user's message, and put what the "
        "assistant said into the column 'answer' if rewards need it",
    )
    return messages


def _message(value: Any, where: str) -> dict[str, Any]:
    require(
        isinstance(value, Mapping) and isinstance(value.get("role"), str) and "content" in value,
        f'{where} is {shorten(value)}; a message is a dict such as {{"role": "user", "content": '
        '"..."}',
        TypeError,
    )
    content = value["content"]
    if content is None and value.get("tool_calls"):
        content = ""
    if isinstance(content, _LISTS):
        content = "".join(_text_part(part, where) for part in content)
    require(
        isinstance(content, str),
        f"{where} has the content {shorten(content)}; it must be a string",
        TypeError,
    )
    # Arrow gives every message the keys of all.
    other = {key: each for key, each in value.items() if each is not None}
    return {**other, "role": value["role"], "content": content}


def _text_part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    require(
        kind == "text" and isinstance(part["text"], str),
        f"{where} has a part of the type {kind!r}; contents are text only: drop such rows, or use "
        '{"type": "text", "text": "..."}',
    )
    return str(part["text"])


def _shown_value(value: Any, column: str, where: str) -> Any:
    require(
        value is not None,
        f"{where}: {column} is None, and conversation_template shows it; drop the row with "
        f"dataset.filter(lambda row: row[{column!r}] is not None), or fill it in",
    )
    require(
        not is_conversation(value),
        f"{where}: {column} is a conversation, which {{{column}}} cannot show; name the column "
        "'prompt', and pass conversation_template=None or messages to stand in front of it",
    )
    return value


def _has_system(conversation: Conversation) -> bool:
    return any(message["role"] in _SYSTEM_ROLES for message in conversation)


def _warn_of_unfilled(
    names: Sequence[str], filled: Collection[str], column_names: Collection[str]
) -> None:
    """Say which placeholders stay as they are although a column is, or may be, meant."""
    for name in names:
        if name in filled:
            continue
        if name == "answer" and name in column_names:
            warn_once(
                logger,
                "{answer} in conversation_template stays as it is: the model would see the answer. "
                "If the column is to be shown, rename it: dataset.rename_column('answer', 'hint').",
            )
            continue
        columns = {column.lower(): column for column in filled}
        near = difflib.get_close_matches(name.strip().lower(), columns, n=1, cutoff=0.75)
        if near:
            warn_once(
                logger,
                "{%s} in conversation_template names no column and stays as it is; did you mean "
                "{%s}?",
                *(name, columns[near[0]]),
            )


def question_text(question: Any) -> str:
    """A question for logs."""
    try:
        return as_text(question)
    except TypeError:
        return str(question)
