"""The order in which training takes dataset rows, and the digest that tells datasets apart."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from agilerl.llm_envs.dataset import TrainingBatchSampler, fingerprint


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


def test_answers_of_any_kind_have_a_fingerprint() -> None:
    """Objects would be other ones in a resumed run, so their addresses must not count."""
    answers = [{"a": 1}, None, float("nan"), object(), np.arange(3), torch.ones(2), {(1, 2): 3}]
    again = [*answers[:3], object(), *answers[4:]]
    assert fingerprint(again) == fingerprint(answers)
    assert fingerprint([*answers[:4], np.arange(4)[1:], *answers[5:]]) != fingerprint(answers)
