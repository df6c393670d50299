"""Training batches from a stream of rows, in its own order."""

from __future__ import annotations

import copy
import itertools
import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agilerl.checks import require
from agilerl.llm_envs.dataset.fingerprint import fingerprint
from agilerl.llm_envs.dataset.prompt_dataset import PromptBatch, PromptReader, join_batches
from agilerl.llm_envs.dataset.repetition import RepetitionCheck, prompt_key
from agilerl.llm_envs.dataset.stream import Stream

logger = logging.getLogger(__name__)

_LONG_ROWS_AT_THE_START = 1_000
_LONG_ROWS_IN_A_ROW = 10_000
_STATE = ("dataset_state", "dataset_state_offset", "epoch", "first_row", "offset")


@dataclass(frozen=True)
class _Row:
    number: int
    """Rows before it in the pass."""
    values: dict[str, Any]
    prompt: PromptBatch
    """The row alone, so that its prompt is rendered and tokenised once."""


@dataclass(frozen=True)
class _Checkpoint:
    """From where rows can be read again."""

    offset: int
    """Rows before it in the pass."""
    state: dict[str, Any] | None
    """The dataset's, None at the start of a pass."""


@dataclass(frozen=True)
class _Batch:
    epoch: int
    rows: list[_Row]
    """Of all processes."""
    own: PromptBatch
    """This process's share."""
    checkpoint: _Checkpoint
    """At or before the first row."""

    def first_row(self) -> str:
        """A digest, which tells whether a resumed stream gives the same rows."""
        return fingerprint([self.rows[0].values])


