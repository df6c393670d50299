"""Attention within packed rows: completions attend to their prompt, which is not copied.

A completion's tokens attend to two sets of keys, those of the prompt and their own. Each part runs
through torch's fused kernel on its own: the prompt's with the queries of all its completions. With
log-sum-exps ``l1`` and ``l2`` the parts' outputs make the whole one::

    l = log(exp l1 + exp l2)    o = exp(l1 - l) o1 + exp(l2 - l) o2

and given ``o`` and ``l`` in place of its own, the kernel's backward computes each part's share of
the gradient of the whole softmax.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from agilerl.llm.forward.attention_kernels import (
    AttendingTokens,
    AttentionGradients,
    AttentionKernel,
    Boundaries,
    PaddedAttention,
    PaddedBlock,
    VarlenAttention,
)
from agilerl.llm.forward.packed_rows import PackedRows
from agilerl.llm.forward.padded_rows import PaddedRows, rows_together

_NAME = "agilerl_packed"


class PackedKernels(NamedTuple):
    """How packed tokens attend."""

    own: AttentionKernel
    """Prompts and completions, each to itself."""
    prefix: AttentionKernel | None
    """Completions to their prompts; None: none has a token that predicts another."""
    prompt_tokens: int
    """Tokens of all prompts, which are the first."""


@dataclass
class PackedAttention:
    """Which tokens of packed rows attend to which, by sliding window."""

    rows: PackedRows
    _kernels: dict[tuple[int | None, torch.dtype], PackedKernels] = field(default_factory=dict)

    def kernels(self, window: int | None, dtype: torch.dtype) -> PackedKernels:
        """How tokens attend in a layer.

        Args:
            window: Tokens that a token attends to, itself included; None: all.
            dtype: Of masks.
        """
        rows = self.rows
        if window is not None and window >= rows.longest_row:
            window = None
        if (window, dtype) not in self._kernels:
            make = _padded_kernels if rows.positions.device.type == "cpu" else _varlen_kernels
            own, prefix = make(rows, window, dtype)
            kernels = PackedKernels(
                own, prefix if any(rows.completions) else None, rows.prompt_tokens
            )
            self._kernels[window, dtype] = kernels
        return self._kernels[window, dtype]


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
        window: As :meth:`PackedAttention.kernels` has it.

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


_current: ContextVar[PackedAttention | None] = ContextVar("packed attention", default=None)


def can_attend_packed(decoder: nn.Module) -> bool:
    """Whether there is a kernel for a model, where it uses torch's fused attention.

    There is one for CPUs, and on CUDA devices one for float16 and bfloat16.
    """
    config: Any = decoder.config
    weight = next(decoder.parameters())
    fits = weight.device.type == "cpu" or (
        weight.is_cuda and weight.dtype in (torch.float16, torch.bfloat16)
    )
    return fits and config._attn_implementation == "sdpa"


@contextlib.contextmanager
def attending_packed(decoder: nn.Module, attention: PackedAttention) -> Iterator[None]:
    """Within it the decoder, run on packed rows, attends as they are packed."""
    config: Any = decoder.config
    before = config._attn_implementation
    token = _current.set(attention)
    config._attn_implementation = _NAME
    try:
        yield
    finally:
        config._attn_implementation = before
        _current.reset(token)


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What ``sdpa_attention_forward`` computes, of packed ``(1, heads, N, head size)``.

    Returns ``(1, N, heads, head size)``.
    """
    attention = _current.get()
    if attention is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    kernels = attention.kernels(sliding_window, query.dtype)
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return attend_packed(q, k, v, kernels, scaling)[None], None


def _mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """None, as what a packed token sees follows from the packing.

    A config is every thread's, so that others' forwards come here too.
    """
    return sdpa_mask(*args, **kwargs) if _current.get() is None else None


AttentionInterface.register(_NAME, _attend)
AttentionMaskInterface.register(_NAME, _mask)


def attend_packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kernels: PackedKernels,
    scaling: float | None,
) -> torch.Tensor:
    """Attention ``(N, heads, head size)`` of packed tokens.

    Args:
        query: ``(N, heads, head size)``.
        key: ``(N, key heads, head size)``; consecutive heads share one where there are fewer.
        value: As ``key``.
        kernels: Which tokens attend to which, from :meth:`PackedAttention.kernels`.
        scaling: Factor on the logits; None: one over the square root of the head size.
    """
    out: torch.Tensor = _PackedAttention.apply(query, key, value, kernels, scaling)
    return out


class _PackedAttention(torch.autograd.Function):
    """``(N, heads, head size)`` from queries, and from keys and values of maybe fewer heads."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kernels: PackedKernels,
        scaling: float | None,
    ) -> torch.Tensor:
        out, log_sum = kernels.own.forward(AttendingTokens(query, key, value, scaling))
        if kernels.prefix is not None:
            p = kernels.prompt_tokens
            prefix, prefix_sum = kernels.prefix.forward(
                AttendingTokens(query[p:], key[:p], value[:p], scaling)
            )
            whole_sum = torch.logaddexp(log_sum[p:], prefix_sum)
            out[p:].mul_((log_sum[p:] - whole_sum).exp_()[..., None])
            out[p:].addcmul_(prefix, prefix_sum.sub_(whole_sum).exp_()[..., None])
            log_sum[p:] = whole_sum
        ctx.save_for_backward(query, key, value, out, log_sum)
        ctx.kernels, ctx.scaling = kernels, scaling
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        query, key, value, out, log_sum = ctx.saved_tensors
        kernels: PackedKernels = ctx.kernels
        tokens = AttendingTokens(query, key, value, ctx.scaling)
        grads = kernels.own.backward(tokens, gradient, out, log_sum)
        if kernels.prefix is not None:
            p = kernels.prompt_tokens
            tokens = AttendingTokens(query[p:], key[:p], value[:p], ctx.scaling)
            into = AttentionGradients(grads.query[p:], grads.key[:p], grads.value[:p])
            kernels.prefix.backward(tokens, gradient[p:], out[p:], log_sum[p:], into)
        return *grads, None, None
