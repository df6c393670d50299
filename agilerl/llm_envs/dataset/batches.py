"""Training batches, one after the other: in shuffled epochs over rows that are all there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from agilerl.llm_envs.dataset.prompt_dataset import PromptBatch, PromptDataset
from agilerl.llm_envs.dataset.sampler import TrainingBatchSampler


class TrainingBatches(Protocol):
    """Stays at a batch until :meth:`advance`: its state names the first that is not done yet."""

    @property
    def epoch(self) -> int:
        """Completed passes over the rows."""

    def __len__(self) -> int:
        """Rows of all processes, without those that are too long."""

    def current(self) -> PromptBatch:
        """This process's share of the present batch."""

    def upcoming(self, count: int) -> list[PromptBatch]:
        """The same of the present batch and those after it, ``count`` in all."""

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


class ShuffledBatches:
    """Every row once in an epoch, in an order that depends on seed and epoch alone.

    Args:
        dataset: The rows.
        sampler: Chooses among them.
    """

    def __init__(self, dataset: PromptDataset, sampler: TrainingBatchSampler) -> None:
        self.dataset, self._sampler = dataset, sampler

    @property
    def epoch(self) -> int:
        """See :class:`TrainingBatches`."""
        return self._sampler.epoch

    def __len__(self) -> int:
        return len(self.dataset)

    def current(self) -> PromptBatch:
        """See :class:`TrainingBatches`."""
        return self.dataset.batch(self._sampler.current())

    def upcoming(self, count: int) -> list[PromptBatch]:
        """See :class:`TrainingBatches`."""
        return [self.dataset.batch(rows) for rows in self._sampler.upcoming(count)]

    def advance(self) -> None:
        """See :class:`TrainingBatches`."""
        self._sampler.advance()

    def restart(self) -> None:
        """See :class:`TrainingBatches`."""
        self._sampler.set_epoch(0)

    def lengths(self) -> list[int]:
        """See :class:`TrainingBatches`."""
        return self.dataset.lengths()

    def fingerprint(self) -> str:
        """See :class:`TrainingBatches`."""
        return self.dataset.fingerprint()

    def state_dict(self) -> dict[str, Any]:
        """See :class:`TrainingBatches`."""
        return self._sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See :class:`TrainingBatches`."""
        self._sampler.load_state_dict(state)