class StreamedBatches:
    """Rows in the order of a stream, those that fit into the context; see ``TrainingBatches``.

    As with ``TrainingBatchSampler``, a batch has ``batch_size`` rows for each process, assigned
    round-robin, and the last one of a pass a row for every process. All processes read the whole
    stream. No more rows are kept than the batches that were asked for, and one for each process.

    Its state names the present batch's place in the pass, and the dataset's own state shortly
    before it. Where that state leaves rows out, as with a shuffle buffer, the pass is read again
    from its start.

    Args:
        stream: The rows.
        reader: Makes prompts of them.
        max_context_length: Tokens a prompt may have; others are dropped as they come.
        batch_size: Rows per batch and process.
        rank: This process.
        num_replicas: Number of processes.
        repetition: Is told the prompts of the first pass; None: there are no test rows.
    """

    def __init__(
        self,
        stream: Stream,
        reader: PromptReader,
        max_context_length: int,
        batch_size: int,
        rank: int = 0,
        num_replicas: int = 1,
        repetition: RepetitionCheck | None = None,
    ) -> None:
        self._stream, self._reader, self._repetition = stream, reader, repetition
        self.max_context_length, self.batch_size = max_context_length, batch_size
        self.rank, self.num_replicas = rank, num_replicas
        self._columns = reader.needed(stream.column_names)
        reader.render(stream.head[0], self._where(0))
        self._open(0, _Checkpoint(0, None))
        self._rows = stream.first_rows()

    @property
    def epoch(self) -> int:
        """Completed passes over the stream."""
        return self._ahead[0].epoch if self._ahead else self._epoch

    def __len__(self) -> int:
        raise TypeError(
            f"{self._stream.name} is a stream, which has no length: bound training by max_steps or "
            "num_epochs, or pass a list of rows: list(dataset.take(1000))"
        )

    def batches(self, count: int) -> list[PromptBatch]:
        """See :class:`TrainingBatches`."""
        while len(self._ahead) < count:
            self._ahead.append(self._next_batch())
        return [batch.own for batch in itertools.islice(self._ahead, count)]

    def advance(self) -> None:
        """See :class:`TrainingBatches`."""
        self._present()
        self._ahead.popleft()

    def restart(self) -> None:
        """See :class:`TrainingBatches`."""
        self._open(0, _Checkpoint(0, None))

    def lengths(self) -> list[int]:
        """The longest that a prompt can be, as the rows are not there to be counted."""
        return [self.max_context_length]

    def fingerprint(self) -> str:
        """A digest of columns, first rows and what makes prompts of them."""
        head = [{name: row.get(name) for name in self._columns} for row in self._stream.head]
        return fingerprint([self._reader.templates(), self._stream.column_names, *head])

    def state_dict(self) -> dict[str, Any]:
        """See :class:`TrainingBatches`."""
        batch = self._present()
        return {
            "epoch": batch.epoch,
            "offset": batch.rows[0].number,
            "first_row": batch.first_row(),
            "dataset_state": batch.checkpoint.state,
            "dataset_state_offset": batch.checkpoint.offset,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Read on from a state. One that is refused leaves the position as it was.

        Raises:
            ValueError: Not a state of this class; the stream gives other rows there.
        """
        require(
            sorted(state) == list(_STATE),
            f"state has the keys {sorted(state)}, expected {list(_STATE)}; pass what state_dict() "
            "returned",
        )
        checkpoints = [
            _Checkpoint(state["dataset_state_offset"], state["dataset_state"]),
            _Checkpoint(0, None),
        ]
        for checkpoint in checkpoints:
            there = copy.copy(self)
            if there._read_to(state, checkpoint):
                vars(self).update(vars(there))
                return
        raise ValueError(
            f"{self._stream.name} gives another row {state['offset']} in pass {state['epoch']} "
            "than when state was saved, so the run cannot go on in the same order: build the "
            "stream from the same files, and shuffle with a seed: dataset.shuffle(seed=42)"
        )

    def with_appended_rows(self, state: Mapping[str, Any], fingerprint: str) -> dict[str, Any]:
        """See :class:`TrainingBatches`. Of a stream the first rows are compared, not the last."""
        require(
            self.fingerprint() == fingerprint,
            f"{self._stream.name} is a stream with other first rows, columns or templates",
        )
        return dict(state)

    def _read_to(self, state: Mapping[str, Any], checkpoint: _Checkpoint) -> bool:
        """Go to a state by way of a checkpoint; whether its row is there."""
        self._open(state["epoch"], checkpoint)
        skipped = state["offset"] - checkpoint.offset
        self._read += sum(1 for _ in itertools.islice(self._rows, skipped))
        if self._read < state["offset"]:
            return False
        batch = self._present()
        found = batch.epoch, batch.rows[0].number, batch.first_row()
        return found == (state["epoch"], state["offset"], state["first_row"])

    def _present(self) -> _Batch:
        if not self._ahead:
            self._ahead.append(self._next_batch())
        return self._ahead[0]

    def _open(self, epoch: int, checkpoint: _Checkpoint) -> None:
        """Read a pass from a checkpoint on; forget what was read before."""
        self._ahead: deque[_Batch] = deque()
        self._begin(epoch, checkpoint)

    def _begin(self, epoch: int, checkpoint: _Checkpoint) -> None:
        self._epoch, self._read = epoch, checkpoint.offset
        self._checkpoints = [checkpoint]
        self._rows = self._stream.rows(epoch, checkpoint.state)
        self._waiting: deque[_Row] = deque()
        self._ended = False
        self._dropped_in_a_row = 0
        if epoch == 0:
            self._dropped = 0

    def _next_batch(self) -> _Batch:
        size = self.batch_size * self.num_replicas
        # Some rows more: if fewer than processes are left after a batch, they belong to it.
        self._fill(size + self.num_replicas)
        require(
            len(self._waiting) >= self.num_replicas,
            f"{self._stream.name} has {len(self._waiting)} rows of at most max_context_length="
            f"{self.max_context_length} tokens in {self._read} rows, for {self.num_replicas} "
            "processes; every process needs at least one: add rows, or raise max_context_length",
        )
        whole = len(self._waiting) >= size + self.num_replicas
        count = size if whole else len(self._waiting)
        rows = [self._waiting.popleft() for _ in range(count)]
        while len(self._checkpoints) > 1 and self._checkpoints[1].offset <= rows[0].number:
            self._checkpoints.pop(0)
        own = join_batches([row.prompt for row in rows[self.rank :: self.num_replicas]])
        batch = _Batch(self._epoch, rows, own, self._checkpoints[0])
        if not whole:
            self._end_pass()
        return batch

    def _end_pass(self) -> None:
        if self._dropped and self._epoch == 0:
            logger.warning(
                "%s: dropped %d of %d rows, their prompts (template included) are longer than "
                "max_context_length=%d tokens.",
                *(self._stream.name, self._dropped, self._read, self.max_context_length),
            )
        self._begin(self._epoch + 1, _Checkpoint(0, None))

    def _fill(self, count: int) -> None:
        """Read until so many rows wait, or the pass is over."""
        state = self._rows.state_dict() if self._read > self._checkpoints[-1].offset else None
        if state is not None:
            self._checkpoints.append(_Checkpoint(self._read, state))
        while len(self._waiting) < count and not self._ended:
            read = next(self._rows, None)
            if read is None:
                self._ended = True
                return
            values = {name: read.get(name) for name in self._columns}
            where = self._where(self._read)
            row = _Row(self._read, values, self._reader.batch([values], [where]))
            self._read += 1
            if self._epoch == 0 and self._repetition is not None:
                conversation = self._reader.conversations.read(values, where)
                self._repetition.trained_on([prompt_key(conversation)])
            tokens = row.prompt.prompts[0]["input_ids"].shape[1]
            if tokens <= self.max_context_length:
                self._waiting.append(row)
                self._dropped_in_a_row = 0
            else:
                self._drop(row, tokens)

    def _drop(self, row: _Row, tokens: int) -> None:
        """Count a row that is too long, and say so at the first one.

        Raises:
            ValueError: So many came one after the other that perhaps no other will come.
        """
        remedy = "raise max_context_length or shorten conversation_template"
        if self._epoch == 0:
            self._dropped += 1
            if self._dropped == 1:
                logger.warning(
                    "%s is left out, and so will others be: its prompt has %d tokens (template "
                    "included), more than max_context_length=%d.",
                    *(self._where(row.number), tokens, self.max_context_length),
                )
        self._dropped_in_a_row += 1
        require(
            self._dropped_in_a_row < _LONG_ROWS_AT_THE_START or self._dropped_in_a_row < self._read,
            f"{self._stream.name}: none of the first {self._read} prompts fits into "
            f"max_context_length={self.max_context_length} tokens (template included); {remedy}",
        )
        require(
            self._dropped_in_a_row < _LONG_ROWS_IN_A_ROW,
            f"{self._stream.name}: of {self._dropped_in_a_row} rows up to row {row.number} no "
            f"prompt fits into max_context_length={self.max_context_length} tokens (template "
            f"included); {remedy}, or leave such rows out with dataset.filter(...)",
        )

    def _where(self, number: int) -> str:
        return f"{self._stream.name} row {number}"
