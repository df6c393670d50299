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
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from agilerl.llm.forward.attention_kernels import AttendingTokens, AttentionGradients
from agilerl.llm.forward.packed_kernels import PackedKernels, packed_kernels
from agilerl.llm.forward.packed_rows import PackedRows

_NAME = "agilerl_packed"


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
            self._kernels[window, dtype] = packed_kernels(rows, window, dtype)
        return self._kernels[window, dtype]


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
