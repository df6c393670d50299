"""Truncation selection, as in Population Based Training."""

from __future__ import annotations

import random
from collections.abc import Sequence

from agilerl.checks import Number
from agilerl.hpo.selection import Selection


class TruncationSelection(Selection):
    """The worst members continue from one of the best each, drawn at random; the others stay.

    The exploiting half of Population Based Training (Jaderberg et al., 2017, section 4.1.1);
    :class:`agilerl.hpo.PerturbOrResample` is the exploring one.

    Args:
        population_size: Members.
        share: Of the members that are replaced, and of those they are replaced by; at least one.
        eval_loop: Evaluations whose mean is an agent's score, counted from the last.
        rand_seed: See :class:`agilerl.hpo.selection.Selection`.

    Raises:
        ValueError: A value out of range.
    """

    def __init__(
        self,
        population_size: int,
        share: float = 0.25,
        eval_loop: int = 1,
        *,
        rand_seed: int | None = None,
    ) -> None:
        Number(0, 0.5, open_low=True)("share", share)
        super().__init__(population_size, eval_loop, rand_seed)
        self.share = share

    def parents(self, scores: Sequence[float], rng: random.Random) -> list[int]:
        """See :meth:`agilerl.hpo.selection.Selection.parents`."""
        order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
        count = max(1, round(self.share * len(scores)))
        parents = list(range(len(scores)))
        for place in order[count:][-count:]:
            # A tie is no reason to exchange one for the other.
            parent = order[rng.randrange(count)]
            if scores[parent] > scores[place]:
                parents[place] = parent
        return parents
