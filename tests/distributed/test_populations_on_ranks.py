"""Several agents on one base, on two ranks: each trains as if it were alone."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from agents_and_batches import data, make_agent, weights
from case_settings import each_setting
from cases_populations import MUTATED, RATES

pytestmark = [pytest.mark.slow, pytest.mark.process]

Ranks = list[dict[str, Any]]


@functools.cache
def alone() -> list[torch.Tensor]:
    """Weights of single agents on bases of their own, in a single process."""
    agents = [make_agent(lr=rate) for rate in RATES]
    for agent in agents:
        data().learned_by(agent)
    return [weights(agent) for agent in agents]


@each_setting("population")
def test_training_one_agent_leaves_the_others_as_they_are(ranks: Ranks) -> None:
    for rank in ranks:
        assert rank["others_moved"] == [False] * 7
        for found, expected in zip(rank["learned"], alone(), strict=True):
            torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    assert all(map(torch.equal, ranks[0]["learned"], ranks[1]["learned"]))


@each_setting("population")
def test_a_clone_that_loads_a_checkpoint_goes_on_as_its_agent(ranks: Ranks) -> None:
    for rank in ranks:
        assert torch.equal(rank["clone"], rank["best"])
        assert torch.equal(rank["clone"], ranks[0]["clone"])
        assert not torch.equal(rank["learned"][2], rank["best"][: len(rank["learned"][2])])


@each_setting("evolution")
def test_ranks_decide_alike_who_goes_on_and_what_changes(ranks: Ranks) -> None:
    first, second = ranks
    assert first["generations"] == second["generations"]
    assert all(map(torch.equal, first["weights"], second["weights"]))
    assert all(size % 2 == 0 for size in first["batch_sizes"])
    members = [member for each in first["generations"] for member in each["members"]]
    assert any(member["parent"] != member["agent"] for member in members)
    assert any(member["mutation"] for member in members)


@each_setting("evolution")
def test_agents_that_were_replaced_leave_nothing_on_any_rank(ranks: Ranks) -> None:
    for rank in ranks:
        assert rank["adapters"] == [6, 6, 6]
        assert rank["engines"] == 3
        first, *_, last = (size for _, size in rank["tensors_held"])
        assert last <= 1.01 * first


@each_setting("mutations")
def test_mutated_hyperparameters_take_effect_in_the_next_step(ranks: Ranks) -> None:
    """The same as if the agent had been made with them."""
    for rank in ranks:
        assert all(size in (2, 4, 6, 8) for size in rank.pop("drawn"))
        plain, _ = rank.pop("nothing")
        assert rank.keys() == MUTATED.keys()
        for name, (mutated, built) in rank.items():
            assert torch.equal(mutated, built), name
            same = torch.allclose(mutated, plain, atol=1e-5, rtol=0)
            assert same == (name == "micro_batch_size_per_gpu"), name
