"""The order in which training takes dataset rows, and the digest that tells datasets apart."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agilerl.llm_envs.dataset import TrainingBatchSampler, fingerprint, with_appended_rows


@pytest.mark.parametrize(("rows", "ranks", "size"), [(7, 1, 3), (20, 3, 2), (13, 2, 2), (5, 5, 1)])
def test_every_row_occurs_once_in_an_epoch(rows: int, ranks: int, size: int) -> None:
    """Whatever the number of processes, which see the rows in the same sampler."""
    samplers = [TrainingBatchSampler(rows, size, 0, rank, ranks) for rank in range(ranks)]
    alone = TrainingBatchSampler(rows, rows, 0).current()
    seen: list[int] = []
    while samplers[0].epoch == 0:
        shares = [sampler.current() for sampler in samplers]
        assert all(shares)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        for sampler in samplers:
            sampler.advance()
        longest = max(map(len, shares))
        seen += [share[i] for i in range(longest) for share in shares if i < len(share)]
    assert seen == alone
    assert {sampler.epoch for sampler in samplers} == {1}


def test_an_epoch_can_be_set() -> None:
    sampler = TrainingBatchSampler(7, 3, seed=0)
    first = sampler.current()
    sampler.advance()
    sampler.set_epoch(1)
    assert (sampler.epoch, sampler.offset) == (1, 0)
    assert sampler.current() != first
    sampler.set_epoch(0)
    assert sampler.current() == first


class Processes:
    """The samplers of some processes that train together."""

    def __init__(self, rows: int, size: int, count: int, state: Any = None) -> None:
        self.each = [TrainingBatchSampler(rows, size, 3, rank, count) for rank in range(count)]
        if state is not None:
            for sampler in self.each:
                sampler.load_state_dict(json.loads(json.dumps(state)))

    @property
    def state(self) -> dict[str, Any]:
        (state,) = {json.dumps(sampler.state_dict()) for sampler in self.each}
        return json.loads(state)

    def next_batch(self) -> list[int]:
        """Rows of all processes, in the order in which they are dealt out."""
        shares = [sampler.current() for sampler in self.each]
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        assert min(map(len, shares)) > 0
        assert [sampler.upcoming(3)[0] for sampler in self.each] == shares
        for sampler, ahead in [(sampler, sampler.upcoming(2)[1]) for sampler in self.each]:
            sampler.advance()
            assert sampler.current() == ahead
        return [
            row
            for turn in range(len(shares[0]))
            for share in shares
            for row in share[turn : turn + 1]
        ]

    def rest_of_pass(self, batches: int | None = None) -> list[list[int]]:
        """Batches to the end of the present pass, or so many."""
        epoch, taken = self.each[0].epoch, []
        while self.each[0].epoch == epoch and len(taken) != batches:
            taken.append(self.next_batch())
        return taken


def joined(batches: list[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(batches))


@settings(max_examples=300, deadline=None)
@given(
    processes=st.integers(1, 3),
    size=st.integers(1, 3),
    sizes=st.tuples(st.integers(3, 12), st.integers(0, 7), st.integers(0, 7)),
    taken=st.tuples(st.integers(0, 5), st.integers(0, 5)),
)
def test_rows_appended_in_the_middle_of_a_pass(
    processes: int, size: int, sizes: tuple[int, ...], taken: tuple[int, int]
) -> None:
    """Twice in the same pass, or in two."""
    first, second, third = np.cumsum(sizes).tolist()
    plain = Processes(first, size, processes).rest_of_pass()
    begun = min(taken[0], len(plain) - 1)
    run = Processes(first, size, processes)
    batches = run.rest_of_pass(begun)
    run = Processes(second, size, processes, with_appended_rows(run.state, second))
    batches += run.rest_of_pass(taken[1])
    epoch, offset = run.state["epoch"], run.state["offset"]
    run = Processes(third, size, processes, with_appended_rows(run.state, third))
    state, rest = run.state, run.rest_of_pass()
    in_pass = joined(batches if epoch == 0 else []) + joined(rest)
    assert sorted(in_pass) == list(range(third))
    assert (epoch, offset) == ((0, len(joined(batches))) if epoch == 0 else (1, 0))

    # What it began with comes first, in the order that it would have had, then what came first.
    if epoch == 0 and begun:
        assert in_pass[:first] == joined(plain)
        assert set(in_pass[first:second]) == set(range(first, second))
        if all(appended == 0 or appended >= processes for appended in sizes):
            assert (batches + rest)[: len(plain)] == plain

    # The next pass is that of a run which has always had all rows.
    always = Processes(third, size, processes)
    for sampler in always.each:
        sampler.set_epoch(epoch + 1)
    assert run.state == always.state
    assert run.rest_of_pass() == always.rest_of_pass()

    # A run that is resumed at every batch takes the same ones.
    resumed = []
    for _ in rest:
        again = Processes(third, size, processes, state)
        resumed.append(again.next_batch())
        state = again.state
    assert resumed == rest


def test_the_order_of_appended_rows() -> None:
    """What the texts promise, once in numbers: shuffled by themselves, in batches of their own."""
    sampler = TrainingBatchSampler(5, 2, seed=42)
    sampler.advance()
    assert sorted(sampler.state_dict()) == ["epoch", "offset", "rows", "seed"]
    state = with_appended_rows(sampler.state_dict(), 8)
    assert state == {"seed": 42, "epoch": 0, "offset": 2, "rows": 8, "segments": [5, 3]}
    assert with_appended_rows(state, 8) == state
    longer = TrainingBatchSampler(8, 2, seed=42)
    longer.load_state_dict(state)
    batches = longer.upcoming(5)
    assert batches[:2] == sampler.upcoming(2)
    assert [len(batch) for batch in batches] == [2, 1, 2, 1, 2]
    order = np.random.default_rng((42, 0, 5)).permutation(3) + 5
    assert batches[2] + batches[3] == order.tolist()
    assert batches[4] == np.random.default_rng((42, 1)).permutation(8)[:2].tolist()
    longer.set_epoch(0)
    assert longer.current() == np.random.default_rng((42, 0)).permutation(8)[:2].tolist()


def test_a_pass_that_has_not_begun_shuffles_all_rows_together() -> None:
    sampler = TrainingBatchSampler(4, 2, seed=42)
    sampler.set_epoch(1)
    state = with_appended_rows(sampler.state_dict(), 6)
    assert state == {"seed": 42, "epoch": 1, "offset": 0, "rows": 6}


def test_fewer_appended_rows_than_processes_join_the_batch_before() -> None:
    """As at the end of any pass: no process has nothing to do."""
    run = Processes(6, 1, 3)
    first = run.next_batch()
    run = Processes(7, 1, 3, with_appended_rows(run.state, 7))
    last = run.rest_of_pass()
    assert [first, *[batch[:3] for batch in last]] == Processes(6, 1, 3).rest_of_pass()
    assert [batch[3:] for batch in last] == [[6]]


def test_answers_of_any_kind_have_a_fingerprint() -> None:
    """Objects would be other ones in a resumed run, so their addresses must not count."""
    answers = [{"a": 1}, None, float("nan"), object(), np.arange(3), torch.ones(2), {(1, 2): 3}]
    again = [*answers[:3], object(), *answers[4:]]
    assert fingerprint(again) == fingerprint(answers)
    assert fingerprint([*answers[:4], np.arange(4)[1:], *answers[5:]]) != fingerprint(answers)
