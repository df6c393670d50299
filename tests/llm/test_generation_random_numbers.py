"""Random numbers by row and position: the same whoever asks for them, and in whatever order."""

from __future__ import annotations

import pytest
import torch

from agilerl.llm.generation.random_numbers import BLOCK, Uniforms


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("positions", [1, 7, BLOCK])
def test_what_fits_one_block_is_one_draw(positions: int) -> None:
    rng, expected = seeded(), seeded()
    numbers = torch.rand(5, positions, generator=expected)
    assert torch.equal(Uniforms(5, positions, rng).block(0, [3, 1]), numbers[[3, 1]])
    assert torch.equal(rng.get_state(), expected.get_state())


def test_a_block_is_the_same_in_any_order_and_for_any_rows() -> None:
    whole = [Uniforms(6, 4 * BLOCK, seeded()).block(n, list(range(6))) for n in range(4)]
    again = Uniforms(6, 4 * BLOCK, seeded())
    for number in (2, 0, 3, 1, 2):
        assert torch.equal(again.block(number, [4, 2]), whole[number][[4, 2]])
    numbers = torch.cat([block.flatten() for block in whole])
    assert numbers.unique().numel() > 0.99 * numbers.numel()
    assert ((numbers >= 0) & (numbers < 1)).all()
    assert abs(float(numbers.mean()) - 0.5) < 0.02


def test_the_random_stream_goes_on_alike_however_far_rows_get() -> None:
    near, far = seeded(), seeded()
    Uniforms(6, 10 * BLOCK, near).block(0, [0])
    numbers = Uniforms(6, 10 * BLOCK, far)
    for number in range(10):
        numbers.block(number, [0, 5])
    assert torch.equal(near.get_state(), far.get_state())
    other = Uniforms(6, 10 * BLOCK, far)
    assert not torch.equal(other.block(1, [0]), numbers.block(1, [0]))
