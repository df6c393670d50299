"""Tournament selection."""

from __future__ import annotations

import random
from collections.abc import Sequence

from agilerl.checks import COUNT, FLAG
from agilerl.hpo.selection import Selection, best_of


class TournamentSelection(Selection):
    """At each place the best of a few members drawn at random continues.

    Args:
        tournament_size: Members drawn for each place; one that is drawn twice counts once, and a
            larger size favours the best more.
        elitism: Whether the best agent stays at its place as it is.
        population_size: Members.
        eval_loop: Evaluations whose mean is an agent's score, counted from the last.
        rand_seed: See :class:`agilerl.hpo.selection.Selection`.

    Raises:
        TypeError: A value of the wrong type.
        ValueError: A value out of range.
    """

    def __init__(
        self,
        tournament_size: int,
        elitism: bool,
        population_size: int,
        eval_loop: int = 1,
        *,
        rand_seed: int | None = None,
    ) -> None:
        COUNT("tournament_size", tournament_size)
        FLAG("elitism", elitism)
        super().__init__(population_size, eval_loop, rand_seed)
        self.tournament_size, self.elitism = tournament_size, elitism

    def parents(self, scores: Sequence[float], rng: random.Random) -> list[int]:
        """See :meth:`agilerl.hpo.selection.Selection.parents`."""
        members = range(len(scores))
        # Drawn for every place, so that the draws do not depend on the scores.
        winners = [
            max(rng.choices(members, k=self.tournament_size), key=lambda i: (scores[i], -i))
            for _ in members
        ]
        best = best_of(scores)
        if self.elitism:
            winners[best] = best
        return _at_own_places(winners)


def _at_own_places(winners: list[int]) -> list[int]:
    """The same winners, as many as possible of them at their own places: those need no clone."""
    places: list[int | None] = [None] * len(winners)
    others = []
    for winner in winners:
        if places[winner] is None:
            places[winner] = winner
        else:
            others.append(winner)
    remaining = iter(others)
    return [next(remaining) if place is None else place for place in places]
