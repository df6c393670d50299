"""The held-out rows of an environment: one test set, or several with names."""

from __future__ import annotations

import itertools
import random
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence

from agilerl.llm_envs.dataset.prompt_dataset import PromptBatch, PromptDataset, join_batches


class HeldOutRows:
    """Test sets one after the other, their rows numbered throughout.

    Args:
        sets: By name; a single one may have the name None.
    """

    def __init__(self, sets: Mapping[str | None, PromptDataset]) -> None:
        self._sets, self._names = list(sets.values()), list(sets)
        self._starts = list(itertools.accumulate(map(len, self._sets), initial=0))

    def __len__(self) -> int:
        return self._starts[-1]

    def prompt_keys(self) -> Iterator[int]:
        """A number for every row of every set: equal where prompts are equal."""
        return itertools.chain.from_iterable(each.prompt_keys() for each in self._sets)

    def set_of(self, row: int) -> str | None:
        """Name of the set that a row is in."""
        return self._names[self._place(row)]

    def batch(self, rows: Sequence[int]) -> PromptBatch:
        """The given rows with their prompts."""
        parts = []
        for place, group in itertools.groupby(rows, self._place):
            start = self._starts[place]
            parts.append(self._sets[place].batch([row - start for row in group]))
        return join_batches(parts)

    def chosen(self, count: int) -> list[int]:
        """``count`` rows of every set, drawn at random; all of one that has no more.

        The same ones every time, and those of a smaller count are among those of a larger one.
        Not the first rows, because test sets are often sorted by subject or difficulty.
        """
        rows = []
        for start, each in zip(self._starts, self._sets, strict=False):
            order = list(range(len(each)))
            random.Random(0).shuffle(order)
            rows += [start + row for row in sorted(order[:count])]
        return rows

    def lengths(self) -> list[int]:
        """Tokens of each row's prompt, template included."""
        return [length for each in self._sets for length in each.lengths()]

    def fingerprint(self) -> str:
        """A digest of the rows of all sets, for each set one."""
        return "-".join(each.fingerprint() for each in self._sets)

    def _place(self, row: int) -> int:
        return bisect_right(self._starts, row) - 1
