"""Shards: whatever way the parameters are cut, reading puts the same moments together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from agilerl.llm.checkpoint.optimizer_shards import (
    Fragment,
    read_shards,
    write_shard,
)

SHAPES = [(2, 3), (5,), (4, 1)]
SIZES = [6, 5, 4]
STATE = {
    number: {
        "step": torch.tensor(3.0),
        "exp_avg": torch.randn(shape, generator=torch.Generator().manual_seed(number)),
        "exp_avg_sq": torch.rand(shape, generator=torch.Generator().manual_seed(9 + number)),
    }
    for number, shape in enumerate(SHAPES)
}


def read(folder: Path, shards: list[dict[int, Fragment]], parameters: int) -> Any:
    for rank, shard in enumerate(shards):
        write_shard(folder, rank, shard)
    return read_shards(folder, len(shards), parameters)


def cut(*ends: int) -> list[dict[int, Fragment]]:
    """Cut the 15 elements of all parameters, one behind the other, at these places."""
    shards = []
    for start, end in zip([0, *ends], [*ends, sum(SIZES)], strict=True):
        fragments: dict[int, Fragment] = {}
        offset = 0
        for number, size in enumerate(SIZES):
            first, last = max(start - offset, 0), min(end - offset, size)
            if first < last:
                state = {
                    name: values if name == "step" else values.flatten()[first:last]
                    for name, values in STATE[number].items()
                }
                fragments[number] = Fragment(SHAPES[number], first, state)
            offset += size
        shards.append(fragments)
    return shards


@pytest.mark.parametrize("ends", [(), (7,), (6,), (1, 2, 3), (4, 15), (8, 8)], ids=str)
def test_any_cut_is_put_together_again(ends: tuple[int, ...], tmp_path: Path) -> None:
    found = read(tmp_path, cut(*ends), 3)
    assert list(found) == [0, 1, 2]
    for number, moments in found.items():
        assert moments.keys() == STATE[number].keys()
        for name, values in moments.items():
            assert torch.equal(values, STATE[number][name])


def test_parameter_groups_may_count_their_steps_apart(tmp_path: Path) -> None:
    shards = [
        {n: replace(f, state=f.state | {"step": torch.tensor(float(n))}) for n, f in shard.items()}
        for shard in cut(7)
    ]
    found = read(tmp_path, shards, 3)
    assert [found[n]["step"] for n in range(3)] == [0.0, 1.0, 2.0]


def test_before_the_first_step_there_is_nothing(tmp_path: Path) -> None:
    assert read(tmp_path, [{}, {}], 3) == {}


@pytest.mark.parametrize("kept", [[0], [1], [0, 0, 1], [0, 1, 1]], ids=str)
def test_what_is_missing_or_twice_there_is_named(kept: list[int], tmp_path: Path) -> None:
    shards = cut(7)
    with pytest.raises(ValueError, match=r"parameters \[.*\], or hold them twice"):
        read(tmp_path, [shards[i] for i in kept], 3)


def test_a_parameter_that_no_shard_knows(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"parameters \[3\]"):
        read(tmp_path, cut(7), 4)
