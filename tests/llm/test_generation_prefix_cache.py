"""Which cached row a prompt continues, and where its columns go. Values are the token ids."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from agilerl.llm.generation.kv_cache import prefix_cache
from agilerl.llm.generation.kv_cache.continued_rows import CachedRow
from agilerl.llm.generation.kv_cache.growing_cache import GrowingCache, GrowingLayer
from agilerl.llm.generation.kv_cache.prefix_cache import PrefixCache
from agilerl.llm.generation.kv_cache.segments import Segment
from agilerl.llm.generation.kv_cache.shared_prefix import CachedPrompts, SharedPrefixCache


def block_of(
    rows: list[list[int]], width: int, heads: int = 2
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys that hold their token's id (values: its negative), right of ``width`` nothing is."""
    columns = torch.full((len(rows), width), 99.0)
    for row, ids in zip(columns, rows, strict=True):
        row[width - len(ids) :] = torch.tensor(ids, dtype=torch.float)
    keys = columns[:, None, :, None] + torch.arange(heads)[:, None, None] * 0.25
    return keys.expand(-1, -1, -1, 3).contiguous(), -keys.expand(-1, -1, -1, 3).contiguous()


def cached_rows(*blocks: list[list[int]]) -> PrefixCache:
    store = PrefixCache()
    for rows in blocks:
        width = max(len(ids) for ids in rows) + 2
        layers = [block_of(rows, width), block_of(rows, width)]
        store.add(
            layers,
            [torch.tensor(ids) for ids in rows],
            [width - len(ids) for ids in rows],
            [0] * len(rows),
        )
    return store


def test_the_longest_row_that_a_prompt_goes_beyond_is_found() -> None:
    store = cached_rows([[1, 2], [1, 2, 3, 4]], [[5, 6, 7]])
    found_rows = [
        store.find(torch.tensor(ids), 0) for ids in ([1, 2, 3, 4, 8], [1, 2, 3, 4], [5, 6, 7, 1])
    ]
    assert [
        row_found and (row_found.prompt.block, row_found.prompt.row, row_found.length)
        for row_found in found_rows
    ] == [
        (0, 1, 4),
        (0, 0, 2),  # the whole of it leaves nothing to run
        (1, 0, 3),
    ]
    assert store.find(torch.tensor([1, 3, 2]), 0) is None
    assert store.find(torch.tensor([5, 6, 7]), 0) is None


def test_found_rows_are_those_of_a_plain_search() -> None:
    """Rows of few different ids, so that many are prefixes of others and of the prompts."""
    draw = random.Random(0)

    def rows(count: int) -> list[list[int]]:
        # Negative ids and those above a byte sort otherwise as bytes than as numbers.
        return [draw.choices([-1, 1, 256], k=draw.randint(1, 7)) for _ in range(count)]

    found = 0
    for _ in range(40):
        cached_ids, prompts = rows(30), rows(60)
        store = cached_rows(cached_ids[:20], cached_ids[20:])
        for prompt in prompts:
            fitting = [ids for ids in cached_ids if len(ids) < len(prompt)]
            expected = max((len(ids) for ids in fitting if prompt[: len(ids)] == ids), default=0)
            row_found = store.find(torch.tensor(prompt), 0)
            assert (row_found.length if row_found else 0) == expected
            found += row_found is not None
    assert found > 500


