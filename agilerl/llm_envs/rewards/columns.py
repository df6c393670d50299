"""What reward functions may know of completions, as columns."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from agilerl.llm_envs.dataset import PromptBatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")

OF_COMPLETIONS = ("completion", "completion_ids", "finish_reason")
"""Columns that do not come from the dataset, whatever columns that has."""
OFFERED = ("completion", "answer", "question", "completion_ids", "finish_reason", "info")
"""Columns that there are with any dataset."""


@dataclass(frozen=True)
class CompletionText:
    """One completion as reward functions see it."""

    text: str
    token_ids: list[int]
    """Without prompt and padding; an end-of-sequence token belongs to it."""
    finish_reason: str
    """``"stop"`` or ``"length"``."""


class CompletionReader:
    """Reads the ids of completions.

    Args:
        tokenizer: From ids to text; has a pad token.
        skip_special_tokens: Whether special tokens are left out of the text. If not, padding and
            the end-of-sequence token at the end still are.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens

    def read(
        self,
        completion_ids: torch.Tensor,
        prompt_length: int,
        finish_reasons: Sequence[str] | None = None,
    ) -> list[CompletionText]:
        """Read a group.

        Args:
            completion_ids: ``(G, T)`` long: prompt, completion, right padding.
            prompt_length: Tokens of the prompt.
            finish_reasons: ``"stop"`` or ``"length"`` for each. None: a completion as long as the
                longest of the group counts as cut off unless it ends with the end-of-sequence
                token.
        """
        rows = completion_ids[:, prompt_length:].tolist()
        reasons = [None] * len(rows) if finish_reasons is None else finish_reasons
        return [self._read(row, reason) for row, reason in zip(rows, reasons, strict=True)]

    def _read(self, row: list[int], reason: str | None) -> CompletionText:
        pad, eos, width = self._tokenizer.pad_token_id, self._tokenizer.eos_token_id, len(row)
        while row and row[-1] == pad:
            row.pop()
        if len(row) < width and pad == eos:
            row.append(eos)  # the first of what looks like padding was sampled
        ended = row[-1:] == [eos]
        if reason is None:
            reason = "stop" if ended or len(row) < width else "length"
        shown = row[:-1] if ended and not self._skip_special_tokens else row
        text = self._tokenizer.decode(shown, skip_special_tokens=self._skip_special_tokens)
        return CompletionText(text, row, reason)


def dataset_columns(asked: Collection[str], there: Sequence[str]) -> list[str]:
    """The columns of a dataset that have to be read for functions that ask for some columns.

    Questions and answers are read anyway.
    """
    as_info = "info" in asked and "info" not in there
    own = {"question", "answer", *OF_COMPLETIONS}
    return [name for name in there if name not in own and (as_info or name in asked)]


def reward_columns(
    batch: PromptBatch, completions: Sequence[Sequence[CompletionText]]
) -> dict[str, list[Any]]:
    """Columns of P·G rows, the completions of a prompt side by side.

    Args:
        batch: P dataset rows.
        completions: A group of G for each.
    """
    group = len(completions[0])
    info = [
        {name: values[row] for name, values in batch.columns.items()}
        for row in range(len(batch.questions))
    ]
    of_prompts: Mapping[str, Sequence[Any]] = {
        "info": info, **batch.columns, "question": batch.questions, "answer": batch.answers
    }  # fmt: skip
    each = [completion for texts in completions for completion in texts]
    return {
        **{name: _repeated(values, group) for name, values in of_prompts.items()},
        "completion": [completion.text for completion in each],
        "completion_ids": [completion.token_ids for completion in each],
        "finish_reason": [completion.finish_reason for completion in each],
    }


def _repeated(values: Sequence[T], times: int) -> list[T]:
    return [value for value in values for _ in range(times)]
