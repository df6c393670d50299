"""What the environments stand on: checked values, the rows of a split, the order they come in."""

from __future__ import annotations

import inspect
import logging
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from agilerl.llm.prompts import PromptEncoder
from agilerl.llm_envs.fingerprint import fingerprint
from agilerl.typing import ReasoningPrompts

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

_COLUMNS = ("question", "answer")
_LARGEST_NUMBER = float(torch.finfo(torch.float32).max)
_SHOWN_CHARACTERS = 500


@dataclass(frozen=True)
class PromptBatch:
    """Rows handed out together: one question, answer and prompt each."""

    questions: list[str]
    answers: list[Any]
    prompts: list[ReasoningPrompts]


class PromptSplit:
    """The rows of one dataset split whose prompts fit into the context.

    Args:
        name: What messages call the split: ``train_dataset`` or ``test_dataset``.
        dataset: Has the columns ``question`` (strings) and ``answer`` (anything).
        encoder: Makes the prompts.
        max_context_length: Tokens a prompt may have, template included; None keeps every row.

    Raises:
        TypeError: Not a ``datasets.Dataset``, or a question that is not a string.
        ValueError: A missing column, no rows, or no row whose prompt fits.
    """

    def __init__(
        self, name: str, dataset: Dataset, encoder: PromptEncoder, max_context_length: int | None
    ) -> None:
        self._encoder = encoder
        self._lengths: list[int] | None = None
        self.questions, self.answers = _read_columns(name, dataset)
        if max_context_length is not None:
            self._drop_long_prompts(name, max_context_length)

    def __len__(self) -> int:
        return len(self.questions)

    def batch(self, rows: Sequence[int]) -> PromptBatch:
        """The given rows with their prompts."""
        questions = [self.questions[row] for row in rows]
        answers = [self.answers[row] for row in rows]
        return PromptBatch(questions, answers, self._encoder.encode(questions))

    def lengths(self) -> list[int]:
        """Tokens of each row's prompt, template included; counted at the first call."""
        if self._lengths is None:
            texts = [self._encoder.render(question) for question in self.questions]
            self._lengths = [len(ids) for ids in self._encoder.tokenize(texts)]
        return self._lengths

    def fingerprint(self) -> str:
        """A digest of questions, answers and what makes prompts of them.

        Of the templates rather than of rendered prompts, into which some write the date.
        """
        chat_template = getattr(self._encoder.tokenizer, "chat_template", None)
        templates = (self._encoder.conversation_template, chat_template)
        return fingerprint([templates, *zip(self.questions, self.answers, strict=True)])

    def _drop_long_prompts(self, name: str, max_context_length: int) -> None:
        lengths = self.lengths()
        kept = [row for row, length in enumerate(lengths) if length <= max_context_length]
        if not kept:
            raise ValueError(
                f"{name}: none of the {len(lengths)} prompts fits into max_context_length="
                f"{max_context_length} tokens (template included), the shortest has "
                f"{min(lengths)}; raise max_context_length or shorten conversation_template"
            )
        if len(kept) < len(lengths):
            logger.warning(
                "%s: left out %d of %d rows, their prompts (template included) are longer than "
                "max_context_length=%d tokens.",
                *(name, len(lengths) - len(kept), len(lengths), max_context_length),
            )
        self.questions = [self.questions[row] for row in kept]
        self.answers = [self.answers[row] for row in kept]
        self._lengths = [lengths[row] for row in kept]


class TrainingBatchSampler:
    """Batches of row numbers, reshuffled every epoch: a pure function of seed, epoch and offset.

    With several processes a batch is ``batch_size`` rows for each, dealt out in turn; every row has
    its place in an epoch once. The last batch of an epoch may be short, but never so short that a
    process has nothing to do: a rest of fewer rows than processes joins the batch before.

    Args:
        rows: Rows of the training split.
        batch_size: Rows per batch and process.
        seed: 0 or more.
        process_index: Which share this process takes.
        num_processes: Number of shares.

    Raises:
        ValueError: Fewer rows than processes.
    """

    def __init__(
        self, rows: int, batch_size: int, seed: int, process_index: int = 0, num_processes: int = 1
    ) -> None:
        if rows < num_processes:
            raise ValueError(
                f"train_dataset has {rows} rows for {num_processes} processes; every process "
                "needs at least one, so add rows or use fewer processes"
            )
        self.rows = rows
        self.batch_size = batch_size
        self.seed = seed
        self.process_index = process_index
        self.num_processes = num_processes
        self.epoch = 0
        """Completed passes."""
        self.offset = 0
        """Rows of all processes that are done in this epoch."""

    def current(self) -> list[int]:
        """This process's share of the batch at the present position."""
        permutation = _permutation(self.rows, self.seed, self.epoch)
        share = permutation[self.offset + self.process_index : self._end() : self.num_processes]
        return [int(row) for row in share]

    def advance(self) -> None:
        """Go to the next batch."""
        self.offset = self._end()
        if self.offset >= self.rows:
            self.epoch, self.offset = self.epoch + 1, 0

    def rewind(self) -> None:
        """Go back to the first batch of the first epoch."""
        self.epoch, self.offset = 0, 0

    def state_dict(self) -> dict[str, int]:
        """The position and what it depends on, JSON-compatible; the same in every process."""
        return {name: getattr(self, name) for name in ("seed", "epoch", "offset", "rows")}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Take the seed and the position of ``state``.

        Raises:
            ValueError: ``state`` is none of ours, or of another number of rows.
        """
        own = self.state_dict()
        if set(state) != set(own):
            raise ValueError(
                f"state has the keys {sorted(state)}, expected {sorted(own)}; pass what "
                "state_dict() returned"
            )
        if state["rows"] != self.rows:
            raise ValueError(
                f"state was saved with rows={state['rows']}, this environment has {self.rows}, so "
                "its position means other rows here; resume with the same train_dataset and "
                "max_context_length"
            )
        self.seed, self.epoch, self.offset = state["seed"], state["epoch"], state["offset"]

    def _end(self) -> int:
        """Where the present batch of all processes ends."""
        end = self.offset + self.batch_size * self.num_processes
        return end if self.rows - end >= self.num_processes else self.rows


@lru_cache(maxsize=2)
def _permutation(rows: int, seed: int, epoch: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.random.default_rng((seed, epoch)).permutation(rows)


def process_rank(accelerator: Any) -> tuple[int, int]:
    """Which of how many processes this one is.

    Raises:
        TypeError: Neither None nor an accelerator.
    """
    if accelerator is None:
        return 0, 1
    try:
        return accelerator.process_index, accelerator.num_processes
    except AttributeError as exc:
        raise TypeError(
            f"accelerator must be an accelerate.Accelerator or None, got {accelerator!r}"
        ) from exc


def checked_int(name: str, value: Any, least: int = 1) -> int:
    """``value`` if it is an int of ``least`` or more.

    Raises:
        TypeError: Not an int.
        ValueError: Below ``least``.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an int of {least} or more, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be {least} or more, got {value!r}")
    return int(value)


