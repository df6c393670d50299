"""Training batches, one after the other: in shuffled epochs over rows that are all there."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping
from typing import Any, Protocol

from agilerl.checks import require
from agilerl.llm_envs.dataset.prompt_dataset import PromptBatch, PromptDataset
from agilerl.llm_envs.dataset.sampler import TrainingBatchSampler, with_appended_rows


class TrainingBatches(Protocol):
    """Stays at a batch until :meth:`advance`: its state names the first that is not done yet."""

    @property
    def epoch(self) -> int:
        """Completed passes over the rows."""

    def __len__(self) -> int:
        """Rows of all processes, without those that are too long."""

    def batches(self, count: int) -> list[PromptBatch]:
        """This process's share of the present batch and those after it, ``count`` in all."""

    def advance(self) -> None:
        """Go to the next batch."""

    def restart(self) -> None:
        """Go back to the first batch of the first epoch."""

    def lengths(self) -> list[int]:
        """Tokens of the prompts, template included."""

    def fingerprint(self) -> str:
        """A digest of the data."""

    def state_dict(self) -> dict[str, Any]:
        """The position, JSON-compatible; the same in every process."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position; raises ValueError if it is one in other data."""

    def with_appended_rows(self, state: Mapping[str, Any], fingerprint: str) -> dict[str, Any]:
        """A position in the first of these rows as one in all of them.

        Args:
            state: The position.
            fingerprint: Of the data that it is in.

        Raises:
            ValueError: These data do not begin with them.
        """


class ShuffledBatches(TrainingBatchSampler):
    """Every row once in an epoch, in an order that depends on seed and epoch alone.

    Args:
        dataset: The rows.
        batch_size: Rows per batch and process.
        seed: Of the order.
        rank: This process.
        num_replicas: Number of processes.

    Raises:
        ValueError: Fewer rows than processes.
    """

    def __init__(
        self,
        dataset: PromptDataset,
        batch_size: int,
        seed: int,
        rank: int = 0,
        num_replicas: int = 1,
    ) -> None:
        super().__init__(len(dataset), batch_size, seed, rank, num_replicas)
        self.dataset = dataset
        # The present batch and those after it, as far as they were asked for: a prompt is
        # rendered and tokenised once.
        self._ahead: deque[PromptBatch] = deque()

    def __len__(self) -> int:
        return self.rows

    def batches(self, count: int) -> list[PromptBatch]:
        """See :class:`TrainingBatches`."""
        for rows in self.upcoming(count)[len(self._ahead) :]:
            self._ahead.append(self.dataset.batch(rows))
        return list(itertools.islice(self._ahead, count))

    def advance(self) -> None:
        """See :class:`TrainingBatches`."""
        super().advance()
        if self._ahead:
            self._ahead.popleft()

    def restart(self) -> None:
        """See :class:`TrainingBatches`."""
        self.set_epoch(0)
        self._ahead.clear()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See :class:`TrainingBatches`."""
        super().load_state_dict(state)
        self._ahead.clear()

    def with_appended_rows(self, state: Mapping[str, Any], fingerprint: str) -> dict[str, Any]:
        """See :class:`TrainingBatches`."""
        saved, name = state["rows"], self.dataset.name
        require(
            saved <= self.rows,
            f"{name} has {self.rows} rows, fewer than the {saved} saved ones; rows can be "
            "appended, not removed",
        )
        # Of the rows that fit, as positions are: a row that is dropped now, or no longer is, moves
        # those behind it, and is found here.
        require(
            self.dataset.fingerprint(saved) == fingerprint,
            f"the first {saved} of the {self.rows} rows of {name} are not the {saved} saved ones, "
            "or other columns are read, or other templates make prompts of them; rows can be "
            "appended at the end, with the same max_context_length, and neither shuffle() nor "
            "train_test_split() of a longer dataset leave them there",
        )
        return with_appended_rows(state, self.rows)

    def lengths(self) -> list[int]:
        """See :class:`TrainingBatches`."""
        return self.dataset.lengths()

    def fingerprint(self) -> str:
        """See :class:`TrainingBatches`."""
        return self.dataset.fingerprint()
