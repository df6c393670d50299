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

from agilerl.llm.forward.attention_kernels import (
    AttendingTokens,
    AttentionPart,
    part_backward,
    part_forward,
)
from agilerl.llm.forward.packed_rows import PackedRows, Segments

_NAME = "agilerl_packed"


@dataclass
class PackedAttention:
    """Which tokens of packed rows attend to which, by sliding window."""

    rows: PackedRows
    _parts: dict[tuple[int | None, torch.dtype], list[AttentionPart]] = field(default_factory=dict)

    def parts(self, window: int | None, dtype: torch.dtype) -> list[AttentionPart]:
        """Prompts with themselves, then completions with themselves and with their prompts.

        Args:
            window: Tokens that a token attends to, itself included; None: all.
            dtype: Of masks.
        """
        if window is not None and window >= self.rows.longest_row:
            window = None
        if (window, dtype) not in self._parts:
            self._parts[window, dtype] = self._make_parts(window, dtype)
        return self._parts[window, dtype]

    def _make_parts(self, window: int | None, dtype: torch.dtype) -> list[AttentionPart]:
        rows = self.rows
        prompts, others = slice(0, rows.prompt_tokens), slice(rows.prompt_tokens, None)
        device = rows.positions.device

        def own(segments: Segments, tokens: slice) -> AttentionPart:
            if window is None or device.type != "cpu":
                return AttentionPart(segments, segments, tokens, tokens, True, window)
            place = torch.arange(segments.width, device=device)
            distance = place[:, None] - place
            mask = _additive((distance >= 0) & (distance < window), dtype)[None, None]
            return AttentionPart(segments, segments, tokens, tokens, False, mask=mask)

        made = [own(rows.prompts, prompts)]
        if rows.completions is None or rows.continuations is None:
            return made
        made.append(own(rows.completions, others))
        mask = sees_nothing = None
        if device.type == "cpu":
            mask, sees_nothing = self._prompt_mask(rows.continuations, window, dtype)
        elif window is not None:
            raise NotImplementedError("a kernel whose windows begin in another sequence")
        made.append(
            AttentionPart(
                rows.continuations,
                rows.prompts,
                others,
                prompts,
                False,
                mask=mask,
                sees_nothing=sees_nothing,
            )
        )
        return made

    def _prompt_mask(
        self, continuations: Segments, window: int | None, dtype: torch.dtype
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Which tokens of its prompt each token of a completion sees."""
        rows = self.rows
        visible = None
        if rows.prompts.padding is not None:
            visible = ~rows.prompts.padding.view(rows.prompts.rows, 1, -1)
        if window is None:
            return None if visible is None else _additive(visible[:, None], dtype), None
        keys = torch.arange(rows.prompts.width, device=rows.positions.device)
        queries = continuations.padded(rows.positions[0, rows.prompt_tokens :])
        near = queries[:, :, None] - keys < window
        visible = near if visible is None else near & visible
        sees_nothing = continuations.unpadded(~visible.any(-1))
        return _additive(visible[:, None], dtype), sees_nothing


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
    parts = attention.parts(sliding_window, query.dtype)
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return attend_packed(q, k, v, parts, scaling)[None], None


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
    parts: list[AttentionPart],
    scaling: float | None,
) -> torch.Tensor:
    """Attention ``(N, heads, head size)`` of packed tokens.

    Args:
        query: ``(N, heads, head size)``.
        key: ``(N, key heads, head size)``; consecutive heads share one where there are fewer.
        value: As ``key``.
        parts: Which tokens attend to which, from :meth:`PackedAttention.parts`.
        scaling: Factor on the logits; None: one over the square root of the head size.
    """
    out: torch.Tensor = _PackedAttention.apply(query, key, value, parts, scaling)
    return out


class _PackedAttention(torch.autograd.Function):
    """``(N, heads, head size)`` from queries, and from keys and values of maybe fewer heads."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        parts: list[AttentionPart],
        scaling: float | None,
    ) -> torch.Tensor:
        tokens = AttendingTokens(query, key, value, scaling)
        outputs = [part_forward(part, tokens) for part in parts]
        out = torch.empty_like(query)
        log_sums = [outputs[0][1]]
        out[parts[0].query_tokens] = outputs[0][0]
        if len(parts) > 1:
            (own, own_sum), (prompt, prompt_sum) = outputs[1:]
            log_sum = torch.logaddexp(own_sum, prompt_sum)
            own_share = own_sum.sub_(log_sum).exp_()[..., None]
            prompt_share = prompt_sum.sub_(log_sum).exp_()[..., None]
            merged = torch.mul(own, own_share, out=out[parts[1].query_tokens])
            merged.addcmul_(prompt, prompt_share)
            log_sums += [log_sum, log_sum]
        ctx.save_for_backward(query, key, value, out, *log_sums)
        ctx.parts, ctx.scaling = parts, scaling
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        query, key, value, out, *log_sums = ctx.saved_tensors
        tokens = AttendingTokens(query, key, value, ctx.scaling)
        grads = [torch.empty_like(tensor) for tensor in (query, key, value)]
        for number, (part, log_sum) in enumerate(zip(ctx.parts, log_sums, strict=True)):
            found = part_backward(part, gradient, tokens, out, log_sum)
            regions = (part.query_tokens, part.key_tokens, part.key_tokens)
            for grad, region, of_part in zip(grads, regions, found, strict=True):
                # The first two parts are all queries and all keys, each once.
                grad[region].copy_(of_part) if number < 2 else grad[region].add_(of_part)
        return *grads, None, None
