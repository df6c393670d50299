"""Which rank trains which trajectories of an optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agilerl.distributed import Ranks
from agilerl.llm.batch import TrainBatch, make_batch
from agilerl.llm.config import UpdateConfig
from agilerl.llm.plan import plan_mini_batches
from agilerl.llm.plan.rank_balancing import (
    LEAST_GAIN,
    Trajectory,
    balance_over_ranks,
    deal_to_ranks,
)

Held = list[list[Trajectory]]


def group(prompt: int, tokens: int, *completions: int) -> list[Trajectory]:
    """Trajectories of one row each."""
    return [Trajectory(prompt, [0], [(prompt, tokens, each)]) for each in completions]


def tokens_of_ranks(held: Held, dealt: list[list[int]], together: int | None) -> list[int]:
    """What each rank runs; a prompt once for ``together`` rows."""
    loads = [0] * len(held)
    rows: dict[tuple[int, int, int], list[int]] = {}
    for origin, (own, chosen) in enumerate(zip(held, dealt, strict=True)):
        for trajectory, rank in zip(own, chosen, strict=True):
            for number, prompt, others in trajectory.row_tokens:
                loads[rank] += others
                rows.setdefault((rank, origin, number), []).append(prompt)
    for (rank, *_), prompts in rows.items():
        loads[rank] += prompts[0] * (1 if together is None else -(-len(prompts) // together))
    return loads


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        # 36 and 14 tokens: of the groups of 21, 15 and 14 the two smaller ones go together.
        ([[*group(0, 5, 8, 8), *group(1, 5, 5, 5)], group(0, 4, 5, 5)], [[0, 0, 1, 1], [1, 1]]),
        # More than an even share of 27: completions of 10 one by one, each with the prompt of 4.
        ([group(0, 4, 10, 10, 10, 10), group(0, 4, 6)], [[0, 1, 0, 1], [1]]),
        # One trajectory is most of it, and stays; what was beside it goes.
        ([[*group(0, 1, 90), *group(1, 1, 9)], group(0, 1, 5)], [[0, 1], [1]]),
        # 41 and 39 are even enough.
        ([group(0, 1, 20, 20), group(0, 1, 19, 19)], [[0, 0], [1, 1]]),
        # Nothing to run on one of them, or on all.
        ([group(0, 1, 9), [], group(0, 1, 9)], [[0], [], [2]]),
        ([[*group(0, 1, 9), *group(1, 1, 9)], []], [[0, 1], []]),
        ([[], []], [[], []]),
    ],
)
def test_groups_go_to_the_rank_with_fewest_tokens(held: Held, expected: list[list[int]]) -> None:
    assert deal_to_ranks(held, None) == expected


def test_a_long_prompt_is_not_run_on_two_ranks_for_short_completions() -> None:
    held = [group(0, 100, 5, 5), group(0, 10, 2)]
    assert deal_to_ranks(held, None) == [[0, 0], [1]]
    # One row at a time it runs for each of them in any case.
    assert deal_to_ranks(held, 1) == [[0, 1], [1]]


def test_rows_of_a_trajectory_stay_together() -> None:
    several = Trajectory(0, [0, 1], [(0, 4, 10), (1, 12, 10)])
    held = [[several, several], group(0, 4, 2)]
    assert deal_to_ranks(held, None) == [[0, 1], [1]]


trajectories = st.builds(
    lambda prompt, rows: Trajectory(prompt, [0], [(prompt, 3 * prompt, row) for row in rows]),
    st.integers(1, 4),
    st.lists(st.integers(0, 50), min_size=1, max_size=2),
)


@given(
    st.lists(st.lists(trajectories, max_size=9), min_size=1, max_size=4),
    st.one_of(st.none(), st.integers(1, 4)),
)
@settings(max_examples=200, deadline=None)
def test_the_largest_rank_gets_less_or_nothing_moves(held: Held, together: int | None) -> None:
    stay = [[rank] * len(own) for rank, own in enumerate(held)]
    dealt = deal_to_ranks(held, together)
    assert [len(each) for each in dealt] == [len(own) for own in held]
    before, after = (tokens_of_ranks(held, each, together) for each in (stay, dealt))
    assert dealt == stay or max(after) < (1 - LEAST_GAIN) * max(before)
    even = sum(before) / len(held)
    for rank, (own, chosen) in enumerate(zip(held, dealt, strict=True)):
        for number in {trajectory.prompt for trajectory in own}:
            places = [i for i, trajectory in enumerate(own) if trajectory.prompt == number]
            alone: Held = [[] for _ in held]
            alone[rank] = [own[i] for i in places]
            (tokens,) = tokens_of_ranks(alone[rank : rank + 1], [[0] * len(places)], together)
            assert tokens > even or len({chosen[i] for i in places}) == 1


def two_prompts() -> TrainBatch:
    """Two completions of each, all as long."""
    ids = [torch.tensor([prompt, 1, 2, 3]) for prompt in (7, 7, 8, 8)]
    return make_batch(ids, [torch.tensor([True] * 3)] * 4)


def test_rows_with_and_without_a_gradient_are_dealt_separately() -> None:
    batch = two_prompts()
    other = [[], [Trajectory(0, [0, 1, 2, 3], [(0, 1, 2)] * 4)]]
    sent: list[Any] = []

    class OtherHasNoGradient(Ranks):
        world_size = 2

        def gather(self, value: Any) -> list[Any]:
            return [value, (value[0], other)]

        def exchange(self, values: Sequence[Any]) -> list[Any]:
            sent.extend(values)
            return [None, None]

    everything = [(torch.arange(4), torch.arange(0))]
    _, [(trained, idle)] = balance_over_ranks(batch, everything, OtherHasNoGradient(), None)
    assert len(trained) == 2
    assert not len(idle)
    assert sent[0] is None
    assert len(sent[1][0]) == 2


def test_ranks_that_know_different_things_of_their_rows_are_refused() -> None:
    class OtherHasTurns(Ranks):
        world_size = 2

        def gather(self, value: Any) -> list[Any]:
            return [value, ([*value[0], "turn_ids"], value[1])]

    step = (torch.arange(4), torch.arange(0))
    with pytest.raises(ValueError, match=r"\['turn_ids'\].*ranks 0 and 1"):
        balance_over_ranks(two_prompts(), [step], OtherHasTurns(), None)


def test_nothing_moves_unless_all_ranks_pack_rows() -> None:
    class OtherPads(Ranks):
        world_size = 2

        def max(self, values: torch.Tensor) -> torch.Tensor:
            return values.clamp(min=1)

        def gather(self, value: Any) -> list[Any]:
            raise AssertionError("no rank may ask for tokens")

    batch = two_prompts()
    update = UpdateConfig(
        batch_size=4, micro_batch_size=4, epochs=1, max_grad_norm=1.0, balance_tokens=True
    )
    planned, _ = plan_mini_batches(
        replace(batch, loss_mask=batch.action_mask),
        torch.ones(4, dtype=torch.bool),
        update,
        OtherPads(),
        torch.Generator(),
        layout="packed",
    )
    assert len(planned) == 4
