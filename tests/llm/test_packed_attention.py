"""Attention within packed rows against a dense mask over the same tokens."""

from __future__ import annotations

import pytest
import torch

from agilerl.llm.batch import TrainBatch, make_batch
from agilerl.llm.forward.packed_attention import PackedAttention, attend_packed
from agilerl.llm.forward.packed_rows import PackedRows, distinct_prompts, packed_tokens

SIZE = 8


def batch_of(groups: dict[int, list[int]], order: list[int]) -> TrainBatch:
    """Prompts of some lengths with completions of some lengths, in an order of rows."""
    ids, masks = [], []
    for prompt, completions in groups.items():
        for completion in completions:
            ids.append(torch.cat([torch.full((prompt,), prompt), torch.arange(completion)]))
            masks.append(torch.arange(prompt + completion - 1) >= prompt - 1)
    return make_batch([ids[row] for row in order], [masks[row] for row in order])


def dense_attention(
    batch: TrainBatch,
    rows: PackedRows,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    window: int | None,
) -> torch.Tensor:
    """Softmax over all packed tokens that a token may see: of its prompt and its completion."""
    first, prompt_of_row = distinct_prompts(batch)
    order = prompt_of_row.argsort(stable=True)
    lengths = (batch.lengths - batch.prompt_lengths - 1)[order]
    prompts = torch.arange(len(first)).repeat_interleave(batch.prompt_lengths[first])
    prompt = torch.cat([prompts, prompt_of_row[order].repeat_interleave(lengths)])
    row = torch.cat([torch.full_like(prompts, -1), order.repeat_interleave(lengths)])
    position = rows.positions[0]
    distance = position[:, None] - position
    visible = (prompt[:, None] == prompt) & ((row == -1) | (row[:, None] == row)) & (distance >= 0)
    if window is not None:
        visible &= distance < window
    key, value = (
        tensor.repeat_interleave(query.shape[1] // tensor.shape[1], dim=1)
        for tensor in (key, value)
    )
    logits = torch.einsum("qhd,khd->hqk", query, key) * SIZE**-0.5
    weights = logits.masked_fill(~visible, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value)


@pytest.mark.parametrize("window", [None, 3, 12])
@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize(
    ("groups", "order"),
    [
        ({5: [4, 4], 6: [4, 4]}, [0, 1, 2, 3]),
        ({5: [4, 1, 7], 3: [1], 9: [2, 30]}, [3, 0, 5, 2, 4, 1]),
        ({5: [1], 3: [1]}, [1, 0]),
        ({70: [40, 1], 33: [70]}, [0, 2, 1]),
        ({140: [35, 3], 12: [150, 40], 15: [20], 4: [1]}, [0, 4, 2, 5, 1, 3]),
        ({3: [2, 2], 4: [9], 5: [2, 2]}, [0, 1, 2, 3, 4]),
    ],
    ids=["even", "ragged", "single tokens", "long", "of many lengths", "apart"],
)
def test_packed_attention_is_that_of_a_dense_mask(
    groups: dict[int, list[int]], order: list[int], key_heads: int, window: int | None
) -> None:
    batch = batch_of(groups, order)
    rows = PackedRows.of(batch)
    tokens = rows.token_ids.shape[1]
    assert tokens == packed_tokens(batch, torch.arange(len(batch)))
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(tokens, heads, SIZE, dtype=torch.float64, generator=generator).requires_grad_()
        for heads in (4, key_heads, key_heads)
    ]
    kernels = PackedAttention(rows).kernels(window, torch.float64)
    made = attend_packed(*inputs, kernels, None)
    expected = dense_attention(batch, rows, *inputs, window)
    torch.testing.assert_close(made, expected, rtol=1e-10, atol=1e-12)
    upstream = torch.randn(made.shape, dtype=torch.float64, generator=generator)
    pairs = zip(
        torch.autograd.grad(made, inputs, upstream),
        torch.autograd.grad(expected, inputs, upstream),
        strict=True,
    )
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def test_each_action_is_predicted_by_the_token_before_it() -> None:
    batch = batch_of({2: [3, 1], 4: [2]}, [2, 0, 1])
    rows = PackedRows.of(batch)
    # Prompts in the order of their first rows' prompts, then completions without their last token.
    assert rows.token_ids.tolist() == [[4, 4, 4, 4, 2, 2, 0, 0, 1]]
    assert rows.positions.tolist() == [[0, 1, 2, 3, 0, 1, 4, 2, 3]]
    assert batch.targets.tolist() == [0, 1, 0, 1, 2, 0]
    assert rows.predictors.tolist() == [3, 6, 5, 7, 8, 5]


on_a_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_a_gpu)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize(
    ("groups", "order"),
    [
        ({70: [40, 1, 3], 33: [70], 5: [1]}, [0, 3, 2, 4, 1]),
        ({5: [2], 3: [1]}, [0, 1]),  # a single query, and a prompt that no query attends to
    ],
    ids=["ragged", "single query"],
)
def test_packed_attention_in_half_precision_is_that_of_a_dense_mask(
    groups: dict[int, list[int]],
    order: list[int],
    key_heads: int,
    dtype: torch.dtype,
    device: str,
) -> None:
    batch = batch_of(groups, order)
    rows = PackedRows.of(batch.to(device))
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(rows.token_ids.shape[1], heads, SIZE, generator=generator)
        .to(device, dtype)
        .requires_grad_()
        for heads in (4, key_heads, key_heads)
    ]
    made = attend_packed(*inputs, PackedAttention(rows).kernels(None, dtype), None)
    exact = [tensor.detach().cpu().double().requires_grad_() for tensor in inputs]
    expected = dense_attention(batch, PackedRows.of(batch), *exact, window=None)
    upstream = torch.randn(made.shape, generator=generator)
    found = torch.autograd.grad(made, inputs, upstream.to(device, dtype))
    theirs = torch.autograd.grad(expected, exact, upstream.double())
    for mine, other in zip((made, *found), (expected, *theirs), strict=True):
        difference = (mine.detach().cpu().double() - other).norm() / other.norm()
        assert difference < 0.02
