"""Which kernels run the attention of packed rows: those of a CPU, or of a CUDA device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from agilerl.llm.forward.attention_kernels import (
    AttentionKernel,
    Boundaries,
    PaddedAttention,
    PaddedBlock,
    VarlenAttention,
)
from agilerl.llm.forward.packed_rows import PackedRows
from agilerl.llm.forward.padded_rows import PaddedRows, rows_together


class PackedKernels(NamedTuple):
    """How packed tokens attend."""

    own: AttentionKernel
    """Prompts and completions, each to itself."""
    prefix: AttentionKernel | None
    """Completions to their prompts; None: none has a token that predicts another."""
    prompt_tokens: int
    """Tokens of all prompts, which are the first."""


def packed_kernels(rows: PackedRows, window: int | None, dtype: torch.dtype) -> PackedKernels:
    """The kernels of a layer.

    Args:
        rows: What is packed.
        window: Tokens that a token attends to, itself included; None: all.
        dtype: Of masks.
    """
    make = _padded_kernels if rows.positions.device.type == "cpu" else _varlen_kernels
    own, prefix = make(rows, window, dtype)
    return PackedKernels(own, prefix if any(rows.completions) else None, rows.prompt_tokens)


def _varlen_kernels(
    rows: PackedRows, window: int | None, dtype: torch.dtype
) -> tuple[AttentionKernel, AttentionKernel]:
    if window is not None and any(rows.completions):
        raise NotImplementedError("a kernel whose windows begin in another sequence")

    def boundaries(lengths: Sequence[int]) -> Boundaries:
        starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        # An upper bound. With 1 the kernel takes it that every row has a query, where heads share
        # keys, and rows of completions may have none.
        return Boundaries(starts.to(rows.positions.device), max(2, *lengths))

    own = boundaries([*rows.prompts, *rows.completions])
    continuations, prompts = boundaries(rows.continuations), boundaries(rows.prompts)
    return (
        VarlenAttention(own, own, causal=True, window=window),
        VarlenAttention(continuations, prompts, causal=False),
    )


def _padded_kernels(
    rows: PackedRows, window: int | None, dtype: torch.dtype
) -> tuple[AttentionKernel, AttentionKernel]:
    device = rows.positions.device
    longest = max(*rows.prompts, *rows.completions)
    band = None if window is None else _band(longest, window, dtype, device)

    def own(lengths: Sequence[int], starts: Sequence[int]) -> Iterator[PaddedBlock]:
        for together in rows_together(lengths, lengths):
            tokens = _some_rows(together, starts, lengths, device)
            mask = None
            if band is not None and window is not None and window < tokens.width:
                mask = band[..., : tokens.width, : tokens.width]
            yield PaddedBlock(tokens, tokens, causal=mask is None, mask=mask)

    def prefix() -> Iterator[PaddedBlock]:
        starts, prompt_starts = _starts(rows.continuations), _starts(rows.prompts)
        positions = rows.positions[0, rows.prompt_tokens :]
        for together in rows_together(rows.continuations, rows.prompts):
            queries = _some_rows(together, starts, rows.continuations, device)
            keys = _some_rows(together, prompt_starts, rows.prompts, device)
            visible = _visible_keys(queries, keys, positions, window)
            mask = nothing = None
            if visible is not None:
                mask = _additive(visible[:, None], dtype)
                nothing = None if window is None else ~visible.any(-1)
            yield PaddedBlock(queries, keys, causal=False, mask=mask, sees_nothing=nothing)

    blocks = [*own(rows.prompts, _starts(rows.prompts))]
    blocks += own(rows.completions, _starts(rows.completions, rows.prompt_tokens))
    return PaddedAttention(blocks), PaddedAttention(list(prefix()))


def _band(width: int, window: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
    """Mask ``(1, 1, width, width)`` of a sliding window; None where it hides nothing."""
    if window >= width:
        return None
    place = torch.arange(width, device=device)
    distance = place[:, None] - place
    return _additive((distance >= 0) & (distance < window), dtype)[None, None]


def _starts(lengths: Sequence[int], first: int = 0) -> list[int]:
    """Where each of consecutive rows begins."""
    return list(accumulate(lengths, initial=first))[:-1]


def _some_rows(
    chosen: Sequence[int], starts: Sequence[int], lengths: Sequence[int], device: torch.device
) -> PaddedRows:
    return PaddedRows.of([starts[row] for row in chosen], [lengths[row] for row in chosen], device)


def _visible_keys(
    queries: PaddedRows, keys: PaddedRows, positions: torch.Tensor, window: int | None
) -> torch.Tensor | None:
    """Which tokens of its prompt each token of a completion sees, ``(R, queries or 1, keys)``.

    Args:
        queries: Tokens of completions.
        keys: Tokens of their prompts.
        positions: Of all tokens of completions in their rows.
        window: As :func:`packed_kernels` has it.

    Returns:
        None: all.
    """
    visible = None
    if keys.padding is not None:
        visible = ~keys.padding.view(keys.rows, 1, keys.width)
    if window is None:
        return visible
    place = torch.arange(keys.width, device=positions.device)
    near = queries.take(positions)[:, :, None] - place < window
    return near if visible is None else near & visible


def _additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(
        ~visible, -torch.inf
    )