@pytest.mark.parametrize("continued", [True, False])
def test_a_search_compares_few_rows(continued: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row is thousands of ids long: hashing a prefix per store length took most of a second."""
    seen: list[int] = []

    class Counted(bytes):
        """Counts the bytes that are sliced off, hashed or searched for a prefix."""

        def startswith(self, prefix: Any, *args: Any) -> bool:
            seen.append(len(prefix))
            return super().startswith(prefix, *args)

        def __getitem__(self, key: Any) -> Any:
            part = super().__getitem__(key)
            seen.append(len(part))
            return part

    monkeypatch.setattr(
        prefix_cache, "row_key", lambda ids, adapter: Counted(ids.numpy().tobytes())
    )
    ids = [[7] * 40 + [1000 + i] * (20 + i) for i in range(128)]
    store = PrefixCache()
    store.add([], [torch.tensor(row) for row in ids], [0] * len(ids), [0] * len(ids))
    for number, row in enumerate(ids):
        seen.clear()
        prompt = torch.tensor([*(row if continued else row[:45]), *[5] * 200])
        row_found = store.find(prompt, 0)
        assert (row_found.prompt.row if row_found else None) == (number if continued else None)
        assert sum(seen) <= 2 * 8 * max(len(row) for row in ids)


def test_columns_are_right_aligned_before_the_block() -> None:
    store = cached_rows([[1, 2, 3], [4, 5, 6, 7, 8]], [[9]])
    prompts = [[1, 2, 3, 20], [4, 5, 6, 7, 8, 21, 22], [9, 23]]
    found_rows = [row_found for ids in prompts if (row_found := store.find(torch.tensor(ids), 0))]
    cache = store.take(found_rows, [len(ids) for ids in prompts], room=3, share=False)
    # Seven columns, the last two of them to be run: the tokens before are in row_found.
    assert cache.get_seq_length() == 5
    for layer in cache.layers:
        assert isinstance(layer, GrowingLayer)
        assert layer.key_buffer.shape == (3, 2, 5 + 2 + 3, 3)
        for head in range(2):
            held = layer.key_buffer[:, head, :5, 0] - 0.25 * head
            assert held[0, 3:].tolist() == [1, 2]
            assert held[1].tolist() == [4, 5, 6, 7, 8]
        assert torch.equal(layer.value_buffer[:, :, :5], -layer.key_buffer[:, :, :5])
    assert store.find(torch.tensor(prompts[0]), 0) is None


def shared_rows() -> PrefixCache:
    """Prompts 1 2 and 3 4 5, whose rows left in two blocks, and a row that shared none."""
    store = PrefixCache()
    prompts = CachedPrompts([block_of([[1, 2], [3, 4, 5]], 3)] * 2, [2, 3], [0, 1, 1])
    segments = store.add_prompts(prompts)
    ids = [[1, 2, 10, 11], [3, 4, 5], [3, 4, 5, 12]]
    for numbers, width in (([0, 1], 2), ([2], 4)):
        # Completions begin in the same column; the second row ended before it was run on.
        own = torch.full((len(numbers), width), 99.0)
        for row, number in zip(own, numbers, strict=True):
            tokens = torch.tensor(ids[number][segments[number].length :])
            row[: len(tokens)] = tokens
        keys = own[:, None, :, None] + torch.arange(2)[:, None, None] * 0.25
        keys = keys.expand(-1, -1, -1, 3).contiguous()
        store.add(
            [(keys, -keys)] * 2,
            [torch.tensor(ids[number]) for number in numbers],
            [0] * len(numbers),
            [0] * len(numbers),
            [segments[number] for number in numbers],
        )
    alone = [[6, 7, 8, 9, 13]]
    store.add([block_of(alone, 6)] * 2, [torch.tensor(alone[0])], [1], [0])
    return store


CONTINUING = [[1, 2, 10, 11, 20], [3, 4, 5, 21], [3, 4, 5, 12, 22, 23], [6, 7, 8, 9, 13, 24]]


def taken(prompts: list[list[int]], *, share: bool) -> GrowingCache:
    store = shared_rows()
    found = [row for ids in prompts if (row := store.find(torch.tensor(ids), 0))]
    assert len(found) == len(prompts)
    return store.take(found, [len(ids) for ids in prompts], 16, share=share)


@pytest.fixture
def any_sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_cache, "LEAST_SAVED", -math.inf)
    monkeypatch.setattr(prefix_cache, "MOST_PLACES", math.inf)


@pytest.mark.usefixtures("any_sharing")
def test_what_rows_share_stays_shared() -> None:
    cache = taken(CONTINUING[:3], share=True)
    assert isinstance(cache, SharedPrefixCache)
    assert cache.lengths_of_rows().tolist() == [2, 3, 3]
    assert cache.groups.prompt_of_row.tolist() == [0, 1, 1]
    # Two of the three own columns are to be run: 10 11 20; 21; 12 22 23.
    assert cache.get_seq_length() == 3 + 1
    mask = cache.prompt_mask()
    for layer in cache.shared_layers:
        for head in range(2):
            held = layer.prompt_keys[cache.groups.prompt_of_row, head, :, 0] - 0.25 * head
            assert [row[seen].tolist() for row, seen in zip(held, mask, strict=True)] == [
                [1, 2],
                [3, 4, 5],
                [3, 4, 5],
            ]
            own = layer.key_buffer[:, head, 0, 0] - 0.25 * head
            assert own[[0, 2]].tolist() == [10, 12]
        assert torch.equal(layer.value_buffer, -layer.key_buffer)
        assert torch.equal(layer.prompt_values, -layer.prompt_keys)
        assert layer.key_buffer.isfinite().all()


@pytest.mark.usefixtures("any_sharing")
def test_prompts_that_are_all_needed_are_not_copied_and_others_are_dropped() -> None:
    store = shared_rows()
    (prompts, _), *_ = (pair for pair in store._blocks[0] if pair is not None)
    found = [row for ids in CONTINUING[:3] if (row := store.find(torch.tensor(ids), 0))]
    cache = store.take(found, [5, 4, 6], 16, share=True)
    assert isinstance(cache, SharedPrefixCache)
    assert cache.shared_layers[0].prompt_keys is prompts
    fewer = taken(CONTINUING[1:3], share=True)
    assert isinstance(fewer, SharedPrefixCache)
    assert fewer.shared_layers[0].prompt_keys[:, 0, :, 0].tolist() == [[3, 4, 5]]


@pytest.mark.parametrize(
    ("groups", "pays"),
    [
        ([(100, [5] * 8)], True),
        ([(100, [5] * 8), (90, [7] * 8)], True),
        ([(100, [5])] * 8, False),
        ([(100, [50] * 2)], True),
        ([(100, [150] * 2)], False),
        # Columns are saved, but not places: nine groups of up to eight rows.
        ([(100, [5] * 8), *([(100, [5])] * 8)], False),
        # Tokens are saved, but not columns: of both parts there are as many as the longest has.
        ([(500, [5] * 8), (10, [495] * 8)], False),
    ],
)
def test_rows_share_where_that_pays(groups: list[tuple[int, list[int]]], pays: bool) -> None:
    rows, lengths = [], []
    for number, (prompt, own) in enumerate(groups):
        for tokens in own:
            rows.append(CachedRow(Segment(0, number, 0, prompt), Segment(1, len(rows), 0, tokens)))
            lengths.append(prompt + tokens + 1)
    assert prefix_cache._sharing_pays(rows, lengths) == pays
    rows[0] = rows[0]._replace(own=None)
    assert not prefix_cache._sharing_pays(rows, lengths)


@pytest.mark.parametrize(("rows", "share"), [(3, False), (4, True), (3, True), (2, True)])
def test_rows_that_do_not_share_have_their_tokens_side_by_side(rows: int, share: bool) -> None:
    """Sharing is off, or a row shared none, or it saves too little, or prompts have one row."""
    prompts = CONTINUING[:rows]
    cache = taken(prompts, share=share)
    assert type(cache) is GrowingCache
    columns = max(map(len, prompts))
    for layer in cache.growing_layers:
        keys = layer.columns_in_use()[0][:, 1, :, 0] - 0.25
        for row, ids in zip(keys, prompts, strict=True):
            first = columns - len(ids)
            assert row[first:].tolist() == ids[: layer.length - first]
        assert keys.isfinite().all()