def finite_number(what: str, value: Any, remedy: str) -> float:
    """``value`` as a float that float32 can hold; 0-d tensors and numpy scalars count as numbers.

    Args:
        what: Starts the message, such as ``"reward_fn returned"``.
        value: The value to check.
        remedy: Ends the message.

    Raises:
        TypeError: Not one real number.
        ValueError: NaN, infinite or beyond float32.
    """
    number = value
    if isinstance(value, torch.Tensor | np.ndarray | np.generic) and value.ndim == 0:
        number = value.item()
    if not isinstance(number, numbers.Real):
        raise TypeError(f"{what} {shorten(value)} of type {type(value).__name__}; {remedy}")
    # Compared before the conversion, which fails on an int beyond any float; no NaN is <= anything.
    size: Any = abs(number)
    if not size <= _LARGEST_NUMBER:
        raise ValueError(f"{what} {shorten(value)}, which is not a finite float32; {remedy}")
    return float(number)


def check_reward_fn(reward_fn: Any) -> None:
    """Refuse what cannot be called as ``reward_fn(completion, answer, question)``.

    Raises:
        TypeError: Not callable, or not with three arguments by position.
    """
    remedy = "pass a function reward_fn(completion, answer, question) that returns a float"
    if not callable(reward_fn):
        raise TypeError(f"reward_fn must be callable, got {reward_fn!r}; {remedy}")
    try:
        inspect.signature(reward_fn).bind("", "", "")
    except TypeError as exc:
        raise TypeError(
            f"reward_fn cannot be called with three arguments ({exc}); {remedy}"
        ) from exc
    except ValueError:
        pass  # Some builtins have no signature; the first call will tell.


ANSWERS_REMEDY = "pass the completion_ids that get_action returned for the prompts handed out last"


def check_answers(completion_ids: Any, prompts: Sequence[ReasoningPrompts]) -> None:
    """Check that ``completion_ids`` is a list of tensors of ids, one per prompt.

    Raises:
        TypeError: It is not.
        ValueError: There are more or fewer.
    """
    if not isinstance(completion_ids, list | tuple):
        raise TypeError(
            f"completion_ids must be a list of tensors, got {type(completion_ids).__name__}; "
            f"{ANSWERS_REMEDY}"
        )
    if len(completion_ids) != len(prompts):
        raise ValueError(
            f"completion_ids has {len(completion_ids)} entries for the {len(prompts)} prompts "
            f"handed out; {ANSWERS_REMEDY}"
        )
    for index, ids in enumerate(completion_ids):
        if not isinstance(ids, torch.Tensor) or ids.is_floating_point():
            raise TypeError(
                f"completion_ids[{index}] must be a tensor of token ids; {ANSWERS_REMEDY}"
            )


def shorten(value: Any) -> str:
    """``repr(value)``, cut to a length that fits into a message."""
    text = repr(value)
    if len(text) <= _SHOWN_CHARACTERS:
        return text
    return f"{text[:_SHOWN_CHARACTERS]}... ({len(text)} characters)"


def _read_columns(name: str, dataset: Any) -> tuple[list[str], list[Any]]:
    """The question and the answer column as lists."""
    columns = getattr(dataset, "column_names", None)
    if not isinstance(columns, list) or not hasattr(dataset, "__len__"):
        raise TypeError(
            f"{name} must be a datasets.Dataset, got {type(dataset).__name__}; build one with "
            "Dataset.from_list([...]), or pass one split of a DatasetDict such as splits['train']"
        )
    missing = [column for column in _COLUMNS if column not in columns]
    if len(dataset) == 0:
        raise ValueError(f"{name} has no rows; pass at least one question with its answer")
    if missing:
        raise ValueError(
            f"{name} has no column {' and no column '.join(map(repr, missing))}, only {columns}; "
            "rename yours with dataset.rename_column(old, new)"
        )
    questions, answers = (list(dataset[column]) for column in _COLUMNS)
    for row, question in enumerate(questions):
        if not isinstance(question, str):
            raise TypeError(
                f"{name} row {row}: question must be a string, got {shorten(question)}; turn "
                "conversations into text, or drop rows without a question"
            )
    return questions, answers
