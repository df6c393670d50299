"""Which agents continue where."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import pytest

from agilerl.hpo import TournamentSelection, TruncationSelection
from agilerl.hpo.selection import Selection

SELECTIONS: list[Selection] = [
    TournamentSelection(2, elitism=True, population_size=4),
    TournamentSelection(2, elitism=False, population_size=4),
    TruncationSelection(4),
]


class Fake:
    """An agent that notes whose clone it is."""

    def __init__(self, index: int, fitness: list[float], parent: int | None = None) -> None:
        self.index, self.fitness, self.parent, self.cleaned = index, fitness, parent, False

    def clone(self, index: int) -> Fake:
        assert not self.cleaned
        return Fake(index, list(self.fitness), self.index)

    def clean_up(self) -> None:
        self.cleaned = True


def test_a_tournament_of_all_is_won_by_the_best() -> None:
    selection = TournamentSelection(200, elitism=True, population_size=3)
    assert selection.parents([0.1, 0.9, 0.5], random.Random(0)) == [1, 1, 1]


def test_a_tournament_of_one_is_a_draw() -> None:
    """Every member wins a place as often as another, but for the elite's own."""
    selection, rng = TournamentSelection(1, elitism=False, population_size=4), random.Random(0)
    counts = Counter(p for _ in range(2000) for p in selection.parents([4.0, 3.0, 2.0, 1.0], rng))
    assert all(1800 < counts[member] < 2200 for member in range(4))


def test_a_tournament_of_two() -> None:
    """The best of two draws from four is the k-th best with probability (9 - 2k) / 16."""
    selection, rng = TournamentSelection(2, elitism=False, population_size=4), random.Random(0)
    counts = Counter(p for _ in range(4000) for p in selection.parents([1.0, 4.0, 2.0, 3.0], rng))
    for member, share in {1: 7, 3: 5, 2: 3, 0: 1}.items():
        assert counts[member] / 16000 == pytest.approx(share / 16, abs=0.015)


@pytest.mark.parametrize("selection", SELECTIONS)
def test_a_winner_stays_at_its_own_place(selection: Selection) -> None:
    """It needs no clone there."""
    rng = random.Random(3)
    for _ in range(100):
        parents = selection.parents([rng.random() for _ in range(4)], rng)
        assert all(parents[parent] == parent for parent in parents)


@pytest.mark.parametrize("elitism", [True, False])
def test_elitism_keeps_the_best(elitism: bool) -> None:
    selection = TournamentSelection(1, elitism, population_size=4)
    rng = random.Random(0)
    kept = [selection.parents([0.0, 0.0, 1.0, 0.0], rng)[2] == 2 for _ in range(200)]
    assert all(kept) == elitism


def test_truncation_replaces_the_worst_by_the_best() -> None:
    scores = [5.0, 1.0, 7.0, 3.0, 6.0, 2.0, 8.0, 4.0]
    parents = TruncationSelection(8).parents(scores, random.Random(0))
    assert [place for place, parent in enumerate(parents) if parent != place] == [1, 5]
    assert {parents[1], parents[5]} <= {2, 6}


@pytest.mark.parametrize("scores", [[1.0] * 4, [1.0]])
def test_truncation_exchanges_no_equals(scores: list[float]) -> None:
    parents = TruncationSelection(len(scores)).parents(scores, random.Random(0))
    assert parents == list(range(len(scores)))


def test_scores_are_means_of_the_last_evaluations() -> None:
    agent = Fake(0, [9.0, 1.0, 2.0])
    for eval_loop, score in ((1, 2.0), (2, 1.5), (5, 4.0)):
        selection = TournamentSelection(2, True, 4, eval_loop)
        assert selection.score(agent) == score
    assert SELECTIONS[0].score(Fake(0, [math.nan])) == -math.inf
    with pytest.raises(ValueError, match="agent 3 was never evaluated"):
        SELECTIONS[0].score(Fake(3, []))


@pytest.mark.parametrize("selection", SELECTIONS)
def test_select_clones_and_cleans_up(selection: Selection) -> None:
    population = [Fake(index, [float(index)]) for index in (3, 1, 0, 2)]
    elite, selected = selection.select(list(population))
    assert elite in selected
    assert elite.fitness == max(agent.fitness for agent in selected)
    assert [agent.index for agent in selected] == [3, 1, 0, 2]
    for old, new in zip(population, selected, strict=True):
        assert old.cleaned == (new is not old)
        assert (new.parent is None) == (new is old)


def test_the_same_seed_selects_the_same() -> None:
    found: list[Any] = []
    for _ in range(2):
        selection = TournamentSelection(2, False, 6, rand_seed=4)
        population = [Fake(index, [float(index)]) for index in range(6)]
        found.append([agent.parent for agent in selection.select(population)[1]])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: TournamentSelection(0, True, 4), "tournament_size is 0"),
        (lambda: TournamentSelection(2, True, 0), "population_size is 0"),
        (lambda: TournamentSelection(2, True, 4, 0), "eval_loop is 0"),
        (lambda: TruncationSelection(4, share=0.6), "share is 0.6"),
        (lambda: SELECTIONS[0].select([Fake(0, [1.0])]), "population_size is 4.*1 members"),
    ],
)
def test_bad_values(make: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()
