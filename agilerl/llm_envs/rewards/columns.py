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
BUILT_IN_COLUMNS = (
    "completion",
    "answer",
    "question",
    "prompt",
    "completion_ids",
    "finish_reason",
    "info",
)
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
        lengths: Sequence[int] | None = None,
        finish_reasons: Sequence[str] | None = None,
    ) -> list[CompletionText]:
        """Read a group.

        Args:
            completion_ids: ``(G, T)`` long: prompt, completion, right padding.
            prompt_length: Tokens of the prompt.
            lengths: Tokens of each completion. None: without what reads as padding at the end.
            finish_reasons: ``"stop"`` or ``"length"`` for each. None: a completion as long as the
                longest of the group counts as cut off unless it ends with the end-of-sequence
                token.
        """
        width = completion_ids.shape[1] - prompt_length
        group = []
        for index, ids in enumerate(completion_ids[:, prompt_length:].tolist()):
            row = self._unpadded(ids) if lengths is None else ids[: lengths[index]]
            reason = "length"
            if finish_reasons is not None:
                reason = finish_reasons[index]
            elif self._ends(row) or len(row) < width:
                reason = "stop"
            group.append(CompletionText(self._text(row), row, reason))
        return group

    def _unpadded(self, ids: list[int]) -> list[int]:
        pad, eos = self._tokenizer.pad_token_id, self._tokenizer.eos_token_id
        end = len(ids)
        while end and ids[end - 1] in (pad, eos):
            end -= 1
        # An agent may pad with the end-of-sequence token too: only the first was sampled.
        return ids[: end + (ids[end : end + 1] == [eos])]

    def _ends(self, row: list[int]) -> bool:
        return row[-1:] == [self._tokenizer.eos_token_id]

    def _text(self, row: list[int]) -> str:
        shown = row[:-1] if self._ends(row) and not self._skip_special_tokens else row
        return self._tokenizer.decode(shown, skip_special_tokens=self._skip_special_tokens)


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
    prompts = [prompt["text"] for prompt in batch.prompts]
    of_prompts: Mapping[str, Sequence[Any]] = {
        "info": info,
        "prompt": prompts,
        **batch.columns,
        "question": batch.questions,
        "answer": batch.answers,
    }
    each = [completion for texts in completions for completion in texts]
    return {
        **{name: _repeated(values, group) for name, values in of_prompts.items()},
        "completion": [completion.text for completion in each],
        "completion_ids": [completion.token_ids for completion in each],
        "finish_reason": [completion.finish_reason for completion in each],
    }


def _repeated(values: Sequence[T], times: int) -> list[T]:
    return [value for value in values for _ in range(times)]
