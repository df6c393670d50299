"""Attention of single queries by matrix products: on a CPU, and where rows share prompts.

torch's fused CPU kernel is made for blocks of queries: for one query per row it takes up to ten
times as long as plain matrix products. A model's own eager attention is no substitute: it need not
be what the model computes otherwise (Gemma 2 caps its attention logits there, and only there), and
then samples would not come from the distribution that is trained.

Rows that share prompts attend to a prompt's keys together: its products are made with the queries
of all of them, and softmax goes over these and the rows' own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from agilerl.llm.generation.kv_cache.shared_prefix import SharedPrefixCache

_NAME = "agilerl_single_query"
# Attention functions are not given the cache.
_shared: ContextVar[SharedPrefixCache | None] = ContextVar("shared prefixes", default=None)


@contextlib.contextmanager
def single_query_attention(decoder: nn.Module, cache: Cache) -> Iterator[None]:
    """Within it a decoder uses matrix products in place of torch's fused attention.

    On a CPU, and where rows of ``cache`` share prompts; elsewhere the fused one is as fast.
    """
    config: Any = decoder.config
    before = config._attn_implementation
    shared = cache if isinstance(cache, SharedPrefixCache) else None
    token = _shared.set(shared)
    on_cpu = next(decoder.parameters()).device.type == "cpu"
    if before == "sdpa" and (on_cpu or shared is not None):
        config._attn_implementation = _NAME
    try:
        yield
    finally:
        config._attn_implementation = before
        _shared.reset(token)


def is_replaced(attention: nn.Module) -> bool:
    """Whether an attention of a decoder runs by :func:`attend` now."""
    config: Any = attention.config
    return bool(config._attn_implementation == _NAME)


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What ``sdpa_attention_forward`` computes for queries ``(N, heads, 1, head size)``.

    Returns ``(N, 1, heads, head size)``.
    """
    rows, heads, queries, size = query.shape
    if queries != 1 or position_bias is not None:
        return sdpa_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            scaling=scaling,
            position_bias=position_bias,
            **kwargs,
        )
    # The heads that share a key are the rows of one product; nothing is repeated.
    grouped = query.view(rows, key.shape[1], -1, size) * (
        size**-0.5 if scaling is None else scaling
    )
    shared = _shared.get()
    if shared is None:
        scores = grouped @ key.transpose(-1, -2)
        if attention_mask is not None:
            scores = scores.masked_fill(~attention_mask[:, :, :, : scores.shape[-1]], -torch.inf)
        attended = _weights(scores, value.dtype) @ value
    else:
        attended = _attend_shared(shared, module, grouped, key.shape[-2], attention_mask)
    return attended.view(rows, heads, 1, -1).transpose(1, 2), None


def _attend_shared(
    shared: SharedPrefixCache,
    module: nn.Module,
    queries: torch.Tensor,
    own: int,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """``(N, heads, r, head size)`` for scaled queries, over prompts and ``own`` columns of rows."""
    keys, values = shared.own_buffers(module)
    scores = torch.cat([shared.scores(module, queries), queries @ keys.transpose(-1, -2)], dim=-1)
    prompt = scores.shape[-1] - keys.shape[-2]
    scores += shared.bias(mask, prompt + own, scores)
    weights = _weights(scores, values.dtype)
    return (weights[..., prompt:] @ values).add_(shared.attended(module, weights[..., :prompt]))


def _weights(scores: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    return weights.to(dtype)


AttentionInterface.register(_NAME, attend)
# A boolean mask, or none where nothing is hidden.
AttentionMaskInterface.register(_NAME, sdpa_mask)
