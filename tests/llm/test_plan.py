"""Which rows go into which optimizer step and which micro-batch."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from rollout_helpers import PLAIN, random_policy
from update_helpers import Run, objective, random_values

from agilerl.distributed import Ranks
from agilerl.llm.batch import TrainBatch, make_batch
from agilerl.llm.config import ROW_LAYOUTS, RowLayout, UpdateConfig
from agilerl.llm.forward.hidden_states import tokens_run
from agilerl.llm.plan import (
    plan_mini_batches,
    split_by_tokens,
    split_evenly_by_tokens,
    split_into_micro_batches,
)
from agilerl.testing import tiny_model


def batch_of(prompts: list[int], new_tokens: list[int]) -> TrainBatch:
    """A row per entry: a prompt that starts with its own length, and completions of ones."""
    ids = [
        torch.cat([torch.full((p,), p), torch.ones(n, dtype=torch.long)])
        for p, n in zip(prompts, new_tokens, strict=True)
    ]
    masks = [torch.arange(len(row) - 1) >= p - 1 for row, p in zip(ids, prompts, strict=True)]
    return make_batch(ids, masks)


def sizes(rows: int, batch_size: int) -> list[int]:
    batch = batch_of([3] * rows, [2] * rows)
    update = UpdateConfig(batch_size, micro_batch_size=4, epochs=1, max_grad_norm=1.0)
    active, rng = torch.ones(rows, dtype=torch.bool), torch.Generator().manual_seed(0)
    _, plan = plan_mini_batches(batch, active, update, Ranks(), rng)
    return [len(mini.rows) for mini in plan]


@pytest.mark.parametrize(
    ("rows", "batch_size", "expected"),
    [(24, 23, [12, 12]), (24, 24, [24]), (24, 8, [8, 8, 8]), (10, 4, [4, 3, 3]), (3, 1, [1, 1, 1])],
)
def test_mini_batches_are_balanced(rows: int, batch_size: int, expected: list[int]) -> None:
    assert sizes(rows, batch_size) == expected


def test_ragged_rows_run_with_rows_of_their_length() -> None:
    batch = batch_of([2] * 6, [9, 1, 9, 1, 9, 1])
    parts = split_into_micro_batches(batch, torch.arange(6), 3, "padded")
    assert [part.tolist() for part in parts] == [[1, 3, 5], [0, 2, 4]]


def test_rows_of_a_long_prompt_stay_together() -> None:
    batch = batch_of([40, 40, 41, 41], [1, 3, 1, 3])
    rows = torch.arange(4)
    shared = split_into_micro_batches(batch, rows, 2, "shared_prompts")
    assert [part.tolist() for part in shared] == [[0, 1], [2, 3]]
    plain = split_into_micro_batches(batch, rows, 2, "padded")
    tokens = [sum(tokens_run(batch, p, "padded") for p in parts) for parts in (plain, shared)]
    assert tokens[0] <= tokens[1]


@pytest.mark.parametrize("layout", ROW_LAYOUTS)
def test_micro_batches_hold_as_many_rows_as_their_tokens_allow(layout: RowLayout) -> None:
    batch = batch_of([6] * 4 + [5] * 4, [9, 1, 9, 1, 9, 1, 30, 1])
    rows = torch.arange(8)
    parts = split_by_tokens(batch, rows, 24, layout)
    assert torch.cat(parts).tolist() == rows.tolist()
    for part, following in itertools.pairwise(parts):
        assert tokens_run(batch, part, layout) <= 24 or len(part) == 1
        assert tokens_run(batch, torch.cat([part, following[:1]]), layout) > 24
    if layout == "packed":
        # Prompts once, and each completion but for its last token: 6 + 8 + 0 + 8 + 0 and so on.
        assert [tokens_run(batch, part, layout) for part in parts] == [22, 13, 34, 5]


def test_packed_micro_batches_are_of_even_sizes() -> None:
    batch = batch_of([3] * 6, [40, 40, 2, 2, 2, 2])
    rows = torch.arange(6)
    parts = split_evenly_by_tokens(batch, rows, 2)
    assert [part.tolist() for part in parts] == [[0], [1, 2, 3, 4, 5]]
    by_rows = split_into_micro_batches(batch, rows, 3, "packed")
    largest = [max(tokens_run(batch, p, "packed") for p in cut) for cut in (parts, by_rows)]
    assert largest == [46, 82]
    assert split_evenly_by_tokens(batch, rows[:0], 0) == []


def test_a_rank_with_few_long_rows_cuts_as_many_micro_batches_as_the_mean() -> None:
    class OtherHasMoreRows(Ranks):
        world_size = 2

        def sum(self, tensor: torch.Tensor) -> torch.Tensor:
            return tensor * 4

        def gather(self, value: Any) -> list[Any]:
            return [value, value]  # as many tokens, so that no row moves

    batch, active = batch_of([3] * 2, [40, 40]), torch.ones(2, dtype=torch.bool)
    update = UpdateConfig(2, 2, epochs=1, max_grad_norm=1.0, balance_tokens=True)
    for ranks, parts in ((Ranks(), 1), (OtherHasMoreRows(), 2)):
        rng = torch.Generator()
        _, (mini,) = plan_mini_batches(batch, active, update, ranks, rng, layout="packed")
        assert len(mini.micro_batches) == parts


def test_a_mini_batch_that_fits_one_forward_keeps_its_order() -> None:
    batch = batch_of([2] * 4, [4, 1, 3, 2])
    rows = torch.tensor([3, 0, 2])
    (part,) = split_into_micro_batches(batch, rows, 3, "padded")
    assert part.tolist() == rows.tolist()
    assert split_into_micro_batches(batch, rows[:0], 3, "padded") == []


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("loss_type", ["grpo", "gspo", "cispo"])
def test_the_ratio_of_unchanged_weights_is_one_in_bfloat16(
    loss_type: str, epochs: int, beta: float
) -> None:
    """In every mini-batch and epoch: rows meet the same rows in the old pass and in training."""
    policy = random_policy(tiny_model(dtype=torch.bfloat16))
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 30, (24,), generator=generator).tolist()
    batch = batch_of([3, 3, 5, 5, 8, 8] * 4, lengths)
    update = UpdateConfig(9, micro_batch_size=2, epochs=epochs, max_grad_norm=1e-30)
    run = Run(batch, random_values(batch), forward=PLAIN, update=update, lr=0.0)
    band = (1 - 1e-9, 1 + 1e-9)
    metrics, engine = run(policy, objective(loss_type, clip_band=band, beta=beta))
    assert len(engine.seen) == 3 * epochs
    assert metrics["ratio_max"] == metrics["ratio_mean"] == 1.0
    assert metrics["clip_fraction"] == 0.0


def test_a_reference_of_equal_weights_has_no_kl_in_bfloat16() -> None:
    policy = random_policy(tiny_model(dtype=torch.bfloat16))
    policy.copy_role("actor", "reference")
    batch = batch_of([3] * 8, [9, 1, 7, 2, 8, 3, 6, 4])
    run = Run(batch, update=replace(Run().update, micro_batch_size=3), lr=0.0)
    assert run(policy, objective(beta=0.1))[0]["mean_kl"] == 0.0


@pytest.mark.slow
@pytest.mark.process
def test_the_ratio_of_unchanged_weights_is_one_when_compiled() -> None:
    policy = random_policy(tiny_model(dtype=torch.bfloat16))
    policy.compile("default")
    batch = batch_of([3] * 12, [9, 1, 7, 2, 8, 3, 6, 4, 5, 9, 2, 7])
    update = UpdateConfig(6, micro_batch_size=3, epochs=2, max_grad_norm=1e-30)
    run = Run(batch, random_values(batch), forward=PLAIN, update=update, lr=0.0)
    metrics, engine = run(policy, objective())
    assert len(engine.seen) == 4
    assert metrics["ratio_max"] == metrics["ratio_mean"] == 1.0
